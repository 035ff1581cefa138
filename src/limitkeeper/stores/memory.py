# cython: boundscheck=False, wraparound=False
"""MemoryStore: keeps state in this process, exact and bounded, without a background thread.

Atomic by construction. Compiled, a decision reads and writes the cell without allocating, calling Python or dropping a reference
in between, so no other thread can interfere under the GIL. The pure-Python build uses a re-entrant lock; `revision` detects a
decision that a finaliser made meanwhile, and the decision is repeated.

Bounded memory that does not forgive. Each call checks a few keys and drops those whose state equals that of an unseen key. When
the store is full of active keys, an unknown key is decided on one of 1024 shared overflow cells until that cell is unused again:
a flood of new keys can't evict an exhausted one.

A cell has the number of the limit whose units its state is in. When another limit of the same name reads it (a plan, an override,
a new rate), the state is converted first.
"""

from __future__ import annotations

import gc
from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.algorithms import all_of, sliding_log
    from cython.cimports.limitkeeper.algorithms.claim import Claim, NamedLimit
    from cython.cimports.limitkeeper.algorithms.constants import PLAIN, REFUSED
    from cython.cimports.limitkeeper.algorithms.limit import Answer, Limit, State
    from cython.cimports.limitkeeper.decision import Decision, Decisions
    from cython.cimports.limitkeeper.stores.cell_store import CellStore, LimitHandle, blank, blank_joined
    from cython.cimports.limitkeeper.stores.cell_table import Capacity, Table
else:
    from ..algorithms import all_of, sliding_log
    from ..algorithms.claim import Claim, NamedLimit
    from ..algorithms.constants import PLAIN, REFUSED
    from ..algorithms.limit import Answer, Limit, State
    from ..decision import Decision, Decisions
    from .cell_store import CellStore, LimitHandle, blank, blank_joined
    from .cell_table import Capacity, Table

    CellPointer = Any

from ..algorithms.limit import StateData
from ..clock import Clock
from ..errors import ConfigurationError


