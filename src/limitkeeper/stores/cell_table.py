"""Cells found by key: what an in-process store keeps. The plain twin: a dict, behind the same few functions.

Where the package is compiled, `table.pyx` takes this module's place: the same names over C memory. The dict is ordered,
so that looking at every key in its turn (`sweep`) costs a few steps a time and never a copy of all keys.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Any

from ..algorithms.limit import Limit
from ..algorithms.sliding_log import new_log, prune, read_log
from ..errors import ConfigurationError

SHARED = 1024
#: A cell says in two bytes whose units it is in.
MOST_UNITS = 65_535
TOO_MANY_UNITS = f"more than {MOST_UNITS} different limits under one name; round them to fewer, or give them names of their own"


class Capacity:
    """How many keys a store may hold, over all its tables."""

    __slots__ = ("live", "max_keys", "shared")

    def __init__(self, max_keys: int) -> None:
        self.max_keys = max_keys
        self.live = 0
        self.shared = 0


class Cell:
    """One key's state: three integers, and which limit's units they are in."""

    __slots__ = ("a", "b", "c", "shared", "unit")

    def __init__(self, shared: bool = False) -> None:
        self.a = self.b = self.unit = 0
        self.shared = shared
        self.c: Any = 0


class Table:
    def __init__(self, room: Capacity, birth_us: int, logs: bool) -> None:
        self.room = room
        self.birth_us = birth_us
        self.logs = logs
        self.units: list[Limit] = []
        self.numbers: dict[Limit, int] = {}
        self.since: list[int] = []
        self.overflow: list[Cell] | None = None
        self._cells: OrderedDict[str, Cell] = OrderedDict()
        #: The key's cell, or None. The dict's own method: a call around it would be a twentieth of a hit.
        self.find: Any = self._cells.get
        self._secret = os.urandom(8)

    def __len__(self) -> int:
        return len(self._cells)

    def __del__(self) -> None:
        self.room.live -= len(self._cells)

    def insert(self, key: str, now_us: int) -> Cell:
        self.sweep(2, now_us)
        cell = self._cells[key] = Cell()
        self.room.live += 1
        return cell

    def stranger(self, key: str) -> Cell:
        """One of the shared cells for keys that came when the store was full, chosen by a keyed hash."""
        if self.overflow is None:
            self.overflow = [Cell(shared=True) for _ in range(SHARED)]
        return self.overflow[hash((self._secret, key)) % SHARED]

    def is_shared(self, cell: Cell) -> bool:
        return cell.shared

    def discard(self, key: str) -> None:
        if self._cells.pop(key, None) is not None:
            self.room.live -= 1

    def is_new(self, cell: Cell, now_us: int) -> bool:
        """Whether the cell holds just what an unseen key would have."""
        limit = self.units[cell.unit - 1]
        now = now_us // limit.tick
        if limit.ramp > 0 and now < self.birth_us // limit.tick + limit.ramp:
            return False
        return bool(limit.rule(limit, cell.a, cell.b, cell.c, now, now, 0, 0)[6] <= now)

    def sweep(self, budget: int, now_us: int) -> None:
        """Looks at a few cells, each in its turn, and forgets those that are as new."""
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
        """Sees to it that the cell's log can take one more entry: prunes, then doubles; shrinks what is mostly empty."""
        if not cell.c:
            cell.c = new_log((), 4)
            return True
        n, room = prune(cell.c, before), cell.c[2]
        if n == room or (room > 16 and n * 8 <= room):
            cell.c = new_log(read_log(cell.c), room * 2 if n == room else room // 4)
        return True

    def state_of(self, cell: Cell) -> Any:
        """The state as plain data: three integers, or the entries of a log."""
        if self.logs:
            return (tuple(read_log(cell.c)) if cell.c else (), 0, 0)
        return (cell.a, cell.b, cell.c)

    def saved(self, key: str) -> Any:
        """A key's unit and state as plain data; 0 and None when there is none."""
        cell = self.find(key)
        return (0, None) if cell is None else (cell.unit, self.state_of(cell))

    def clear(self) -> None:
        self.room.live -= len(self._cells)
        self._cells.clear()

    def items(self) -> list[tuple[str, int, Any]]:
        return [(key, cell.unit, self.state_of(cell)) for key, cell in list(self._cells.items()) if cell.unit]

    def unit_of(self, limit: Limit, now_us: int) -> int:
        """The number under which this table knows a limit's units; 0 is none."""
        found = self.numbers.get(limit)
        if found is None:
            if len(self.units) >= MOST_UNITS:
                raise ConfigurationError(TOO_MANY_UNITS)
            self.since.append(now_us)
            self.units.append(limit)
            found = self.numbers[limit] = len(self.units)
        return found
