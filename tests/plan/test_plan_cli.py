"""The command `limitkeeper plan` and its reports: text, JSON, HTML and the policy file."""

from __future__ import annotations

import json
import re
from io import StringIO
from xml.etree import ElementTree

import pytest
from test_probe import Server

from limitkeeper import ConfigurationError
from limitkeeper.cli import main
from limitkeeper.plan import LoadStep
from limitkeeper.plan.cli import ProgressBar, headers_of

NUMBERS = {"--pods": "10", "--concurrency": "40", "--p95": "800ms", "--margin": "0.7", "--per-user": "5"}
SEED = ["plan", *(word for pair in NUMBERS.items() for word in pair), "--split", "partner=200,public=rest"]


def test_the_command_of_the_source_document(capsys):
    """The seed's command prints its numbers: 400, 500, 350, 200 and 150, 450, 250–400 and 300–400."""
    assert main(SEED) == 0
    out = capsys.readouterr().out
    for text in (
        "= 400 concurrent",
        "500 RPS × 0.7 = 350 RPS",
        "partner 200 RPS, public 150 RPS",
        "450 RPS",
        "250 RPS to 400 RPS",
    ):
        assert text in out
    assert re.search(r"each user +5 +10\n", out)


def test_json_has_the_numbers(capsys):
    """`--json` prints the same as numbers."""
    assert main([*SEED, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["total_concurrency"], found["ceiling"], found["limit"], found["one_pod_down"]) == (400, 500, 350, 450)
    assert found["band"] == [250, 400]
    assert [(one["name"], one["rps"]) for one in found["limits"]] == [
        ("all clients together", 350),
        ("partner", 200),
        ("public", 150),
        ("each user", 5),
    ]


def test_the_written_policy_passes_policy_check(tmp_path, capsys):
    """`--write-policy`, then `limitkeeper policy check --strict`: no errors; an existing file is kept without --force."""
    file = str(tmp_path / "shop.yaml")
    assert main([*SEED, "--match", "POST /checkout", "--write-policy", file]) == 0
    assert main(["policy", "check", "--strict", file]) == 0
    assert "5 rules, no errors" in capsys.readouterr().out
    assert main([*SEED, "--write-policy", file]) == 2
    assert "exists; choose another name, or add --overwrite" in capsys.readouterr().err
    assert main([*SEED, "--write-policy", file, "--overwrite"]) == 0


@pytest.mark.parametrize("name", ["checkout_loads.csv", "checkout_latencies.csv", "access.log"])
def test_the_page_is_self_contained_and_its_charts_have_lines(name, examples, tmp_path, capsys):
    """The HTML report is well-formed, loads nothing, and each chart draws points."""
    page = tmp_path / "report.html"
    assert main(["plan", "analyze", str(examples / name), "--pods", "10", "--concurrency", "40", "--html", str(page)]) == 0
    text = page.read_text()
    assert "<script" not in text
    assert not re.search(r"(src|href)=|url\(|@import", text)
    tree = ElementTree.fromstring(text.replace("<!DOCTYPE html>\n", ""))
    charts = list(tree.iter("{http://www.w3.org/2000/svg}svg"))
    assert charts
    for chart in charts:
        drawn = [one for one in chart.iter() if one.tag.endswith("path") or one.tag.endswith("circle")]
        assert drawn
        assert "nan" not in ElementTree.tostring(chart, "unicode").lower()


def test_a_capacity_has_a_chart_too(tmp_path, capsys):
    """The page of numbers alone shows concurrency by rate, with limit, ceiling and slots."""
    page = tmp_path / "report.html"
    assert main([*SEED, "--html", str(page)]) == 0
    assert "<title>Concurrency by rate</title>" in page.read_text()
    assert ">400 slots<" in page.read_text()


def test_names_from_outside_are_escaped_in_the_page(tmp_path, capsys):
    """A name with markup is text."""
    page = tmp_path / "report.html"
    assert main([*SEED, "--name", "<b>&", "--html", str(page)]) == 0
    assert "<h1>&lt;b&gt;&amp;</h1>" in page.read_text()


def test_a_broken_slo_is_exit_code_1(examples, capsys):
    """`analyze` fails a pipeline when the SLO is broken."""
    assert main(["plan", "analyze", str(examples / "checkout_latencies.csv"), "--slo", "p99=1s"]) == 1
    assert "warning: the SLO is broken: p99 1.5 s > 1 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("plan", "--p95 is missing"),
        ("plan --pods 10 --concurrency 40 --p95 0s", "p95 must be greater than 0"),
        ("plan --pods 10 --concurrency 40 --p95 800ms --margin 1.5", "margin must be at most 1"),
        ("plan --pods 10 --concurrency 40 --p95 800ms --split a=300,b=100", "exceed the limit of 350 RPS"),
        ("plan --pods 10 --concurrency 1e400 --p95 800ms", "must be at most 1000000000"),
        ("plan --pods 10 --concurrency 1e999999999 --p95 800ms", "must be at most 1000000000"),
        ("plan --pods 10 --concurrency 40 --p95 800ms --margin 1e-999999999", "below one request per hour"),
        ("plan --pods 10 --concurrency 40 --p95 800ms --per-tenant 1e400", "must be at most 1000000000"),
        ("plan suggest --policy none.yaml --log=", ": can't read the file"),
        ("plan analyze none.log", "none.log: can't read the file"),
        ("plan analyze none.log --window 0s", "window must be greater than 0"),
        ("plan probe http://shop.example/", "is not this machine"),
    ],
)
def test_bad_usage_is_exit_code_2_with_the_remedy(words, message, capsys):
    """Impossible plans are errors on stderr with the reason."""
    assert main(words.split()) == 2
    assert message in capsys.readouterr().err


