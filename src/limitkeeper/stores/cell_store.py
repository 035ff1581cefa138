"""CellStore: decides, gives back and rebooks claims on cells in memory; the base class of MemoryStore and SharedStore.

A subclass implements access to its cells (`read`, `put`, `known`, `is_full`, `discard`) and locking (`begin`, `end`). The rest is
the same for cells of this process (`memory.py`) and cells in a file that several processes share (`shared/`). Inheritance instead
of a separate cells object: the lock and the journal of a shared file cover the cells and the decision, and `MemoryStore` decides
on a cell without a call in between.

The store's time never goes back: when the clock does, the store continues from the last time it read.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable, Sequence

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.algorithms import all_of
    from cython.cimports.limitkeeper.algorithms.claim import Claim, NamedLimit
    from cython.cimports.limitkeeper.algorithms.constants import MAX_WAIT, REFUSED
    from cython.cimports.limitkeeper.algorithms.limit import Answer, Limit, State
    from cython.cimports.limitkeeper.clock import SystemClock
    from cython.cimports.limitkeeper.decision import Decision, Decisions
    from cython.cimports.limitkeeper.monotonic import monotonic_us
    from cython.cimports.limitkeeper.stores.cell_table import Table
    from cython.cimports.limitkeeper.stores.contract import Store
else:
    from ..algorithms import all_of
    from ..algorithms.claim import Claim, NamedLimit
    from ..algorithms.constants import MAX_WAIT, REFUSED
    from ..algorithms.limit import Answer, Limit, State
    from ..clock import SystemClock, monotonic_us
    from ..decision import Decision, Decisions, fresh
    from .cell_table import Table
    from .contract import Store

    def blank(store: CellStore, handle: LimitHandle) -> Decision:
        """A new Decision whose fields the store sets."""
        return fresh(handle.name)

    def blank_joined(store: CellStore, names: tuple[str, ...]) -> Decisions | None:
        """None: only the compiled build allocates the joined result before the decision."""
        return None


from ..algorithms.all_of import join_results
from ..algorithms.limit import StateData
from ..clock import SYSTEM, Clock
from ..decision import STORE
from ..errors import ConfigurationError
from ..fork import reset_after_fork
from .contract import Booking, KeyState


@cython.cclass
class LimitHandle:
    """A limit registered in one store: the number of its units there, the time of its first use, and its cells."""

    __slots__ = ("cells", "limit", "name", "since_us", "store", "unit")

    def __init__(
        self,
        store: CellStore,
        named: NamedLimit,
        unit: cython.int,
        since_us: cython.longlong,
        cells: Table = None,  # type: ignore[assignment]
    ) -> None:
        self.store = store
        self.limit = named.limit
        self.name = named.name
        self.unit = unit
        self.since_us = since_us
        self.cells = cells


@cython.cclass
class CellStore(Store):
    """A store whose cells are in memory; a subclass implements access to the cells."""

    local = True

    def __init__(self, clock: Clock | None = None) -> None:
        self.set_clock(SYSTEM if clock is None else clock)
        self.last_us = 0
        self.shift_us = 0
        self.revision = 0
        self._lock = threading.RLock()
        reset_after_fork(self)

    # Time ------------------------------------------------------------------------------------------------------

    def set_clock(self, clock: Clock) -> None:
        """Sets the clock."""
        self._clock = clock
        self.system = self._clock if isinstance(self._clock, SystemClock) else None
        self.offset_us = 0 if self.system is None else self.system.offset_us

    @property
    def clock(self) -> Clock:
        return self._clock

    @cython.cfunc
    def now(self) -> cython.longlong:
        """Reads the clock, once per decision; if it went back, time continues from the last value."""
        if self.system is not None:
            return monotonic_us() + self.offset_us
        now_us: cython.longlong = self._clock.now_us() + self.shift_us
        if now_us < self.last_us:
            self.shift_us += self.last_us - now_us
            now_us = self.last_us
        self.last_us = now_us
        return now_us

    def now_us(self) -> int:
        """This store's time."""
        return self.now()

    # Access to cells: implemented by subclasses -----------------------------------------------------------------

    @cython.cfunc
    def handle_of(self, named: NamedLimit) -> LimitHandle:
        """The handle of a limit in this store; a limit remembers the last one."""
        handle = named.handle
        if isinstance(handle, LimitHandle) and handle.store is self:
            return handle
        handle = self.handle(named)
        named.handle = handle
        return handle

    def handle(self, named: NamedLimit) -> LimitHandle:
        """The handle of a limit in this store, made when it is first named."""
        raise NotImplementedError

    @cython.cfunc
    def is_full(self, handle: LimitHandle, needed: cython.longlong, now_us: cython.longlong) -> cython.bint:
        """Whether there is no space for `needed` new keys, even after a sweep of idle ones."""
        raise NotImplementedError

    @cython.cfunc
    def known(self, handle: LimitHandle, key: str, now_us: cython.longlong, full: cython.bint) -> cython.bint:
        """Whether the key has a cell."""
        raise NotImplementedError

    @cython.cfunc
    def read(self, handle: LimitHandle, key: str, now_us: cython.longlong, full: cython.bint) -> State:
        """The key's state in this limit's units; without a cell, the state of an unseen key. Writes nothing."""
        raise NotImplementedError

    @cython.cfunc
    def put(
        self,
        handle: LimitHandle,
        key: str,
        a: cython.longlong,
        b: cython.longlong,
        c: cython.longlong,
        now_us: cython.longlong,
        full: cython.bint,
    ) -> cython.int:
        """Stores the state that an algorithm returned: three integers, or an entry to add to a log."""
        raise NotImplementedError

    @cython.cfunc
    def log_full_until(self, handle: LimitHandle, key: str, at: cython.longlong, now_us: cython.longlong) -> cython.longlong:
        """When a log of bounded length can take an entry at `at`; 0: now."""
        return 0

    @cython.cfunc
    def expose(self, handle: LimitHandle, key: str, now_us: cython.longlong, full: cython.bint) -> cython.int:
        """Called before an algorithm changes this key's log in~handle."""
        return 0

    def discard(self, handle: LimitHandle, key: str) -> None:
        """Deletes the state of one key."""
        raise NotImplementedError

    def pairs(self, handle: LimitHandle) -> list[tuple[str, int, StateData]]:
        """(key, unit, state as plain data) of every key of a limit."""
        raise NotImplementedError

    def saved(self, handle: LimitHandle, key: str, now_us: int) -> StateData | None:
        """A key's state as plain data in its limit's units; None when there is none."""
        raise NotImplementedError

    def limit_of(self, handle: LimitHandle, unit: int) -> Limit:
        """The limit with this unit number."""
        raise NotImplementedError

    def in_units(self, handle: LimitHandle, unit: int, state: StateData, now_us: int) -> StateData:
        """Converts a state from the units of another rate under the same name."""
        if unit == handle.unit or handle.limit.logs:
            return state
        return handle.limit.convert(self.limit_of(handle, unit), state, min(now_us, handle.since_us))

    @cython.cfunc
    def begin(self) -> cython.int:
        """Locks out other writers until `end`."""
        self._lock.acquire()
        return 0

    @cython.cfunc
    def end(self) -> cython.int:
        self._lock.release()
        return 0

    # Deciding --------------------------------------------------------------------------------------------------

    @cython.cfunc
    def decide_cell(
        self,
        decision: Decision,
        handle: LimitHandle,
        key: str,
        cost: cython.longlong,
        max_wait_us: cython.longlong,
        commit: cython.bint,
        now_us: cython.longlong,
    ) -> cython.longlong:
        """Decides one limit for one key, under the lock; sets the fields of `decision`. Allocates nothing."""
        limit: Limit = handle.limit
        tick: cython.longlong = limit.tick
        now: cython.longlong = now_us // tick
        max_wait: cython.longlong = 0
        if max_wait_us > 0 and limit.reserves:
            max_wait = (now_us + max_wait_us) // tick - now
        full: cython.bint = self.is_full(handle, 1, now_us)
        answer: Answer
        state: State
        until: cython.longlong = 0
        while True:
            stamp: cython.ulonglong = self.revision
            state = self.read(handle, key, now_us, full)
            answer = limit.rule(limit, state[0], state[1], state[2], now, now, cost, max_wait)
            if stamp == self.revision:
                break
        start: cython.longlong = answer[3]
        if limit.logs and start >= 0 and cost > 0:
            until = self.log_full_until(handle, key, answer[0], now_us)
            if until > 0:
                start = REFUSED
        seen: Answer = answer
        if not commit or cost == 0 or until > 0:  # the current values, without a charge
            seen = limit.rule(limit, state[0], state[1], state[2], now, now, 0, 0)
        elif start >= 0:
            self.put(handle, key, answer[0], answer[1], answer[2], now_us, full)
        decision.remaining = seen[5]
        decision.reset_us = seen[6] * tick - now_us if seen[6] > now else 0
        decision.allowed = start >= 0 or cost == 0
        decision.limit = limit.capacity
        decision.retry_us = 0
        decision.wait_us = 0
        decision.start_us = now_us
        if start > now and cost > 0:
            decision.start_us = start * tick
            decision.wait_us = start * tick - now_us
        elif start < 0 and cost > 0:
            if until > 0:
                decision.retry_us = until - now_us
            elif start != REFUSED:
                decision.retry_us = -1
            elif tick > 1 and max_wait_us > 0 and limit.reserves:
                decision.retry_us = all_of.retry_us(limit, state[0], state[1], state[2], now_us, cost, max_wait_us) - now_us
            else:
                decision.retry_us = answer[4] * tick - now_us
        return start

    @cython.cfunc
    def charge(
        self,
        claims: list,  # type: ignore[type-arg]
        max_wait_us: cython.longlong,
        commit: cython.bint,
        now_us: cython.longlong,
        not_before_us: cython.longlong,
    ) -> cython.longlong:
        """Several limits: load, decide, store. The common start, or REFUSED or NEVER; the answers are left in the claims.
        When anything was decided in between, it is done again."""
        i: cython.Py_ssize_t
        claim: Claim
        n: cython.Py_ssize_t = len(claims)
        if not cython.compiled and gc.isenabled():
            for claim in claims:
                if claim.named.limit.logs:  # storing into a log allocates, and a finaliser that ran then could change it as well
                    gc.disable()
                    try:
                        return CellStore.charge(self, claims, max_wait_us, commit, now_us, not_before_us)
                    finally:
                        gc.enable()
        while True:
            full: cython.bint = False
            for i in range(n):  # whatever has to be made first may run Python
                claim = claims[i]
                full = full or self.is_full(self.handle_of(claim.named), n, now_us)
            stamp: cython.ulonglong = self.revision
            for i in range(n):
                claim = claims[i]
                state: State = self.read(self.handle_of(claim.named), claim.key, now_us, full)
                claim.a = state[0]
                claim.b = state[1]
                claim.c = state[2]
            if stamp != self.revision:  # a finaliser ran while a state was converted: a log that was read may have moved
                continue
            start_us: cython.longlong = all_of.decide(claims, now_us, not_before_us, max_wait_us)
            if stamp == self.revision:
                break
        if start_us >= 0 and self.has_full_log(claims, now_us):
            start_us = REFUSED
        if start_us >= 0 and commit:
            for i in range(n):
                claim = claims[i]
                if claim.cost > 0:
                    self.put(self.handle_of(claim.named), claim.key, claim.new_a, claim.new_b, claim.new_c, now_us, full)
                    claim.undoable = True
        else:
            for i in range(n):
                all_of.peek_claim(claims[i], now_us)
        return start_us

    @cython.cfunc
    def has_full_log(self, claims: list, now_us: cython.longlong) -> cython.bint:  # type: ignore[type-arg]
        """Whether a log of bounded length is full for one of these claims; that claim is refused until it has space."""
        found: cython.bint = False
        i: cython.Py_ssize_t
        claim: Claim
        for i in range(len(claims)):
            claim = claims[i]
            if claim.named.limit.logs and claim.cost > 0:
                until: cython.longlong = self.log_full_until(self.handle_of(claim.named), claim.key, claim.new_a, now_us)
                if until > 0:
                    claim.start = REFUSED
                    claim.retry = until
                    found = True
        return found

    @cython.cfunc
    def decide_checked(
        self,
        claims: list,  # type: ignore[type-arg]
        names: tuple,  # type: ignore[type-arg]
        max_wait_us: cython.longlong,
        commit: cython.bint,
        not_before_us: cython.longlong,
    ) -> Decision:
        """Decides claims without duplicates of a limit and key; `names` are those of their limits."""
        joined: Decisions | None = blank_joined(self, names)
        self.begin()
        try:
            now_us: cython.longlong = self.now()
            start_us: cython.longlong = self.charge(claims, max_wait_us, commit, now_us, not_before_us)
        finally:
            self.end()
        return all_of.join_claims(claims, now_us, start_us, joined)

    def decide(
        self,
        claims: Sequence[Claim],
        max_wait_us: int | None = 0,
        *,
        commit: bool = True,
        remember: bool = False,
        not_before_us: int = 0,
    ) -> Decision:
        asked: list = checked(claims)  # type: ignore[type-arg]
        return self.decide_checked(asked, all_of.names_of(asked), bounded_wait_us(max_wait_us), commit, not_before_us)

    def decide_many(self, asks: Sequence[Sequence[Claim]], max_wait_us: int | None = 0) -> list[Decision]:
        wait: cython.longlong = bounded_wait_us(max_wait_us)
        asked = [checked(claims) for claims in asks]
        self.begin()
        try:
            now_us: cython.longlong = self.now()
            return [join_results(claims, now_us, self.charge(claims, wait, True, now_us, 0)) for claims in asked]
        finally:
            self.end()

    # Giving back ------------------------------------------------------------------------------------------------

    @cython.cfunc
    def give_back_all(self, claims: list, charged_at: cython.longlong, now_us: cython.longlong) -> cython.int:  # type: ignore[type-arg]
        claim: Claim
        for claim in claims:
            self.give_back_one(claim, charged_at, now_us)
        return 0

    @cython.cfunc
    def give_back_one(self, claim: Claim, charged_at: cython.longlong, now_us: cython.longlong) -> cython.int:
        handle: LimitHandle = self.handle_of(claim.named)
        limit: Limit = handle.limit
        tick: cython.longlong = limit.tick
        at: cython.longlong = charged_at // tick if charged_at >= 0 else -1
        full: cython.bint = self.is_full(handle, 1, now_us)
        while True:
            stamp: cython.ulonglong = self.revision
            if claim.cost >= 0 and not self.known(handle, claim.key, now_us, full):
                return 0
            state: State = self.read(handle, claim.key, now_us, full)
            untouched = state[0] == claim.new_a and state[1] == claim.new_b and state[2] == claim.new_c
            if untouched and claim.undoable and not handle.limit.logs and claim.cost == claim.charged:
                claim.undoable = False  # unchanged since the charge: restore the state before it
                return self.put(handle, claim.key, claim.a, claim.b, claim.c, now_us, full)
            if limit.logs:
                self.expose(handle, claim.key, now_us, full)
            back: State = limit.undo(limit, state[0], state[1], state[2], now_us // tick, claim.cost, claim.charged, at)
            if stamp == self.revision:
                break
        return self.put(handle, claim.key, back[0], back[1], back[2], now_us, full)

    def give_back(self, claims: Sequence[Claim], charged_at: int = -1, source: str = STORE) -> None:
        asked = list(claims)
        only_claims(asked)
        self.begin()
        try:
            self.give_back_all(asked, charged_at, self.now())
        finally:
            self.end()

    @property
    def can_rebook(self) -> bool:
        return True

    def rebook(self, bookings: Sequence[Booking]) -> list[Decision | None]:
        """Removes the waiters that leave and moves the others up, in one step; the bookings come in order of their starts. All
        whose start is in the future are given back, from the last to the first; those that stay are charged again, in order.
        Returns their new Decisions, None for a booking that keeps its start.

        No waiter may get a later start. That is possible when several limits left gaps between their charges, which can't be
        given back one by one. Then all states are restored, the leaving bookings give back what the algorithms allow, and the
        others keep their starts.
        """
        collecting = gc.isenabled()
        gc.disable()  # a decision made by a finaliser meanwhile would be undone when states are restored
        try:
            self.begin()
            try:
                return self.rebooked(list(bookings), self.now())
            finally:
                self.end()
        finally:
            if collecting:
                gc.enable()

    def rebooked(self, bookings: list[Booking], now_us: int) -> list[Decision | None]:
        claims = {(claim.limit.identity, claim.key): claim for booking in bookings for claim in booking.claims}
        saved = [(claim, self.saved(self.handle_of(claim.limit), claim.key, now_us)) for claim in claims.values()]
        for asked, charged_at, _, stays, _ in reversed(bookings):
            if not stays or charged_at > now_us:
                self.give_back_all(list(asked), charged_at, now_us)
        found: list[Decision | None] = []
        for asked, charged_at, deadline_us, stays, _ in bookings:
            if not stays or charged_at <= now_us:
                found.append(None)
                continue
            left = None if deadline_us is None else max(0, deadline_us - now_us)
            again = list(asked)
            decision: Decision = join_results(again, now_us, self.charge(again, bounded_wait_us(left), True, now_us, 0))
            if not decision.allowed or decision.start_us > charged_at:
                return self.put_back(bookings, saved, now_us)
            found.append(decision)
        return found

    def put_back(
        self, bookings: list[Booking], saved: list[tuple[Claim, StateData | None]], now_us: int
    ) -> list[Decision | None]:
        """Undoes a rebooking that would delay a waiter: restores the states and gives back only the leaving bookings."""
        for claim, state in saved:
            self.replace(self.handle_of(claim.limit), claim.key, state, now_us)
        for asked, charged_at, _, stays, _ in reversed(bookings):
            if not stays:
                self.give_back_all(list(asked), charged_at, now_us)
        return [None] * len(bookings)

    def replace(self, handle: LimitHandle, key: str, state: StateData | None, now_us: int) -> None:
        """Replaces a key's state by one given as plain data; None deletes it."""
        self.discard(handle, key)
        if state is not None:
            self.restore(handle, key, state, now_us)

    @cython.cfunc
    def restore(self, handle: LimitHandle, key: str, state: StateData, now_us: cython.longlong) -> cython.int:
        """Stores a state given as plain data: three integers, or the entries of a log."""
        full: cython.bint = self.is_full(handle, 1, now_us)
        if not handle.limit.logs:
            return self.put(handle, key, state[0], state[1], state[2], now_us, full)
        for moment, cost in state[0]:
            self.put(handle, key, moment, cost, 0, now_us, full)
        return 0

    # Keys ------------------------------------------------------------------------------------------------------

    def reset(self, claims: Sequence[Claim]) -> None:
        asked = list(claims)
        only_claims(asked)
        self.begin()
        try:
            for claim in asked:
                self.discard(self.handle_of(claim.limit), claim.key)
                self.revision += 1
        finally:
            self.end()

    def items(self, limit: NamedLimit) -> Iterable[KeyState]:
        handle: LimitHandle = self.handle(limit)
        now_us = self.now()
        return [(key, self.in_units(handle, unit, state, now_us)) for key, unit, state in self.pairs(handle)]

    def load(self, limit: NamedLimit, items: Iterable[KeyState]) -> None:
        pairs = list(items)
        for key, _ in pairs:
            if type(key) is not str:
                raise TypeError(f"a key must be a str, got {type(key).__name__}: {key!r}")
        handle: LimitHandle = self.handle(limit)
        for start in range(0, len(pairs), 500):  # in batches, so that other callers do not wait long
            self.begin()
            try:
                now_us: cython.longlong = self.now()
                for key, state in pairs[start : start + 500]:
                    self.replace(handle, key, state, now_us)
            finally:
                self.end()

    def register(self, limit: NamedLimit) -> None:
        self.handle_of(limit)

    def __bool__(self) -> bool:
        return True

    def _reset_after_fork(self) -> None:
        self._lock = threading.RLock()


def bounded_wait_us(max_wait_us: int | None) -> int:
    """A wait in microseconds, at most MAX_WAIT; None means without bound."""
    if max_wait_us is None or max_wait_us > MAX_WAIT:
        return MAX_WAIT
    return int(max_wait_us)


def checked(claims: Iterable[Claim]) -> list[Claim]:
    """The claims of one decision as a list; raises ConfigurationError for no claims and for duplicates of a limit and key."""
    asked = list(claims)
    if not asked:
        raise ConfigurationError("a decision needs at least one claim")
    only_claims(asked)
    if len(asked) > 1 and is_twice(asked):
        raise ConfigurationError(
            "duplicate claim: the same limit and key twice in one decision; claim it once, with the whole cost"
        )
    return asked


@cython.cfunc
def is_twice(claims: list) -> cython.bint:  # type: ignore[type-arg]
    """Whether two claims have the same limit and key. Up to 12 claims are compared in pairs, which is faster than a set."""
    n: cython.Py_ssize_t = len(claims)
    i: cython.Py_ssize_t
    j: cython.Py_ssize_t
    one: Claim
    two: Claim
    if n > 12:
        return len({(claim.limit.identity, claim.key) for claim in claims}) < n
    for i in range(1, n):
        one = claims[i]
        for j in range(i):
            two = claims[j]
            if one.named.name == two.named.name and one.key == two.key and one.named.identity == two.named.identity:
                return True
    return False


def only_claims(claims: Iterable[object]) -> None:
    """Raises TypeError for anything but a Claim: the compiled code below does not check types."""
    for claim in claims:
        if not isinstance(claim, Claim):
            raise TypeError(f"expected a Claim, got {claim!r}")
