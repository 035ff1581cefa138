"""The pictures of the docs are what the library draws today, and each is complete without its page."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import scenes
from draw.runs import SECOND, send
from draw.traffic import NOON
from scenes.resilience4j import Permits

from limitkeeper import MemoryStore, SlidingWindowCounter
from limitkeeper.resilience4j import RateLimiter, RateLimiterConfig
from limitkeeper.testing import ManualClock

FOLDER = Path(scenes.__file__).parents[1]
SVG = "{http://www.w3.org/2000/svg}"
SIZES = {"title": 17, "big": 15, "small": 12, "code": 12}
NAMES = pytest.mark.parametrize("name", scenes.PICTURES)


@NAMES
def test_pictures_are_up_to_date(name: str) -> None:
    """The file is what the script draws; if not: run `python docs/pictures/make.py` and look at it."""
    assert (FOLDER / f"{name}.svg").read_text(encoding="utf-8") == scenes.PICTURES[name]().markup()


def test_there_are_no_others() -> None:
    """Every SVG file in the folder is drawn by the script."""
    assert {path.stem for path in FOLDER.glob("*.svg")} == set(scenes.PICTURES)


@NAMES
def test_a_picture_stands_on_its_own(name: str) -> None:
    """A picture is well-formed, named and described, light and dark, and loads nothing."""
    text = scenes.PICTURES[name]().markup()
    root = ElementTree.fromstring(text)
    assert root.findtext(f"{SVG}title")
    assert root.findtext(f"{SVG}desc")
    assert "@media (prefers-color-scheme: dark)" in text
    assert set(re.findall(r"\w+://[^\"' ]+", text)) == {SVG[1:-1]}
    assert not re.search(r"@import|url\(|href|<script|<image", text)


@NAMES
def test_text_stays_on_the_card(name: str) -> None:
    """No text runs over the edge of its card, in a font as wide as half its size."""
    root = ElementTree.fromstring(scenes.PICTURES[name]().markup())
    width, height = (float(part) for part in root.attrib["viewBox"].split()[2:])
    for text in root.iter(f"{SVG}text"):
        size = next((SIZES[word] for word in text.attrib["class"].split() if word in SIZES), 13)
        wide = len(text.text or "") * size * 0.5
        left = float(text.attrib["x"]) - {"start": 0.0, "middle": wide / 2, "end": wide}[text.attrib["text-anchor"]]
        assert left >= 0, text.text
        assert left + wide <= width, text.text
        assert size <= float(text.attrib["y"]) <= height, text.text


def test_thousandths_of_a_call_answer_alike() -> None:
    """The sliding counter decides the same in calls and in thousandths of a call, as its picture counts."""
    at = [NOON + second * SECOND for second in (*range(5, 45, 5), 65, 70, 75, 80, 85, 90, 93, 100, 103)]
    frame = scenes.sheet.panel(0, 100, NOON, NOON + 150 * SECOND)
    finer, _ = scenes.sheet.played(SlidingWindowCounter("10000/min"), at, frame, lambda _: 0.0, cost=1000)
    assert [mark.start for mark in finer] == [mark.start for mark in send(SlidingWindowCounter("10/min"), at)]


def test_thousandths_of_a_permission_answer_alike() -> None:
    """The refill-rate-limiter's example answers the same in permissions and in thousandths, as its pictures count."""
    clock = ManualClock(NOON / SECOND)
    config = RateLimiterConfig(10, "1s", "100ms", permit_capacity=10, initial_permits=2)
    whole, finer = RateLimiter("backend", config, store=MemoryStore(clock=clock)), Permits()
    for wait, permits in ((0, 1), (0.05, 2), (0.1, 1), (0.05, 3), (0.15, 1), (4.65, 4)):
        clock.advance(wait)
        finer.clock.advance(wait)
        answer = whole.reserve_permission(permits)
        finer.ask(permits)
        start = finer.marks[-1].start
        assert answer == (-1 if start is None else (start - clock.now_us()) * 1000)
        assert whole.metrics.available_permissions == finer.available() // 1
