"""Table: the cells of MemoryStore by key, in an OrderedDict (pure-Python build).

The compiled build uses `cell_table.pyx` instead: the same interface over C memory. The dict is ordered so that `sweep` can
check a few keys per call, in rotation, without copying all keys.
"""

from __future__ import annotations

import gc
import hashlib
import os
from collections import OrderedDict
from typing import Any

from ..algorithms.limit import Limit, StateData
from ..algorithms.sliding_log import new_log, prune, read_log
from ..errors import ConfigurationError
from ..garbage_collection import uncollected

#: Cells checked for each one inserted, and for a key that is new to a full store.
CHECKS_PER_INSERT, CHECKS_WHEN_FULL = 4, 512
#: The unit of a cell whose key has several rates, or was reset: its `a` is a Rates.
SEVERAL = 65_535
#: Rates of one key.
MOST_RATES = 4
#: A compiled cell stores its unit number in two bytes, of which one value stands for several rates.
MOST_UNITS = 65_534
TOO_MANY_UNITS = f"more than {MOST_UNITS} different limits under one name; round them to fewer, or give them names of their own"


NEVER_US = 2**62


class Capacity:
    """The number of keys a store may hold and holds, over all its tables, and its decisions on overflow cells.

    `ungranted` overflow cells are left for tables. The era is part of the secret by which keys are mapped to overflow cells; it
    ends at `era_end_us` and lasts for the longest window of the store's limits. `checked` cells in rotation are not as new before
    `soonest_us`: when these are all, a full store need not be swept before that.
    """

    __slots__ = ("checked", "era", "era_end_us", "live", "max_keys", "overflow", "soonest_us", "ungranted", "window_us")

    def __init__(self, max_keys: int) -> None:
        self.max_keys = max_keys
        self.ungranted = max_keys // 2 + 2048
        self.live = self.overflow = self.era = self.era_end_us = self.window_us = 0
        self.unsettle()

    def unsettle(self) -> None:
        """Called when a cell may be as new sooner than it was: the rotation begins again."""
        self.checked, self.soonest_us = 0, NEVER_US

    def grant(self) -> int:
        """The number of overflow cells of one more table: half of those that are left, at least 64."""
        granted = max(64, self.ungranted // 2)
        self.ungranted = max(0, self.ungranted - granted)
        return granted

    def era_at(self, now_us: int) -> int:
        if now_us >= self.era_end_us:
            self.era += 1
            self.era_end_us = now_us + self.window_us
        return self.era

    def widen(self, window_us: int) -> None:
        """Registers the window of a limit."""
        if window_us > self.window_us:
            self.era_end_us += window_us - self.window_us
            self.window_us = window_us


class Rates:
    """The rates in use on one key, in order of their first use, with their states; and the number of the key's last reset
    (0: none), which counts until `reset_until`."""

    __slots__ = ("a", "b", "c", "n", "reset_id", "reset_until", "unit")

    def __init__(self) -> None:
        self.n = self.reset_id = self.reset_until = 0
        self.unit = [0] * MOST_RATES
        self.a: list[Any] = [0] * MOST_RATES
        self.b: list[Any] = [0] * MOST_RATES
        self.c: list[Any] = [0] * MOST_RATES

    def copy(self) -> Rates:
        found = Rates()
        found.n, found.reset_id, found.reset_until = self.n, self.reset_id, self.reset_until
        found.unit, found.a, found.b, found.c = self.unit[:], self.a[:], self.b[:], self.c[:]
        return found


class Cell:
    """One key's state: three integers, and the number of the rate that they belong to."""

    __slots__ = ("a", "b", "c", "shared", "unit")

    def __init__(self, shared: bool = False) -> None:
        self.b = self.unit = 0
        self.shared = shared
        self.a: Any = 0
        self.c: Any = 0


class Table:
    """The cells of one limit name."""

    def __init__(self, capacity: Capacity, birth_us: int, logs: bool) -> None:
        self.capacity = capacity
        self.birth_us = birth_us
        self.logs = logs
        self.units: list[Limit] = []
        self.numbers: dict[Limit, int] = {}
        self.overflow: dict[int, Cell] = {}
        self.slots = 0
        self._unchecked = 0
        self._cells: OrderedDict[str, Cell] = OrderedDict()
        #: The key's cell, or None. The dict's own method: a wrapper would take 5 % of a hit.
        self.find: Any = self._cells.get
        self._secret = os.urandom(32)

    def __len__(self) -> int:
        return len(self._cells)

    def __del__(self) -> None:
        self.capacity.live -= len(self._cells)

    def insert(self, key: str) -> Cell:
        cell = self._cells[key] = Cell()
        self.capacity.live += 1
        self.capacity.unsettle()
        return cell

    def overflow_cell(self, key: str, now_us: int) -> Cell:
        """The overflow cell of a key that is new to a full store, chosen by a keyed hash."""
        if self.slots == 0:
            self.slots = self.capacity.grant()
        salt = self.capacity.era_at(now_us).to_bytes(16, "little")
        digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8, key=self._secret, salt=salt).digest()
        number = int.from_bytes(digest, "little") % self.slots
        if number not in self.overflow:
            self.overflow[number] = Cell(shared=True)
        return self.overflow[number]

    def is_shared(self, cell: Cell) -> bool:
        return cell.shared

    def discard(self, key: str) -> None:
        if self._cells.pop(key, None) is not None:
            self.capacity.live -= 1

    def set_rates(self, cell: Cell, rates: Rates) -> bool:
        """Stores the rates of a key: a single one in the cell itself, otherwise in an object of their own."""
        if rates.n == 1 and rates.reset_id == 0:
            cell.unit = rates.unit[0]
            cell.a = cell.b = 0
            if not self.logs:
                cell.a, cell.b, cell.c = rates.a[0], rates.b[0], rates.c[0]
        else:
            cell.unit, cell.a, cell.b = SEVERAL, rates.copy(), 0
        return True

    def due_us(self, cell: Cell, now_us: int) -> int:
        """When the cell's state equals that of an unseen key. Of several rates, all must: a rate whose state is dropped while
        another's remains would start again with what that one holds."""
        if cell.unit == 0:
            return now_us + 1
        if cell.unit != SEVERAL:
            return self.state_due_us(cell.unit, cell.a, cell.b, cell.c, now_us)
        rates = cell.a
        due = rates.reset_until
        for i in range(rates.n):
            c = cell.c if self.logs else rates.c[i]
            due = max(due, self.state_due_us(rates.unit[i], rates.a[i], rates.b[i], c, now_us))
        return int(due)

    def state_due_us(self, unit: int, a: Any, b: int, c: Any, now_us: int) -> int:
        limit = self.units[unit - 1]
        now = now_us // limit.tick
        reset = limit.rule(limit, a, b, c, now, now, 0, 0)[6]
        return int(max(reset, self.birth_us // limit.tick + limit.ramp if limit.ramp > 0 else 0) * limit.tick)

    def is_new(self, cell: Cell, now_us: int) -> bool:
        return self.due_us(cell, now_us) <= now_us

    def sweep(self, budget: int, now_us: int) -> int:
        """Checks the next `budget` cells and removes those whose state equals that of an unseen key. At the end of the table,
        what is left of the budget; before, −1."""
        if gc.isenabled():  # a finaliser that decides would remove cells meanwhile
            return uncollected(self.sweep, budget, now_us)  # type: ignore[no-any-return]
        while budget > 0 and self._unchecked > 0 and self._cells:
            budget -= 1
            self._unchecked -= 1
            key = next(iter(self._cells))
            cell = self._cells[key]
            due_us = self.due_us(cell, now_us)
            if due_us <= now_us:
                self.discard(key)
            else:
                self.capacity.checked += 1
                self.capacity.soonest_us = min(due_us, self.capacity.soonest_us)
                self._cells.move_to_end(key)
        if self._unchecked > 0 and self._cells:
            return -1
        self._unchecked = len(self._cells)
        return budget

    def tidy(self, budget: int, now_us: int) -> None:
        self._unchecked = len(self._cells)
        self.capacity.unsettle()
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

    def empty(self, cell: Cell) -> None:
        """Removes the states of an overflow cell that is as new, and the entries of its log: another rate may have a longer
        window."""
        cell.unit = cell.a = cell.b = cell.c = 0

    def copy_cell(self, source: Cell, target: Cell) -> bool:
        """Gives a new cell a copy of another cell's log or states."""
        target.unit, target.b = source.unit, source.b
        target.a = source.a.copy() if source.unit == SEVERAL else source.a
        target.c = list(source.c) if self.logs and source.c else source.c
        return True

    def states_of(self, cell: Cell) -> list[tuple[int, StateData]]:
        """(unit, state as plain data) of each rate: three integers, or the entries of a log."""
        rates = cell.a
        if self.logs:
            units = [cell.unit] if cell.unit != SEVERAL else rates.unit[: rates.n]
            return [(unit, (tuple(read_log(cell.c)) if cell.c else (), 0, 0)) for unit in units]
        if cell.unit == SEVERAL:
            return [(rates.unit[i], (rates.a[i], rates.b[i], rates.c[i])) for i in range(rates.n)]
        return [(cell.unit, (cell.a, cell.b, cell.c))] if cell.unit else []

    def states(self, key: str) -> list[tuple[int, StateData]]:
        """(unit, state as plain data) of each rate of a key."""
        cell = self.find(key)
        return [] if cell is None else self.states_of(cell)

    def clear(self) -> None:
        """Removes every key, and the states of overflow cells."""
        self.capacity.live -= len(self._cells)
        self._cells.clear()
        self.overflow.clear()

    def items(self) -> list[tuple[str, list[tuple[int, StateData]]]]:
        """(key, [(unit, state), …]) of every key."""
        if gc.isenabled():  # as in `sweep`
            return uncollected(self.items)  # type: ignore[no-any-return]
        return [(key, self.states_of(cell)) for key, cell in list(self._cells.items())]

    def unit_of(self, limit: Limit) -> int:
        """The number of a limit's units in this table, from 1; registers a new limit."""
        found = self.numbers.get(limit)
        if found is None:
            if len(self.units) >= MOST_UNITS:
                raise ConfigurationError(TOO_MANY_UNITS)
            self.units.append(limit)
            found = self.numbers[limit] = len(self.units)
        return found
