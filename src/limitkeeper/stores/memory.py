# cython: boundscheck=False, wraparound=False
"""MemoryStore: keeps state in this process, exact and bounded, without a background thread.

Atomic by construction: compiled, a decision reads and writes the cell without allocating, calling Python or dropping a reference
in between, so no other thread can interfere under the GIL. The pure-Python build uses a re-entrant lock; `revision` detects a
decision that a finaliser made meanwhile, and the decision is repeated.

Keys whose state equals that of an unseen key are dropped by the calls: each insertion checks four keys, in rotation over all
limits, so of n active keys at most n / 3 more are kept. When the store is full of active keys, an unknown key is decided on a
shared overflow cell: a flood of new keys can't evict an exhausted one. When there is room again, such a key gets its own cell,
with the state of the overflow cell, so it is not forgiven. A cell has the number of the rate that its state belongs to; the
states of a key with several rates are in a block of their own.
"""

from __future__ import annotations

from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.algorithms import all_of, sliding_log
    from cython.cimports.limitkeeper.algorithms.claim import Claim, NamedLimit
    from cython.cimports.limitkeeper.algorithms.constants import PLAIN, REFUSED
    from cython.cimports.limitkeeper.algorithms.limit import I64, Answer, Limit, State
    from cython.cimports.limitkeeper.decision import Decision, Decisions
    from cython.cimports.limitkeeper.monotonic import monotonic_us
    from cython.cimports.limitkeeper.stores.cell_store import CellStore, blank, blank_joined
    from cython.cimports.limitkeeper.stores.cell_table import (
        CHECKS_PER_INSERT,
        CHECKS_WHEN_FULL,
        SEVERAL,
        Capacity,
        RatesPointer,
        Table,
    )
    from cython.cimports.limitkeeper.stores.several_rates_per_key import LimitHandle
else:
    from ..algorithms import all_of, sliding_log
    from ..algorithms.claim import Claim, NamedLimit
    from ..algorithms.constants import PLAIN, REFUSED
    from ..algorithms.limit import I64, Answer, Limit, State
    from ..clock import monotonic_us
    from ..decision import Decision, Decisions, fresh
    from .cell_store import CellStore, blank_joined
    from .cell_table import CHECKS_PER_INSERT, CHECKS_WHEN_FULL, SEVERAL, Capacity, Table
    from .several_rates_per_key import LimitHandle

    CellPointer = Any
    RatesPointer = Any

from ..clock import Clock
from ..errors import ConfigurationError
from .cell_store import turnover_us
from .several_rates_per_key import UnitStates
from .store_hash import MemoryHash, memory_hash


