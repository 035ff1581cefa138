"""WaitQueue: the waiters of a store, first come, first served; they move up when one ahead of them leaves.

A waiter has made one decision and holds its start; it sleeps once. The queue records the waiters whose start is in the future.
When some leave, each waiter behind takes the start of the one before it, and the last starts are given back. That needs no call
for those that stay, and works while other processes wait on the same key. Where the waiters differ in cost or keys, they are
given back from the last to the first and charged again in order (`Store.rebook`). In both ways all move up and none is overtaken.
Of the waiters that have moved up only the next one is woken (of each event loop); when it is done, it wakes the one behind it.
There is one queue per store, because limiters of one name share their state.

All that leave a remote store in one iteration of an event loop leave in one call. It is sent when the decisions in progress on
their keys are answered: a start behind it that is not known yet would keep the server from giving anything back. Decisions that
begin later are held back for it, for two round trips at most, and it never waits for them: there may always be one.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress

from .algorithms.claim import Claim, charge_numbers
from .algorithms.constants import WAS_RESET
from .clock import ServerClock, SystemClock
from .decision import Decision
from .errors import StoreError
from .fork import call_after_fork, reset_after_fork
from .future_charges import FutureCharges
from .garbage_collection import without_finalisers
from .stores.contract import Booking, Store, charges_of
from .stores.sans_io import Call, Plan, T, arun, run, start_task

Identity = tuple[str, str, str]
Pair = tuple[Identity, str]
#: The arrival of a charge that has begun: before all that wait.
BEGUN = -1
#: Among how many waiters the next one of each event loop is looked for.
LOOKAHEAD = 100
#: Seconds for which a new decision is held back so that a call that gives back can precede it: twice as long as the last one
#: took, at least and at most this.
HOLD, LONGEST_HOLD = 0.02, 0.25


class Waiter:
    """A start in the future: the charged claims, the decision, the start on the clock on which the caller sleeps (`until_us`),
    and a function that wakes the caller, who sleeps until `alarm_us`, when the start has moved up."""

    # fmt: off
    __slots__ = ("alarm_us", "arrival", "asleep", "claims", "deadline_us", "decision", "interrupted", "is_last", "kind",
                 "leaving", "loop", "own_claims", "pairs", "until_us", "wake", "whole")
    # fmt: on

    def __init__(
        self,
        claims: list[Claim],
        decision: Decision,
        deadline_us: int | None,
        arrival: int | None = None,
        until_us: int = 0,
        whole: Waiter | None = None,
    ) -> None:
        if arrival is None:  # the order in which charges were made
            arrival = max([claim.number for claim in claims], default=0) or next(charge_numbers)
        self.arrival = arrival
        self.until_us = self.alarm_us = until_us
        self.claims: Sequence[Claim] = list(claims)  # waiters exchange them with their charges
        self.decision, self.deadline_us = decision, deadline_us
        self.own_claims = claims  # those of its caller
        self.pairs = pairs_of(claims)
        self.asleep = self.interrupted = False  # interrupted: its wait ends with CancelledError
        self.is_last = False  # it leaves, and all that wait behind it have moved up
        self.whole = whole  # that has the charge of which this is a part, and its start
        self.leaving: Waiter | None = None  # it, or a part of it: left during a call that moves it, which gives it back then
        self.wake: Callable[[], None] | None = None
        self.loop: asyncio.AbstractEventLoop | None = None  # in which it sleeps; None: in a thread
        self.kind = kind_of(claims, decision)

    def is_past(self, now_us: int) -> bool:
        """Whether it is a reservation whose start has passed at this time of the caller's clock."""
        return not self.asleep and not self.is_last and self.until_us <= now_us

    def is_moving(self) -> bool:
        """Whether a call decides its start again. It is of a kind of its own meanwhile: it exchanges its start with no other."""
        return self.kind == id(self)

    def left_us(self, now_us: int) -> int:
        """The rest of the wait at this time of the caller's clock, no more than the whole wait if that clock went back. (The
        decision's `start_us` may be the time of another clock: a server's, a shard's, that of a share.)"""
        return min(self.decision.wait_us, max(0, self.until_us - now_us))

    def charges(self) -> list[tuple[Sequence[Claim], int, str]]:
        """Its claims with the start and the source of their charge."""
        return charges_of(self.claims, self.decision)

    def start(self) -> tuple[int, Sequence[Claim], Decision, int]:
        return self.arrival, self.claims, self.decision, self.until_us

    def leaves_later(self) -> bool:
        """Whether a call moves its charge, and gives it back then. A part of a charge has the start of that."""
        whole = self.whole or self
        if self.decision is not whole.decision:
            self.arrival, self.decision = whole.arrival, whole.decision
            for claim in self.claims:
                claim.forget_charge()  # the states before and after it were those of the former start
        whole.leaving = self if whole.is_moving() else None
        return whole.leaving is not None

    def move_to(self, start: tuple[int, Sequence[Claim], Decision, int]) -> None:
        """Takes a start, and the charge made for it."""
        self.arrival, self.claims, self.decision, self.until_us = start


