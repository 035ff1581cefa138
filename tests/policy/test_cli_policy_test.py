"""`limitkeeper policy init` and `policy test`: the starting policy, and test files with requests and their expected outcome."""

from __future__ import annotations

import json

import pytest

from limitkeeper.cli import main

POLICY = """\
identify: {user: {header: X-User}}
limits:
  - {name: checkout, match: POST /checkout, key: user, limit: token bucket 5/s burst 10}
  - {name: payment, match: POST /payments, key: user, limit: fixed window 1/min, on_refusal: wait up to 1min}
  - {name: report, match: GET /report, key: user, limit: fixed window 1/min, on_refusal: degrade smaller, status: 503}
  - {name: trial, match: GET /trial, key: user, limit: fixed window 1/min, on_refusal: shadow}
  - {name: login, match: POST /login, key: ip, limit: sliding window log 2/min, charge: {status: 401}}
  - {name: bulk, match: POST /bulk, key: user, limit: token bucket 5/s burst 10, cost: {query: n, max: 20}}
  - {name: later, match: GET /later, key: user, limit: fixed window 1/min, retry_after: spread 1min}
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Writes the policy and the steps of one test, and runs `policy test`; returns the exit code and the lines of the output."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "limitkeeper.yaml").write_text(POLICY)

    def run_steps(*steps: str, policy: str = "limitkeeper.yaml") -> tuple[int, list[str]]:
        lines = [f"policy: {policy}", "tests:", "  - name: one", "    steps:", *(f"      - {step}" for step in steps)]
        (tmp_path / "one.yaml").write_text("\n".join(lines))
        return main(["policy", "test", "one.yaml"]), capsys.readouterr().out.splitlines()

    return run_steps


def test_the_starting_policy_is_valid(tmp_path, monkeypatch, capsys):
    """`policy init` writes a policy that `policy check --strict` accepts, and whose rules the comments describe."""
    monkeypatch.chdir(tmp_path)
    assert main(["policy", "init"]) == 0
    assert main(["policy", "check", "--strict", "limitkeeper.yaml"]) == 0
    assert capsys.readouterr().out.endswith("limitkeeper.yaml: 3 rules, no errors\n")
    steps = "[{request: POST /login, times: 5}, {request: POST /login, refused_by: login}, {request: /healthz, times: 99}]"
    (tmp_path / "one.yaml").write_text(f"policy: limitkeeper.yaml\ntests: [{{name: login, steps: {steps}}}]\n")
    assert main(["policy", "test", "one.yaml"]) == 0


def test_init_overwrites_nothing_without_force(tmp_path, capsys):
    """`policy init` refuses to overwrite a file, with the remedy in the error: --force."""
    file = tmp_path / "mine.yaml"
    file.write_text("limits: []\n")
    assert main(["policy", "init", str(file)]) == 2
    assert "exists already; write another name, or --force" in capsys.readouterr().err
    assert file.read_text() == "limits: []\n"
    assert main(["policy", "init", str(file), "--force"]) == 0
    assert "name: login" in file.read_text()


def test_a_file_that_cannot_be_written(tmp_path, capsys):
    """A path that can't be written is an error with the reason."""
    assert main(["policy", "init", str(tmp_path / "nowhere" / "mine.yaml")]) == 2
    assert "can't write the policy: no such file" in capsys.readouterr().err