def test_a_split_without_a_limit_prints_the_report_and_the_remedy(examples, capsys):
    """Latencies alone give no limit to split: the known figures are printed, and the missing ones named."""
    assert main(["plan", "analyze", str(examples / "checkout_latencies.csv"), "--split", "a=rest"]) == 2
    captured = capsys.readouterr()
    assert "200 ms / 600 ms / 1.5 s" in captured.out
    assert "the measurements give no limit; add --pods and --concurrency" in captured.err


@pytest.mark.server
def test_probe_prints_steps_and_a_limit(tmp_path, capsys):
    """The command probes a local server, prints a line per step on stderr, and writes a policy."""
    policy = str(tmp_path / "probed.yaml")
    with Server(lambda number, flying: (200, 0.0)) as server:
        bounds = "--start 10 --factor 2 --max-rate 20 --step 500ms --time 200s --slo p95=200s"
        assert main(["plan", "probe", server.url, *bounds.split(), "--write-policy", policy]) == 0
    captured = capsys.readouterr()
    assert "20 RPS: p95" in captured.err
    assert "The probe ended: the largest load of 20 RPS is reached." in captured.out
    assert main(["policy", "check", policy]) == 0


def test_the_progress_of_a_probe_is_a_bar_on_a_terminal_only():
    """A terminal gets a bar that is drawn over itself; a file gets a line per step."""
    terminal, file = StringIO(), StringIO()
    terminal.isatty = lambda: True
    for out in (terminal, file):
        bar = ProgressBar(out)
        bar.progress(0.5, 20.0)
        bar.step(LoadStep(20.0, 20.0, {95.0: 0.1}, requests=10))
    assert terminal.getvalue().startswith("\r[############............]  50% of the time, 20 RPS ")
    assert file.getvalue() == "20 RPS: p95 100 ms, 0.0% errors, 0.0% refused\n"


def test_headers_of_a_probe_may_hold_anything():
    """The first "=" separates name and value."""
    assert headers_of(["Cookie=a=b, c=d", "X-User=7"]) == {"Cookie": "a=b, c=d", "X-User": "7"}
    with pytest.raises(ConfigurationError, match="'X-User' is no header"):
        headers_of(["X-User"])


def test_suggest_prints_a_diff_and_writes_elsewhere(examples, tmp_path, capsys):
    """The proposal is a diff and reasons; it is written to another file only, and keys can be hashed."""
    policy, log = str(examples / "limitkeeper.yaml"), str(examples / "access.log")
    target = str(tmp_path / "next.yaml")
    assert main(["plan", "suggest", "--policy", policy, "--log", log, "--write-policy", target]) == 0
    out = capsys.readouterr().out
    assert "+  - name: api-next" in out
    assert "would have refused user:u99" in out
    assert main(["policy", "check", target]) == 0
    capsys.readouterr()
    assert main(["plan", "suggest", "--policy", policy, "--log", log, "--hash-keys", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "u99" not in json.dumps(found["suggestions"])
    assert main(["plan", "suggest", "--policy", policy, "--log", log, "--write-policy", policy, "--overwrite"]) == 2
    for ceiling in ("nan", "-5", "many"):
        assert main(["plan", "suggest", "--policy", policy, "--log", log, "--ceiling", ceiling]) == 2
    assert "never changed by this command" in capsys.readouterr().err


def test_suggest_reads_metrics(examples, tmp_path, capsys):
    """Prometheus text of a running policy is a source, too."""
    page = tmp_path / "metrics.txt"
    page.write_text('limitkeeper_rule_decisions_total{policy="shop",rule="checkout",outcome="passed"} 100\n')
    assert main(["plan", "suggest", "--policy", str(examples / "limitkeeper.yaml"), "--metrics", str(page)]) == 0
    assert "No change is proposed." in capsys.readouterr().out
