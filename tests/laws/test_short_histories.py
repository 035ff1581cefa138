"""Laws 1, 3, 8 and 13 in all short histories: every sequence of a few operations on one key, not a random selection.

Two features that meet wrongly mostly do so within a few calls. A history is played from its beginning for each further operation,
on a manual clock; one whose next operation means nothing (there is no reservation to cancel) is not continued.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from limitkeeper import (
    FixedWindow,
    LeakyBucket,
    LeakyBucketQueue,
    Limiter,
    MemoryStore,
    Reservation,
    SlidingWindowLog,
    TokenBucket,
)
from limitkeeper.testing import ManualClock
from limitkeeper.testing.admission_bounds import check_bound
from stand_ins import NOON

RULES: dict[str, Any] = {
    "bucket": TokenBucket("2/s burst 2"),
    "meter": LeakyBucket("2/s", 2),
    "queue": LeakyBucketQueue("2/s"),
    "short queue": LeakyBucketQueue("2/s", 3),
    "window": FixedWindow("2/s"),
    "own window": FixedWindow("2/s", align="first"),
    "log": SlidingWindowLog("2/s"),
    "bucket and window": {"a": TokenBucket("2/s burst 2"), "b": FixedWindow("3/2s")},
    "log and bucket": {"a": SlidingWindowLog("2/s"), "b": TokenBucket("1/s burst 3")},
    "queue and bucket": {"a": LeakyBucketQueue("2/s"), "b": TokenBucket("1/s burst 3")},
    "two windows": {"a": FixedWindow("2/s"), "b": FixedWindow("3/2s")},
}


class Held:
    """A reservation that is neither settled nor cancelled."""

    def __init__(self, reservation: Reservation, cost: int, answers: list[tuple[object, ...]]) -> None:
        self.reservation, self.cost = reservation, cost
        self.before: list[tuple[object, ...]] | None = (
            answers  # of the key before it was made; None: there was another call since
        )
        self.entered = False

    @property
    def start_us(self) -> int:
        return self.reservation.decision.start_us


class History:
    """One key's calls, and what they were answered."""

    def __init__(self, rule: Any) -> None:
        self.clock = ManualClock(NOON)
        self.rule, self.limiter = rule, Limiter(rule, store=MemoryStore(8, self.clock), name="short")
        self.held: list[Held] = []
        self.hits: list[tuple[int, int]] = []
        self.kept: list[tuple[Reservation, int]] = []  # settled or cancelled: with what stays charged
        self.returned: list[tuple[int, int]] = []
        self.above = False  # settled above an estimate, which is debt beyond every bound

    # Operations: False where one means nothing -----------------------------------------------------------------

    def hit(self) -> bool:
        self.forget_answers()
        if self.limiter.hit("k"):
            self.hits.append((self.clock.now_us(), 1))
        return True

    def reserve_one(self) -> bool:
        return self.reserve(1)

    def reserve_two(self) -> bool:
        return self.reserve(2)

    def cancel_first(self) -> bool:
        return self.waiting() != [] and self.cancel(self.waiting()[0])

    def cancel_last(self) -> bool:
        return len(self.waiting()) > 1 and self.cancel(self.waiting()[-1])

    def cancel_entered(self) -> bool:
        entered = [one for one in self.held if one.entered]
        return entered != [] and self.cancel(entered[0])

    def settle_below(self) -> bool:
        return self.held != [] and self.held[0].cost == 2 and self.settle(self.held[0], 1)

    def settle_above(self) -> bool:
        self.above = True
        return self.held != [] and self.settle(self.held[0], self.held[0].cost + 1)

    def enter(self) -> bool:
        """Waits for the start of the first that waits."""
        if not self.waiting():
            return False
        self.forget_answers()
        first, now_us = self.waiting()[0], self.clock.now_us()
        start_us = first.start_us
        first.reservation.__enter__()
        assert self.clock.now_us() == max(start_us, now_us)
        first.entered = True
        return True

    def pass_time(self) -> bool:
        self.forget_answers()
        self.clock.advance(0.5)
        return True

    def reset(self) -> bool:
        self.limiter.reset("k")
        assert not any(one.reservation.cancel() for one in self.held)
        for past in (self.held, self.hits, self.kept, self.returned):
            past.clear()
        self.above = False
        return True

    # Their parts ------------------------------------------------------------------------------------------------

    def waiting(self) -> list[Held]:
        return [one for one in self.held if not one.entered]

    def answers(self) -> list[tuple[object, ...]]:
        asked = [self.limiter.peek("k", cost) for cost in (1, 2)]
        return [(one.allowed, one.remaining, one.retry_us, one.reset_us) for answer in asked for one in answer.decisions]

    def forget_answers(self) -> None:
        for one in self.held:
            one.before = None

    def reserve(self, cost: int) -> bool:
        answers = self.answers()
        reservation = self.limiter.reserve("k", cost, max_wait=3600)
        if not reservation:
            return False
        self.forget_answers()
        self.held.append(Held(reservation, cost, answers))
        return True

    def cancel(self, one: Held) -> bool:
        self.end(one, one.reservation.cancel, 0)
        assert one.before is None or self.answers() == one.before, "the latest charge was cancelled"
        return True

    def settle(self, one: Held, used: int) -> bool:
        self.end(one, lambda: one.reservation.settle(used), min(used, one.cost))
        return True

    def end(self, one: Held, how: Callable[[], bool], stays: int) -> None:
        self.held.remove(one)
        starts = [other.start_us for other in self.held]
        assert how()
        now_us = self.clock.now_us()
        self.kept.append((one.reservation, stays if one.start_us >= now_us else one.cost))
        if one.start_us < now_us and stays < one.cost:
            self.returned.append((now_us, one.cost - stays))
        assert all(other.start_us <= start for other, start in zip(self.held, starts, strict=True)), "a start was put off"
        for other in self.held:
            other.before = None

    # Laws -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        starts = [one.start_us for one in self.waiting()]
        assert starts == sorted(starts), "a waiter was overtaken"
        if not isinstance(self.rule, dict) and not self.above:
            ended = [(reservation.decision.start_us, cost) for reservation, cost in self.kept if cost]
            open_ones = [(one.start_us, one.cost) for one in self.held]
            check_bound(self.rule, [*self.hits, *ended, *open_ones], self.returned)
        refused = self.limiter.hit("k")
        if not refused and refused.retry_us > 0:
            self.clock.advance((refused.retry_us - 1) / 1e6)
            assert not self.limiter.hit("k"), "admitted before the time to retry"
            self.clock.advance(1e-6)
            assert self.limiter.hit("k"), "refused at the time to retry"


