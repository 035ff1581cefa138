"""Adaptive concurrency: the formulas by hand, and the closed loop with a simulated server on a virtual clock."""

from __future__ import annotations

import asyncio
import os
from contextlib import nullcontext

import pytest
from closed_loop import ClosedLoop
from hypothesis import given
from hypothesis import strategies as st

from limitkeeper import BulkheadFull, ConfigurationError, InvalidLimit
from limitkeeper.concurrency import AIMD, AdaptiveBulkhead, Bulkhead, Gradient2
from limitkeeper.testing import ManualClock


class Fixed:
    """A limit that does not move."""

    window_us, least_samples = 0, 1

    def __init__(self, limit):
        self.limit = float(limit)

    def update(self, seconds, in_flight, dropped):
        return self.limit


def test_aimd_by_hand():
    """+1 while at least half is in use, × 0.9 rounded down after a drop or a slow call, within the range."""
    aimd = AIMD()
    steps = [(0.1, 20, False), (0.1, 10, False), (0.1, 11, False), (5.1, 1, False), (5.0, 22, False), (0.1, 22, True)]
    assert [aimd.update(*step) for step in steps] == [21, 21, 22, 20, 21, 20]
    aimd = AIMD(initial=199)
    assert [aimd.update(0.1, 150, False) for _ in range(2)] == [200, 200]


@pytest.mark.parametrize(("window", "limit"), [(0, 14), ("1s", 18)])
def test_aimd_by_window(window, limit):
    """Three slow calls that end together lower the limit three times; with a window, once."""
    clock = ManualClock(1_000_000)
    adaptive = AdaptiveBulkhead(AIMD(minimum=5, timeout="1s", window=window), clock=clock)
    calls = [adaptive.call() for _ in range(3)]
    for call in calls:
        call.__enter__()
    clock.advance(2)
    for call in calls:
        call.__exit__(None)
    assert adaptive.bulkhead.max_concurrent == limit


def test_gradient2_by_hand():
    """Golden values: growth at g = 1, decrease by the gradient without the queue, and the bound of 0.5."""
    limit = Gradient2(initial=100, minimum=10, maximum=1000)
    assert limit.update(0.1, 75, False) == pytest.approx(100 + 0.2 * 4)  # long = 0.1, g = 1
    assert limit.update(0.1, 40, False) == pytest.approx(100.8)  # less than half is in use
    # long = 0.1 + (0.4 - 0.1) / 3 = 0.2; g = 1.5 * 0.2 / 0.4 = 0.75
    assert limit.update(0.4, 75, False) == pytest.approx(100.8 * (0.8 + 0.2 * 0.75))
    assert limit.long == pytest.approx(0.2)
    # long = 0.2 + (2 - 0.2) / 4 = 0.65; g = max(0.5, 0.4875)
    before = limit.limit
    assert limit.update(2.0, 75, False) == pytest.approx(before * 0.9)
    # a drop: × 0.9, and the response time is not learned
    assert limit.update(9.0, 75, True) == pytest.approx(before * 0.81)
    assert limit.long == pytest.approx(0.65)
    # long = 0.65 + (0.1 - 0.65) / 5 = 0.54, more than twice the present time: × 0.95
    limit.update(0.1, 75, False)
    assert limit.long == pytest.approx(0.54 * 0.95)


def test_gradient2_after_its_warm_up():
    """After ten windows the long-term time is an exponential mean with the factor 2 / 601."""
    limit = Gradient2()
    for _ in range(10):
        limit.update(0.1, 15, False)
    limit.update(0.15, 15, False)
    assert limit.long == pytest.approx(0.1 + 0.05 * 2 / 601)


def published(limit, long, seconds):
    """Netflix's formula, the long-term time given."""
    g = min(max(1.5 * long / seconds, 0.5), 1.0)
    return min(max(limit * 0.8 + 0.2 * (limit * g + 4), 20), 200)


@given(st.lists(st.floats(0.05, 0.07), min_size=1, max_size=40))
def test_without_overload_it_is_the_published_formula(times):
    """While the gradient is 1, every step is that of the published algorithm."""
    ours, limit = Gradient2(), 20.0
    for seconds in times:
        ours.update(seconds, int(limit * 0.75), False)
        limit = published(limit, ours.long, seconds)
        assert ours.limit == pytest.approx(limit)


def test_constant_overload_does_not_drift():
    """At a gradient of 0.8 the published formula raises a limit of 10 towards 4 / (1 − 0.8) = 20; ours lowers it every time."""
    ours, theirs = Gradient2(initial=10, minimum=1), 10.0
    for _ in range(20):
        before, ours.long, ours.windows = ours.limit, 0.08, 100
        assert ours.update(0.15, 200, False) == pytest.approx(before * 0.96)
        theirs = theirs * 0.8 + 0.2 * (theirs * 0.8 + 4)
    assert ours.limit < 5
    assert theirs > 14


def loop(algorithm, **options):
    clock = ManualClock(1_000_000)
    adaptive = AdaptiveBulkhead(algorithm, clock=clock)
    return ClosedLoop(adaptive, clock, **options)


