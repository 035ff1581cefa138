"""The report and the command: figures side by side, self-contained pages, series as CSV, PNG files."""

from __future__ import annotations

import csv
import json
import re
import shutil
from html.parser import HTMLParser

import pytest

from limitkeeper.charts.line_chart import LEGEND_ROW, WIDTH, Line, legend_places, line_chart
from limitkeeper.cli import main
from limitkeeper.simulate import Scenario, Simulation
from limitkeeper.simulate.recorder import jain
from limitkeeper.simulate.report import Report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SCENARIO = """\
about: "<b>a test</b>"
duration: 5s
slo: p95=50ms
clients:
  public: {arrivals: 100/s, users: 10}
  batch: {arrivals: 20/s}
gateway: {calls: [order], concurrency: 1000}
services:
  order: {concurrency: 10, time: 20ms, calls: [{to: db, bulkhead: {concurrent: 5}}]}
  db: {concurrency: 5, time: 5ms}
"""


@pytest.fixture
def files(tmp_path):
    for name in ("first", "second"):
        (tmp_path / f"{name}.yaml").write_text(SCENARIO)
    return tmp_path


def test_a_report_is_one_page_without_scripts_or_requests(files):
    """The page loads nothing, runs nothing, escapes names, and has a chart of each kind for each run."""
    results = [Simulation(Scenario.load(files / f"{name}.yaml")).run() for name in ("first", "second")]
    page = Report(results).html("A & B")
    assert not re.search(r"<script|<link|<img|@import|url\(|src=|href=|<iframe", page)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)
    assert "&lt;b&gt;a test&lt;/b&gt;" in page
    assert page.count("<svg") == 2 * 6
    assert page.count("<path") >= 2 * 6 * 2
    HTMLParser().feed(page)


@pytest.mark.server
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here; Debian's package is `chromium`")
def test_a_page_opens_in_chromium_without_errors(files):
    """Chromium shows the page without a message on its console and without a request."""
    playwright = pytest.importorskip("playwright.sync_api", reason="the test of the page needs playwright")
    result = Simulation(Scenario.load(files / "first.yaml")).run()
    (files / "report.html").write_text(Report([result]).html())
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"], timeout=120_000)
        page = browser.new_page()
        messages, requests = [], []
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto((files / "report.html").as_uri())
        boxes = [one.bounding_box() for one in page.locator("svg").all()]
        browser.close()
    assert messages == []
    assert len(requests) == 1
    assert all(box is not None and box["width"] > 200 and box["height"] > 80 for box in boxes)


def test_a_service_has_one_colour_in_all_runs(files):
    """The lines of a service have the same colour in the charts of all runs, whichever of its services is the busiest."""
    (files / "third.yaml").write_text(SCENARIO.replace("db: {concurrency: 5, time: 5ms}", "db: {concurrency: 5, time: 45ms}"))
    results = [Simulation(Scenario.load(files / f"{name}.yaml")).run() for name in ("first", "third")]
    for row in Report(results).charts():
        first, third = ({line.name: line.colour for line in chart.lines} for _, chart in row)
        assert first == third


def test_a_long_legend_continues_in_the_next_row():
    """Names that would run over the edge of a chart begin a row, and the chart is as much higher."""
    lines = [Line(f"connections of service {number}", [(0, 1), (1, 2)]) for number in range(6)]
    low, high = (line_chart("t", "x", "y", lines[:count]) for count in (1, 6))
    assert {x + 16 + 6.4 * len(lines[0].name) <= WIDTH for x, _ in legend_places(lines)} == {True}
    assert len({y for _, y in legend_places(lines)}) == 3
    assert high.height - low.height == 2 * LEGEND_ROW


def test_the_command_compares_runs(files, capsys):
    """Two scenarios are two columns of the same figures."""
    assert main(["simulate", str(files / "first.yaml"), str(files / "second.yaml"), "--duration", "1s"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["first", "second"]
    goodput = next(line for line in lines if "public: goodput" in line)
    assert len(re.findall(r"\d+\.\d/s", goodput)) == 2


def test_without_a_terminal_each_tenth_of_a_run_is_a_line(files, capsys):
    """A run in a log or a pipe shows how far it is."""
    assert main(["simulate", str(files / "first.yaml"), "--duration", "10s"]) == 0
    expected = [[f"{share}%", "first"] for share in range(10, 101, 10)]
    assert [line.split() for line in capsys.readouterr().err.splitlines()] == expected


def test_the_command_writes_files(files, capsys):
    """The page, the series and JSON are written, and an existing file is not overwritten."""
    out = [str(files / "r.html"), str(files / "r.csv")]
    command = ["simulate", str(files / "first.yaml"), "--json", "--html", out[0], "--csv", out[1]]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)["runs"][0]
    assert found["clients"]["public"]["sent"] > 0
    rows = list(csv.DictReader((files / "r.csv").open()))
    assert [row["time"] for row in rows] == ["1", "2", "3", "4", "5"]
    assert sum(float(row["public.sent"]) for row in rows) == found["clients"]["public"]["sent"]
    assert main(command) == 2
    assert "exists" in capsys.readouterr().err


def test_charts_are_written_as_png(files):
    """With matplotlib each kind of chart is one PNG file with the runs side by side."""
    pytest.importorskip("matplotlib")
    assert main(["simulate", str(files / "first.yaml"), "--duration", "2s", "--png", str(files / "png")]) == 0
    found = sorted((files / "png").iterdir())
    assert len(found) == 6
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in found)
    assert main(["simulate", str(files / "first.yaml"), "--duration", "2s", "--png", str(files / "first.yaml" / "png")]) == 2


def test_mistakes_end_with_a_code(files, capsys):
    """A scenario with mistakes is not run: the exit code is 1 and the mistakes are on stderr."""
    (files / "wrong.yaml").write_text(SCENARIO.replace("time: 20ms", "tim: 20ms"))
    assert main(["simulate", str(files / "wrong.yaml")]) == 1
    assert "did you mean 'time'?" in capsys.readouterr().err


def test_an_interrupted_run_keeps_what_it_has(files):
    """Ctrl-C after two intervals leaves a result with two rows and a note about it."""

    def interrupt(share: float) -> None:
        if share >= 0.4:
            raise KeyboardInterrupt

    result = Simulation(Scenario.load(files / "first.yaml"), progress=interrupt).run()
    assert result.interrupted
    assert [row["time"] for row in result.series] == [1.0, 2.0]
    assert "interrupted" in Report([result]).text()


def test_jains_index_is_one_for_equals_and_one_nth_for_one_winner():
    """(Σx)² / (n·Σx²) of equal shares is 1, of one winner among four 1/4."""
    assert jain([0.5, 0.5, 0.5]) == pytest.approx(1)
    assert jain([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
