"""Scenario files: mistakes are shown with their lines and the right form."""

from __future__ import annotations

import pytest

from limitkeeper.errors import ConfigurationError
from limitkeeper.policy import PolicyError
from limitkeeper.simulate import Scenario

GOOD = """\
clients:
  public: {arrivals: 10/s}
gateway:
  calls: [order]
services:
  order: {pods: 2, concurrency: 4, time: {p50: 20ms, p95: 60ms}}
"""
MISTAKES = [
    ("arrivals: 10/s", "arivals: 10/s", 2, "did you mean 'arrivals'"),
    ("10/s", "fast", 2, "rate"),
    ("calls: [order]", "calls: [ordr]", 4, "did you mean 'order'"),
    ("pods: 2", "pods: 0", 6, "a number of instances"),
    ("p95: 60ms", "p95: 10ms", 6, "percentiles lie between p0 and p100 and grow"),
    ("p95: 60ms", "q95: 60ms", 6, "percentiles such as p95"),
    ("time: {p50: 20ms, p95: 60ms}", "calls: [order]", 6, "in a circle: order → order"),
    ("gateway:", "gateway:\n  policy: missing.yaml", 4, "can't read the policy"),
    ("gateway:", "gateway:\n  store: {kind: leassed}", 4, "did you mean 'leased'"),
    ("gateway:", "limit: 5/s\ngateway:", 3, "a trace through one limiter"),
    ("gateway:", "gateway:\n  faults: [{at: 1s, down: 1s, node: 3}]", 4, "there is no node 3"),
]


def test_a_trace_has_no_loop():
    """Senders in a loop wait for responses, which a limiter alone does not give."""
    with pytest.raises(PolicyError, match="a 'loop' waits for responses, and a limit alone has none; write a rate"):
        Scenario.of(limit="5/s", clients={"all": {"arrivals": {"loop": 5}}})


@pytest.mark.parametrize(("before", "after", "line", "message"), MISTAKES)
def test_a_mistake_is_shown_with_its_line(tmp_path, before, after, line, message):
    """A mistake names the file, the line and the remedy."""
    file = tmp_path / "scenario.yaml"
    assert before in GOOD
    file.write_text(GOOD.replace(before, after, 1))
    with pytest.raises(PolicyError) as caught:
        Scenario.load(file)
    text = str(caught.value)
    assert message in text
    assert f"scenario.yaml:{line}:" in text


def test_all_mistakes_are_shown_at_once(tmp_path):
    """Three mistakes in one file are three errors in one message."""
    file = tmp_path / "scenario.yaml"
    file.write_text(GOOD.replace("10/s", "fast").replace("pods: 2", "pods: x").replace("[order]", "[ordr]"))
    with pytest.raises(PolicyError) as caught:
        Scenario.load(file)
    assert len(caught.value.errors) >= 2


def test_a_file_that_is_not_there_is_named():
    """The error of an unreadable scenario has its path."""
    with pytest.raises(ConfigurationError, match=r"nowhere\.yaml: can't read the scenario"):
        Scenario.load("nowhere.yaml")


def test_the_name_of_the_file_is_the_default_name(tmp_path):
    """A scenario without a name has that of its file."""
    file = tmp_path / "quiet day.yaml"
    file.write_text(GOOD)
    assert Scenario.load(file).name == "quiet day"