def of_loop(kept: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, T], loop: asyncio.AbstractEventLoop, make: type[T]) -> T:
    """What is kept for an event loop, made on first use. What was kept for loops that are closed now goes: an event that a task
    has waited for refers to its loop, which would never be collected."""
    found = kept.get(loop)
    if found is None:
        for other in [one for ref in kept.keyrefs() if (one := ref()) is not None and one.is_closed()]:
            kept.pop(other, None)
        found = kept.setdefault(loop, make())
    return found


def pairs_of(claims: Sequence[Claim]) -> set[Pair]:
    """The keys of claims."""
    return {(claim.limit.identity, claim.key) for claim in claims}


def wake_next(queue: Sequence[Waiter]) -> None:
    """Wakes the first waiter that sleeps in threads, and the first in each event loop (another may be blocked, or have stopped),
    if it would sleep beyond its start. It looks at the first LOOKAHEAD that sleep."""
    asleep = list(itertools.islice((waiter for waiter in queue if waiter.wake is not None), LOOKAHEAD))
    for waiter in {waiter.loop: waiter for waiter in reversed(asleep)}.values():
        if waiter.wake is not None and waiter.until_us < waiter.alarm_us:
            waiter.alarm_us = waiter.until_us
            waiter.wake()


def sleeper_us(store: Store, decision: Decision | None = None) -> int:
    """The time on the clock on which callers sleep: now, when a decision has just been made. A server's clock, or a shard's, may
    differ from this machine's, which is read. A given clock is the store's, and is read once for each decision."""
    clock = store.clock
    if isinstance(clock, SystemClock | ServerClock):
        return clock.now_us()
    return store.now_us() if decision is None else decision.start_us - decision.wait_us


def kind_of(claims: Sequence[Claim], decision: Decision) -> Hashable:
    """Waiters of one kind can exchange their starts: same cost of the same keys, with no reset between their charges."""
    return (decision.source, *[(claim.limit, claim.key, claim.cost, claim.reset_id) for claim in claims])


def shares_no_limit(one: Waiter, other: Waiter) -> bool:
    """Whether these wait under different rates."""
    return {claim.limit for claim in one.claims}.isdisjoint(claim.limit for claim in other.claims)


def by_charge(waiter: Waiter) -> tuple[int, int]:
    """Sorts waiters in the order in which they were charged; charges that have begun by their starts."""
    return waiter.arrival, waiter.decision.start_us


def by_start(waiter: Waiter) -> tuple[int, int]:
    return waiter.decision.start_us, waiter.arrival


def refunded(claims: list[Claim]) -> Waiter:
    """A refund as a Waiter that leaves: a charge at an unknown time."""
    return Waiter(claims, Decision(True, start_us=-1), None, BEGUN)


class DecisionInProgress:
    """A decision on these keys that is not answered yet."""

    def __init__(self, pairs: set[Pair]) -> None:
        self.pairs, self.answered = pairs, asyncio.Event()


