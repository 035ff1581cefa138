"""Who waits, in which order, and who moves up when somebody leaves.

A waiter made one decision and holds its start; it sleeps once. The line only remembers who holds a start that is still
to come, so that, when one of them leaves, those behind it give back from the last to the first and ask again in order:
everybody moves up and nobody is overtaken. One line per store, because limiters of one name share their state.

The sliding counter can't reserve; its waiters stand in a turnstile, one per key: the first asks again when it was told
to, the others wait until they are first.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from .algorithms.claim import Claim
from .decision import Decision
from .fork import call_after_fork, reset_after_fork
from .stores.contract import Booking, Store

Pair = tuple[Any, str]
_arrivals = itertools.count()


class Waiter:
    """A start that is still to come: what was charged, when, and whom to wake when it comes earlier."""

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
    """What a refund gives back: a charge whose moment nobody knows."""
    return Waiter(claims, Decision(True, start_us=-1), None)


class WaitQueue:
    """Everybody in this process who holds a start to come in one store."""

    def __init__(self, store: Store) -> None:
        self._store = weakref.ref(store)
        self._reset_after_fork()
        reset_after_fork(self)

    def _reset_after_fork(self) -> None:
        """Starts again with nobody in it."""
        self.lock = threading.RLock()
        self._turns: dict[Pair, list[Waiter]] = {}
        self._leaving: list[Waiter] = []
        self._moving: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = weakref.WeakKeyDictionary()

    def join(self, turn: Waiter) -> None:
        """Takes a place, in the order of starts; those whose start is over step out on the way."""
        with self.lock:
            for pair in turn.pairs():
                line = self._turns.setdefault(pair, [])
                now_us = turn.decision.start_us - turn.decision.wait_us
                while line and not line[0].asleep and line[0].decision.start_us <= now_us:
                    line.pop(0)
                at = len(line)
                while at and line[at - 1].decision.start_us > turn.decision.start_us:
                    at -= 1
                line.insert(at, turn)

    def done(self, turn: Waiter) -> None:
        """The turn has come, or is settled otherwise."""
        with self.lock:
            for pair in turn.pairs():
                line = self._turns.get(pair)
                if line is not None and turn in line:
                    line.remove(turn)
                    if not line:
                        del self._turns[pair]

    def leave(self, turns: Sequence[Waiter]) -> None:
        """Gives these charges back, whole turns or parts of them; in process, everybody behind them moves up.

        Without that the rule alone would decide, and it gives back only what nobody has reserved behind: under
        constant demand, nothing.
        """
        store = self._store()
        if store is None:
            return
        with self.lock:
            order, asked = self._parting(turns)
            if asked:
                self._move_up(order, store.rebook(asked))
            else:
                for turn in reversed(turns):
                    store.give_back(turn.claims, turn.decision.start_us, turn.decision.source)

    async def aleave(self, turns: Sequence[Waiter]) -> None:
        """As leave, where the store is far away: awaited, one after the other in each loop, and no lock is held meanwhile."""
        store = self._store()
        if store is None:
            return
        async with self._moving.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            with self.lock:
                order, asked = self._parting(turns)
            if asked:
                decisions = await store.arebook(asked)
                with self.lock:
                    self._move_up(order, decisions)
            else:
                for turn in reversed(turns):
                    await store.agive_back(turn.claims, turn.decision.start_us, turn.decision.source)

    def _parting(self, turns: Sequence[Waiter]) -> tuple[list[Waiter], list[Booking]]:
        """Those who leave step out. Answers with all concerned, in order, and what to rebook: nothing when nobody is behind."""
        behind = [] if any(claim.cost < 0 for turn in turns for claim in turn.claims) else self._behind(turns)
        for turn in turns:
            self.done(turn)
        if not behind:
            return [], []
        leaving = {id(turn) for turn in turns}
        order = sorted([*turns, *behind], key=lambda turn: (turn.decision.start_us, turn.arrival))
        return order, [
            Booking(turn.claims, turn.decision.start_us, turn.deadline_us, id(turn) not in leaving, turn.decision.source)
            for turn in order
        ]

    def _move_up(self, order: Sequence[Waiter], decisions: Sequence[Decision | None]) -> None:
        for turn, decision in zip(order, decisions, strict=True):
            if decision is None:
                continue
            moved = decision.start_us != turn.decision.start_us
            turn.decision = decision
            if moved and turn.wake is not None:
                turn.wake()

    def _behind(self, turns: Sequence[Waiter]) -> list[Waiter]:
        """Those with a later start that share a key with the leaving, or with somebody who does."""
        store = self._store()
        if store is None or not store.can_rebook:
            return []
        first = min(turn.decision.start_us for turn in turns)
        shared: set[Pair] = set().union(*(turn.pairs() for turn in turns))
        found: list[Waiter] = []
        seen = {id(turn) for turn in turns}
        grown = True
        while grown:
            grown = False
            for pair in tuple(shared):
                for other in self._turns.get(pair, ()):
                    if id(other) not in seen and other.decision.start_us >= first:
                        seen.add(id(other))
                        found.append(other)
                        grown = grown or not other.pairs() <= shared
                        shared |= other.pairs()
        return found

    def leave_soon(self, turn: Waiter, loop: asyncio.AbstractEventLoop) -> None:
        """As leave, for a task that was cancelled: all that are cancelled in this turn of the loop leave together."""
        with self.lock:
            self._leaving.append(turn)
            if len(self._leaving) > 1:
                return
        try:
            loop.call_soon(self._leave_all)
        except RuntimeError:  # the loop is closed: nobody else will do it
            self._leave_all()

    def _leave_all(self) -> None:
        with self.lock:
            turns, self._leaving = self._leaving, []
            if turns:
                self.leave(turns)

    def waiting(self, identities: set[Any], keys: set[str] | None = None) -> int:
        """How many callers sleep for one of these limits (and keys)."""
        with self.lock:
            asleep = {
                id(turn)
                for (identity, key), line in self._turns.items()
                if identity in identities and (keys is None or key in keys)
                for turn in line
                if turn.asleep
            }
            return len(asleep)


_lines: weakref.WeakKeyDictionary[Store, WaitQueue] = weakref.WeakKeyDictionary()
_lines_lock = threading.Lock()


def wait_queue_of(store: Store) -> WaitQueue:
    """The line of a store."""
    with _lines_lock:
        line = _lines.get(store)
        if line is None:
            line = _lines[store] = WaitQueue(store)
        return line


class FifoGate:
    """Waiters of one key in order of arrival; only the first may ask, the others wait on their tickets."""

    def __init__(self) -> None:
        self._reset_after_fork()
        reset_after_fork(self)

    def _reset_after_fork(self) -> None:
        """Starts again with nobody in it."""
        self.lock = threading.Lock()
        self._lines: dict[Any, deque[Any]] = {}

    def enter(self, key: Any, ticket: Any) -> bool:
        """Joins the line; True when first."""
        with self.lock:
            line = self._lines.setdefault(key, deque())
            line.append(ticket)
            return line[0] is ticket

    def is_first(self, key: Any, ticket: Any) -> bool:
        with self.lock:
            return self._lines[key][0] is ticket

    def leave(self, key: Any, ticket: Any) -> Any:
        """Leaves the line; answers with the ticket that is first now, if that has changed."""
        with self.lock:
            line = self._lines[key]
            first = line[0]
            line.remove(ticket)
            if not line:
                del self._lines[key]
                return None
            return line[0] if line[0] is not first else None

    def waiting(self, key: Any = None) -> int:
        with self.lock:
            return sum(len(line) for name, line in self._lines.items() if key is None or name == key)


def _after_fork() -> None:
    global _lines_lock
    _lines_lock = threading.Lock()


call_after_fork(_after_fork)
