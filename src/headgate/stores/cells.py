"""Where a key's cell is: the tables of an in-process store, its clock, finding a cell and storing into it.

Memory is bounded without forgiving. A key whose state is what an unseen key would have is forgotten, a few keys looked
at per call. When the store is full of active keys, a stranger is decided on one of 1024 shared cells, and goes on being
decided there until that cell is as new: a flood of fresh keys can't wash an exhausted one out.

A cell knows in whose units its state is. When another limit of the same name reads it (a plan, an override, a new rate), it is
converted first. Time never runs backwards in here: when a clock does, the store carries on from the last moment it saw.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from headgate import _plain as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.headgate.algorithms import sliding_log
    from cython.cimports.headgate.algorithms.claim import NamedLimit
    from cython.cimports.headgate.algorithms.limit import State
    from cython.cimports.headgate.clock import SystemClock
    from cython.cimports.headgate.monotonic import monotonic_us
    from cython.cimports.headgate.stores.contract import Store
    from cython.cimports.headgate.stores.table import Room, Table
else:
    from ..algorithms import sliding_log
    from ..algorithms.claim import NamedLimit
    from ..algorithms.limit import State
    from ..clock import SystemClock, monotonic_us
    from .contract import Store
    from .table import Room, Table

    CellPointer = Any

from ..clock import SYSTEM, Clock
from ..errors import ConfigurationError

_stores: Any = weakref.WeakSet()


@cython.cclass
class Place:
    """Where one limit lives in this store: its table, and the number of its units there."""

    __slots__ = ("limit", "name", "since_us", "store", "table", "unit")

    def __init__(self, store: Cells, table: Table, named: NamedLimit, now_us: cython.longlong) -> None:
        self.store = store
        self.table = table
        self.limit = named.limit
        self.unit = table.unit_of(named.limit, now_us)
        self.since_us = table.since[self.unit - 1]  # when this rate came to hold under its name
        self.name = named.name


@cython.cclass
class Cells(Store):
    """What an in-process store is made of, before it decides anything."""

    local = True

    @cython.annotation_typing(False)
    def __init__(self, max_keys: int = 1_000_000, clock: Clock | None = None) -> None:
        if isinstance(max_keys, bool) or not isinstance(max_keys, int) or max_keys < 1:
            raise ConfigurationError(f"max_keys must be a whole number of keys, at least 1, not {max_keys!r}")
        self._clock = SYSTEM if clock is None else clock
        self.system = self._clock if isinstance(self._clock, SystemClock) else None
        self.room = Room(max_keys)
        self.last_us = 0
        self.shift_us = 0
        self.calls = 0
        self.stamp = 0
        self.spare = self.other = None
        self._tables: dict[Any, Table] = {}
        self._lock = threading.RLock()
        _stores.add(self)

    # Time ------------------------------------------------------------------------------------------------------

    @property
    def clock(self) -> Any:
        return self._clock

    @cython.cfunc
    def now(self) -> cython.longlong:
        """The clock, read once per decision; a clock that went back is carried on from where it was."""
        if self.system is not None:
            return monotonic_us() + self.system.offset_us
        now_us: cython.longlong = self._clock.now_us() + self.shift_us
        if now_us < self.last_us:
            self.shift_us += self.last_us - now_us
            now_us = self.last_us
        self.last_us = now_us
        return now_us

    def now_us(self) -> int:
        """This store's time."""
        return self.now()

    @property
    def strangers(self) -> int:
        return int(self.room.shared)

    # Places ----------------------------------------------------------------------------------------------------

    @cython.cfunc
    def place_of(self, named: NamedLimit) -> Place:
        place = named.place
        if isinstance(place, Place) and place.store is self:
            return place
        place = self.place(named)
        named.place = place
        return place

    def place(self, named: NamedLimit) -> Place:
        """The place of a limit in this store, made when it is first named."""
        with self._lock:
            now_us = self.now()
            table = self._tables.get(named.identity)
            if table is None:
                table = Table(self.room, now_us, named.limit.logs)
                self._tables[named.identity] = table
            return Place(self, table, named, now_us)

    def know(self, limit: NamedLimit) -> None:
        self.place_of(limit)

    # Cells -----------------------------------------------------------------------------------------------------

    @cython.cfunc
    def is_full(self, table: Table, needed: cython.longlong, now_us: cython.longlong) -> cython.bint:
        """Whether there is no room for so many new keys, not even after looking for idle ones."""
        if self.room.live + needed <= self.room.max_keys:
            return False
        table.sweep(16, now_us)
        return self.room.live + needed > self.room.max_keys

    @cython.cfunc
    def find(self, place: Place, key: str, now_us: cython.longlong, full: cython.bint) -> CellPointer:
        """The key's cell, or a shared one for a stranger to a full store, or none."""
        table: Table = place.table
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
    def read(self, place: Place, key: str, now_us: cython.longlong, full: cython.bint) -> State:
        """The key's state in this limit's units; what an unseen key has when there is none. Nothing is written."""
        table: Table = place.table
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
        place: Place,
        key: str,
        a: cython.longlong,
        b: cython.longlong,
        c: cython.longlong,
        now_us: cython.longlong,
        full: cython.bint,
    ) -> cython.int:
        """Stores what a rule answered: three integers, or one more entry of a log."""
        table: Table = place.table
        cell = self.find(place, key, now_us, full)
        if not cell:
            cell = table.insert(key, now_us)
            if not cell:
                raise MemoryError
        self.stamp += 1
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

    def _renew_lock(self) -> None:
        self._lock = threading.RLock()


def _after_fork() -> None:
    """A child starts with locks that nobody holds."""
    for store in list(_stores):
        store._renew_lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
