"""WaitQueue: the waiters of a store in order of their starts, and how they move up when one leaves.

A waiter has made one decision and holds its start; it sleeps once. The queue records the waiters whose start is in the future.
When one leaves, those behind it are given back from the last to the first and charged again in order, so that all move up and
none is overtaken. There is one queue per store, because limiters of one name share their state.

FifoGate is for limits that can't reserve (the sliding window counter), one queue per key: the first waiter decides again after
`retry_after`, the others wait until they are first.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from .algorithms.claim import Claim
from .decision import Decision
from .fork import call_after_fork, reset_after_fork
from .stores.contract import Booking, Store

Identity = tuple[str, str, str]
Pair = tuple[Identity, str]
E = TypeVar("E", threading.Event, asyncio.Event)
_arrivals = itertools.count()


class Waiter:
    """A start in the future: the charged claims, the decision, and a function that wakes the caller when the start moves up."""

    __slots__ = ("arrival", "asleep", "claims", "deadline_us", "decision", "wake")

    def __init__(self, claims: Sequence[Claim], decision: Decision, deadline_us: int | None) -> None:
        self.arrival = next(_arrivals)
        self.claims = claims
        self.decision = decision
        self.deadline_us = deadline_us
        self.asleep = False
        self.wake: Callable[[], None] | None = None

    def pairs(self) -> set[Pair]:
        return {(claim.limit.identity, claim.key) for claim in self.claims}


def refunded(claims: Sequence[Claim]) -> Waiter:
    """A refund as a Waiter that leaves: a charge at an unknown time."""
    return Waiter(claims, Decision(True, start_us=-1), None)


class WaitQueue:
    """The waiters of one store in this process."""

    def __init__(self, store: Store) -> None:
        self._store = weakref.ref(store)
        self._reset_after_fork()
        reset_after_fork(self)

    def _reset_after_fork(self) -> None:
        """Starts empty."""
        self.lock = threading.RLock()
        self._waiters: dict[Pair, list[Waiter]] = {}
        self._leaving: list[Waiter] = []
        self._moving: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = weakref.WeakKeyDictionary()

    def join(self, waiter: Waiter) -> None:
        """Adds a waiter in order of starts; removes reservations at the front whose start has passed."""
        with self.lock:
            for pair in waiter.pairs():
                queue = self._waiters.setdefault(pair, [])
                now_us = waiter.decision.start_us - waiter.decision.wait_us
                while queue and not queue[0].asleep and queue[0].decision.start_us <= now_us:
                    queue.pop(0)
                at = len(queue)
                while at and queue[at - 1].decision.start_us > waiter.decision.start_us:
                    at -= 1
                queue.insert(at, waiter)

    def done(self, waiter: Waiter) -> None:
        """Removes a waiter whose start has come, or that was settled or cancelled."""
        with self.lock:
            for pair in waiter.pairs():
                queue = self._waiters.get(pair)
                if queue is not None and waiter in queue:
                    queue.remove(waiter)
                    if not queue:
                        del self._waiters[pair]

    def leave(self, waiters: Sequence[Waiter]) -> None:
        """Gives these charges back, whole or in part; the waiters behind them in this process move up.

        Without moving up, an algorithm can give back only what is not reserved behind the charge: under constant demand,
        nothing.
        """
        store = self._store()
        if store is None:
            return
        with self.lock:
            order, bookings = self._remove_leaving(waiters)
            if bookings:
                self._move_up(order, store.rebook(bookings))
            else:
                for waiter in reversed(waiters):
                    store.give_back(waiter.claims, waiter.decision.start_us, waiter.decision.source)

    async def aleave(self, waiters: Sequence[Waiter]) -> None:
        """As leave, for a store that is not local: one call at a time per event loop, without holding the lock while awaiting."""
        store = self._store()
        if store is None:
            return
        async with self._moving.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            with self.lock:
                order, bookings = self._remove_leaving(waiters)
            if bookings:
                decisions = await store.arebook(bookings)
                with self.lock:
                    self._move_up(order, decisions)
            else:
                for waiter in reversed(waiters):
                    await store.agive_back(waiter.claims, waiter.decision.start_us, waiter.decision.source)

    def _remove_leaving(self, waiters: Sequence[Waiter]) -> tuple[list[Waiter], list[Booking]]:
        """Removes the leaving waiters. Returns them and those behind, in order, with their bookings; empty if none is behind."""
        behind = [] if any(claim.cost < 0 for waiter in waiters for claim in waiter.claims) else self._behind(waiters)
        for waiter in waiters:
            self.done(waiter)
        if not behind:
            return [], []
        leaving = {id(waiter) for waiter in waiters}
        order = sorted([*waiters, *behind], key=lambda waiter: (waiter.decision.start_us, waiter.arrival))
        return order, [
            Booking(
                waiter.claims, waiter.decision.start_us, waiter.deadline_us, id(waiter) not in leaving, waiter.decision.source
            )
            for waiter in order
        ]

    def _move_up(self, order: Sequence[Waiter], decisions: Sequence[Decision | None]) -> None:
        for waiter, decision in zip(order, decisions, strict=True):
            if decision is None:
                continue
            moved = decision.start_us != waiter.decision.start_us
            waiter.decision = decision
            if moved and waiter.wake is not None:
                waiter.wake()

    def _behind(self, waiters: Sequence[Waiter]) -> list[Waiter]:
        """The waiters with a later start that share a key with those that leave, directly or through other waiters."""
        store = self._store()
        if store is None or not store.can_rebook:
            return []
        first = min(waiter.decision.start_us for waiter in waiters)
        shared: set[Pair] = set().union(*(waiter.pairs() for waiter in waiters))
        found: list[Waiter] = []
        seen = {id(waiter) for waiter in waiters}
        grown = True
        while grown:
            grown = False
            for pair in tuple(shared):
                for other in self._waiters.get(pair, ()):
                    if id(other) not in seen and other.decision.start_us >= first:
                        seen.add(id(other))
                        found.append(other)
                        grown = grown or not other.pairs() <= shared
                        shared |= other.pairs()
        return found

    def leave_soon(self, waiter: Waiter, loop: asyncio.AbstractEventLoop) -> None:
        """As leave, for a cancelled task: all tasks cancelled in one iteration of the loop leave in one call."""
        with self.lock:
            self._leaving.append(waiter)
            if len(self._leaving) > 1:
                return
        try:
            loop.call_soon(self._leave_all)
        except RuntimeError:  # the loop is closed
            self._leave_all()

    def _leave_all(self) -> None:
        with self.lock:
            waiters, self._leaving = self._leaving, []
            if waiters:
                self.leave(waiters)

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


_queues: weakref.WeakKeyDictionary[Store, WaitQueue] = weakref.WeakKeyDictionary()
_queues_lock = threading.Lock()


def wait_queue_of(store: Store) -> WaitQueue:
    """The wait queue of a store, created on first use."""
    with _queues_lock:
        queue = _queues.get(store)
        if queue is None:
            queue = _queues[store] = WaitQueue(store)
        return queue


class FifoGate(Generic[E]):
    """Queues of waiters by key, in order of arrival; only the first of a queue may decide, the others wait for their event."""

    def __init__(self) -> None:
        self._reset_after_fork()
        reset_after_fork(self)

    def _reset_after_fork(self) -> None:
        """Starts empty."""
        self.lock = threading.Lock()
        self._queues: dict[Hashable, deque[E]] = {}

    def enter(self, key: Hashable, event: E) -> bool:
        """Adds a waiter's event to the queue of a key; True if it is the first."""
        with self.lock:
            queue = self._queues.setdefault(key, deque())
            queue.append(event)
            return queue[0] is event

    def is_first(self, key: Hashable, event: E) -> bool:
        with self.lock:
            return self._queues[key][0] is event

    def leave(self, key: Hashable, event: E) -> E | None:
        """Removes a waiter's event; returns the event that is first now, if that has changed."""
        with self.lock:
            queue = self._queues[key]
            first = queue[0]
            queue.remove(event)
            if not queue:
                del self._queues[key]
                return None
            return queue[0] if queue[0] is not first else None

    def waiting(self, key: Hashable = None) -> int:
        with self.lock:
            return sum(len(queue) for name, queue in self._queues.items() if key is None or name == key)


def _after_fork() -> None:
    global _queues_lock
    _queues_lock = threading.Lock()


call_after_fork(_after_fork)