class Departures:
    """The waiters of one event loop that leave a remote store, and the decisions that are in progress there."""

    def __init__(self) -> None:
        self.leaving: list[Waiter] = []
        self.leaving_pairs: set[Pair] = set()
        self.call: asyncio.Task[None] | None = None  # gives back all that are leaving
        self.one_call = asyncio.Lock()
        self.deciding: set[DecisionInProgress] = set()
        self.held = 0  # decisions that are held back
        self.took = 0.0  # seconds, by the last decision that was answered
        self.sent = asyncio.Event()

    @asynccontextmanager
    async def decision(self, claims: Sequence[Claim]) -> AsyncIterator[None]:
        """Around a decision that may wait. It is not sent before a call that gives back to one of its keys, nor before another
        decision that was held back for that and is about to go on."""
        pairs = pairs_of(claims)
        is_held = not pairs.isdisjoint(self.leaving_pairs)
        if is_held or self.held:
            self.held += 1
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(max(HOLD, 2 * self.took), LONGEST_HOLD)):
                        await (self.sent.wait() if is_held else asyncio.sleep(0))
            finally:
                self.held -= 1
        one, now = DecisionInProgress(pairs), asyncio.get_running_loop().time
        begun = now()
        self.deciding.add(one)
        try:
            yield
            self.took = now() - begun
        finally:
            self.deciding.discard(one)
            one.answered.set()

    def leave(self, waiters: Sequence[Waiter]) -> None:
        self.leaving += waiters
        self.leaving_pairs.update(*(waiter.pairs for waiter in waiters))
        self.sent.clear()

    def send(self) -> list[Waiter]:
        """Those that leave with the call that is sent now."""
        leaving, self.leaving, self.leaving_pairs, self.call = self.leaving, [], set(), None
        self.sent.set()
        return leaving


def were_charged(waiters: Sequence[Waiter]) -> bool:
    """After giving back: False when all keys of these waiters were reset after their charge."""
    claims = [claim for waiter in waiters for claim in waiter.claims]
    return not claims or any(claim.reset_id != WAS_RESET for claim in claims)


