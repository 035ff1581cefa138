"""`limitkeeper policy check`, `explain` and `schema`: output, JSON and exit codes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

import limitkeeper
from limitkeeper import Limiter, MemoryStore, TokenBucket
from limitkeeper.cli import main, print_diagnostics
from limitkeeper.policy import Policy, PolicyError, WrittenRequest
from limitkeeper.policy.explain import RequestExplanation
from limitkeeper.policy.gate import Gate
from limitkeeper.policy.one_line_request import parse_request
from limitkeeper.policy.reading.diagnostics import Diagnostic
from limitkeeper.policy.reading.policy_sections import policy_schema
from limitkeeper.testing import ManualClock
from servers.valkey import Valkey

HERE = Path(__file__).parent
SHOP = str(HERE / "shop.yaml")
GOOD = "limits: [{name: api, key: ip, limit: token bucket 5/s burst 10}]\n"
WARNED = "safe_concurrency: 5\nlimits: [{name: api, key: ip, limit: token bucket 5/s burst 10}]\n"


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes policies into an empty folder, which is the working one."""
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "policy.yaml") -> str:
        (tmp_path / name).write_text(text)
        return name

    return write


# check -----------------------------------------------------------------------------------------------------------------------


def test_check_of_a_good_file(capsys):
    """A good file has exit code 0, also with --strict; notes name rules without a key, and cut bursts."""
    for strict in ([], ["--strict"]):
        assert main(["policy", "check", *strict, SHOP]) == 0
        out = capsys.readouterr().out
        assert out.endswith(f"{SHOP}: 8 rules, no errors\n")
        notes = [line for line in out.splitlines() if ": note: " in line and " has no key" not in line]
        assert out.count(" has no key: all requests share its limit; write key: ip, or key: everyone if that is meant\n") == 2
        cut = "note: the burst of 400 is cut to 40 by rule 'checkout-capacity'; "
        assert [cut in line for line in notes] == [True, False, False]
        assert "error" not in out.removesuffix("no errors\n")
    assert main(["policy", "check", "--json", "--strict", SHOP]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert {one["severity"] for one in report["diagnostics"]} == {"note"}


def test_check_of_a_bad_file(written, capsys):
    """Every error is shown with its line, and the exit code is 1."""
    assert main(["policy", "check", written("limits:\n  - name: api\n    kye: ip\n")]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "policy.yaml:2:5: error: missing field 'limit' in rule; write limit: token bucket 5/s burst 10",
        "    2 |   - name: api",
        "      |     ^^^^",
        "policy.yaml:3:5: error: unknown field 'kye' in rule; did you mean 'key'?",
        "    3 |     kye: ip",
        "      |     ^^^",
        "policy.yaml: 2 errors",
    ]


def test_warnings_pass_unless_strict(written, capsys):
    """A warning is shown and lets the file pass; with --strict it does not."""
    file = written(WARNED)
    assert main(["policy", "check", file]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "policy.yaml: 1 rule, 1 warning"
    assert main(["policy", "check", "--strict", file]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "policy.yaml: 1 rule, 1 error"


def test_several_files_have_one_exit_code(written, capsys):
    """All files are checked, and the worst of them is the exit code."""
    good, bad = written(GOOD, "good.yaml"), written("limits: 3", "bad.yaml")
    assert main(["policy", "check", bad, good]) == 1
    out = capsys.readouterr().out
    assert "bad.yaml: 1 error\n" in out
    assert "good.yaml: 1 rule, no errors\n" in out


def test_check_as_json(written, capsys):
    """With --json the output is one value with every diagnostic's position, text and suggestion."""
    assert main(["policy", "check", "--json", written("limits: [{name: a, limit: tokn bucket 5/s}]")]) == 1
    (report,) = json.loads(capsys.readouterr().out)
    assert (report["file"], report["ok"]) == ("policy.yaml", False)
    (diagnostic,) = report["diagnostics"]
    assert (diagnostic["line"], diagnostic["column"], diagnostic["text"]) == (1, 27, "tokn bucket")
    assert diagnostic["suggestion"] == "did you mean 'token bucket'?"
    assert diagnostic["path"] == "limits[0].limit"


@pytest.mark.parametrize("source", ["key_file: keys/jwt.pub", "key_env: LIMITKEEPER_NO_SUCH_KEY"])
def test_a_missing_key_is_a_warning(written, capsys, source):
    """A key that exists only where the application runs is a warning for check, an error with --strict, and an error for the
    application; explain takes the identity as given, and no token is valid."""
    identify = f"identify: {{user: {{jwt: {{claim: sub, {source}, algorithms: [RS256]}}}}}}"
    file = written(f"{identify}\nlimits: [{{name: a, key: user, limit: 5/s}}]\n")
    assert main(["policy", "check", file]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "policy.yaml: 1 rule, 1 warning"
    assert main(["policy", "check", "--strict", file]) == 1
    assert main(["policy", "explain", file, "--request", "GET / user=42"]) == 0
    assert "5 of 5 left" in capsys.readouterr().out
    assert main(["policy", "explain", file, "--request", "GET / header:Authorization=a.b.c"]) == 0
    assert "no rule applies" in capsys.readouterr().out
    with pytest.raises(PolicyError, match=r"can't read|is not set"):
        Policy.load(file)


def test_the_policy_of_the_example_shop_can_be_checked_in_a_fresh_clone(tmp_path, capsys):
    """Its key is created at the first start; without it the file has no errors."""
    copy = tmp_path / "limitkeeper.yaml"
    copy.write_text((HERE.parents[1] / "examples" / "shop" / "limitkeeper.yaml").read_text())
    assert main(["policy", "check", str(copy)]) == 0
    assert "warning: can't read 'keys/jwt.pub'" in capsys.readouterr().out


def test_check_imports_only_with_the_option(written, capsys, tmp_path):
    """Callables are imported only with --import, also from the working directory."""
    file = written('identify: {vip: {call: "cli_policy_people:vip_of"}}\nlimits: [{name: a, key: vip | ip, limit: 5/s}]\n')
    assert main(["policy", "check", file]) == 0
    assert main(["policy", "check", "--import", file]) == 1
    assert "the module 'cli_policy_people' can't be imported" in capsys.readouterr().out
    (tmp_path / "cli_policy_people.py").write_text("def vip_of(facts): return None\n")
    assert main(["policy", "check", "--import", file]) == 0


def test_a_missing_file_is_exit_code_2(capsys):
    """A file that can't be read is exit code 2, with the reason on stderr."""
    assert main(["policy", "check", "nowhere.yaml"]) == 2
    assert capsys.readouterr().err == "limitkeeper: nowhere.yaml: can't read the policy: no such file or directory\n"


@pytest.mark.parametrize(
    ("argv", "remedy"),
    [
        (["check", "x.yaml"], "; did you mean 'limitkeeper policy check'?"),
        (["policy"], "required: COMMAND; 'limitkeeper policy --help' lists them"),
        ([], "required: COMMAND; 'limitkeeper --help' lists them"),
    ],
    ids=["check", "policy", "nothing"],
)
def test_a_missing_command_is_named(argv, remedy, capsys):
    """The error says what to write instead of a command that is not there."""
    with pytest.raises(SystemExit):
        main(argv)
    assert capsys.readouterr().err.endswith(f"{remedy}\n")


@pytest.mark.parametrize("argv", [[], ["policy"], ["policy", "check"], ["policy", "explain", "x.yaml"], ["polcy"]], ids=" ".join)
def test_wrong_usage_is_exit_code_2(argv, capsys):
    """A command that is not understood is exit code 2 and a line of usage."""
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert "usage: limitkeeper" in capsys.readouterr().err


def test_color_is_for_terminals():
    """Colors are used on a terminal, unless NO_COLOR is set."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    diagnostic = Diagnostic("error", "a.yaml", 1, 1, "x", "message", excerpt="x: 1")
    there, plain = Terminal(), io.StringIO()
    print_diagnostics([diagnostic], plain)
    assert "\x1b" not in plain.getvalue()
    before = os.environ.pop("NO_COLOR", None)
    try:
        print_diagnostics([diagnostic], there)
        assert "\x1b[31merror\x1b[0m" in there.getvalue()
        os.environ["NO_COLOR"] = "1"
        quiet = Terminal()
        print_diagnostics([diagnostic], quiet)
        assert quiet.getvalue() == plain.getvalue()
    finally:
        os.environ.pop("NO_COLOR", None)
        if before is not None:
            os.environ["NO_COLOR"] = before


# explain -----------------------------------------------------------------------------------------------------------------------

CHECKOUT = """\
POST /checkout
  tenant   acme
  user     42
  partner  absent
  plan     free
  ip       10.0.0.1

applies:
  tenant-and-user    tenant, user = acme|42    sliding window counter 1000/min           1000 of 1000 left
  user               user | ip = user:42       token bucket 20/s burst 40 (plan = free)  40 of 40 left
  checkout           user = 42                 token bucket 5/s burst 10                 10 of 10 left
  checkout-capacity  one key for all requests  token bucket 350/s burst 40               40 of 40 left
  public-checkout    one key for all requests  token bucket 150/s burst 40               40 of 40 left

does not apply:
  partner  partner is absent
  login    method and path do not match
  payment  method and path do not match

→ allowed
"""


def test_explain_shows_rules_keys_and_limits(capsys):
    """Explaining the sample shows every rule: its key, its limit, what remains, or why it does not apply."""
    request = "POST /checkout user=42 ip=10.0.0.1 header:X-Tenant=acme"
    assert main(["policy", "explain", SHOP, "--request", request]) == 0
    assert capsys.readouterr().out == CHECKOUT


def explained(capsys, *argv: str) -> dict[str, object]:
    assert main(["policy", "explain", *argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    return found | {"by_name": {rule["name"]: rule for rule in found["rules"]}}


def test_explain_as_json(capsys):
    """The same, for programs: overrides, tiers without a limit and joined keys with a part missing."""
    found = explained(capsys, SHOP, "--request", "POST /login user=42 plan=enterprise partner=acme-corp")
    rules = found["by_name"]
    assert rules["partner"]["limits"][0]["limit"] == "token bucket 500/s burst 1000"
    assert rules["tenant-and-user"]["key"] == "-|42"
    assert (rules["user"]["applies"], rules["user"]["limits"]) == (True, [])
    assert rules["login"]["key"] == "127.0.0.1|42"
    assert rules["checkout"] == {"name": "checkout", "applies": False, "reason": "method and path do not match"}
    assert found["allowed"] is True


def test_explain_shows_why_a_limit_holds(capsys):
    """An override and a tier are named beside the limit that they chose."""
    assert main(["policy", "explain", SHOP, "--request", "GET / user=42 plan=pro partner=acme-corp"]) == 0
    out = capsys.readouterr().out
    assert "token bucket 500/s burst 1000 (override)" in out
    assert "token bucket 100/s burst 200 (plan = pro)" in out


def test_explain_shows_exemptions(capsys):
    """An exempt path and an exempt network are named as the reason of every rule."""
    for request in ("GET /healthz", "GET /products ip=10.1.2.3", "GET /products peer=10.1.2.3"):
        found = explained(capsys, SHOP, "--request", request)
        number, what = (0, "/healthz") if "healthz" in request else (1, "10.1.0.0/16")
        assert {rule["reason"] for rule in found["rules"]} == {f"the request is exempt: exempt[{number}] ({what})"}


def test_explain_reads_headers_queries_cookies_and_hosts(written, capsys):
    """Parts of a request line reach the identities and rules that use them."""
    file = written("""
identify: {tenant: {header: X-Tenant}, key: {query: api_key}, session: {cookie: sid}, order: {path: order_id}}
limits:
  - {name: all, key: [tenant, key, session, order], match: {path: "/orders/{order_id}", host: api.example.com}, limit: 5/s}
""")
    line = "get /orders/7?api_key=k header:X-Tenant='a b' cookie:sid=s host=api.example.com:8080"
    assert explained(capsys, file, "--request", line)["by_name"]["all"]["key"] == "a b|k|s|7"
    other = explained(capsys, file, "--request", "/orders/7 query:api_key=k host=www.example.com")["by_name"]["all"]
    assert other["reason"] == "expected the host api.example.com, got www.example.com"


def test_explain_shows_a_refusal(written, capsys):
    """A request that costs more than any limit holds is refused forever, and shadow rules do not refuse."""
    file = written("""
limits:
  - {name: bulk, key: ip, limit: fixed window 10/min, cost: {header: X-Cost}, status: 503, priority: 1}
  - {name: shadow, key: ip, limit: fixed window 5/min, cost: {header: X-Cost}, on_refusal: shadow}
""")
    assert main(["policy", "explain", file, "--request", "GET / header:X-Cost=11"]) == 0
    out = capsys.readouterr().out
    assert "10 of 10 left, costs 11, refused: never" in out
    assert "in shadow" in out
    assert out.endswith("→ refused by bulk with 503: never\n")


def test_explain_needs_no_handlers(written, capsys):
    """Degrade handlers that only the application knows are not needed for an explanation."""
    file = written("limits: [{name: a, key: ip, limit: 5/s, on_refusal: degrade cached}]")
    assert explained(capsys, file, "--request", "GET /")["allowed"] is True


def test_explain_of_a_wrong_request(capsys):
    """An unknown identity, and a line without a path, are exit code 2 and a hint."""
    assert main(["policy", "explain", SHOP, "--request", "POST /checkout usr=42"]) == 2
    assert "the policy has no identity 'usr'; did you mean 'user'?" in capsys.readouterr().err
    assert main(["policy", "explain", SHOP, "--request", "checkout"]) == 2
    assert "has no path; write it like" in capsys.readouterr().err


def test_explain_of_a_wrong_policy(written, capsys):
    """The errors of an invalid policy are shown, and the exit code is 1."""
    assert main(["policy", "explain", written("limits: 3"), "--request", "GET /"]) == 1
    assert "a list of rules" in capsys.readouterr().err


def test_explain_of_a_store_that_is_not_there(capsys):
    """A store that can't be read from here is exit code 2, without an explanation."""
    assert main(["policy", "explain", SHOP, "--request", "POST /checkout user=1", "--store", "memory://"]) == 2
    assert "are in the memory of their process; write --store URL" in capsys.readouterr().err
    assert main(["policy", "explain", SHOP, "--request", "POST /checkout user=1", "--store", "redis://127.0.0.1:1/0"]) == 2
    assert "127.0.0.1:1 can't be reached" in capsys.readouterr().err


def test_explain_reads_a_store(valkey: Valkey, written, capsys):
    """With --store the store's state is shown, and nothing is charged."""
    url = f"{valkey.url}?timeout=60s"
    file = written(f"name: explained\nstore: {url}\nlimits: [{{name: api, key: ip, limit: token bucket 1/h burst 10}}]\n")
    with closing(Limiter({"api": TokenBucket("1/h burst 10")}, store=url, name="explained")) as limiter:
        for _ in range(10):
            assert limiter.hit("10.0.0.9")
    for store in (["--store"], ["--store", url]):
        found = explained(capsys, file, "--request", "GET / ip=10.0.0.9", *store)
        (limit,) = found["by_name"]["api"]["limits"]
        assert limit["remaining"] == 0
        assert 3540 < limit["retry_after"] <= 3600
        assert found["allowed"] is False
    assert explained(capsys, file, "--request", "GET / ip=10.0.0.9")["allowed"] is True


# schema, and the command itself --------------------------------------------------------------------------------


def test_schema_is_printed(capsys):
    """`limitkeeper policy schema` prints the schema."""
    assert main(["policy", "schema"]) == 0
    assert json.loads(capsys.readouterr().out) == policy_schema()


def command(*argv: str, **options: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(limitkeeper.__path__[0])}
    return subprocess.run(
        [sys.executable, "-m", "limitkeeper", *argv], env=environment, capture_output=True, text=True, timeout=60, **options
    )


def test_the_module_is_the_command():
    """`python -m limitkeeper` is the command, with its exit codes and without colors in a pipe."""
    done = command("policy", "check", SHOP, str(HERE / "reading" / "diagnostics" / "unknown_key.yaml"))
    assert done.returncode == 1
    assert "\x1b" not in done.stdout
    assert "did you mean 'key'?" in done.stdout
    assert command("--version").stdout == f"limitkeeper {limitkeeper.__version__}\n"


def test_a_closed_pipe_ends_quietly(tmp_path):
    """A pipe that is closed early ends the command without a traceback."""
    code = "from limitkeeper.cli import main; import sys; sys.exit(main(['policy', 'schema']))"
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(limitkeeper.__path__[0])}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) in (0, 1)
    assert b"Traceback" not in error


def test_explain_needs_no_application(tmp_path, capsys):
    """A policy can be explained where the functions that it names are not installed: their values are given in the request."""
    (tmp_path / "p.yaml").write_text(
        "identify: {vip: {call: nowhere.people:vip_of}}\n"
        "limits: [{name: a, limit: {by: vip, gold: 100/s, default: 1/s}, on_refusal: degrade nowhere.cache:stale}]\n"
    )
    assert main(["policy", "explain", str(tmp_path / "p.yaml"), "--request", "GET / vip=gold"]) == 0
    assert "100" in capsys.readouterr().out


def test_a_module_that_raises_is_reported_at_its_position(tmp_path, capsys, monkeypatch):
    """When importing a module raises, `check --import` shows where it is named."""
    monkeypatch.chdir(tmp_path)
    Path("broken_shop.py").write_text("def cost(:\n")
    Path("shop.yaml").write_text('limits:\n  - {name: a, key: ip, limit: 5/s, cost: {call: "broken_shop:cost"}}\n')
    assert main(["policy", "check", "--import", "shop.yaml"]) == 1
    assert "shop.yaml:2:50: error: 'broken_shop:cost': importing" in capsys.readouterr().out


def test_an_unreadable_file_does_not_hide_others(tmp_path, capsys, monkeypatch):
    """All files are checked, and the exit code is that of the worst."""
    monkeypatch.chdir(tmp_path)
    Path("good.yaml").write_text("limits: [{name: a, key: ip, limit: 5/s}]\n")
    assert main(["policy", "check", "gone.yaml", "good.yaml", "--json"]) == 2
    captured = capsys.readouterr()
    assert [(one["file"], one["ok"]) for one in json.loads(captured.out)] == [("gone.yaml", False), ("good.yaml", True)]
    assert "gone.yaml" in captured.err


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_an_encoding_without_an_arrow_works(tmp_path, more):
    """Characters that the output encoding does not have are replaced, and JSON is escaped."""
    file = tmp_path / "shop.yaml"
    file.write_text("limits: [{name: a, key: ip, limit: 5/s}]\n")
    words = ["policy", "explain", str(file), "--request", "GET /ü ip=10.0.0.1", *more]
    environment = {**os.environ, "PYTHONIOENCODING": "cp437"}
    done = subprocess.run([sys.executable, "-m", "limitkeeper", *words], capture_output=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert (
        json.loads(done.stdout)["request"]["path"] == "/ü"
        if more
        else done.stdout.endswith(b"allowed\r\n" if os.name == "nt" else b"allowed\n")
    )


VERDICTS = [
    ("wait up to 2s", "→ waits 1 s for a, then allowed"),
    ("wait up to 200ms", "→ refused by a with 429: retry in 1 s"),
    ("degrade cheaper", "→ refused by a, answered by the handler of a: retry in 1 s"),
    ("reject", "→ refused by a with 429: retry in 1 s"),
    ("shadow", "→ allowed"),
]


@pytest.mark.parametrize(("action", "verdict"), VERDICTS)
def test_the_verdict_is_what_would_happen(action, verdict):
    """A request that would wait, or go to a degrade handler, is not shown as refused with a status."""
    policy = Policy.of(limits=[{"name": "a", "key": "ip", "limit": "token bucket 1/s burst 1", "on_refusal": action}])
    store = MemoryStore(clock=ManualClock())
    with Gate(policy, store=store, handlers={"cheaper": print}) as gate:
        gate.ask(WrittenRequest())
        request = parse_request("GET /", policy)
        text = RequestExplanation(policy, request, gate.explain(request)).text()
    assert text.splitlines()[-1] == verdict


@pytest.mark.parametrize(
    ("request_line", "allowed"),
    [
        ("GET / ip=10.1.2.3 peer=203.0.113.9", True),
        ("GET / ip=203.0.113.9 peer=10.1.2.3", False),
        ("GET / peer=10.1.2.3", True),
        ("GET / peer=203.0.113.9", False),
        ("GET / ip=10.1.2.3 peer=10.9.9.9 header:X-Forwarded-For=203.0.113.9", True),
        ("GET / peer=10.9.9.9 header:X-Forwarded-For=203.0.113.9", False),
        ("GET / ip=2001:db8::/64 peer=203.0.113.9", True),
        ("GET / ip=office peer=10.1.2.3", False),
    ],
)
def test_explain_honours_exemptions_of_the_address_that_is_given(written, capsys, request_line, allowed):
    """`ip=` is the client's address for everything that uses it: exempt networks and classes of networks, not only keys."""
    file = written("""
        identify:
          ip: {client_ip: {trusted_proxies: [10.9.0.0/16]}}
          class: {network: {inside: ["10.1.0.0/16", "2001:db8::/32"]}}
        exempt: [{network: ["10.1.0.0/16", "2001:db8::/32"]}]
        limits: [{name: api, key: ip, limit: 5/s}]
    """)
    found = explained(capsys, file, "--request", request_line)
    assert found["by_name"]["api"]["applies"] is not allowed
    assert found["identities"]["class"] == ("inside" if allowed else None)


@pytest.mark.parametrize(
    ("address", "key"),
    [
        ("2001:db8:1:2:aaaa::1", "2001:db8:1:2::/64"),
        ("203.0.113.9", "203.0.113.0/24"),
        ("::ffff:203.0.113.9", "203.0.113.0/24"),
        ("2001:db8:1:2::/64", "2001:db8:1:2::/64"),
        ("office", "office"),
    ],
)
def test_explain_counts_a_given_address_as_a_request_from_it(written, capsys, address, key):
    """The key of `ip=` is that of a request from the address, and networks are compared with the whole address."""
    file = written("""
        identify:
          ip: {client_ip: {ipv4_prefix: 24}}
          class: {network: {probe: ["2001:db8:1:2:aaaa::1", 203.0.113.9]}}
        limits: [{name: api, key: ip, limit: 5/s, override: {"2001:db8:1:2::/64": 7/s, 203.0.113.0/24: 7/s}}]
    """)
    found = explained(capsys, file, "--request", f"GET / ip={address}")
    assert found["by_name"]["api"]["key"] == key
    assert found["by_name"]["api"]["limits"][0]["of"] == (5 if key == "office" else 7)
    assert found["identities"]["class"] == (None if "/" in address or key == "office" else "probe")


def test_of_a_key_file_without_an_end_only_the_beginning_is_read(written, capsys):
    """A policy from elsewhere may name any file; the check ends with an error, and does not use up the memory."""
    os.truncate(written("", "endless"), 1 << 40)
    user = "user: {jwt: {claim: sub, key_file: endless, algorithms: [RS256]}}"
    assert main(["policy", "check", written(f"identify: {{{user}}}\n{GOOD}")]) == 1
    assert "policy.yaml:1:47: error: the key is not an RSA key" in capsys.readouterr().out
