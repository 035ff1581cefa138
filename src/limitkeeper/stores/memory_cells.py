"""Where a key's cell is: the tables of an in-process store, its clock, finding a cell and storing into it.

Memory is bounded without forgiving. A key whose state is what an unseen key would have is forgotten, a few keys looked
at per call. When the store is full of active keys, a stranger is decided on one of 1024 shared cells, and goes on being
decided there until that cell is as new: a flood of fresh keys can't wash an exhausted one out.

A cell knows in whose units its state is. When another limit of the same name reads it (a plan, an override, a new rate), it is
converted first.
"""

from __future__ import annotations

from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.algorithms import sliding_log
    from cython.cimports.limitkeeper.algorithms.claim import NamedLimit
    from cython.cimports.limitkeeper.algorithms.limit import Limit, State
    from cython.cimports.limitkeeper.stores.cell_store import LimitHandle
    from cython.cimports.limitkeeper.stores.cell_table import Capacity, Table
    from cython.cimports.limitkeeper.stores.refunds import RefundingStore
else:
    from ..algorithms import sliding_log
    from ..algorithms.claim import NamedLimit
    from ..algorithms.limit import Limit, State
    from .cell_store import LimitHandle
    from .cell_table import Capacity, Table
    from .refunds import RefundingStore

    CellPointer = Any

    def table_of(place: LimitHandle) -> Any:
        """A place's table."""
        return place.table  # type: ignore[attr-defined]


from ..clock import Clock
from ..errors import ConfigurationError


@cython.cclass
class TableHandle(LimitHandle):
    """A place in this process: its table."""

    __slots__ = ("table",)

    def __init__(self, store: MemoryCells, table: Table, named: NamedLimit, now_us: cython.longlong) -> None:
        unit: cython.int = table.unit_of(named.limit, now_us)
        super().__init__(store, named, unit, table.since[unit - 1])
        self.table = table


@cython.cclass
class MemoryCells(RefundingStore):
    """Cells in tables of this process, before anything is decided."""

    @cython.annotation_typing(False)
    def __init__(self, max_keys: int = 1_000_000, clock: Clock | None = None) -> None:
        if isinstance(max_keys, bool) or not isinstance(max_keys, int) or max_keys < 1:
            raise ConfigurationError(f"max_keys must be a whole number of keys, at least 1, not {max_keys!r}")
        super().__init__(clock)
        self.room = Capacity(max_keys)
        self.calls = 0
        self.spare = self.other = None
        self._tables: dict[Any, Table] = {}

    @property
    def overflow(self) -> int:
        return int(self.room.shared)

    # Places ----------------------------------------------------------------------------------------------------

    def place(self, named: NamedLimit) -> LimitHandle:
        with self._lock:
            now_us = self.now()
            table = self._tables.get(named.identity)
            if table is None:
                table = Table(self.room, now_us, named.limit.logs)
                self._tables[named.identity] = table
            return TableHandle(self, table, named, now_us)

    def limit_of(self, place: LimitHandle, unit: int) -> Limit:
        return table_of(place).units[unit - 1]  # type: ignore[no-any-return]

    def discard(self, place: LimitHandle, key: str) -> None:
        table_of(place).discard(key)

    def pairs(self, place: LimitHandle) -> list[tuple[str, int, Any]]:
        with self._lock:
            return table_of(place).items()  # type: ignore[no-any-return]

    def saved(self, place: LimitHandle, key: str, now_us: int) -> Any:
        unit, state = table_of(place).saved(key)
        return state if state is None else self.in_units(place, unit, state, now_us)

    # Cells -----------------------------------------------------------------------------------------------------

    @cython.cfunc
    def is_full(self, place: LimitHandle, needed: cython.longlong, now_us: cython.longlong) -> cython.bint:
        if self.room.live + needed <= self.room.max_keys:
            return False
        table_of(place).sweep(16, now_us)
        return self.room.live + needed > self.room.max_keys

    @cython.cfunc
    def known(self, place: LimitHandle, key: str, now_us: cython.longlong, full: cython.bint) -> cython.bint:
        return True if self.find(place, key, now_us, full) else False  # noqa: SIM210 - a pointer when compiled

    @cython.cfunc
    def find(self, place: LimitHandle, key: str, now_us: cython.longlong, full: cython.bint) -> CellPointer:
        """The key's cell, or a shared one for a stranger to a full store, or none."""
        table: Table = table_of(place)
        cell = table.find(key)
        if cell:
            return cell
        if table.overflow:
            cell = table.stranger(key)
            if cell.unit and not table.is_new(cell, now_us):
                return cell
        if not full:
            return table.find(key)
        cell = table.stranger(key)
        if not cell:
            raise MemoryError
        if cell.unit == 0 or table.is_new(cell, now_us):
            first: State = place.limit.unseen(table.birth_us)
            if not table.logs:
                cell.a = first[0]
                cell.b = first[1]
                cell.c = first[2]
            cell.unit = place.unit
        return cell

    @cython.cfunc
    def read(self, place: LimitHandle, key: str, now_us: cython.longlong, full: cython.bint) -> State:
        table: Table = table_of(place)
        while True:
            cell = self.find(place, key, now_us, full)
            if not cell:
                return place.limit.unseen(table.birth_us)
            if table.overflow and table.is_shared(cell):
                self.room.shared += 1
            if cell.unit == place.unit or table.logs:
                return (cell.a, cell.b, cell.c)
            # Written under another rate of this name. Converting runs Python, so look again before believing it.
            unit: cython.int = cell.unit
            a: cython.longlong = cell.a
            b: cython.longlong = cell.b
            c: cython.longlong = cell.c
            moment = now_us if now_us < place.since_us else place.since_us
            state = place.limit.convert(table.units[unit - 1], (a, b, c), moment)
            new_a: cython.longlong = state[0]
            new_b: cython.longlong = state[1]
            new_c: cython.longlong = state[2]
            cell = self.find(place, key, now_us, full)
            if not cell:
                continue
            if cell.unit == unit and cell.a == a and cell.b == b and cell.c == c:
                return (new_a, new_b, new_c)

    @cython.cfunc
    def put(
        self,
        place: LimitHandle,
        key: str,
        a: cython.longlong,
        b: cython.longlong,
        c: cython.longlong,
        now_us: cython.longlong,
        full: cython.bint,
    ) -> cython.int:
        table: Table = table_of(place)
        cell = self.find(place, key, now_us, full)
        if not cell:
            cell = table.insert(key, now_us)
            if not cell:
                raise MemoryError
        self.revision += 1
        cell.unit = place.unit
        if not table.logs:
            cell.a = a
            cell.b = b
            cell.c = c
        elif b > 0:
            if not table.make_room(cell, now_us - place.limit.window):
                raise MemoryError
            if cython.compiled:
                sliding_log.add(cython.cast(cython.p_longlong, cell.c), a, b)
            else:
                sliding_log.add(cell.c, a, b)
        return 0