def test_steps_that_hold(run):
    """A file whose expectations all hold has exit code 0; a request without an expectation must be allowed."""
    code, out = run(
        "{request: POST /checkout user=42, times: 10}",
        "{request: POST /checkout user=42, refused_by: checkout, status: 429, retry_after: 200ms}",
        "POST /checkout user=43",
        "{wait: 199ms}",
        "{request: POST /checkout user=42, retry_after: 1ms}",
        "{wait: 1ms}",
        "POST /checkout user=42",
    )
    assert (code, out) == (0, ["one.yaml: 1 test, all passed"])


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        ("", "expected allowed, got refused by checkout, status 429, retry_after 200ms"),
        ("refused_by: login", "expected refused by login, got refused by checkout, status 429, retry_after 200ms"),
        ("status: 503", "expected refused, status 503, got refused by checkout, status 429, retry_after 200ms"),
        ("retry_after: 1", "expected refused, retry_after 1s, got refused by checkout, status 429, retry_after 200ms"),
        ("retry_after: never", "expected refused, retry_after never, got refused by checkout, status 429, retry_after 200ms"),
    ],
)
def test_a_failed_step_is_shown_with_its_line(run, expected, found):
    """Every part of an expectation can fail; the message has the line, the test, and the expected and the actual value."""
    code, out = run("{request: POST /checkout user=42, times: 10}", f"{{request: POST /checkout user=42, {expected}}}")
    assert code == 1
    assert out[0] == f"one.yaml:6:19: error: one: {found}"
    assert out[2].endswith("^" * len("POST /checkout user=42"))
    assert out[-1] == "one.yaml: 1 test, 1 failed"


def test_a_repeated_request_reports_the_one_that_failed(run):
    """Of the requests of one step, the first that fails is named; later steps run all the same."""
    _, out = run("{request: POST /checkout user=42, times: 12}", "{request: GET / user=42, refused_by: checkout}")
    assert "request 11 of 12: expected allowed" in out[0]
    assert out[3].endswith("one: expected refused by checkout, got allowed")


def test_each_test_starts_with_an_empty_store(tmp_path, run, capsys):
    """Tests are isolated from each other, and only the failing one is reported as failed."""
    times = {"a": 10, "b": 10, "c": 11}
    tests = [f"{{name: {name}, steps: [{{request: POST /checkout user=42, times: {n}}}]}}" for name, n in times.items()]
    text = f"policy: limitkeeper.yaml\ntests: [{', '.join(tests)}]\n"
    (tmp_path / "three.yaml").write_text(text)
    assert main(["policy", "test", "--json", "three.yaml"]) == 1
    (report,) = json.loads(capsys.readouterr().out)
    assert [(test["name"], test["ok"]) for test in report["tests"]] == [("a", True), ("b", True), ("c", False)]
    assert [one["line"] for one in report["diagnostics"]] == [2]


def test_what_rules_do_on_refusal(run):
    """Waiting moves the clock and is allowed; a degraded request counts as refused; a shadow rule refuses nothing."""
    code, out = run(
        "{request: POST /payments user=1, times: 2}",
        "{request: POST /payments user=1}",
        "GET /report user=1",
        "{request: GET /report user=1, refused_by: report, status: 503}",
        "{request: GET /trial user=1, times: 2}",
    )
    assert (code, out) == (0, ["one.yaml: 1 test, all passed"])
    _, out = run("GET /trial user=1", "{request: GET /trial user=1, refused_by: trial}")
    assert "expected refused by trial, got allowed (refused in shadow by trial)" in out[0]


def test_outcomes_costs_and_times(run):
    """`response` is the status that decides a charge; a cost above the limit is refused for ever; a spread is left out."""
    code, out = run(
        "{request: POST /login, times: 9}",
        "{request: POST /login, times: 2, response: 401}",
        "{request: POST /login, refused_by: login}",
        "{request: POST /bulk?n=11 user=1, refused_by: [bulk], retry_after: never}",
        "GET /later user=1",
        "{request: GET /later user=1, retry_after: 1min}",
    )
    assert (code, out) == (0, ["one.yaml: 1 test, all passed"])


def test_a_response_costs_its_estimate(run, tmp_path):
    """A cost by response size is the estimate: no response has a size here."""
    rule = "{name: bytes, key: ip, limit: fixed window 5/d, cost: {response: 1kB, estimate: 2}}"
    (tmp_path / "bytes.yaml").write_text(f"limits: [{rule}]\n")
    assert run("{request: GET /, times: 2}", "{request: GET /, refused_by: bytes}", policy="bytes.yaml")[0] == 0


