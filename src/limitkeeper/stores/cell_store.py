"""CellStore: decides, gives back and rebooks claims on cells in memory; the base class of MemoryStore and SharedStore.

A subclass implements access to its cells (`several_rates_per_key.py`) and locking (`begin`, `end`); the rest is the same for
cells of this process (`memory.py`) and in a file that processes share (`shared/`).

The store's time never goes back: when the clock does, the store continues from the last time it read.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.algorithms import all_of
    from cython.cimports.limitkeeper.algorithms.claim import Claim, NamedLimit
    from cython.cimports.limitkeeper.algorithms.constants import NEVER, REFUSED, WAS_RESET
    from cython.cimports.limitkeeper.algorithms.limit import I64, Answer, Limit, State
    from cython.cimports.limitkeeper.clock import SystemClock
    from cython.cimports.limitkeeper.decision import Decision, Decisions
    from cython.cimports.limitkeeper.monotonic import monotonic_us
    from cython.cimports.limitkeeper.stores.several_rates_per_key import CellRates, LimitHandle
else:
    from ..algorithms import all_of
    from ..algorithms.claim import Claim, NamedLimit
    from ..algorithms.constants import NEVER, REFUSED, WAS_RESET
    from ..algorithms.limit import I64, Answer, Limit, State
    from ..clock import SystemClock, monotonic_us
    from ..decision import Decision, Decisions
    from .several_rates_per_key import CellRates, LimitHandle

    def blank_joined(store: CellStore, names: tuple[str, ...]) -> Decisions | None:
        """None: only the compiled build allocates the joined result before the decision."""
        return None


from ..algorithms.all_of import join_results
from ..algorithms.limit import StateData
from ..clock import SYSTEM, Clock
from ..decision import STORE
from ..errors import ConfigurationError
from ..fork import reset_after_fork
from ..garbage_collection import uncollected
from .contract import Booking, Claims, KeyState, bounded_wait_us, checked, only_claims
from .several_rates_per_key import UnitStates

#: How long a reset is remembered: the limit's time to full, at least an hour and at most a day.
HOUR_US, DAY_US = 3_600_000_000, 86_400_000_000


@cython.cclass
class CellStore(CellRates):
    """A store whose cells are in memory; a subclass implements access to the cells."""

    local = True

    def __init__(self, clock: Clock | None = None, max_keys: int = 1) -> None:
        super().__init__()
        self.half = max_keys // 2 + 2
        if clock is not None and not callable(getattr(clock, "now_us", None)):
            raise ConfigurationError(f"clock must have the methods of limitkeeper.testing.ManualClock, got {clock!r}")
        self.set_clock(SYSTEM if clock is None else clock)
        CellStore._reset_after_fork(self)
        reset_after_fork(self)

    # Time ------------------------------------------------------------------------------------------------------

    def set_clock(self, clock: Clock) -> None:
        """Sets the clock, which may be behind the one before it."""
        self._clock = clock
        self.last_us = self.shift_us = 0
        self.system = self._clock if isinstance(self._clock, SystemClock) else None
        self.offset_us = 0 if self.system is None else self.system.offset_us

    @property
    def clock(self) -> Clock:
        return self._clock

    @cython.cfunc
    def now(self) -> I64:
        """Reads the clock, once per decision; if it went back, time continues from the last value."""
        if self.system is not None:
            return monotonic_us() + self.offset_us
        now_us: I64 = self._clock.now_us() + self.shift_us
        if now_us < self.last_us:
            self.shift_us += self.last_us - now_us
            now_us = self.last_us
        self.last_us = now_us
        return now_us

    def now_us(self) -> int:
        """This store's time."""
        return self.now()

    # Handles and locking: implemented by subclasses -------------------------------------------------------------

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
    def is_full(self, handle: LimitHandle, key: str, needed: I64, now_us: I64) -> cython.bint:
        """Whether there is no space for `needed` new keys, even after a sweep of idle ones; False for a key that has a cell."""
        raise NotImplementedError

    @cython.cfunc
    def hold_mapping(self, handle: LimitHandle, key: str, start_us: I64, now_us: I64, full: cython.bint) -> cython.int:
        """A key was charged ahead: if that was on an overflow cell, keys keep theirs until that start. On another one, such a key
        would get the rate a second time."""
        raise NotImplementedError

    @cython.cfunc
    def begin(self) -> cython.int:
        """Locks out other writers until `end`. A signal handler that raises here leaves nothing locked."""
        try:
            self._lock.acquire()
        except BaseException:
            if self._lock._is_owned():  # type: ignore[attr-defined]
                self._lock.release()
            raise
        return 0

    @cython.cfunc
    def end(self) -> cython.int:
        self._lock.release()
        return 0

    @cython.annotation_typing(False)
    def run_locked(self, call: Callable[..., Any], *args: object) -> Any:
        """Calls something while this process has the lock of the store: for state that is kept beside its cells."""
        self.begin()
        try:
            return call(*args)
        finally:
            self.end()

    # Deciding --------------------------------------------------------------------------------------------------

    @cython.cfunc
    def decide_cell(
        self, decision: Decision, handle: LimitHandle, key: str, cost: I64, max_wait_us: I64, commit: cython.bint, now_us: I64
    ) -> cython.int:
        """Decides one limit for one key and sets the fields of `decision`; allocates nothing but a new cell."""
        limit: Limit = handle.limit
        if not cython.compiled:  # noqa: SIM102 - as in `begin` of a shared store
            if gc.isenabled():  # a new cell and a log's entry allocate: no finaliser may run and change them as well
                args = (self, decision, handle, key, cost, max_wait_us, commit, now_us)
                return uncollected(CellStore.decide_cell, *args)  # type: ignore[no-any-return]
        tick: I64 = limit.tick
        now: I64 = now_us // tick
        max_wait: I64 = 0
        if max_wait_us > 0 and limit.reserves:
            max_wait = (now_us + max_wait_us) // tick - now
        answer: Answer
        state: State
        until: I64 = 0
        while True:
            full: cython.bint = self.is_full(handle, key, 1, now_us)
            stamp: cython.ulonglong = self.revision
            self.is_first_use = False
            state = self.read(handle, key, now_us, full)
            answer = limit.rule(limit, state[0], state[1], state[2], now, now, cost, max_wait)
            if stamp == self.revision:
                break
        start: I64 = answer[3]
        if limit.logs and start != NEVER and cost > 0:
            until = self.log_full_until(handle, key, start if start >= 0 else answer[4] + max_wait, answer[4], now_us)
            if until > 0:
                start = REFUSED
        seen: Answer = answer
        if not commit or cost == 0 or until > 0:  # the current values, without a charge
            seen = limit.rule(limit, state[0], state[1], state[2], now, now, 0, 0)
        elif start >= 0 and self.put(handle, key, answer[0], answer[1], answer[2], now_us, full):
            self.charge_others(handle, key, start * tick if start > now else now_us, cost, now_us, full)
        if commit and start > now and cost > 0 and until == 0:
            self.hold_mapping(handle, key, start * tick, now_us, full)
        decision.limit, decision.remaining = limit.capacity, seen[5]
        decision.reset_us = seen[6] * tick - now_us if seen[6] > now else 0
        decision.retry_us = decision.wait_us = 0
        decision.start_us, decision.allowed = now_us, start >= 0 or cost == 0
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
            if self.is_first_use and start == REFUSED and commit:
                self.keep_seed(handle, key, now_us, full)
        return 0

    @cython.cfunc
    def charge(self, claims: list, max_wait_us: I64, commit: cython.bint, now_us: I64, not_before_us: I64) -> I64:
        """Several limits: load, decide, store. The common start, or REFUSED or NEVER; the answers are left in the claims.
        When anything was decided in between, it is done again."""
        i: cython.Py_ssize_t
        claim: Claim
        n: cython.Py_ssize_t = len(claims)
        if not cython.compiled:  # noqa: SIM102 - as in `decide_cell`
            if gc.isenabled():
                args = (self, claims, max_wait_us, commit, now_us, not_before_us)
                return uncollected(CellStore.charge, *args)  # type: ignore[no-any-return]
        while True:
            full: cython.bint = False
            for i in range(n):  # whatever has to be made first may run Python
                claim = claims[i]
                full = full or self.is_full(self.handle_of(claim.named), claim.key, n, now_us)
            stamp: cython.ulonglong = self.revision
            first_use: cython.bint = False
            for i in range(n):
                claim = claims[i]
                self.seen_reset = self.last_unmarked_reset(0)
                self.is_first_use = False
                state: State = self.read(self.handle_of(claim.named), claim.key, now_us, full)
                claim.a, claim.b, claim.c = state
                claim.reset_id = self.seen_reset
                first_use = first_use or self.is_first_use
            if stamp != self.revision:  # a finaliser ran while a state was read: a log that was read may have moved
                continue
            start_us: I64 = all_of.decide(claims, now_us, not_before_us, max_wait_us)
            if stamp == self.revision:
                break
        if start_us != NEVER and self.has_full_log(claims, max_wait_us, now_us):
            start_us = REFUSED
        if start_us >= 0 and commit:
            for i in range(n):
                claim = claims[i]
                if claim.cost > 0:
                    handle: LimitHandle = self.handle_of(claim.named)
                    claim.others = None
                    if self.put(handle, claim.key, claim.new_a, claim.new_b, claim.new_c, now_us, full):
                        claim.others = self.charge_others(handle, claim.key, start_us, claim.cost, now_us, full)
                    claim.undoable = True
                    if start_us > now_us:
                        self.hold_mapping(handle, claim.key, start_us, now_us, full)
        else:
            for i in range(n):
                claim = claims[i]
                all_of.peek_claim(claim, now_us)
                if first_use and start_us == REFUSED and commit and claim.cost > 0:
                    self.keep_seed(self.handle_of(claim.named), claim.key, now_us, full)
        return start_us

    @cython.cfunc
    def has_full_log(self, claims: list, max_wait_us: I64, now_us: I64) -> cython.bint:
        """Whether a log of bounded length is full for one of these claims, also at the retry time of one that is refused; that
        claim is refused until it has space."""
        found: cython.bint = False
        i: cython.Py_ssize_t
        claim: Claim
        start: I64 = 0  # the common one; of a call that is refused that at its retry time
        retry: I64 = now_us
        for i in range(len(claims)):
            claim = claims[i]
            start = claim.start if claim.start > start else start
            retry = claim.retry if claim.start == REFUSED and claim.retry > retry else retry
        start = retry + max_wait_us if retry > now_us else start
        for i in range(len(claims)):
            claim = claims[i]
            if claim.named.limit.logs and claim.cost > 0:
                until: I64 = self.log_full_until(self.handle_of(claim.named), claim.key, start, retry, now_us)
                if until > 0:
                    claim.start = REFUSED
                    claim.retry = until
                    found = True
        return found

    @cython.cfunc
    def decide_checked(self, claims: list, names: tuple, max_wait_us: I64, commit: cython.bint, not_before_us: I64) -> Decision:
        """Decides claims without duplicates of a limit and key; `names` are those of their limits."""
        joined: Decisions | None = blank_joined(self, names)
        self.begin()
        try:
            now_us: I64 = self.now()
            start_us: I64 = self.charge(claims, max_wait_us, commit, now_us, not_before_us)
        finally:
            self.end()
        return all_of.join_claims(claims, now_us, start_us, joined)

    def decide(
        self, claims: Claims, max_wait_us: int | None = 0, *, commit: bool = True, remember: bool = False, not_before_us: int = 0
    ) -> Decision:
        asked: list = checked(claims)
        return self.decide_checked(asked, all_of.names_of(asked), bounded_wait_us(max_wait_us), commit, not_before_us)

    def decide_many(self, asks: Sequence[Sequence[Claim]], max_wait_us: int | None = 0) -> list[Decision]:
        wait: I64 = bounded_wait_us(max_wait_us)
        asked = [checked(claims) for claims in asks]
        self.begin()
        try:
            now_us: I64 = self.now()
            return [join_results(claims, now_us, self.charge(claims, wait, True, now_us, 0)) for claims in asked]
        finally:
            self.end()

    # Giving back ------------------------------------------------------------------------------------------------

    @cython.cfunc
    def give_back_all(self, claims: list, charged_at: I64, now_us: I64) -> cython.int:
        """Returns the number of claims whose key was not reset since their charge."""
        claim: Claim
        found: cython.int = 0
        for claim in claims:
            found += self.give_back_one(claim, charged_at, now_us)
        return found

    @cython.cfunc
    def give_back_one(self, claim: Claim, charged_at: I64, now_us: I64) -> cython.int:
        """Returns 0, and does nothing, when the key was reset since the charge."""
        handle: LimitHandle = self.handle_of(claim.named)
        limit: Limit = handle.limit
        known: cython.bint = claim.undoable
        self.unsettle()
        full: cython.bint = self.is_full(handle, claim.key, 1, now_us)
        while True:
            stamp: cython.ulonglong = self.revision
            n: cython.int = self.load_rates(handle, claim.key, now_us, full)
            if claim.reset_id >= 0 and self.is_before_reset(claim.reset_id):
                claim.reset_id = WAS_RESET
            if claim.reset_id == WAS_RESET:
                return 0
            if claim.cost == 0 or (claim.cost > 0 and n == 0):
                return 1
            i: cython.int
            own: cython.bint = limit.logs or claim.cost < 0  # of a rate that has no state nothing can be taken
            for i in range(n):
                own = own or self.rates.unit[i] == handle.unit
            state: State = self.read(handle, claim.key, now_us, full)
            if limit.logs:
                self.expose(handle, claim.key, now_us, full)
            back: State
            untouched: cython.bint = state[0] == claim.new_a and state[1] == claim.new_b and state[2] == claim.new_c
            untouched = untouched and claim.undoable and not limit.logs and claim.cost == claim.charged
            if untouched:  # unchanged since the charge: restore the state before it
                back = (claim.a, claim.b, claim.c)
            else:
                before_until: I64 = claim.c if claim.undoable and not limit.logs and state[2] == claim.new_c else -1
                back = all_of.given_back(limit, state, now_us, claim.cost, claim.charged, charged_at, before_until)
            if stamp == self.revision:
                break
        if untouched:
            claim.undoable = False
        if not own or self.put(handle, claim.key, back[0], back[1], back[2], now_us, full):
            self.give_back_others(handle, claim, charged_at, now_us, full, known, untouched)
        return 1

    @cython.cfunc
    def is_before_reset(self, seen: I64) -> cython.bint:
        """Whether the key whose rates are loaded was reset since a charge that saw the reset with this number (0: none)."""
        return seen != self.rates.reset_id if self.rates.reset_id else seen < self.last_unmarked_reset(0)

    def give_back(self, claims: Sequence[Claim], charged_at: int = -1, source: str = STORE) -> bool:
        asked = list(claims)
        only_claims(asked)
        # Restoring the states of other rates allocates: no finaliser may run and change them as well.
        return self.run_locked(uncollected, self.given_back, asked, charged_at) > 0 or not asked

    def given_back(self, claims: list[Claim], charged_at: int) -> int:
        return self.give_back_all(claims, charged_at, self.now())

    @property
    def can_rebook(self) -> bool:
        return True

    def rebook(self, bookings: Sequence[Booking]) -> list[Decision | None]:
        """Removes the waiters that leave and moves the others up, in one step; the bookings are in order of their charges. All
        whose start is in the future are given back, from the last to the first; those that stay are charged again, in order.
        Returns their new Decisions, None for a booking that keeps its start.

        No waiter may get a later start. That is possible when several limits left gaps between their charges, which can't be
        given back one by one. Then all states are restored, the leaving bookings give back what the algorithms allow, and the
        others keep their starts.
        """
        # A decision made by a finaliser meanwhile would be undone when states are restored.
        return uncollected(self.run_locked, self.rebooked, list(bookings))  # type: ignore[no-any-return]

    def rebooked(self, bookings: list[Booking]) -> list[Decision | None]:
        now_us = self.now()
        claims = {(claim.limit.identity, claim.key): claim for booking in bookings for claim in booking.claims}
        if any(one.limit.limit.logs and self.is_on_overflow_cell(one, now_us) for one in claims.values()):
            return self.put_back(bookings, [], now_us)  # a log there has the entries of other keys too
        saved = [(claim, *self.saved(self.handle_of(claim.limit), claim.key, now_us)) for claim in claims.values()]
        charges = [(claim, claim.charge()) for booking in bookings for claim in booking.claims]
        given = [
            self.give_back_all(list(asked), charged_at, now_us) if not stays or charged_at > now_us else 0
            for asked, charged_at, _, stays, _ in reversed(bookings)
        ]
        found: list[Decision | None] = []
        for asked, charged_at, deadline_us, stays, _ in bookings:
            if not given.pop() or not stays:  # it has begun, or is from before a reset, or leaves
                found.append(None)
                continue
            left = None if deadline_us is None else max(0, deadline_us - now_us)
            again = list(asked)
            decision: Decision = join_results(again, now_us, self.charge(again, bounded_wait_us(left), True, now_us, 0))
            if not decision.allowed or decision.start_us > charged_at:
                for claim, charge in charges:
                    claim.set_charge(charge)
                return self.put_back(bookings, saved, now_us)
            found.append(decision)
        return found

    def is_on_overflow_cell(self, claim: Claim, now_us: int) -> bool:
        """Whether a key is decided on an overflow cell: it has no other, and the store is full, or was at its last call."""
        handle: LimitHandle = self.handle_of(claim.limit)
        if self.states(handle, claim.key):
            return False
        return bool(self.is_full(handle, claim.key, 1, now_us) or self.load_rates(handle, claim.key, now_us, False))

    def put_back(self, bookings: list[Booking], saved: list[tuple[Claim, Any, Any]], now_us: int) -> list[Decision | None]:
        """Undoes a rebooking that would delay a waiter: restores the states and gives back only the leaving bookings."""
        for claim, rates, log in saved:
            handle: LimitHandle = self.handle_of(claim.limit)
            if log is not None:
                self.replace(handle, claim.key, log, now_us)
            full: cython.bint = self.is_full(handle, claim.key, 1, now_us)
            self.rates = rates
            self.save_rates(handle, claim.key, now_us, full)
        for asked, charged_at, _, stays, _ in reversed(bookings):
            if not stays:
                self.give_back_all(list(asked), charged_at, now_us)
        return [None] * len(bookings)

    def saved(self, handle: LimitHandle, key: str, now_us: int) -> tuple[Any, StateData | None]:
        """All states of a key, for `put_back`: its rates, and the entries of a log."""
        states = self.states(handle, key) or [(0, ((), 0, 0))]
        self.load_rates(handle, key, now_us, False)
        return self.rates, states[0][1] if handle.limit.logs else None

    def replace(self, handle: LimitHandle, key: str, state: StateData, now_us: int) -> None:
        """Replaces the state of this rate by one given as plain data: three integers, or the entries of a log."""
        self.unsettle()
        full: cython.bint = self.is_full(handle, key, 1, now_us)
        self.load_rates(handle, key, now_us, full)
        self.rates.reset_id = 0
        if handle.limit.logs:
            self.discard(handle, key)
            self.save_rates(handle, key, now_us, full)  # the longest window used on the key, by which it is pruned
            for moment, cost in state[0]:
                self.put(handle, key, moment, cost, 0, now_us, full)
            return
        self.set_rate(handle, state[0], state[1], state[2], now_us)
        self.save_rates(handle, key, now_us, full)

    # Keys ------------------------------------------------------------------------------------------------------

    def reset(self, claims: Sequence[Claim]) -> None:
        """Deletes the states. The key remembers the reset for a while, so that charges from before it give nothing back. One that
        has no cell gets one for it in a store that is less than half full; in a fuller one the store remembers the reset for all
        keys (`last_unmarked_reset`), so that resets of unused keys can't fill it."""
        self.forget(claims, True)

    def forget(self, claims: Sequence[Claim], remember: bool = False) -> None:
        asked = list(claims)
        only_claims(asked)
        uncollected(self.run_locked, self.forget_all, asked, remember)

    def forget_all(self, claims: list[Claim], remember: bool) -> None:
        now_us: I64 = self.now()
        for claim in claims:
            handle: LimitHandle = self.handle_of(claim.limit)
            until: I64 = now_us + remembered_us(handle.limit)
            self.load_rates(handle, claim.key, now_us, False)
            has_cell: cython.bint = self.rates.reset_id > 0 or len(self.states(handle, claim.key)) > 0
            number: I64 = max(now_us, self.rates.reset_id + 1, self.last_unmarked_reset(0) + 1)
            needed: I64 = 2 if has_cell else self.half  # 2: a full store gets room for a new key
            self.discard(handle, claim.key)
            self.revision += 1
            if not remember:
                continue
            if self.is_full(handle, claim.key, needed, now_us):
                self.last_unmarked_reset(number)
                continue
            self.load_rates(handle, claim.key, now_us, False)
            self.rates.n = 0
            self.rates.reset_id = number
            self.rates.reset_until = until
            self.save_rates(handle, claim.key, now_us, False)

    def items(self, limit: NamedLimit) -> Iterable[KeyState]:
        handle: LimitHandle = self.handle(limit)
        now_us = self.now()
        return [(key, self.state_under(handle, states, now_us)) for key, states in self.pairs(handle) if states]

    def rate_items(self, limit: NamedLimit) -> Iterable[KeyState]:
        handle: LimitHandle = self.handle(limit)
        return [(key, state) for key, states in self.pairs(handle) for unit, state in states if unit == handle.unit]

    def state_under(self, handle: LimitHandle, states: UnitStates, now_us: int) -> StateData:
        """The state of this rate among those of a key; without one, the one that it would start with."""
        for unit, state in states:
            if unit == handle.unit or handle.limit.logs:
                return state
        rates = [(self.limit_at(handle, unit), state) for unit, state in states]
        return all_of.seeded(
            handle.limit, handle.birth_us, now_us, max(limit.used(state, now_us // limit.tick) for limit, state in rates)
        )

    def load(self, limit: NamedLimit, items: Iterable[KeyState]) -> None:
        pairs = list(items)
        for key, _ in pairs:
            if type(key) is not str:
                raise TypeError(f"a key must be a str, got {type(key).__name__}: {key!r}")
        handle: LimitHandle = self.handle(limit)
        for start in range(0, len(pairs), 500):  # in batches, so that other callers do not wait long
            uncollected(self.run_locked, self.replace_all, handle, pairs[start : start + 500])

    def replace_all(self, handle: LimitHandle, pairs: list[KeyState]) -> None:
        now_us: I64 = self.now()
        for key, state in pairs:
            self.replace(handle, key, state, now_us)

    def register(self, limit: NamedLimit) -> None:
        self.handle_of(limit)

    def unregister(self, limit: NamedLimit) -> None:
        limit.handle = None

    def __bool__(self) -> bool:
        return True

    def _reset_after_fork(self) -> None:
        self._lock = threading.RLock()
        if not cython.compiled and type(self).end is CellStore.end:
            self.end = self._lock.release  # type: ignore  # a signal handler may raise where a function begins


def turnover_us(limit: Limit) -> int:
    """How long an exhausted key takes to be as new, at most a year: the least time between two secrets of overflow cells."""
    capacity, count, period = (int(number) for number in (limit.capacity, limit.count, limit.period))
    return min(max(period, capacity * period // count), 366 * 86_400_000_000)


def remembered_us(limit: Limit) -> int:
    """How long a reset is remembered."""
    full_us = int(limit.capacity) * int(limit.period) // int(limit.count)
    return min(max(HOUR_US, full_us), DAY_US)