@cython.cclass
class MemoryStore(CellStore):
    """The default store: state in this process, for at most `max_keys` keys. `clock` is for tests."""

    @cython.annotation_typing(False)
    def __init__(self, max_keys: int = 1_000_000, clock: Clock | None = None) -> None:
        if isinstance(max_keys, bool) or not isinstance(max_keys, int) or max_keys < 1:
            raise ConfigurationError(f"max_keys must be a whole number, at least 1, got {max_keys!r}")
        super().__init__(clock, max_keys)
        self.capacity = Capacity(max_keys)
        self.calls = self.turn = 0
        self.rotation: list[Table] = []
        self._own = type(self).decide is CellStore.decide
        self._tables: dict[tuple[str, str, str], Table] = {}
        #: The ids of the registered limits of each table, and the tables without any that are not empty yet.
        self._users: dict[tuple[str, str, str], set[int]] = {}
        self._unused: set[tuple[str, str, str]] = set()

    @property
    def overflow(self) -> int:
        return int(self.capacity.overflow)

    def open_hash(self, name: str) -> MemoryHash:
        return memory_hash(self, name)

    # Limits ----------------------------------------------------------------------------------------------------

    def handle(self, named: NamedLimit) -> LimitHandle:
        with self._lock:
            now_us = self.now()
            table = self._tables.get(named.identity)
            if table is None:
                table = Table(self.capacity, now_us, named.limit.logs)
                self._tables[named.identity] = table
                self.rotation.append(table)
            self._users.setdefault(named.identity, set()).add(id(named))
            self._unused.discard(named.identity)
            self.capacity.widen(turnover_us(named.limit))
            return LimitHandle(self, named, table.unit_of(named.limit), table.birth_us, table, 0)

    def unregister(self, limit: NamedLimit) -> None:
        """Drops the table of a limit that has no other handle, once all its keys are as new; checked at each call."""
        with self._lock:
            handle = limit.handle
            if not isinstance(handle, LimitHandle) or handle.store is not self:
                return
            limit.handle = None
            self._users[limit.identity].discard(id(limit))
            if not self._users[limit.identity]:
                self._unused.add(limit.identity)
            for identity in list(self._unused):
                table: Table = self._tables[identity]
                table.tidy(CHECKS_WHEN_FULL, self.now())
                if len(table) == 0 and table.slots == 0:  # no overflow cells, which may hold states
                    self.turn = 0
                    self.rotation.remove(table)
                    del self._tables[identity], self._users[identity]
                    self._unused.discard(identity)

    @cython.cfunc
    def limit_at(self, handle: LimitHandle, unit: I64) -> Limit:
        return handle.cells.units[unit - 1]

    def discard(self, handle: LimitHandle, key: str) -> None:
        self.unsettle()
        handle.cells.discard(key)

    def clear(self) -> None:
        """Forgets all keys, for tests."""
        with self._lock:
            self.unsettle()
            self.revision += 1
            for one in self._tables.values():
                table: Table = one
                table.clear()

    def pairs(self, handle: LimitHandle) -> list[tuple[str, UnitStates]]:
        with self._lock:
            return handle.cells.items()

    def states(self, handle: LimitHandle, key: str) -> UnitStates:
        return handle.cells.states(key)

    # Cells -----------------------------------------------------------------------------------------------------

    @cython.cfunc
    def is_full(self, handle: LimitHandle, key: str, needed: I64, now_us: I64) -> cython.bint:
        if self.capacity.live + needed <= self.capacity.max_keys or handle.cells.find(key):
            return False
        if self.capacity.checked >= self.capacity.live:
            if now_us < self.capacity.soonest_us:  # nothing can be as new yet
                return True
            self.capacity.unsettle()
        checks: cython.int = 0
        while checks < CHECKS_WHEN_FULL and self.capacity.live + needed > self.capacity.max_keys:
            self.sweep_some(16, now_us)
            checks += 16
        if cython.compiled:  # a log that an interrupted decision has read may be freed
            self.revision += 1
        return self.capacity.live + needed > self.capacity.max_keys

    @cython.cfunc
    def unsettle(self) -> cython.int:
        self.capacity.unsettle()
        return 0

    @cython.cfunc
    def sweep_some(self, budget: cython.Py_ssize_t, now_us: I64) -> cython.int:
        """Checks the next `budget` cells, in rotation over all tables, and removes those that are as new. The end of a table
        counts as one check."""
        tables: cython.Py_ssize_t = len(self.rotation)
        if budget > self.capacity.live + tables:
            budget = self.capacity.live + tables
        while budget > 0:
            table: Table = self.rotation[self.turn]
            budget = table.sweep(budget, now_us)
            if budget >= 0:
                budget -= 1
                self.turn = self.turn + 1 if self.turn + 1 < len(self.rotation) else 0  # a finaliser may have dropped one
        return 0

    @cython.cfunc
    def find(self, handle: LimitHandle, key: str, now_us: I64, full: cython.bint) -> CellPointer:
        """The key's cell; for an unknown key its overflow cell, if that is in use or the store is full; otherwise None."""
        table: Table = handle.cells
        cell = table.find(key)
        if cell:
            return cell
        if table.overflow:
            cell = table.overflow_cell(key, now_us)
            if cell.unit and not table.is_new(cell, now_us):
                return cell
        if not full:
            return table.find(key)
        cell = table.overflow_cell(key, now_us)
        if not cell:
            raise MemoryError
        return cell

    @cython.cfunc
    def read(self, handle: LimitHandle, key: str, now_us: I64, full: cython.bint) -> State:
        table: Table = handle.cells
        cell = self.find(handle, key, now_us, full)
        if not cell:
            return handle.limit.unseen(handle.birth_us)
        if table.overflow and table.is_shared(cell):
            self.capacity.overflow += 1
            if cell.unit == 0 or table.is_new(cell, now_us):
                return handle.limit.unseen(handle.birth_us)
        if cell.unit == handle.unit:
            return (cell.a, cell.b, cell.c)
        state: State = self.read_rates(handle, key, now_us, full)
        if table.logs:
            return (0, 0, cell.c)
        return state

    @cython.cfunc
    def can_keep(self, handle: LimitHandle, key: str, now_us: I64, full: cython.bint) -> cython.bint:
        return True

    @cython.cfunc
    def fetch_rates(self, handle: LimitHandle, key: str, now_us: I64, full: cython.bint) -> cython.int:
        cell = self.find(handle, key, now_us, full)
        if not cell or cell.unit == 0 or (handle.cells.is_shared(cell) and handle.cells.is_new(cell, now_us)):
            return 0
        if cell.unit != SEVERAL:
            self.rates.n = 1
            self.rates.unit[0] = cell.unit
            self.rates.a[0] = cell.a
            self.rates.b[0] = cell.b
        elif cython.compiled:
            self.rates = cython.cast(RatesPointer, cell.a)[0]
        else:
            self.rates = cell.a.copy()
        if handle.cells.logs or cell.unit != SEVERAL:
            self.rates.c[0] = cell.c
        return 0

    @cython.cfunc
    def save_rates(self, handle: LimitHandle, key: str, now_us: I64, full: cython.bint) -> cython.int:
        table: Table = handle.cells
        self.revision += 1
        if self.rates.n == 0 and self.rates.reset_id == 0:
            self.unsettle()
            table.discard(key)
            return 0
        cell = self.cell_to_write(handle, key, now_us, full, self.rates.n > 0)
        stored: cython.bint = False
        if cython.compiled:
            stored = table.set_rates(cell, cython.address(self.rates))
        else:
            stored = table.set_rates(cell, self.rates)
        if not stored:
            raise MemoryError
        return 0

    @cython.cfunc
    def cell_to_write(self, handle: LimitHandle, key: str, now_us: I64, full: cython.bint, copy: cython.bint) -> CellPointer:
        """The key's cell. Unless the store is full, a key on an overflow cell gets its own, with a `copy` of the states there."""
        table: Table = handle.cells
        cell = self.find(handle, key, now_us, full)
        if cell and not table.is_shared(cell):
            return cell
        if full:
            if cell.unit and table.is_new(cell, now_us):
                table.empty(cell)
            return cell
        self.sweep_some(CHECKS_PER_INSERT, now_us)
        shared = cell
        cell = table.insert(key)
        if not cell or (shared and copy and not table.copy_cell(shared, cell)):
            raise MemoryError
        return cell

    @cython.cfunc
    def hold_mapping(self, handle: LimitHandle, key: str, start_us: I64, now_us: I64, full: cython.bint) -> cython.int:
        if full and self.capacity.era_end_us < start_us:
            self.capacity.era_end_us = start_us
        return 0

    @cython.cfunc
    def put(self, handle: LimitHandle, key: str, a: I64, b: I64, c: I64, now_us: I64, full: cython.bint) -> cython.int:
        table: Table = handle.cells
        cell = self.cell_to_write(handle, key, now_us, full, True)
        self.revision += 1
        if cell.unit == 0:
            cell.unit = handle.unit
        before: I64 = now_us - handle.limit.window
        if table.logs and b > 0:
            if cell.unit != handle.unit:
                before = now_us - self.log_window(handle, key, now_us, full, True)
            if not table.make_room(cell, before):
                raise MemoryError
            sliding_log.write(cell.c, before, a, b)
        elif cell.unit == handle.unit and not table.logs:
            cell.a, cell.b, cell.c = a, b, c
        elif not table.logs:
            return self.put_rate(handle, key, a, b, c, now_us, full)
        return 0

    # Deciding --------------------------------------------------------------------------------------------------

    @cython.cfunc
    def decide_quickly(
        self, decision: Decision, handle: LimitHandle, key: str, cost: I64, max_wait_us: I64, commit: cython.bint, now_us: I64
    ) -> Decision:
        """Decides one limit for one key: the hot path. Sets the fields of `decision`: nothing is allocated after the lookup.
        `decide_cell` decides for a key that is new or has other rates, and on any log in the plain build."""
        limit: Limit = handle.limit
        table: Table = handle.cells
        tick: I64 = limit.tick
        now: I64 = now_us if limit.fine else now_us // tick
        max_wait: I64 = 0
        if max_wait_us > 0 and limit.reserves:
            max_wait = (now_us + max_wait_us) // tick - now
        answer: Answer
        a: I64
        b: I64
        c: I64
        start: I64
        retry: I64
        remaining: I64
        reset: I64
        if PLAIN:
            stamp = self.revision
        cell = table.find(key)
        known: cython.bint = False
        if cell:
            known = cell.unit == handle.unit and not (PLAIN and table.logs)
        if known:
            answer = limit.rule(limit, cell.a, cell.b, cell.c, now, now, cost, max_wait)
            known = not PLAIN or stamp == self.revision
        if not known:
            self.decide_cell(decision, handle, key, cost, max_wait_us, commit, now_us)
        else:
            a, b, c, start, retry, remaining, reset = answer
            if start >= 0 and commit and cost > 0:
                if not table.logs:
                    cell.a = a
                    cell.b = b
                    cell.c = c
                    self.revision += 1
                else:
                    self.put(handle, key, a, b, c, now_us, False)
            elif not commit or cost == 0:  # the current values, without a charge
                answer = limit.rule(limit, cell.a, cell.b, cell.c, now, now, 0, 0)
                remaining = answer[5]
                reset = answer[6]
                if cost == 0:
                    start = now
            decision.limit = limit.capacity
            decision.remaining = remaining
            decision.reset_us = reset * tick - now_us if reset > now else 0
            decision.retry_us = 0
            decision.wait_us = 0
            decision.start_us = now_us
            decision.allowed = start >= 0
            if start > now:
                decision.start_us = start * tick
                decision.wait_us = start * tick - now_us
            elif start < 0:
                decision.retry_us = retry * tick - now_us if start == REFUSED else -1
                if not limit.fine and may_wait(limit, max_wait_us) and start == REFUSED:
                    retry = all_of.retry_us(limit, cell.a, cell.b, cell.c, now_us, cost, max_wait_us)
                    decision.retry_us = retry - now_us
        self.calls += 1
        if self.calls & 63 == 0:
            self.sweep_some(16, now_us)
            self.revision += 1
        if PLAIN:
            decision.__class__ = Decision
        return decision

    @cython.ccall
    def decide_one(self, named: NamedLimit, key: str, cost: I64, max_wait_us: I64, commit: cython.bint) -> Decision:
        if not self._own:  # a subclass overrides `decide`
            return CellStore.decide_one(self, named, key, cost, max_wait_us, commit)
        handle: LimitHandle = named.handle if isinstance(named.handle, LimitHandle) else self.handle_of(named)
        if handle.store is not self:
            handle = self.handle_of(named)
        now_us: I64 = monotonic_us() + self.offset_us if self.system is not None else self.now()
        if cython.compiled:
            return self.decide_quickly(blank(self, handle), handle, key, cost, max_wait_us, commit, now_us)
        with self._lock:
            return self.decide_quickly(fresh(handle.name), handle, key, cost, max_wait_us, commit, now_us)

    @cython.cfunc
    def decide_checked(self, claims: list, names: tuple, max_wait_us: I64, commit: cython.bint, not_before_us: I64) -> Decision:
        if not cython.compiled:
            return CellStore.decide_checked(self, claims, names, max_wait_us, commit, not_before_us)
        joined: Decisions | None = blank_joined(self, names)  # compiled: atomic without a lock
        now_us: I64 = self.now()
        start_us: I64 = self.charge(claims, max_wait_us, commit, now_us, not_before_us)
        return all_of.join_claims(claims, now_us, start_us, joined)

    @cython.cfunc
    def charge(self, claims: list, max_wait_us: I64, commit: cython.bint, now_us: I64, not_before_us: I64) -> I64:
        """Several limits. Compiled, when every key has a cell in its limit's own units, each cell is looked up only once: nothing
        moves it before it is written."""
        if not cython.compiled or not self.load_cells(claims):
            return CellStore.charge(self, claims, max_wait_us, commit, now_us, not_before_us)
        i: cython.Py_ssize_t
        claim: Claim
        start_us: I64 = all_of.decide(claims, now_us, not_before_us, max_wait_us)
        self.calls += 1
        if start_us < 0 or not commit:
            for i in range(len(claims)):
                all_of.peek_claim(claims[i], now_us)
            return start_us
        for i in range(len(claims)):
            claim = claims[i]
            if claim.cost > 0:
                cell = cython.cast(CellPointer, claim.cell)
                cell.a = claim.new_a
                cell.b = claim.new_b
                cell.c = claim.new_c
                claim.others = None
                claim.undoable = True
        self.revision += 1
        if self.calls & 63 == 0:
            self.sweep_some(16, now_us)
        return start_us

    @cython.cfunc
    def load_cells(self, claims: list) -> cython.bint:
        """Loads the states of these claims and pointers to their cells; False if a claim has no cell in its limit's units."""
        i: cython.Py_ssize_t
        claim: Claim
        for i in range(len(claims)):
            claim = claims[i]
            if not isinstance(claim.named.handle, LimitHandle):
                return False
            handle: LimitHandle = claim.named.handle
            if handle.store is not self or handle.cells.logs:
                return False
            cell = handle.cells.find(claim.key)
            if not cell or cell.unit != handle.unit:
                return False
            claim.a = cell.a
            claim.b = cell.b
            claim.c = cell.c
            claim.cell = cython.cast(cython.p_void, cell)
            claim.reset_id = self.unmarked_reset
        return True

    def sweep(self, budget: int = 1_000_000) -> None:
        """Drops idle keys now, instead of a few with each call."""
        with self._lock:
            now_us = self.now()
            for table in self._tables.values():
                table.tidy(budget, now_us)

    def __len__(self) -> int:
        return self.capacity.live

    def close(self) -> None:
        with self._lock:
            for table in self._tables.values():
                table.clear()


@cython.cfunc
@cython.exceptval(check=False)
def may_wait(limit: Limit, max_wait_us: I64) -> cython.bint:
    return max_wait_us > 0 and limit.reserves