@cython.cclass
class MemoryStore(CellStore):
    """The default store: state in this process, for at most `max_keys` keys. `clock` is for tests."""

    @cython.annotation_typing(False)
    def __init__(self, max_keys: int = 1_000_000, clock: Clock | None = None) -> None:
        if isinstance(max_keys, bool) or not isinstance(max_keys, int) or max_keys < 1:
            raise ConfigurationError(f"max_keys must be a whole number, at least 1, got {max_keys!r}")
        super().__init__(clock)
        self.capacity = Capacity(max_keys)
        self.calls = 0
        self._own = type(self).decide is CellStore.decide
        self._tables: dict[tuple[str, str, str], Table] = {}

    @property
    def overflow(self) -> int:
        return int(self.capacity.overflow)

    # Limits ----------------------------------------------------------------------------------------------------

    def handle(self, named: NamedLimit) -> LimitHandle:
        with self._lock:
            now_us = self.now()
            table = self._tables.get(named.identity)
            if table is None:
                table = Table(self.capacity, now_us, named.limit.logs)
                self._tables[named.identity] = table
            unit = table.unit_of(named.limit, now_us)
            return LimitHandle(self, named, unit, table.since[unit - 1], table)

    def limit_of(self, handle: LimitHandle, unit: int) -> Limit:
        return handle.cells.units[unit - 1]

    def discard(self, handle: LimitHandle, key: str) -> None:
        handle.cells.discard(key)

    def pairs(self, handle: LimitHandle) -> list[tuple[str, int, StateData]]:
        with self._lock:
            return handle.cells.items()

    def saved(self, handle: LimitHandle, key: str, now_us: int) -> StateData | None:
        unit, state = handle.cells.saved(key)
        return state if state is None else self.in_units(handle, unit, state, now_us)

    # Cells -----------------------------------------------------------------------------------------------------

    @cython.cfunc
    def is_full(self, handle: LimitHandle, needed: cython.longlong, now_us: cython.longlong) -> cython.bint:
        if self.capacity.live + needed <= self.capacity.max_keys:
            return False
        handle.cells.sweep(16, now_us)
        if cython.compiled:  # a log that an interrupted decision has read may be freed
            self.revision += 1
        return self.capacity.live + needed > self.capacity.max_keys

    @cython.cfunc
    def known(self, handle: LimitHandle, key: str, now_us: cython.longlong, full: cython.bint) -> cython.bint:
        return True if self.find(handle, key, now_us, full) else False  # noqa: SIM210 - a pointer when compiled

    @cython.cfunc
    def find(self, handle: LimitHandle, key: str, now_us: cython.longlong, full: cython.bint) -> CellPointer:
        """The key's cell; for an unknown key in a full store an overflow cell; otherwise None."""
        table: Table = handle.cells
        cell = table.find(key)
        if cell:
            return cell
        if table.overflow:
            cell = table.overflow_cell(key)
            if cell.unit and not table.is_new(cell, now_us):
                return cell
        if not full:
            return table.find(key)
        cell = table.overflow_cell(key)
        if not cell:
            raise MemoryError
        if cell.unit == 0 or table.is_new(cell, now_us):
            first: State = handle.limit.unseen(table.birth_us)
            if not table.logs:
                cell.a = first[0]
                cell.b = first[1]
                cell.c = first[2]
            cell.unit = handle.unit
        return cell

    @cython.cfunc
    def read(self, handle: LimitHandle, key: str, now_us: cython.longlong, full: cython.bint) -> State:
        table: Table = handle.cells
        while True:
            cell = self.find(handle, key, now_us, full)
            if not cell:
                return handle.limit.unseen(table.birth_us)
            if table.overflow and table.is_shared(cell):
                self.capacity.overflow += 1
            if cell.unit == handle.unit or table.logs:
                return (cell.a, cell.b, cell.c)
            # Written under another rate of this name. Conversion runs Python code, so check that the cell is unchanged.
            unit: cython.int = cell.unit
            a: cython.longlong = cell.a
            b: cython.longlong = cell.b
            c: cython.longlong = cell.c
            moment = now_us if now_us < handle.since_us else handle.since_us
            state = handle.limit.convert(table.units[unit - 1], (a, b, c), moment)
            new_a: cython.longlong = state[0]
            new_b: cython.longlong = state[1]
            new_c: cython.longlong = state[2]
            cell = self.find(handle, key, now_us, full)
            if not cell:
                continue
            if cell.unit == unit and cell.a == a and cell.b == b and cell.c == c:
                return (new_a, new_b, new_c)

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
        table: Table = handle.cells
        cell = self.find(handle, key, now_us, full)
        if not cell:
            cell = table.insert(key, now_us)
            if not cell:
                raise MemoryError
        self.revision += 1
        cell.unit = handle.unit
        if not table.logs:
            cell.a = a
            cell.b = b
            cell.c = c
        elif b > 0:
            if not table.make_room(cell, now_us - handle.limit.window):
                raise MemoryError
            if cython.compiled:
                sliding_log.add(cython.cast(cython.p_longlong, cell.c), a, b)
            else:
                sliding_log.add(cell.c, a, b)
        return 0

    # Deciding --------------------------------------------------------------------------------------------------

    @cython.cfunc
    def decide_quickly(
        self,
        decision: Decision,
        handle: LimitHandle,
        key: str,
        cost: cython.longlong,
        max_wait_us: cython.longlong,
        commit: cython.bint,
        now_us: cython.longlong,
    ) -> Decision:
        """Decides one limit for one key: the hot path. Sets the fields of `decision`: nothing is allocated after the lookup."""
        limit: Limit = handle.limit
        table: Table = handle.cells
        if PLAIN and table.logs and gc.isenabled():  # storing into a log allocates: no finaliser may run and change it as well
            gc.disable()
            try:
                return self.decide_quickly(decision, handle, key, cost, max_wait_us, commit, now_us)
            finally:
                gc.enable()
        tick: cython.longlong = limit.tick
        now: cython.longlong = now_us if limit.fine else now_us // tick
        max_wait: cython.longlong = 0
        if max_wait_us > 0 and limit.reserves:
            max_wait = (now_us + max_wait_us) // tick - now
        full: cython.bint = False
        answer: Answer
        state: State
        a: cython.longlong
        b: cython.longlong
        c: cython.longlong
        start: cython.longlong
        retry: cython.longlong
        remaining: cython.longlong
        reset: cython.longlong
        while True:
            if PLAIN:
                stamp = self.revision
            cell = table.find(key)
            known: cython.bint = False
            if cell:
                known = cell.unit == handle.unit
            else:
                full = self.is_full(handle, 1, now_us)
            if known:
                answer = limit.rule(limit, cell.a, cell.b, cell.c, now, now, cost, max_wait)
            else:
                state = self.read(handle, key, now_us, full)
                answer = limit.rule(limit, state[0], state[1], state[2], now, now, cost, max_wait)
            if not PLAIN or stamp == self.revision:
                break
        a, b, c, start, retry, remaining, reset = answer
        if start >= 0 and commit and cost > 0:
            if known and not table.logs:
                cell.a = a
                cell.b = b
                cell.c = c
                self.revision += 1
            else:
                self.put(handle, key, a, b, c, now_us, full)
        elif not commit or cost == 0:  # the current values, without a charge
            state = self.read(handle, key, now_us, full)
            answer = limit.rule(limit, state[0], state[1], state[2], now, now, 0, 0)
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
                state = self.read(handle, key, now_us, full)
                retry = all_of.retry_us(limit, state[0], state[1], state[2], now_us, cost, max_wait_us)
                decision.retry_us = retry - now_us
        self.calls += 1
        if self.calls & 63 == 0:
            table.sweep(16, now_us)
            self.revision += 1
        if PLAIN:
            decision.__class__ = Decision
        return decision

    @cython.ccall
    def decide_one(
        self, named: NamedLimit, key: str, cost: cython.longlong, max_wait_us: cython.longlong, commit: cython.bint
    ) -> Decision:
        if not self._own:  # a subclass overrides `decide`
            return CellStore.decide_one(self, named, key, cost, max_wait_us, commit)
        handle: LimitHandle = self.handle_of(named)
        if cython.compiled:
            return self.decide_quickly(blank(self, handle), handle, key, cost, max_wait_us, commit, self.now())
        with self._lock:
            return self.decide_quickly(blank(self, handle), handle, key, cost, max_wait_us, commit, self.now())

    @cython.cfunc
    def decide_checked(
        self,
        claims: list,  # type: ignore[type-arg]
        names: tuple,  # type: ignore[type-arg]
        max_wait_us: cython.longlong,
        commit: cython.bint,
        not_before_us: cython.longlong,
    ) -> Decision:
        if not cython.compiled:
            return CellStore.decide_checked(self, claims, names, max_wait_us, commit, not_before_us)
        joined: Decisions | None = blank_joined(self, names)  # compiled: atomic without a lock
        now_us: cython.longlong = self.now()
        start_us: cython.longlong = self.charge(claims, max_wait_us, commit, now_us, not_before_us)
        return all_of.join_claims(claims, now_us, start_us, joined)

    @cython.cfunc
    def charge(
        self,
        claims: list,  # type: ignore[type-arg]
        max_wait_us: cython.longlong,
        commit: cython.bint,
        now_us: cython.longlong,
        not_before_us: cython.longlong,
    ) -> cython.longlong:
        """Several limits. Compiled, when every key has a cell in its limit's own units, each cell is looked up only once: nothing
        moves it before it is written."""
        if not cython.compiled or not self.load_cells(claims):
            return CellStore.charge(self, claims, max_wait_us, commit, now_us, not_before_us)
        i: cython.Py_ssize_t
        claim: Claim
        start_us: cython.longlong = all_of.decide(claims, now_us, not_before_us, max_wait_us)
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
                claim.undoable = True
        self.revision += 1
        if self.calls & 63 == 0:
            for i in range(len(claims)):
                claim = claims[i]
                handle: LimitHandle = self.handle_of(claim.named)
                handle.cells.sweep(16, now_us)
        return start_us

    @cython.cfunc
    def load_cells(self, claims: list) -> cython.bint:  # type: ignore[type-arg]
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
def may_wait(limit: Limit, max_wait_us: cython.longlong) -> cython.bint:
    return max_wait_us > 0 and limit.reserves
