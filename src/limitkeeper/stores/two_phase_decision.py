"""Decides claims that are in several places (the shards of a ShardedStore, the slots of a cluster), all or nothing.

1. Every place charges its own claims at their earliest start. All have the same one: done, in one round trip.
2. One refuses: those that were charged give back and are peeked at; the limit with the longest retry decides. Starts differ:
   those with an earlier one give back and are charged again, not before the latest start of all, until all have the same.

Where a wait is allowed, the first attempt asks for now; only what has to wait looks for a common start, and in one process one
after the other on a key: callers that do it at once push each other back, in another order at each place.

Places may have clocks of their own: starts are compared as waits since each place was first asked. Between the two steps others
may see a charge and be refused because of it, never admitted. What is charged in some places only, because the caller died in
between or a place failed while it gave back, is at most the cost of this one decision: too strict, never too lax.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..algorithms.claim import Claim
from ..clock import Clock
from ..decision import Decision, Decisions
from ..errors import StoreError, StoreUnavailable
from ..fork import reset_after_fork
from .sans_io import Pause, Pending, Plan

#: The rounds of each attempt to find a common start, while other processes take theirs. Between two attempts all is given back,
#: for a random part of a pause (seconds) that doubles each time. Windows that are reserved far ahead need many rounds.
ROUNDS, FIRST_PAUSE = (3, 3, 3, 3, 12), 0.008
#: Seconds after which a decision does not wait for one before it that neither ends nor waits: its task may never run again.
LONGEST_WAIT = 1.0


class QueuedDecision(Pending):
    """One decision in the queues of its keys: it waits until the one `before` it has ended, for at most `max_wait_us` in all. A
    decision that waits counts its `looks`: those behind it see that its task runs, however long the queue is."""

    def __init__(self, clock: Clock, max_wait_us: int | None) -> None:
        super().__init__(clock)
        self.before: QueuedDecision | None = None
        self.looks = 0
        self._end_us = None if max_wait_us is None else clock.now_us() + max_wait_us

    def left_us(self) -> int | None:
        return None if self._end_us is None else max(0, self._end_us - self._clock.now_us())

    def _waits(self, timeout: float | None, waker: Callable[[], object]) -> Iterator[float]:
        before, left_us = self.before, self.left_us()
        assert before is not None
        before._wakers.append(waker)
        left = min(math.inf if timeout is None else timeout, math.inf if left_us is None else left_us / 1e6)
        seen, unseen_s = before.looks, 0.0
        while not before.done and left > 0 and unseen_s < LONGEST_WAIT:
            self.looks += 1
            yield min(self.RECHECK_S, left)
            left -= self.RECHECK_S
            seen, unseen_s = before.looks, unseen_s + self.RECHECK_S if before.looks == seen else 0.0

    def wait(self, timeout: float | None = None) -> None:
        self.result(timeout)

    async def await_(self, timeout: float | None = None) -> None:
        await self.aresult(timeout)


class DecisionQueues:
    """The last decision in the queue of each key. The lock is re-entrant: the garbage collector may end a decision anywhere."""

    def __init__(self) -> None:
        self._reset_after_fork()
        reset_after_fork(self)

    def _reset_after_fork(self) -> None:
        self._lock = threading.RLock()
        self._last: dict[Hashable, QueuedDecision] = {}

    def join(self, keys: Iterable[Hashable], queued: QueuedDecision) -> list[QueuedDecision]:
        """Joins all queues at once; the decisions before it."""
        with self._lock:
            before = dict.fromkeys(self._last[key] for key in keys if key in self._last)
            self._last.update(dict.fromkeys(keys, queued))
        return list(before)

    def leave(self, keys: Iterable[Hashable], queued: QueuedDecision) -> None:
        with self._lock:
            for key in keys:
                if self._last.get(key) is queued:
                    del self._last[key]
        queued.finish(None)


QUEUES = DecisionQueues()


@dataclass(slots=True, eq=False)
class Group:
    """The claims of a decision that are in one place, and their positions in it."""

    place: Any
    claims: list[Claim]
    positions: list[int]
    decision: Any = None  # the latest of its place; None: not asked since it gave back
    now_us: int | None = None  # the place's time when it was first asked
    start_us: int = 0  # of the latest decision; where it needed no wait, or was rounded, as it was asked for
    charged: bool = False

    def take(self, decision: Decision, not_before_us: int, commit: bool) -> None:
        self.decision, self.charged, self.start_us = decision, commit and decision.allowed, decision.start_us
        if self.now_us is None:
            self.now_us = decision.start_us - decision.wait_us
        elif not decision.wait_us or decision.start_us < not_before_us:
            # A call takes its time: later places would never catch up. And coarse ticks round a start down.
            self.start_us = not_before_us

    def wait_us(self, start_us: int) -> int:
        """The wait for a start, counted from when the place was first asked."""
        return start_us - (self.now_us or 0)


def group_claims(claims: Sequence[Claim], place_of: Callable[[Claim], Any]) -> list[Group]:
    """Claims by their places, in the order in which these are first named."""
    found: dict[Any, list[int]] = {}
    for at, claim in enumerate(claims):
        found.setdefault(place_of(claim), []).append(at)
    return [Group(place, [claims[at] for at in positions], positions) for place, positions in found.items()]


class TwoPhaseDecision:
    """One decision on several groups; `decide` is a plan. A subclass asks the places."""

    #: Whether a peek comes first and finds a refusal, or the common start, without a charge.
    peeks_first = False

    def __init__(
        self,
        groups: Sequence[Group],
        max_wait_us: int | None,
        commit: bool,
        not_before_us: int,
        clock: Clock,
        draw: Callable[[], float],
    ) -> None:
        """`clock` is that of the wait for other callers; `draw` returns random parts of a pause."""
        self.groups, self.max_wait_us, self.commit, self.not_before_us = groups, max_wait_us, commit, not_before_us
        self.clock, self.draw = clock, draw

    def ask(
        self, groups: Sequence[Group], not_before_us: Sequence[int], commit: bool, undo: bool, first: bool
    ) -> Plan[Sequence[object]]:
        """The Decision or StoreError of each group; those behind a refusal may be missing. `undo`: give back before. `first`: a
        peek that a charge may follow."""
        raise NotImplementedError

    def give_back(self, groups: Iterable[Group]) -> Plan[None]:
        """Gives back the charges of groups. A place that fails at it keeps its charge."""
        raise NotImplementedError

    def queue_of(self, group: Group, claim: Claim) -> Hashable:
        """The queue that a claim waits in."""
        raise NotImplementedError

    def decide(self) -> Plan[Decision]:
        max_wait_us = self.max_wait_us
        if max_wait_us == 0 or not self.commit or self.not_before_us:
            return (yield from self._decide())
        self.max_wait_us = 0
        decision = yield from self._decide()
        if decision.allowed:
            return decision
        queued = QueuedDecision(self.clock, max_wait_us)
        waits = decision.retry_us >= 0  # what can never fit is refused at once
        keys = [self.queue_of(group, claim) for group in self.groups for claim in group.claims if waits]
        try:
            for before in QUEUES.join(keys, queued):
                queued.before = before
                yield queued
            self.max_wait_us = queued.left_us() if queued.looks else max_wait_us
            return (yield from self._decide())
        finally:
            queued.before = None  # those that have ended keep none alive
            QUEUES.leave(keys, queued)

    def _decide(self) -> Plan[Decision]:
        for attempt, rounds in enumerate(ROUNDS):
            if attempt:
                yield Pause(FIRST_PAUSE * 2 ** (attempt - 1) * self.draw())
            if (decision := (yield from self._look_for_start(rounds))) is not None:
                return decision
            yield from self._withdraw()
        raise StoreUnavailable(f"no common start was found in {sum(ROUNDS)} rounds: too many callers use these keys; try again")

    def _look_for_start(self, rounds: int) -> Plan[Decision | None]:
        """The decision; None, with something charged: there was no common start in so many rounds."""
        groups, not_before_us = self.groups, [self.not_before_us] * len(self.groups)
        for group in groups:
            group.now_us = None
        if self.commit and self.peeks_first:
            yield from self._update(groups, not_before_us, commit=False, first=True)
            if not all(group.decision for group in groups):
                return self._joined(False)
            latest_us = max(group.wait_us(group.start_us) for group in groups)
            not_before_us = [(group.now_us or 0) + latest_us for group in groups]
        yield from self._update(groups, not_before_us, self.commit)
        for _ in range(rounds):
            if not all(group.decision for group in groups):
                yield from self._withdraw()
                return self._joined(False)
            latest_us = max(group.wait_us(group.start_us) for group in groups)
            early = [group for group in groups if group.wait_us(group.start_us) < latest_us]
            if not early or not self.commit:
                return self._joined(True)
            yield from self._update(early, [(group.now_us or 0) + latest_us for group in early], commit=True, undo=True)
        return None

    def _withdraw(self) -> Plan[None]:
        """Gives back what was charged, and peeks at what is there then."""
        some = [group for group in self.groups if group.charged or group.decision is None]
        try:
            if some:
                yield from self._update(some, [self.not_before_us] * len(some), commit=False, undo=True)
        finally:
            self._forget_charges()

    def _update(
        self, groups: Sequence[Group], not_before_us: Sequence[int], commit: bool, undo: bool = False, first: bool = False
    ) -> Plan[None]:
        """Decides again for some groups. If one fails, all give back what they charged."""
        answers = yield from self.ask(groups, not_before_us, commit, undo, first)
        self.take(groups, answers, not_before_us, commit)
        failed = next((answer for answer in answers if isinstance(answer, StoreError)), None)
        if failed is not None:
            try:
                yield from self.give_back(self.groups)
            finally:
                self._forget_charges()
            raise failed

    def _forget_charges(self) -> None:
        """A caller that fails or is cancelled gives back what its claims show as charged: that would be a second time."""
        for group in self.groups:
            for claim in group.claims:
                claim.forget_charge()

    def take(self, groups: Sequence[Group], answers: Sequence[object], not_before_us: Sequence[int], commit: bool) -> None:
        for group in groups:
            group.decision, group.charged = None, False
        for group, answer, moment in zip(groups, answers, not_before_us, strict=False):
            if isinstance(answer, Decision):
                group.take(answer, moment, commit)

    def _joined(self, allowed: bool) -> Decision:
        parts: dict[int, Decision] = {}
        for group in self.groups:
            for position, part in zip(group.positions, group.decision.decisions, strict=True):
                if allowed:
                    times = (part.retry_us, part.reset_us, group.wait_us(part.start_us), part.start_us)
                    part = Decision(True, part.limit, part.remaining, *times, part.name, part.source)
                parts[position] = part
        return Decisions.join([parts[position] for position in range(len(parts))])
