"""Table: the cells of MemoryStore by key, in an OrderedDict (pure-Python build).

The compiled build uses `cell_table.pyx` instead: the same interface over C memory. The dict is ordered so that `sweep` can
check a few keys per call, in rotation, without copying all keys.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Any

from ..algorithms.limit import Limit, StateData
from ..algorithms.sliding_log import new_log, prune, read_log
from ..errors import ConfigurationError

SHARED = 1024
#: A compiled cell stores its unit number in two bytes.
MOST_UNITS = 65_535
TOO_MANY_UNITS = f"more than {MOST_UNITS} different limits under one name; round them to fewer, or give them names of their own"


class Capacity:
    """The number of keys a store may hold and holds, over all its tables, and its decisions on overflow cells."""

    __slots__ = ("live", "max_keys", "overflow")

    def __init__(self, max_keys: int) -> None:
        self.max_keys = max_keys
        self.live = 0
        self.overflow = 0


class Cell:
    """One key's state: three integers, and the number of the limit whose units they are in."""

    __slots__ = ("a", "b", "c", "shared", "unit")

    def __init__(self, shared: bool = False) -> None:
        self.a = self.b = self.unit = 0
        self.shared = shared
        self.c: Any = 0


class Table:
    """The cells of one limit name."""

    def __init__(self, capacity: Capacity, birth_us: int, logs: bool) -> None:
        self.capacity = capacity
        self.birth_us = birth_us
        self.logs = logs
        self.units: list[Limit] = []
        self.numbers: dict[Limit, int] = {}
        self.since: list[int] = []
        self.overflow: list[Cell] | None = None
        self._cells: OrderedDict[str, Cell] = OrderedDict()
        #: The key's cell, or None. The dict's own method: a wrapper would take 5 % of a hit.
        self.find: Any = self._cells.get
        self._secret = os.urandom(8)

    def __len__(self) -> int:
        return len(self._cells)

    def __del__(self) -> None:
        self.capacity.live -= len(self._cells)

    def insert(self, key: str, now_us: int) -> Cell:
        self.sweep(2, now_us)
        cell = self._cells[key] = Cell()
        self.capacity.live += 1
        return cell

    def overflow_cell(self, key: str) -> Cell:
        """The overflow cell of a key that is new to a full store, chosen by a keyed hash."""
        if self.overflow is None:
            self.overflow = [Cell(shared=True) for _ in range(SHARED)]
        return self.overflow[hash((self._secret, key)) % SHARED]

    def is_shared(self, cell: Cell) -> bool:
        return cell.shared

    def discard(self, key: str) -> None:
        if self._cells.pop(key, None) is not None:
            self.capacity.live -= 1

    def is_new(self, cell: Cell, now_us: int) -> bool:
        """Whether the cell's state equals that of an unseen key."""
        limit = self.units[cell.unit - 1]
        now = now_us // limit.tick
        if limit.ramp > 0 and now < self.birth_us // limit.tick + limit.ramp:
            return False
        return bool(limit.rule(limit, cell.a, cell.b, cell.c, now, now, 0, 0)[6] <= now)

    def sweep(self, budget: int, now_us: int) -> None:
        """Checks `budget` cells, in rotation, and removes those whose state equals that of an unseen key."""
        for _ in range(min(budget, len(self._cells))):
            key = next(iter(self._cells))
            cell = self._cells[key]
            if cell.unit and self.is_new(cell, now_us):
                self.discard(key)
            else:
                self._cells.move_to_end(key)

    def tidy(self, budget: int, now_us: int) -> None:
        self.sweep(budget, now_us)

    def make_room(self, cell: Cell, before: int) -> bool:
        """Makes room for one more entry in the cell's log: prunes it, doubles a full one, shrinks a nearly empty one."""
        if not cell.c:
            cell.c = new_log((), 4)
            return True
        n, room = prune(cell.c, before), cell.c[2]
        if n == room or (room > 16 and n * 8 <= room):
            cell.c = new_log(read_log(cell.c), room * 2 if n == room else room // 4)
        return True

    def state_of(self, cell: Cell) -> StateData:
        """The state as plain data: three integers, or the entries of a log."""
        if self.logs:
            return (tuple(read_log(cell.c)) if cell.c else (), 0, 0)
        return (cell.a, cell.b, cell.c)

    def saved(self, key: str) -> tuple[int, StateData | None]:
        """A key's unit and state as plain data; (0, None) without a cell."""
        cell = self.find(key)
        return (0, None) if cell is None else (cell.unit, self.state_of(cell))

    def clear(self) -> None:
        self.capacity.live -= len(self._cells)
        self._cells.clear()

    def items(self) -> list[tuple[str, int, StateData]]:
        return [(key, cell.unit, self.state_of(cell)) for key, cell in list(self._cells.items()) if cell.unit]

    def unit_of(self, limit: Limit, now_us: int) -> int:
        """The number of a limit's units in this table, from 1; registers a new limit."""
        found = self.numbers.get(limit)
        if found is None:
            if len(self.units) >= MOST_UNITS:
                raise ConfigurationError(TOO_MANY_UNITS)
            self.since.append(now_us)
            self.units.append(limit)
            found = self.numbers[limit] = len(self.units)
        return found