#: The longest accepted response time: twice the service time. A limit of more than twice the workers makes every call slower.
IN_TIME_US = 100_000


def after_a_drop(limit):
    """A server under three times the load of its capacity loses half of its workers; the state 5 s later."""
    server = loop(limit, every_us=417)
    server.run(8)
    assert server.goodput(2, IN_TIME_US) >= 0.9 * 800
    server.workers = 20
    server.run(5)
    return server


@pytest.mark.parametrize(
    "limit",
    [
        lambda: Gradient2(initial=40, minimum=5, window="100ms"),
        lambda: AIMD(initial=40, minimum=5, timeout="75ms", window="100ms"),
    ],
    ids=["Gradient2", "AIMD"],
)
def test_half_of_the_capacity_is_found_within_5_s(limit):
    """5 s after half of the workers failed, calls in time are at least 0.9 of the best fixed limit's, and p95 is held."""
    best = 0.0
    for size in (15, 20, 25, 30, 40):
        fixed = loop(Fixed(size), every_us=417, workers=20)
        fixed.run(3)
        best = max(best, fixed.goodput(1, IN_TIME_US))
    server = after_a_drop(limit())
    assert server.goodput(1, IN_TIME_US) >= 0.9 * best
    assert server.p95(1) <= IN_TIME_US / 1e6


def test_a_fixed_limit_does_not_find_it():
    """The limit at which an adaptive one uses the whole server answers no call in time after the drop."""
    server = after_a_drop(Fixed(60))
    assert server.goodput(1, IN_TIME_US) == 0


@pytest.mark.parametrize("window", [pytest.param("1s", marks=pytest.mark.slow), "250ms"])
def test_gradient2_follows_the_capacity(window):
    """Under overload the whole capacity of a server is used and its queue stays short; when half of its workers fail, goodput
    is that of the best fixed limit within 5 s, and p95 comes back."""
    server = loop(Gradient2(window=window), every_us=1000)
    server.run(40)
    assert server.goodput(10) == pytest.approx(800, rel=0.02)
    assert server.p95(10) < 2 * 0.05
    server.workers = 20
    server.run(5)
    server.run(5)
    assert server.goodput(5) >= 0.9 * 400
    server.run(10)
    assert server.goodput(5) >= 0.9 * 400
    assert server.p95(5) <= 2 * 0.05
    server.workers = 40
    server.run(40)
    assert server.goodput(5) == pytest.approx(800, rel=0.02)


@pytest.mark.slow
def test_gradient2_does_not_creep():
    """Ten minutes of overload leave the limit where one minute left it."""
    server = loop(Gradient2(window="250ms"), every_us=1000)
    server.run(60)
    after_a_minute = server.adaptive.algorithm.limit
    server.run(120)
    assert server.adaptive.algorithm.limit == pytest.approx(after_a_minute, rel=0.05)
    assert server.p95(10) <= 2 * 0.05


@pytest.mark.slow
def test_a_slower_server_is_learned():
    """When every call takes twice as long, the limit finds its way back: the baseline is learned at the minimum."""
    server = loop(Gradient2(window="250ms"), every_us=1200)
    server.run(20)
    server.service_us = 100_000
    server.run(60)
    assert server.goodput(5) >= 0.9 * 400


@pytest.mark.parametrize("algorithm", [AIMD, Gradient2])
def test_constant_timeouts_lower_the_limit(algorithm):
    """A server that answers nothing brings the limit to its minimum, though its response times are constant; then it recovers."""
    server = loop(algorithm(initial=50, minimum=5), every_us=2000)
    server.run(2)
    server.hung = True
    server.run(30)
    assert server.adaptive.algorithm.limit == 5
    server.hung = False
    server.run(30)
    assert server.goodput(5) > 300


@pytest.mark.slow
def test_aimd_holds_its_timeout():
    """AIMD keeps response times near its timeout."""
    server = loop(AIMD(timeout="100ms"))
    server.run(30)
    assert server.goodput(10) >= 0.8 * 800
    server.workers = 20
    server.run(10)
    assert server.goodput(5) >= 0.9 * 400
    assert server.p95(5) < 0.25


def test_outcomes():
    """A call that raises changes nothing; a timeout, a cancellation and `drop()` lower the limit; `ignore()` changes nothing."""
    adaptive = AdaptiveBulkhead(AIMD(initial=50))

    def run(error=None, action=None):
        with pytest.raises(type(error)) if error else nullcontext(), adaptive.call() as call:
            if action:
                getattr(call, action)()
            if error:
                raise error
        return adaptive.bulkhead.max_concurrent

    assert run(KeyError()) == 50
    assert run(action="ignore") == 50
    assert run(TimeoutError()) == 45
    assert run(asyncio.CancelledError()) == 40
    assert run(action="drop") == 36
    assert adaptive.bulkhead.in_use == 0


def test_the_decorator_and_async_calls():
    """`@adaptive.limit` and `async with adaptive.call()` hold a place."""
    adaptive = AdaptiveBulkhead(AIMD(initial=1, minimum=1))

    @adaptive.limit
    async def fetch():
        assert adaptive.bulkhead.in_use == 1
        with pytest.raises(BulkheadFull):
            async with adaptive.call():
                pass
        return 5

    assert asyncio.run(fetch()) == 5
    assert adaptive.bulkhead.max_concurrent == 2