class WaitQueue:
    """The waiters of one store in this process."""

    def __init__(self, store: Store) -> None:
        self._store = weakref.ref(store)
        self._reset_after_fork()
        reset_after_fork(self)

    def _reset_after_fork(self) -> None:
        """Starts empty."""
        self.lock = threading.RLock()
        self._waiters: OrderedDict[Pair, list[Waiter]] = OrderedDict()
        self._later = FutureCharges()
        self._ahead_us: int | None = None  # of the last decision with a later start: its store's clock less that of the callers
        self._leaving: list[tuple[Waiter, Callable[[StoreError], None]]] = []
        self._leaving_in: asyncio.AbstractEventLoop | None = None  # where `_leave_all` is scheduled
        self._departures: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Departures] = weakref.WeakKeyDictionary()

    def departures(self) -> Departures:
        """Those of the running loop."""
        return of_loop(self._departures, asyncio.get_running_loop(), Departures)

    @without_finalisers
    def join(self, waiter: Waiter) -> None:
        """Adds a waiter in order of starts; removes reservations at the front whose start has passed. Two other keys are checked
        too, in rotation: reservations for a key that is never waited for again would stay for ever."""
        wait_us = waiter.decision.wait_us
        with self.lock:
            self._ahead_us = waiter.decision.start_us - waiter.until_us
            self._later.add(waiter.claims, waiter.decision)
            vacant: list[Waiter] = []
            begun_us = waiter.until_us - wait_us
            checked = set(waiter.pairs)
            with suppress(RuntimeError):  # a signal handler has made or cancelled a reservation just now
                checked.update(itertools.islice(self._waiters, 2))
            queues = [self._waiters.get(pair, ()) for pair in checked]
            past = [other for queue in queues for other in itertools.takewhile(lambda other: other.is_past(begun_us), queue)]
            if past:
                self._remove(past)  # from the queues of all their keys
            for pair in checked:
                if pair in self._waiters:
                    self._waiters.move_to_end(pair)
            for pair in waiter.pairs:
                queue = self._waiters.setdefault(pair, [])
                at = len(queue)
                while at and queue[at - 1].decision.start_us > waiter.decision.start_us:
                    at -= 1
                    if queue[at].kind == waiter.kind and queue[at].arrival < waiter.arrival:  # of two threads, charged before it
                        queue[at].arrival, waiter.arrival = waiter.arrival, queue[at].arrival
                if at and queue[at - 1].is_last:
                    vacant += [other for other in queue[:at] if other.is_last]
                queue.insert(at, waiter)
            if vacant and all(other.kind == waiter.kind for other in vacant):
                self._close_gaps(waiter, waiter.decision.start_us - wait_us)
            else:
                for other in vacant:
                    other.is_last = False

    @without_finalisers
    def find(self, claims: Sequence[Claim]) -> Waiter | None:
        """The waiter that was made of these claims, if it still waits."""
        with self.lock:
            queues = [self._waiters.get((claim.limit.identity, claim.key), ()) for claim in claims]
            return next((waiter for queue in queues for waiter in queue if waiter.own_claims is claims), None)

    @without_finalisers
    def done(self, waiter: Waiter) -> None:
        """Removes a waiter whose start has come, or that was settled: its caller gets the claims of its charge."""
        with self.lock:
            waiter.own_claims[:] = waiter.claims
            self._remove([waiter])

    @without_finalisers
    def _remove(self, waiters: Sequence[Waiter]) -> None:
        gone = {id(waiter) for waiter in waiters}
        with self.lock:
            for pair in set[Pair]().union(*(waiter.pairs for waiter in waiters)):
                queue = self._waiters.get(pair, [])
                if len(waiters) > 1:
                    queue = [waiter for waiter in queue if id(waiter) not in gone]
                elif waiters[0] in queue:  # mostly the first of many
                    queue.remove(waiters[0])
                if queue:
                    self._waiters[pair] = queue
                    wake_next(queue)
                else:
                    self._waiters.pop(pair, None)

    def leave(self, waiters: Sequence[Waiter]) -> bool:
        """Gives these charges back, whole or in part; the waiters behind them in this process move up. False when all their keys
        were reset since.

        Without moving up, an algorithm can give back only what is not reserved behind the charge: under constant demand,
        nothing.
        """
        store = self._store()
        if store is not None:
            with self.lock if store.never_waits else nullcontext():  # the queue is not locked while a store waits
                self._vacate(store, waiters)
                run(self._leave(store, waiters))
        return were_charged(waiters)

    async def aleave(self, waiters: Sequence[Waiter]) -> bool:
        """As leave. All that leave a remote store in one iteration of the loop, or during a call, leave in the next call, which
        goes on when the caller is cancelled."""
        store = self._store()
        if store is None or store.local:
            return self.leave(waiters)
        try:
            departures = self.departures()
        except RuntimeError:  # tasks that are collected after their loop was closed: no call can be awaited, their charges stay
            self._remove(waiters)
            return True
        departures.leave(waiters)
        for waiter in waiters:
            waiter.asleep, waiter.wake = False, None
        if departures.call is None:
            departures.call = start_task(self._leave_together(store, departures))
            departures.call.add_done_callback(lambda call: call.cancelled() or call.exception())  # every leaver raises it
        await asyncio.shield(departures.call)
        return were_charged(waiters)

    async def _leave_together(self, store: Store, departures: Departures) -> None:
        self._vacate(store, departures.leaving)
        before = tuple(departures.deciding)
        try:
            async with departures.one_call:
                with self.lock:
                    pairs = departures.leaving_pairs.union(*(other.pairs for other in self._behind(departures.leaving)))
                for one in before:
                    if not one.pairs.isdisjoint(pairs):
                        await one.answered.wait()
                waiters = departures.send()
                self._vacate(store, waiters)
                await arun(self._leave(store, waiters))
        finally:
            if departures.call is asyncio.current_task():  # cancelled before its call
                departures.send()

    @without_finalisers
    def _vacate(self, store: Store, waiters: Sequence[Waiter]) -> None:
        """Moves up all behind those that leave, if they are of one kind: those that leave have the last starts then."""
        if not store.can_rebook:
            return
        by_kind: dict[Hashable, list[Waiter]] = {}
        with self.lock:
            pairs = {pair for one in waiters for pair in one.pairs}
            waiting = {pair: {id(one) for one in self._waiters.get(pair, ())} for pair in pairs}
            for waiter in waiters:
                waiter.asleep, waiter.wake = False, None
                joined = all(id(waiter) in waiting[pair] for pair in waiter.pairs)  # an interrupted call may be in some only
                if joined and not waiter.is_last and waiter.decision.start_us > self._now_us(store, waiter):
                    by_kind.setdefault(waiter.kind, []).append(waiter)
            for kind, some in by_kind.items():
                if all(other.kind == kind or shares_no_limit(other, some[0]) for other in self._behind(some)):
                    for waiter in some:
                        waiter.is_last = True
                    self._close_gaps(some[0], self._now_us(store, some[0]))

    def _now_us(self, store: Store, waiter: Waiter) -> int:
        """The time on the clock of a waiter's start, by its decision, or by the last one with a later start: asking a store could
        mean a call, and each shard has a clock of its own."""
        ahead_us = waiter.decision.start_us - waiter.until_us if waiter.until_us else self._ahead_us
        return store.now_us() if store.local or ahead_us is None else sleeper_us(store) + ahead_us

    def _close_gaps(self, one: Waiter, now_us: int) -> None:
        """Gives the first starts of one kind to the waiters that stay, in order, and the last to those that leave."""
        queues = [self._waiters[pair] for pair in one.pairs]
        same = [waiter for waiter in queues[0] if waiter.decision.start_us > now_us and waiter.kind == one.kind]
        starts = [waiter.start() for waiter in same]
        ordered = sorted(same, key=lambda waiter: waiter.is_last)
        for waiter, start in zip(ordered, starts, strict=True):
            waiter.move_to(start)
        following = {id(waiter): other for waiter, other in zip(same, ordered, strict=True)}
        for queue in queues:
            queue[:] = [following.get(id(waiter), waiter) for waiter in queue]
        wake_next(queues[0])

    def _leave(self, store: Store, waiters: Sequence[Waiter]) -> Plan[None]:
        behind, bookings, apart = self._remove_and_book(store, waiters)
        if bookings:
            decisions: Sequence[Decision | None] = ()
            try:
                decisions = yield Call(store, "rebook", ([booking for _, booking in bookings],))
            finally:
                self._move_up([waiter for waiter, _ in bookings], decisions, store, behind)
                if left := [waiter.leaving for waiter in behind if waiter.leaving is not None]:
                    yield from self._leave(store, left)
        for waiter in sorted(apart, key=by_charge, reverse=True):
            for claims, start_us, source in waiter.charges():
                if not (yield Call(store, "give_back", (claims, start_us, source))):
                    for claim in claims:
                        claim.reset_id = WAS_RESET

    @without_finalisers
    def _remove_and_book(
        self, store: Store, waiters: Sequence[Waiter]
    ) -> tuple[list[Waiter], list[tuple[Waiter, Booking]], list[Waiter]]:
        """Removes those that leave. Those behind them, which move up; the bookings with which they do; who gives back alone."""
        with self.lock:
            self._remove(waiters)
            waiters = [waiter for waiter in waiters if not waiter.leaves_later()]
            last = [waiter for waiter in waiters if waiter.is_last]
            apart = [waiter for waiter in waiters if not waiter.is_last]
            behind = self._behind([waiter for waiter in waiters if max((claim.cost for claim in waiter.claims), default=0) > 0])
            # Several batches can't move up together, nor can those that another call moves at this time.
            behind = [waiter for waiter in behind if len(waiter.charges()) == 1 and not waiter.is_moving()]
            if self._later:
                self._mark_begun(waiters, behind, store)
            if behind or (len(apart) > 1 and store.can_rebook):
                last, apart = [*waiters, *behind], []
            bookings = self._bookings(last, {id(waiter) for waiter in behind})
            if len(bookings) < 2:
                return [], [], apart + last
            for waiter in behind:
                waiter.kind = id(waiter)
            return behind, bookings, apart

    def _mark_begun(self, leaving: Sequence[Waiter], behind: Sequence[Waiter], store: Store) -> None:
        """Has the claims that are given back say where no other charge is to come."""
        for waiter in (*leaving, *behind):
            waiter.claims = self._later.mark(waiter.claims, self._now_us(store, waiter), waiter.decision)
        for waiter in leaving:
            if not behind or waiter.decision.start_us > self._now_us(store, waiter):
                self._later.forget(waiter.claims, waiter.decision)

    def _bookings(self, waiters: Sequence[Waiter], staying: set[int]) -> list[tuple[Waiter, Booking]]:
        """The bookings of waiters, in the order in which they were charged: the last charge is undone first, and exactly. What
        leases answered was charged with its batch: those are in the order of their starts."""
        order = by_start if any(one.decision.source == "lease" for one in waiters) else by_charge
        return [
            (one, Booking(claims, start_us, one.deadline_us, id(one) in staying, source))
            for one in sorted(waiters, key=order)
            for claims, start_us, source in one.charges()
        ]

    @without_finalisers
    def _move_up(
        self, order: Sequence[Waiter], decisions: Sequence[Decision | None], store: Store, behind: Sequence[Waiter]
    ) -> None:
        with self.lock:
            again = [(waiter, decision) for waiter, decision in zip(order, decisions, strict=False) if decision is not None]
            arrivals = sorted(waiter.arrival for waiter, _ in again)  # they were charged again in this order
            for (waiter, decision), arrival in zip(again, arrivals, strict=True):
                waiter.arrival, waiter.decision = arrival, decision
                waiter.until_us = sleeper_us(store, decision) + decision.wait_us
                self._later.add(waiter.claims, decision)
            for pair in set[Pair]().union(*(waiter.pairs for waiter in order)):
                queue = self._waiters.get(pair, [])
                queue.sort(key=by_start)
                wake_next(queue)
            for waiter in behind:
                waiter.kind = kind_of(waiter.claims, waiter.decision)

    def _behind(self, waiters: Sequence[Waiter]) -> list[Waiter]:
        """The waiters charged later (or with a later start, where it is not known when those that leave were charged) that share
        a key with them, directly or through other waiters. The start of one charged earlier does not depend on them."""
        store = self._store()
        if store is None or not store.can_rebook or not waiters:
            return []
        first = min(waiter.decision.start_us for waiter in waiters)
        oldest = min(waiter.arrival for waiter in waiters)
        shared: set[Pair] = set().union(*(waiter.pairs for waiter in waiters))
        found: list[Waiter] = []
        seen = {id(waiter) for waiter in waiters}
        grown = True
        while grown:
            grown = False
            for pair in tuple(shared):
                for other in self._waiters.get(pair, ()):
                    is_behind = other.arrival > oldest if oldest >= 0 else other.decision.start_us >= first
                    if id(other) not in seen and not other.is_last and is_behind:
                        seen.add(id(other))
                        found.append(other)
                        grown = grown or not other.pairs <= shared
                        shared |= other.pairs
        return found

    def leave_soon(self, waiter: Waiter, loop: asyncio.AbstractEventLoop, failed: Callable[[StoreError], None]) -> None:
        """As leave, for a cancelled task: all tasks cancelled in one iteration of the loop leave in one call. `failed` is called
        for each of them if the store fails then."""
        with self.lock:
            self._leaving.append((waiter, failed))
            if self._leaving_in is loop and not loop.is_closed():
                return
            self._leaving_in = loop  # another loop may have stopped before its call
        try:
            loop.call_soon(self._leave_all)
        except RuntimeError:  # the loop is closed
            self._leave_all()

    def _leave_all(self) -> None:
        with self.lock:
            leaving, self._leaving, self._leaving_in = self._leaving, [], None
        try:
            if leaving:
                self.leave([waiter for waiter, _ in leaving])
        except StoreError as error:
            for _, failed in leaving:
                failed(error)

    @without_finalisers
    def waiting(self, identities: set[Identity], keys: set[str] | None = None) -> int:
        """The number of callers that sleep for one of these limits (and keys)."""
        with self.lock:
            asleep = {
                id(waiter)
                for (identity, key), queue in self._waiters.items()
                if identity in identities and (keys is None or key in keys)
                for waiter in queue
                if waiter.asleep
            }
            return len(asleep)


_queues_lock = threading.RLock()  # a finaliser may come back while a queue is created


def wait_queue_of(store: Store) -> WaitQueue:
    """The wait queue of a store, created on first use. It belongs to the store: its charges refer to it."""
    with _queues_lock:
        if store.wait_queue is None:
            queue = WaitQueue(store)
            store.wait_queue = store.wait_queue or queue  # a finaliser may have been quicker
        found: WaitQueue = store.wait_queue
        return found


def _after_fork() -> None:
    global _queues_lock
    _queues_lock = threading.RLock()


call_after_fork(_after_fork)
