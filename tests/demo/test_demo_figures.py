"""The demo's figures are the figures of the texts that limitkeeper started from."""

from __future__ import annotations

import pytest
from draw.runs import SECOND, Figures, Mark, figures
from draw.traffic import NOON, PATTERNS, Pattern, Run, runs

from limitkeeper import FixedWindow, LeakyBucket, LeakyBucketQueue, SlidingWindowCounter, SlidingWindowLog, TokenBucket

DOUBLE, THREE_PER_SECOND, TEN, TWENTY, ROUND_MINUTE = PATTERNS


def run(pattern: Pattern, limit: str, waits: bool = False) -> Run:
    return next(found for found in runs(pattern) if str(found.lane.limit) == limit and found.lane.waits == waits)


def counts(found: Run) -> tuple[int, int, int]:
    return found.figures.at_once, found.figures.delayed, found.figures.refused


def starts(found: Run) -> list[float]:
    return [(mark.start - NOON) / SECOND for mark in found.marks if mark.start is not None]


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.name)
def test_every_rule_is_there(pattern: Pattern) -> None:
    """Every pattern goes through every rule, bounded and unlimited, clock-aligned and from the first request."""
    limits = {lane.limit for lane in pattern.lanes}
    kinds = {TokenBucket, LeakyBucket, LeakyBucketQueue, FixedWindow, SlidingWindowLog, SlidingWindowCounter}
    assert {type(limit) for limit in limits} == kinds
    assert len(limits) == len(kinds) + 2


def test_normal_traffic_passes() -> None:
    """At 3 per second every rule admits all at once."""
    assert {counts(found) for found in runs(THREE_PER_SECOND)} == {(12, 0, 0)}


@pytest.mark.parametrize("limit", ["token bucket 5/s burst 10", "leaky bucket 5/s capacity 10"])
def test_a_bucket_admits_a_burst(limit: str) -> None:
    """A bucket of 10 admits 10 at once, and of 20 at once it refuses 10."""
    assert counts(run(TEN, limit)) == (10, 0, 0)
    assert counts(run(TWENTY, limit)) == (10, 0, 10)


def test_the_queue_smooths_a_burst() -> None:
    """The queue makes a line at 5 per second of 10 at once: five in the first second, five in the next."""
    found = run(TEN, "leaky bucket queue 5/s capacity 10", waits=True)
    assert starts(found) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6, 1.8]
    assert found.figures.most_in_window == 5


def test_the_queue_is_bounded() -> None:
    """Of 20 at once a queue of 10 takes 10, the last waits 1.8 s, and 10 are refused."""
    assert run(TWENTY, "leaky bucket queue 5/s capacity 10", waits=True).figures == Figures(20, 1, 9, 10, 1_800_000, 5)


def test_the_queue_without_end_takes_all() -> None:
    """Of 20 at once an unlimited queue takes all, and the last waits 3.8 s."""
    assert run(TWENTY, "leaky bucket queue 5/s", waits=True).figures == Figures(20, 1, 19, 0, 3_800_000, 5)


def test_now_or_never_at_twenty() -> None:
    """Of 20 at once every rule that does not wait admits 10 and refuses 10."""
    assert {counts(found) for found in runs(TWENTY) if not found.lane.waits} == {(10, 0, 10)}


def test_a_bucket_that_is_waited_for() -> None:
    """Of 20 at once a bucket admits 10, and the others follow at 5 per second when they may wait."""
    found = run(TWENTY, "token bucket 5/s burst 10", waits=True)
    assert starts(found)[10:] == [0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0]


def test_the_double_burst() -> None:
    """A clock-aligned window admits 20 within 2 ms at its edge; a window from the first request and the log admit 10."""
    fixed = run(DOUBLE, "fixed window 10/s")
    assert counts(fixed) == (20, 0, 0)
    assert fixed.figures.most_in_window == 20
    assert starts(fixed)[-1] - starts(fixed)[0] == pytest.approx(0.002)
    assert counts(run(DOUBLE, "fixed window 10/s align first")) == (10, 0, 10)
    assert counts(run(DOUBLE, "sliding window log 10/s")) == (10, 0, 10)


def test_over_the_round_minute() -> None:
    """3 per minute: a fixed window admits 6 within one minute over its edge, the log 3."""
    assert run(ROUND_MINUTE, "fixed window 3/min").figures.most_in_window == 6
    assert run(ROUND_MINUTE, "sliding window log 3/min").figures.most_in_window == 3


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.name)
def test_the_log_keeps_its_promise(pattern: Pattern) -> None:
    """The log never starts more than its limit in any window, with waiting or without."""
    for found in runs(pattern):
        if isinstance(found.lane.limit, SlidingWindowLog):
            assert found.figures.most_in_window <= found.lane.limit.count


def test_windows_are_half_open() -> None:
    """A start exactly one window before another is not in the same window."""
    marks = [Mark(at, at, at) for at in (0, SECOND // 2, SECOND)]
    assert figures(marks, SECOND).most_in_window == 2


def test_edges_are_read_off_the_answers() -> None:
    """A clock-aligned window ends on the second; one from the first request ends a second after it."""
    assert NOON + SECOND in run(DOUBLE, "fixed window 10/s").edges
    assert run(DOUBLE, "fixed window 10/s align first").edges == (NOON + 999_000, NOON + 1_999_000)
