"""MemoryStore: the state in this process, exact, bounded, without a thread of its own.

Atomic by construction. Compiled, a decision runs from reading the cell to writing it without allocating, calling Python
or dropping a reference, so nothing can come in between under the interpreter's lock. Plain, a re-entrant lock keeps
other threads out, and a stamp tells when a finaliser that ran meanwhile decided something itself; then it is done again.
"""

from __future__ import annotations

from collections.abc import Sequence

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.algorithms import all_of
    from cython.cimports.limitkeeper.algorithms.claim import Claim, NamedLimit
    from cython.cimports.limitkeeper.algorithms.constants import PLAIN, REFUSED
    from cython.cimports.limitkeeper.algorithms.limit import Answer, Limit, State
    from cython.cimports.limitkeeper.decision import Decision
    from cython.cimports.limitkeeper.stores.cell_store import blank
    from cython.cimports.limitkeeper.stores.cell_table import Table
    from cython.cimports.limitkeeper.stores.memory_cells import MemoryCells, TableHandle
else:
    from ..algorithms import all_of
    from ..algorithms.claim import Claim, NamedLimit
    from ..algorithms.constants import PLAIN, REFUSED
    from ..algorithms.limit import Answer, Limit, State
    from ..decision import Decision
    from .cell_store import blank
    from .cell_table import Table
    from .memory_cells import MemoryCells, TableHandle

from ..algorithms.all_of import together
from .cell_store import checked, patience_us


@cython.cclass
class MemoryStore(MemoryCells):
    """The default store. `max_keys` bounds it; `clock` is for tests."""

    @cython.cfunc
    def decide_quickly(
        self,
        decision: Decision,
        place: TableHandle,
        key: str,
        cost: cython.longlong,
        max_wait_us: cython.longlong,
        commit: cython.bint,
        now_us: cython.longlong,
    ) -> Decision:
        """One limit, one key: the hot path. The answer goes into `decision`, so nothing is allocated once the cell is found."""
        limit: Limit = place.limit
        table: Table = place.table
        tick: cython.longlong = limit.tick
        now: cython.longlong = now_us if limit.fine else now_us // tick
        patience: cython.longlong = 0
        if max_wait_us > 0 and limit.reserves:
            patience = (now_us + max_wait_us) // tick - now
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
                known = cell.unit == place.unit
            else:
                full = self.is_full(place, 1, now_us)
            if known:
                answer = limit.rule(limit, cell.a, cell.b, cell.c, now, now, cost, patience)
            else:
                state = self.read(place, key, now_us, full)
                answer = limit.rule(limit, state[0], state[1], state[2], now, now, cost, patience)
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
                self.put(place, key, a, b, c, now_us, full)
        elif not commit or cost == 0:
            return self.glance(place, key, cost, start, retry, now_us)
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
            if not limit.fine and patience_given(limit, max_wait_us) and start == REFUSED:
                state = self.read(place, key, now_us, full)
                retry = all_of.retry_us(limit, state[0], state[1], state[2], now_us, cost, max_wait_us)
                decision.retry_us = retry - now_us
        self.calls += 1
        if self.calls & 63 == 0:
            table.sweep(16, now_us)
        if PLAIN:
            decision.__class__ = Decision
        return decision

    @cython.cfunc
    def glance(
        self,
        place: TableHandle,
        key: str,
        cost: cython.longlong,
        start: cython.longlong,
        retry: cython.longlong,
        now_us: cython.longlong,
    ) -> Decision:
        """The answer to a peek: the verdict on a hit, beside what is there now."""
        limit: Limit = place.limit
        now: cython.longlong = now_us // limit.tick
        state: State = self.read(place, key, now_us, self.is_full(place, 1, now_us))
        answer: Answer = limit.rule(limit, state[0], state[1], state[2], now, now, 0, 0)
        allowed = start >= 0 or cost == 0
        start_us: cython.longlong = start * limit.tick if start > now and cost > 0 else now_us
        return Decision(
            allowed,
            limit.capacity,
            answer[5],
            0 if allowed else (retry * limit.tick - now_us if start == -1 else -1),
            answer[6] * limit.tick - now_us if answer[6] > now else 0,
            start_us - now_us,
            start_us,
            place.name,
        )

    @cython.ccall
    def decide_one(
        self, named: NamedLimit, key: str, cost: cython.longlong, max_wait_us: cython.longlong, commit: cython.bint
    ) -> Decision:
        if type(self) is not MemoryStore:  # a subclass that decides otherwise is asked in its own way
            return MemoryCells.decide_one(self, named, key, cost, max_wait_us, commit)
        place: TableHandle = self.place_of(named)  # type: ignore[assignment]
        if cython.compiled:
            return self.decide_quickly(blank(self, place), place, key, cost, max_wait_us, commit, self.now())
        with self._lock:
            return self.decide_quickly(blank(self, place), place, key, cost, max_wait_us, commit, self.now())

    def decide(
        self,
        claims: Sequence[Claim],
        max_wait_us: int | None = 0,
        *,
        commit: bool = True,
        remember: bool = False,
        not_before_us: int = 0,
    ) -> Decision:
        if not cython.compiled:
            return super().decide(claims, max_wait_us, commit=commit, remember=remember, not_before_us=not_before_us)
        asked = checked(claims)  # compiled, nothing comes in between: no lock
        now_us: cython.longlong = self.now()
        start_us: cython.longlong = self.charge(asked, patience_us(max_wait_us), commit, now_us, not_before_us)
        return together(asked, now_us, start_us)

    def sweep(self, budget: int = 1_000_000) -> None:
        """Forgets idle keys now, rather than a few at a time as calls come in."""
        with self._lock:
            now_us = self.now()
            for table in self._tables.values():
                table.tidy(budget, now_us)

    def __len__(self) -> int:
        return self.room.live

    def close(self) -> None:
        with self._lock:
            for table in self._tables.values():
                table.clear()


@cython.cfunc
@cython.exceptval(check=False)
def patience_given(limit: Limit, max_wait_us: cython.longlong) -> cython.bint:
    return max_wait_us > 0 and limit.reserves