def test_the_penalty_box_can_be_expected(run, tmp_path):
    """A refusal by the penalty box is `refused_by: penalty box`."""
    box = "penalty_box: {after: fixed window 1/s, for: 1min}\nlimits: [{name: api, key: ip, limit: fixed window 1/s}]\n"
    (tmp_path / "box.yaml").write_text(box)
    steps = ["/", "{request: /, times: 2, refused_by: api}", "{request: /, refused_by: penalty box, retry_after: 1min}"]
    assert run(*steps, policy="box.yaml") == (0, ["one.yaml: 1 test, all passed"])


def test_a_capacity_can_be_expected(run, tmp_path):
    """A refusal by the capacity that a rule divides among its keys names that rule."""
    (tmp_path / "capacity.yaml").write_text("limits: [{name: all, key: ip, capacity: {rate: 10/s, window: 100ms}}]\n")
    steps = ["/", "{request: /, refused_by: all}", "{wait: 1s}", "/"]
    assert run(*steps, policy="capacity.yaml") == (0, ["one.yaml: 1 test, all passed"])


@pytest.mark.parametrize(
    ("step", "column", "message"),
    [
        ("{request: GET /, tmes: 5}", 26, "unknown field 'tmes' in step; did you mean 'times'?"),
        ("{wait: 3 parsecs}", 16, "expected a duration, got '3 parsecs'; write it like 200ms, 30s or 24h"),
        ("{wait: 1s, status: 429}", 20, "a wait has no 'status'; write it beside a request"),
        ("{request: GET /, wait: 1s}", 26, "step can't have both 'request' and 'wait'; write one of request, wait"),
        (
            "{request: GET /, retry_after: soon}",
            39,
            "expected a duration or never, got 'soon'; write it like 200ms, 30s or never",
        ),
        ("GET / usr=4", 9, "'usr=4': the policy has no identity 'usr'; did you mean 'user'?"),
        ("{request: GET /, refused_by: [login, chekout]}", 46, "the policy has no rule 'chekout'; did you mean 'checkout'?"),
        ("[]", 9, "expected a step, got a list; write it like POST /checkout user=42"),
    ],
)
def test_errors_of_a_test_file(run, step, column, message):
    """An invalid step is shown with line, column and remedy, and no test runs."""
    code, out = run(step)
    assert code == 1
    assert out[0] == f"one.yaml:5:{column}: error: {message}"
    assert out[-1] == "one.yaml: 1 error"


def test_errors_of_the_policy(run, tmp_path, capsys):
    """A policy that is missing or has errors is reported at the line that names it; a missing test file is bad usage."""
    code, out = run("GET /", policy="nowhere.yaml")
    assert (code, out[0]) == (
        1,
        "one.yaml:1:9: error: nowhere.yaml: can't read the policy: no such file or directory; write a path relative to this file",
    )
    (tmp_path / "bad.yaml").write_text("limits: 3\n")
    code, out = run("GET /", policy="bad.yaml")
    assert code == 1
    assert "the policy has errors; the first is at bad.yaml:1:9: " in out[0]
    assert main(["policy", "test", "nowhere.yaml"]) == 2
    assert "can't read the policy test" in capsys.readouterr().err


def test_a_flood_of_failures_ends_the_run(tmp_path, run, capsys):
    """After 100 failed steps no further test runs, and none that has not run is reported as passed."""
    steps = ", ".join(["{request: GET /, status: 429}"] * 150)
    (tmp_path / "two.yaml").write_text(
        f"policy: limitkeeper.yaml\ntests: [{{name: a, steps: [{steps}]}}, {{name: b, steps: [GET /]}}]\n"
    )
    assert main(["policy", "test", "--json", "two.yaml"]) == 1
    (report,) = json.loads(capsys.readouterr().out)
    assert report["tests"] == [{"name": "a", "ok": False}]