def test_a_share_is_counted_when_it_is_taken():
    """Threads that find the limit used up at the same time get no more than their partition's share."""
    adaptive = AdaptiveBulkhead(Fixed(10), partitions={"live": 0.2})
    for _ in range(10):
        adaptive.call().__enter__()
    assert [adaptive._take("live") for _ in range(3)] == [True, True, False]
    assert adaptive.bulkhead.in_use == 12


def test_a_place_that_was_free_a_moment_ago_costs_no_guaranteed_one():
    """Another caller takes the last place while a call of a partition enters: the partition has its share all the same."""

    class Contested(Bulkhead):
        def acquire(self):
            self.try_acquire()  # of the other caller
            super().acquire()

    adaptive = AdaptiveBulkhead(Fixed(2), partitions={"live": 0.5})
    adaptive.bulkhead = Contested(2, 0)
    adaptive.bulkhead.try_acquire()
    with adaptive.call("live"):
        assert adaptive.busy["live"] == 1


def test_every_admitted_call_is_an_event():
    """Calls of a partition's share too: as many are allowed as have finished."""
    adaptive = AdaptiveBulkhead(Fixed(1), partitions={"live": 0.5})
    heard = []
    for kind in ("allowed", "finished"):
        adaptive.bulkhead.events.on(kind, lambda event: heard.append(event.kind))
    with adaptive.call("batch"), adaptive.call("live"):
        pass
    assert sorted(heard) == ["allowed"] * 2 + ["finished"] * 2


def test_partitions():
    """Below the limit every partition passes; at the limit only those below their share."""
    adaptive = AdaptiveBulkhead(Fixed(10), partitions={"live": 0.7, "batch": 0.3})
    batch = [adaptive.call("batch") for _ in range(10)]
    for call in batch:
        call.__enter__()  # borrows the share of the others
    with pytest.raises(BulkheadFull):
        adaptive.call("batch").__enter__()
    live = [adaptive.call("live") for _ in range(7)]
    for call in live:
        call.__enter__()
    with pytest.raises(BulkheadFull):
        adaptive.call("live").__enter__()
    for partition in (None, "unknown"):
        with pytest.raises(BulkheadFull):
            adaptive.call(partition).__enter__()
    assert adaptive.busy == {"live": 7, "batch": 10}
    for call in batch[:7]:
        call.__exit__(None)
    with pytest.raises(BulkheadFull):
        adaptive.call("batch").__enter__()  # the limit is in use, and it holds its share
    for call in (*batch[7:], *live):
        call.__exit__(None)
    assert adaptive.busy == {"live": 0, "batch": 0}
    assert adaptive.bulkhead.in_use == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: AIMD(initial=5),
        lambda: AIMD(backoff=0),
        lambda: Gradient2(initial=300),
        lambda: Gradient2(minimum=0),
        lambda: Gradient2(tolerance=0.9),
        lambda: Gradient2(smoothing=1.5),
        lambda: AdaptiveBulkhead(partitions={"a": 0.0}),
    ],
)
def test_invalid_settings(make):
    """Settings that fit no limit are refused."""
    with pytest.raises(InvalidLimit):
        make()


def test_shares_fit():
    """Shares are at most 1 together."""
    with pytest.raises(ConfigurationError, match="at most 1 together"):
        AdaptiveBulkhead(partitions={"a": 0.7, "b": 0.4})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_fork_with_running_calls():
    """A forked child has the whole share of a partition, and leaving a call of its parent changes nothing."""
    adaptive = AdaptiveBulkhead(Fixed(2), partitions={"live": 0.5})
    with adaptive.call("live"):
        child = os.fork()
        if child == 0:
            good = adaptive.busy == {"live": 0} and adaptive.bulkhead.in_use == 0
            adaptive._end("live", adaptive._clock.now_us(), 1, False, True)
            os._exit(0 if good and adaptive.busy == {"live": 0} and adaptive.bulkhead.in_use == 0 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert adaptive.busy == {"live": 0}


def test_an_algorithm_that_raises_keeps_no_place():
    """The error of an application's own algorithm reaches the caller, whose place is free afterwards."""

    class Broken(Fixed):
        def update(self, seconds: float, in_flight: int, dropped: bool) -> float:
            raise ZeroDivisionError

    adaptive = AdaptiveBulkhead(Broken(1))
    with pytest.raises(ZeroDivisionError), adaptive.call():
        pass
    assert adaptive.bulkhead.in_use == 0


def test_a_clock_that_goes_back_does_not_hold_the_limit():
    """After a step of an hour back the limit follows the responses as soon as without it."""
    clock = ManualClock(10_000)
    bulkhead = AdaptiveBulkhead(AIMD(initial=50, timeout="100ms", window="1s"), clock=clock)
    clock.advance(-3600)
    for _ in range(200):
        with bulkhead.call():
            clock.advance(1)
    assert bulkhead.bulkhead.max_concurrent < 50
