"""The page of the demo: well-formed, complete, and on its own."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from draw.page import page
from draw.traffic import PATTERNS, runs

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def markup() -> str:
    return page([runs(pattern) for pattern in PATTERNS])


@pytest.fixture(scope="module")
def tree(markup: str) -> ElementTree.Element:
    return ElementTree.fromstring(markup)


def test_it_refers_to_nothing_outside(markup: str, tree: ElementTree.Element) -> None:
    """No element loads anything, no style imports anything, and the only address is the name of SVG itself."""
    assert set(re.findall(r"\w+://[^\"' ]+", markup)) <= {SVG[1:-1]}
    assert not re.search(r"@import|url\(", markup)
    assert not {"script", "link", "img", "iframe", "object"} & {element.tag for element in tree.iter()}
    assert not any(name in element.attrib for element in tree.iter() for name in ("src", "href", "srcset"))


def test_it_is_for_phones_and_for_the_night(markup: str, tree: ElementTree.Element) -> None:
    """It has a viewport, a narrow layout, and a dark scheme for marks and page."""
    assert tree.find(".//meta[@name='viewport']") is not None
    assert "@media (max-width" in markup
    assert markup.count("@media (prefers-color-scheme: dark)") == 2


def test_every_answer_is_a_mark(tree: ElementTree.Element) -> None:
    """Every lane has a circle for each arrival that starts, a ring where it is delayed, and a cross for each that is refused."""
    lanes = [lane for lane in tree.iter("div") if lane.get("class") == "lane" and lane.find(".//b") is not None]
    found = [run for pattern in PATTERNS for run in runs(pattern)]
    assert [lane.findtext(".//b") for lane in lanes] == [str(run.lane.limit) for run in found]
    for lane, run in zip(lanes, found, strict=True):
        circles = [element.get("class") for element in lane.iter(f"{SVG}circle")]
        assert circles.count("green") == run.figures.at_once
        assert circles.count("amber-line fine") == run.figures.delayed
        assert sum(1 for _ in lane.iter(f"{SVG}path")) == run.figures.refused


def test_the_legend_names_every_mark(tree: ElementTree.Element) -> None:
    """The legend explains admitted, delayed and refused, and window boundaries."""
    legend = next(element for element in tree.iter("p") if element.get("class") == "legend")
    words = " ".join(legend.itertext())
    assert all(word in words for word in ("admitted at once", "delayed", "refused", "boundary"))