Operation = Callable[[History], bool]
#: With a clock that is advanced, and of callers that wait for their starts.
MOMENTS: list[Operation] = [History.hit, History.reserve_one, History.reserve_two, History.cancel_first, History.cancel_last]
MOMENTS += [History.settle_below, History.settle_above, History.pass_time, History.reset]
WAITS: list[Operation] = [History.hit, History.reserve_one, History.reserve_two, History.cancel_first]
WAITS += [History.enter, History.cancel_entered, History.settle_below]


def play(rule: Any, operations: list[Operation], most: int, begun: tuple[Operation, ...] = ()) -> int:
    """Plays every continuation of a history up to a length; the number of histories."""
    history = History(rule)
    try:
        if not all(operation(history) for operation in begun):
            return 0
        history.check()
    except AssertionError as error:
        raise AssertionError(f"{rule}: {', '.join(one.__name__ for one in begun)}: {error}") from error
    longer = operations if len(begun) < most else []
    return 1 + sum(play(rule, operations, most, (*begun, operation)) for operation in longer)


LONGER = [pytest.param(0, id="short"), pytest.param(2, marks=pytest.mark.soak, id="longer")]


@pytest.mark.parametrize("longer", LONGER)
@pytest.mark.parametrize(("operations", "length"), [(MOMENTS, 4), (WAITS, 5)], ids=["moments", "waits"])
@pytest.mark.parametrize("rule", RULES)
def test_every_short_history_keeps_the_laws(rule: str, operations: list[Operation], length: int, longer: int) -> None:
    """Honest times to retry, the bound, first come first served, and exact cancels, whatever four operations (or five) meet."""
    assert play(RULES[rule], operations, length + longer) >= 1000
