"""Hash table of cells in a mapped file: chains of cells by key, and blocks that hold long keys.

A cell is eight words: hash, three of state, next cell of the chain and the key's size, limit and rate, and sixteen bytes of key
or the first block that holds it. Cells lie densely: removing one moves the last one into its slot, so a sweep never passes free
slots. New keys of a full file share overflow cells, which are chained like any other, under a hash of their own.
"""

from __future__ import annotations

import hashlib
from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.algorithms.limit import I64, Answer, Limit
    from cython.cimports.limitkeeper.stores.cell_table import MOST_RATES, SEVERAL, RatesPointer
    from cython.cimports.limitkeeper.stores.shared import layout as lay
    from cython.cimports.limitkeeper.stores.shared.journal import publish
    from cython.cimports.limitkeeper.stores.shared.log_rings import LogRings
else:
    from ...algorithms.limit import I64, Answer, Limit
    from ..cell_table import MOST_RATES, SEVERAL, Rates
    from . import layout as lay
    from .journal import publish
    from .log_rings import LogRings

    RatesPointer = Any

    # Keys as words. The builds never share a file (they lock it differently, and the file says how), so the bytes of a key may
    # differ: UTF-8 here, the string's own characters when compiled.

    def kind_of(key: str) -> int:
        return 1

    def size_of(key: str) -> int:
        return len(key.encode("utf-8", "surrogatepass"))

    def hashed(key: str, secret: int, other: int, limit_id: int) -> int:
        """A keyed hash: without the file's secret, colliding keys can't be chosen."""
        secrets = b"".join(part.to_bytes(8, "little", signed=True) for part in (secret, other, limit_id))
        digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8, key=secrets).digest()
        return int.from_bytes(digest, "little", signed=True)

    def copy_in(words: Any, at: int, key: str, offset: int, size: int) -> None:
        """Copies `size` bytes of the key, from `offset` on, into words beginning at `at`."""
        data = key.encode("utf-8", "surrogatepass")[offset : offset + size]
        count = (len(data) + 7) // 8
        words[at : at + count] = memoryview(data.ljust(8 * count, b"\0")).cast("q")

    def same_at(words: Any, at: int, key: str, offset: int, size: int) -> bool:
        """Whether the words at `at` hold these bytes of the key."""
        return copy_out(words, at, size) == key.encode("utf-8", "surrogatepass")[offset : offset + size]

    def copy_out(words: Any, at: int, size: int) -> bytes:
        return bytes(words[at : at + (size + 7) // 8].tobytes()[:size])

    def text_of(kind: int, data: bytes) -> str:
        """The key whose bytes these are."""
        return data.decode("utf-8", "surrogatepass")


from ...algorithms.sliding_log import read_log
from ...errors import StoreError
from .layout import Regions

#: The longest key in characters that is stored unchanged.
LONGEST_KEY = 16384


@cython.cclass
class SharedCellTable(LogRings):
    """The cells of one file. Callers hold the file's lock."""

    def __init__(self, memory: Any, plan: Regions, max_keys: int, secret: int, other: int, fd: int) -> None:
        super().__init__(memory, plan, max_keys, fd)
        self.heads, self.cells = plan.heads, plan.cells
        self.blocks, self.blocks_room, self.mask = plan.blocks, plan.blocks_room, plan.mask
        self.secret, self.other = secret, other
        self.units: list[Limit] = []
        self.births: list[int] = []
        self.entries: list[int] = []  # by limit_id: the word of its directory entry that counts its overflow cells
        self.unread = False  # whether a cell has a rate that this process has not read yet

    # Finding ---------------------------------------------------------------------------------------------------

    @cython.cfunc
    def hash_of(self, key: str, limit_id: I64) -> I64:
        return hashed(key, self.secret, self.other, limit_id)

    @cython.cfunc
    def find(self, limit_id: I64, key: str, hash: I64) -> I64:
        """The word at which the key's cell begins; 0 when there is none."""
        link: I64 = self.words[self.heads + (hash & self.mask)]
        while link:
            cell: I64 = self.cells + (link - 1) * lay.CELL
            if self.words[cell + lay.HASH] == hash and self.words[cell + lay.TAG] & 0xFFFF == limit_id and self.holds(cell, key):
                return cell
            link = self.words[cell + lay.LINK] & 0xFFFFFFFF
        return 0

    @cython.cfunc
    def holds(self, cell: I64, key: str) -> cython.bint:
        """Whether this is the key's cell."""
        size: I64 = size_of(key)
        if self.words[cell + lay.LINK] >> 32 != size or self.words[cell + lay.TAG] >> 32 != kind_of(key):
            return False
        if size <= lay.INLINE:
            return same_at(self.words, cell + lay.KEY, key, 0, size)
        offset: I64 = 0
        block: I64 = self.words[cell + lay.KEY]
        while offset < size:
            at: I64 = self.blocks + (block - 1) * lay.BLOCK
            part: I64 = size - offset if size - offset < lay.PAYLOAD else lay.PAYLOAD
            if not same_at(self.words, at + 1, key, offset, part):
                return False
            offset += part
            block = self.words[at]
        return True

    def widen(self, window_us: int) -> None:
        """Registers the window of a limit."""
        if window_us > self.words[lay.ERA_WINDOW]:
            self.words[lay.ERA_END] += window_us - self.words[lay.ERA_WINDOW]
            self.words[lay.ERA_WINDOW] = window_us

    @cython.cfunc
    def overflow_number(self, limit_id: I64, key: str, now_us: I64) -> I64:
        """The number of a key's overflow cell, by a hash under another order of the secrets and with the era, which ends after
        the longest window of the file's limits. A limit is granted half of the cells that are left, once."""
        words = self.words
        at: I64 = self.entries[limit_id - 1]
        if words[at] == 0:
            granted: I64 = words[lay.UNGRANTED] // 2
            if granted < lay.FEWEST:
                granted = lay.FEWEST
            words[lay.UNGRANTED] = words[lay.UNGRANTED] - granted if words[lay.UNGRANTED] > granted else 0
            words[at] = granted
        if now_us >= words[lay.ERA_END]:
            words[lay.ERA] += 1
            words[lay.ERA_END] = now_us + words[lay.ERA_WINDOW]
        chosen: I64 = hashed(key, self.other, self.secret, (words[lay.ERA] << 16) | limit_id) & 0x7FFFFFFFFFFFFFFF
        slots: I64 = words[at]
        return chosen % slots

    @cython.cfunc
    def overflow_cell(self, limit_id: I64, key: str, now_us: I64) -> I64:
        """The overflow cell of a key that has no cell of its own; 0 when it is not in use."""
        number: I64 = self.overflow_number(limit_id, key, now_us)
        shared: I64 = overflow_hash(limit_id, number)
        link: I64 = self.words[self.heads + (shared & self.mask)]
        while link:
            cell: I64 = self.cells + (link - 1) * lay.CELL
            if (
                self.words[cell + lay.TAG] >> 32 == lay.OVERFLOW
                and self.words[cell + lay.TAG] & 0xFFFF == limit_id
                and self.words[cell + lay.KEY] == number
            ):
                return cell
            link = self.words[cell + lay.LINK] & 0xFFFFFFFF
        return 0

    @cython.cfunc
    def is_overflow(self, cell: I64) -> cython.bint:
        return bool(self.words[cell + lay.TAG] >> 32 == lay.OVERFLOW)

    @cython.cfunc
    def set_unit(self, cell: I64, unit: I64) -> cython.int:
        """Sets the number of the rate whose units the state is in."""
        tag: I64 = self.words[cell + lay.TAG]
        if (tag >> 16) & 0xFFFF != unit:
            self.change(cell + lay.TAG, (tag & 0xFFFF) | (unit << 16) | (tag >> 32 << 32))
            self.unsettle()
        return 0

    @cython.cfunc
    def set_state(self, cell: I64, unit: I64, a: I64, b: I64, c: I64) -> cython.int:
        """Stores the state of a single rate."""
        self.set_unit(cell, unit)
        self.journal_words(cell + lay.STATE, 3)
        self.words[cell + lay.STATE] = a
        self.words[cell + lay.STATE + 1] = b
        self.words[cell + lay.STATE + 2] = c
        return 0

    # Adding ----------------------------------------------------------------------------------------------------

    @cython.cfunc
    def insert(self, limit_id: I64, unit: I64, key: str, hash: I64) -> I64:
        """A new cell for a key that is not there, with an empty state; 0 without room for it."""
        size: I64 = size_of(key)
        if self.words[lay.LIVE] >= self.max_keys or (size > lay.INLINE and not self.has_blocks(size)):
            return 0
        self.unsettle()
        cell: I64 = self.fresh_cell()
        if size <= lay.INLINE:
            self.words[cell + lay.KEY] = 0
            self.words[cell + lay.KEY + 1] = 0
            copy_in(self.words, cell + lay.KEY, key, 0, size)
        else:
            self.words[cell + lay.KEY] = self.store_long(key, size)
        self.change(lay.LIVE, self.words[lay.LIVE] + 1)
        self.place(cell, hash, size, limit_id | (unit << 16) | (kind_of(key) << 32))
        return cell

    @cython.cfunc
    def insert_overflow_cell(self, limit_id: I64, unit: I64, key: str, now_us: I64) -> I64:
        """Creates the overflow cell of a key."""
        if self.words[lay.OVERFLOW_CELLS] >= self.cells_room - self.max_keys:
            raise StoreError(
                "a shared file and its overflow cells are full: too many limits share it; raise max_keys, or use several files"
            )
        number: I64 = self.overflow_number(limit_id, key, now_us)
        cell: I64 = self.fresh_cell()
        self.words[cell + lay.KEY] = number
        self.change(lay.OVERFLOW_CELLS, self.words[lay.OVERFLOW_CELLS] + 1)
        kind: I64 = lay.OVERFLOW
        self.place(cell, overflow_hash(limit_id, number), 0, limit_id | (unit << 16) | (kind << 32))
        return cell

    @cython.cfunc
    def fresh_cell(self) -> I64:
        """The cell behind the last one. There is one: callers have checked LIVE or OVERFLOW_CELLS."""
        high: I64 = self.words[lay.HIGH]
        self.allocate(lay.CELLS_READY, high + 1, self.cells, lay.CELL, self.cells_room)
        self.change(lay.HIGH, high + 1)
        return self.cells + high * lay.CELL

    @cython.cfunc
    def place(self, cell: I64, hash: I64, size: I64, tag: I64) -> cython.int:
        """Puts a fresh cell into its chain."""
        head: I64 = self.heads + (hash & self.mask)
        self.journal_words(cell + lay.LINK, 2)
        self.words[cell + lay.HASH] = hash
        self.words[cell + lay.STATE] = self.words[cell + lay.STATE + 1] = self.words[cell + lay.STATE + 2] = 0
        self.words[cell + lay.LINK] = self.words[head] | (size << 32)
        self.words[cell + lay.TAG] = tag
        return self.change(head, (cell - self.cells) // lay.CELL + 1)

    @cython.cfunc
    def has_blocks(self, size: I64) -> cython.bint:
        """Whether there is room for a key of this size, in blocks never used and in those that are free again."""
        needed: I64 = (size + lay.PAYLOAD - 1) // lay.PAYLOAD
        block: I64 = self.words[lay.BLOCKS_FREE]
        needed -= self.blocks_room - self.words[lay.BLOCKS_HIGH]
        while needed > 0 and block:
            needed -= 1
            block = self.words[self.blocks + (block - 1) * lay.BLOCK]
        return needed <= 0

    @cython.cfunc
    def store_long(self, key: str, size: I64) -> I64:
        """Writes a long key into blocks, the last one first; answers with the first."""
        following: I64 = 0
        offset: I64 = (size - 1) // lay.PAYLOAD * lay.PAYLOAD
        while offset >= 0:
            following = self.fresh_block(following)
            at: I64 = self.blocks + (following - 1) * lay.BLOCK
            copy_in(self.words, at + 1, key, offset, size - offset if size - offset < lay.PAYLOAD else lay.PAYLOAD)
            offset -= lay.PAYLOAD
        return following

    @cython.cfunc
    def fresh_block(self, following: I64) -> I64:
        """A block that links to `following`; there must be one (`has_blocks`)."""
        block: I64 = self.words[lay.BLOCKS_FREE]
        at: I64 = self.blocks + (block - 1) * lay.BLOCK
        if block:
            self.change(lay.BLOCKS_FREE, self.words[at])
            self.journal_words(at, 1)
        else:
            block = self.words[lay.BLOCKS_HIGH] + 1
            self.allocate(lay.BLOCKS_READY, block, self.blocks, lay.BLOCK, self.blocks_room)
            at = self.blocks + (block - 1) * lay.BLOCK
            self.change(lay.BLOCKS_HIGH, block)
        self.words[at] = following
        return block

    # Several rates ---------------------------------------------------------------------------------------------

    @cython.cfunc
    def unit_of(self, cell: I64) -> I64:
        """The number of the rate that the cell's state belongs to, or SEVERAL."""
        return (self.words[cell + lay.TAG] >> 16) & 0xFFFF  # type: ignore[no-any-return]

    @cython.cfunc
    def rates_word(self, cell: I64, i: I64) -> I64:
        """The place of word i of a cell's rates, which lie in blocks: reset_id, reset_until, n, then unit and state of each."""
        block: I64 = self.words[cell + lay.STATE]
        while True:
            if not 0 < block <= self.blocks_room:
                raise StoreError("the rates of a key are out of range")
            at: I64 = self.blocks + (block - 1) * lay.BLOCK
            if i < lay.BLOCK - 1:
                return at + 1 + i
            block = self.words[at]
            i -= lay.BLOCK - 1

    @cython.cfunc
    def read_rates(self, cell: I64) -> RatesPointer:
        """All states of a cell, and its last reset: valid until the next call."""
        if cython.compiled:
            rates: RatesPointer = cython.address(self.scratch)
        else:
            rates = Rates()
        i: cython.int
        unit: I64 = self.unit_of(cell)
        rates.reset_id = rates.reset_until = 0
        if unit != SEVERAL:
            rates.n = 1
            rates.unit[0] = unit
            rates.a[0] = self.words[cell + lay.STATE]
            rates.b[0] = self.words[cell + lay.STATE + 1]
            rates.c[0] = self.words[cell + lay.STATE + 2]
            return rates
        rates.reset_id = self.words[self.rates_word(cell, 0)]
        rates.reset_until = self.words[self.rates_word(cell, 1)]
        rates.n = self.words[self.rates_word(cell, 2)]
        if not 0 <= rates.n <= MOST_RATES:
            rates.n = 0
        for i in range(rates.n):
            rates.unit[i] = self.words[self.rates_word(cell, 3 + 4 * i)]
            rates.a[i] = self.words[self.rates_word(cell, 4 + 4 * i)]
            rates.b[i] = self.words[self.rates_word(cell, 5 + 4 * i)]
            rates.c[i] = self.words[self.rates_word(cell, 6 + 4 * i)]
        return rates

    @cython.cfunc
    def write_rates(self, cell: I64, rates: RatesPointer, logs: cython.bint) -> cython.bint:
        """Stores the rates of a key: a single one in a cell that never had several, otherwise in blocks. False: no room for them.
        (Blocks are freed with the cell, or by a sweep: those freed and reused within one change could not be rolled back.)"""
        i: I64
        unit: I64 = self.unit_of(cell)
        if unit != SEVERAL and rates.n == 1 and rates.reset_id == 0:
            if logs:
                self.set_unit(cell, rates.unit[0])
            else:
                self.set_state(cell, rates.unit[0], rates.a[0], rates.b[0], rates.c[0])
            return True
        if unit != SEVERAL:
            if not self.has_blocks(lay.RATES_BLOCKS * lay.PAYLOAD):
                return False
            block: I64 = 0
            for _ in range(lay.RATES_BLOCKS):
                block = self.fresh_block(block)
            self.journal_words(cell + lay.STATE, 3)
            self.words[cell + lay.STATE] = block
            if not logs:
                self.words[cell + lay.STATE + 1] = self.words[cell + lay.STATE + 2] = 0
            self.set_unit(cell, SEVERAL)
        for i in range(3 + 4 * rates.n):
            self.journal_words(self.rates_word(cell, i), 1)
        self.words[self.rates_word(cell, 0)] = rates.reset_id
        self.words[self.rates_word(cell, 1)] = rates.reset_until
        self.words[self.rates_word(cell, 2)] = rates.n
        for i in range(rates.n):
            self.words[self.rates_word(cell, 3 + 4 * i)] = rates.unit[i]
            self.words[self.rates_word(cell, 4 + 4 * i)] = rates.a[i]
            self.words[self.rates_word(cell, 5 + 4 * i)] = rates.b[i]
            self.words[self.rates_word(cell, 6 + 4 * i)] = rates.c[i]
        return True

    @cython.cfunc
    def copy_cell(self, source: I64, target: I64, logs: cython.bint) -> cython.int:
        """Gives a new cell a copy of another cell's log or states, as far as there is room for several."""
        rates: RatesPointer = self.read_rates(source)
        self.write_rates(target, rates, logs)
        if logs:
            self.copy_log(source, target)
        return 0

    # Forgetting ------------------------------------------------------------------------------------------------

    @cython.cfunc
    def remove(self, cell: I64, logs: cython.bint) -> cython.int:
        """Takes a cell out of its chain, frees its blocks and its log, and moves the last cell into its slot. The caller commits
        before it inserts: a new cell is not journalled, and would overwrite the last one."""
        at: I64 = self.link_to(cell)
        size: I64 = self.words[cell + lay.LINK] >> 32
        self.change(at, (self.words[at] >> 32 << 32) | (self.words[cell + lay.LINK] & 0xFFFFFFFF))
        several: cython.bint = self.unit_of(cell) == SEVERAL
        if (logs or several) and self.words[cell + lay.STATE + 2]:
            self.free_log(self.words[cell + lay.STATE + 2])
        if several:
            self.free_long(self.words[cell + lay.STATE])
        if self.is_overflow(cell):
            self.change(lay.OVERFLOW_CELLS, self.words[lay.OVERFLOW_CELLS] - 1)
        else:
            self.change(lay.LIVE, self.words[lay.LIVE] - 1)
            if size > lay.INLINE:
                self.free_long(self.words[cell + lay.KEY])
        last: I64 = self.cells + (self.words[lay.HIGH] - 1) * lay.CELL
        if cell != last:
            at = self.link_to(last)
            self.change(at, (self.words[at] >> 32 << 32) | ((cell - self.cells) // lay.CELL + 1))
            self.journal_words(cell, lay.CELL)
            i: I64
            for i in range(lay.CELL):
                self.words[cell + i] = self.words[last + i]
        return self.change(lay.HIGH, self.words[lay.HIGH] - 1)

    @cython.cfunc
    def link_to(self, cell: I64) -> I64:
        """The word that links to this cell: the head of its chain, or the LINK of the cell before it."""
        mine: I64 = (cell - self.cells) // lay.CELL + 1
        at: I64 = self.heads + (self.words[cell + lay.HASH] & self.mask)
        while self.words[at] & 0xFFFFFFFF != mine:
            at = self.cells + ((self.words[at] & 0xFFFFFFFF) - 1) * lay.CELL + lay.LINK
        return at

    @cython.cfunc
    def free_long(self, first: I64) -> cython.int:
        """Adds the blocks of a key to the free list."""
        last: I64 = self.blocks + (first - 1) * lay.BLOCK
        while self.words[last]:
            last = self.blocks + (self.words[last] - 1) * lay.BLOCK
        self.change(last, self.words[lay.BLOCKS_FREE])
        return self.change(lay.BLOCKS_FREE, first)

    @cython.cfunc
    def is_new(self, cell: I64, now_us: I64) -> cython.bint:
        return self.due_us(cell, now_us) <= now_us

    @cython.cfunc
    def unsettle(self) -> cython.int:
        """Called when a cell may be as new sooner than it was: the rotation begins again."""
        self.words[lay.CHECKED] = 0
        self.words[lay.SOONEST] = lay.NEVER_US
        return 0

    @cython.cfunc
    def due_us(self, cell: I64, now_us: I64) -> I64:
        """When the cell holds just what an unseen key would have. Of several rates, all must: a rate whose state is dropped while
        another's remains would start again with what that one holds."""
        rates: RatesPointer = self.read_rates(cell)
        latest: I64 = rates.reset_until
        i: cython.int
        for i in range(rates.n):
            due: I64 = self.state_due_us(cell, rates.unit[i], rates.a[i], rates.b[i], rates.c[i], now_us)
            if due > latest:
                latest = due
        return latest

    @cython.cfunc
    def state_due_us(self, cell: I64, unit: I64, a: I64, b: I64, c: I64, now_us: I64) -> I64:
        """When a state is as new; unknown while its limit has not been read."""
        if unit == 0 or unit > len(self.units):
            self.unread = True
            return now_us + 1
        limit: Limit = self.units[unit - 1]
        now: I64 = now_us // limit.tick
        if limit.logs:
            c = self.log_at(self.words[cell + lay.STATE + 2])
        answer: Answer = limit.rule(limit, a, b, c, now, now, 0, 0)
        reset: I64 = answer[6]
        if limit.ramp > 0:
            birth: I64 = self.births[(self.words[cell + lay.TAG] & 0xFFFF) - 1]
            if reset < birth // limit.tick + limit.ramp:
                reset = birth // limit.tick + limit.ramp
        return reset * limit.tick

    @cython.cfunc
    def sweep(self, budget: I64, now_us: I64) -> cython.int:
        """Checks the next few cells, of all limits in rotation, and removes those that are as new."""
        if budget > self.words[lay.HIGH]:
            budget = self.words[lay.HIGH]
        at: I64 = self.words[lay.CURSOR]
        while budget > 0:
            budget -= 1
            if at >= self.words[lay.HIGH]:
                at = 0
            cell: I64 = self.cells + at * lay.CELL
            unit: I64 = self.unit_of(cell)
            due_us: I64 = self.due_us(cell, now_us)
            if due_us <= now_us:
                self.remove(cell, unit != SEVERAL and cython.cast(Limit, self.units[unit - 1]).logs)
                self.commit()
                continue
            if unit == SEVERAL:
                self.collapse(cell, now_us)
            self.words[lay.CHECKED] += 1
            if due_us < self.words[lay.SOONEST]:
                self.words[lay.SOONEST] = due_us
            at += 1
        self.words[lay.CURSOR] = at
        return 0

    @cython.cfunc
    def collapse(self, cell: I64, now_us: I64) -> cython.int:
        """Puts a single rate, with no reset to remember, back into the cell."""
        rates: RatesPointer = self.read_rates(cell)
        if rates.n != 1 or now_us < rates.reset_until:
            return 0
        first: I64 = self.words[cell + lay.STATE]
        log: I64 = self.words[cell + lay.STATE + 2]
        self.set_state(cell, rates.unit[0], rates.a[0], rates.b[0], log if log else rates.c[0])
        self.free_long(first)
        return self.commit()

    # Taking over ----------------------------------------------------------------------------------------------

    @cython.cfunc
    def adopt_all(self, old: SharedCellTable) -> cython.int:
        """Takes over the cells of another file, but for those that fail their check."""
        i: I64
        for i in range(min(old.words[lay.HIGH], old.cells_room)):
            try:
                self.adopt(old, old.cells + i * lay.CELL)
            except (StoreError, ValueError, SystemError):
                self.roll_back()
            publish(old.words, lay.ADOPTED, i + 1)  # for those who wait for this
        return 0

    @cython.cfunc
    def adopt(self, old: SharedCellTable, cell: I64) -> cython.int:
        """Takes over a cell of another file, if it passes its check and its key is not there; its last reset is forgotten."""
        tag: I64 = old.words[cell + lay.TAG]
        limit_id: I64 = tag & 0xFFFF
        if not 0 < limit_id <= len(self.births) or tag >> 32 not in (1, 2, 4):
            return 0
        known = [0 < unit <= len(self.units) for unit, _ in old.states_of(cell, False)]
        if not known or not all(known) or not old.is_whole(cell):
            return 0
        rates: RatesPointer = old.read_rates(cell)
        limit: Limit = self.units[rates.unit[0] - 1]
        entries = old.log_of(cell)[0] if limit.logs else ()
        key: str = old.key_of(cell)
        hashed: I64 = self.hash_of(key, limit_id)
        if self.find(limit_id, key, hashed):
            return 0
        mine: I64 = self.insert(limit_id, rates.unit[0], key, hashed)
        rates.reset_id = rates.reset_until = 0
        if mine and limit.logs:
            self.fill(mine, entries)
        elif mine:
            self.write_rates(mine, rates, False)
        return self.commit()

    # Looking ---------------------------------------------------------------------------------------------------

    def key_of(self, cell: I64) -> str:
        size: I64 = self.words[cell + lay.LINK] >> 32
        kind: I64 = self.words[cell + lay.TAG] >> 32
        if size <= lay.INLINE:
            return text_of(kind, copy_out(self.words, cell + lay.KEY, size))
        parts = []
        block: I64 = self.words[cell + lay.KEY]
        while size > 0:
            if not 0 < block <= self.blocks_room or size > 4 * LONGEST_KEY:
                raise StoreError("a key's block or its size is out of range")
            at: I64 = self.blocks + (block - 1) * lay.BLOCK
            parts.append(copy_out(self.words, at + 1, size if size < lay.PAYLOAD else lay.PAYLOAD))
            size -= lay.PAYLOAD
            block = self.words[at]
        return text_of(kind, b"".join(parts))

    def is_whole(self, cell: I64) -> bool:
        """Whether the cell's hash is that of its key."""
        limit_id: I64 = self.words[cell + lay.TAG] & 0xFFFF
        return bool(self.hash_of(self.key_of(cell), limit_id) == self.words[cell + lay.HASH])

    def items_between(self, first: int, last: int, limit_id: int, logs: bool) -> list[tuple[str, list[tuple[int, Any]]]]:
        """(key, states) of the cells of a limit with these numbers."""
        cells = [self.cells + i * lay.CELL for i in range(first, last)]
        tags = [(cell, self.words[cell + lay.TAG]) for cell in cells]
        own = [cell for cell, tag in tags if tag and tag & 0xFFFF == limit_id and tag >> 32 != lay.OVERFLOW]
        return [(self.key_of(cell), self.states_of(cell, logs)) for cell in own]

    def states_of(self, cell: I64, logs: bool) -> list[tuple[int, Any]]:
        """(unit, state as plain data) of each rate: three integers, or the entries of a log."""
        rates: RatesPointer = self.read_rates(cell)
        found = [(rates.unit[i], (rates.a[i], rates.b[i], rates.c[i])) for i in range(rates.n)]
        return [(unit, self.log_of(cell)) for unit, _ in found] if logs else found

    def log_of(self, cell: I64) -> Any:
        """The entries of a cell's log, as a state."""
        number: I64 = self.words[cell + lay.STATE + 2]
        if not number:
            return ((), 0, 0)
        at: I64 = self.logs + (number - 1) * self.log_words
        if not 0 < number <= self.cells_room or not 0 <= self.words[at + 1] <= self.words[at + 2] == (self.log_words - 4) // 2:
            raise StoreError("a key's log is out of range")
        words: Any = memoryview(self.memory).cast("q")  # of which only the entries are read, not the free places
        return (tuple(read_log(words[at : at + self.log_words])), 0, 0)


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def overflow_hash(limit_id: I64, number: I64) -> I64:
    """The hash under which an overflow cell is chained."""
    return limit_id * 7919 + number * 104729


def shortened(key: str) -> str:
    """A longer key as stored: a prefix and a digest."""
    return f"{key[:64]}…{hashlib.blake2b(key.encode('utf-8', 'surrogatepass'), digest_size=24).hexdigest()}"
