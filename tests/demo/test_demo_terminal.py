"""What the demo prints: at most 100 columns wide, coloured only on request, and readable in a poor encoding."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from draw import terminal
from draw.traffic import PATTERNS, runs

import demo

SCRIPT = Path(demo.__file__)
LOOKS = {"marks": terminal.Look(), "letters": terminal.PLAIN}


class Screen(io.StringIO):
    """A stream that claims to be a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class OldScreen(Screen):
    encoding = "ascii"


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


def printed(look: terminal.Look, pictures: bool = True) -> list[str]:
    return list(demo.text([runs(pattern) for pattern in PATTERNS], look, pictures))


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_it_fits_into_100_columns(look: terminal.Look) -> None:
    """No line is wider than 100 columns."""
    assert [line for line in printed(look) if len(line) > 100] == []


def test_a_terminal_gets_colours() -> None:
    """A terminal gets colours, and without them the text is the same."""
    look = terminal.look_of(Screen())
    painted = "\n".join(printed(look))
    for code in terminal.CODES.values():
        painted = painted.replace(f"\x1b[{code}m", "")
    assert look.colours
    assert painted.replace("\x1b[0m", "") == "\n".join(printed(terminal.Look()))


def test_a_file_gets_no_colours() -> None:
    """What is not a terminal gets no escape codes."""
    assert not any("\x1b" in line for line in printed(terminal.look_of(io.StringIO())))


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colours_can_be_unwanted(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NO_COLOR and a dumb terminal get no escape codes."""
    monkeypatch.setenv(name, value)
    assert not any("\x1b" in line for line in printed(terminal.look_of(Screen())))


def test_letters_stand_in_for_marks() -> None:
    """Where the encoding is ASCII, everything printed is."""
    assert all(line.isascii() for line in printed(terminal.look_of(OldScreen())))


def test_the_queue_is_drawn_as_a_line() -> None:
    """10 at once through the queue are one mark at once and nine at even steps, 0.2 s apart."""
    (found,) = (run for run in runs(PATTERNS[2]) if str(run.lane.limit) == "leaky bucket queue 5/s capacity 10")
    lines = terminal.picture(PATTERNS[1], [found], terminal.Look())
    assert next(line for line in lines if line.startswith("leaky bucket queue")).endswith("  ●" + "──○" * 9)


def test_the_edge_stands_between_the_bursts() -> None:
    """Two bursts 2 ms apart are both seen, on either side of the window's edge."""
    (found,) = (run for run in runs(PATTERNS[0]) if str(run.lane.limit) == "fixed window 10/s" and not run.lane.waits)
    assert any("●10┊●10" in line for line in terminal.picture(PATTERNS[0], [found], terminal.Look()))


def test_the_table_shows_the_figures() -> None:
    """The row of the bounded queue under 20 at once: 20 arrived, 1 at once, 9 delayed, 10 refused, 1.8 s, 5."""
    rows = terminal.table(PATTERNS[3], runs(PATTERNS[3]), terminal.Look())
    row = next(row for row in rows if row.startswith("leaky bucket queue 5/s capacity 10"))
    assert row.split()[-7:] == ["20", "1", "9", "10", "1.8", "s", "5"]


def test_without_pictures() -> None:
    """--no-picture leaves the tables, and no mark."""
    lines = printed(terminal.Look(), pictures=False)
    assert not any(mark in line for line in lines for mark in "●○✕")
    assert sum("longest wait" in line for line in lines) == 2 * len(PATTERNS)


def test_it_runs(tmp_path: Path) -> None:
    """The demo runs as a script and prints where its page is, and that page exists."""
    page = tmp_path / "deep" / "page.html"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--no-live", "--html", str(page)],
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=True,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines()[0].endswith(str(page))
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_a_reader_may_leave_early(tmp_path: Path) -> None:
    """A reader that closes the pipe after the first line, as `head` does, causes no error message."""
    command = [sys.executable, str(SCRIPT), "--html", str(tmp_path / "page.html")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        assert running.stderr.read() == b""
    assert running.returncode == 0


def test_it_helps(capsys: pytest.CaptureFixture[str]) -> None:
    """--help names every option and runs nothing."""
    with pytest.raises(SystemExit) as left:
        demo.main(["--help"])
    assert left.value.code == 0
    assert {"--html", "--no-picture", "--no-live", "--seconds", "--live-html"} <= set(capsys.readouterr().out.split())
