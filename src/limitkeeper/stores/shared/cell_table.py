"""Hash table of cells in a mapped file: chains of cells by key, and blocks that hold long keys.

A cell is eight words: hash, three of state, next cell of the chain and the key's size, limit and rate, and sixteen bytes of key
or the first block that holds it. Free cells are linked through the same words. New keys of a full file share overflow cells,
which are chained like any other, under a hash of their own.
"""

from __future__ import annotations

from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.algorithms.limit import Answer, Limit
    from cython.cimports.limitkeeper.stores.shared import key_codec as codec
    from cython.cimports.limitkeeper.stores.shared import layout as lay
    from cython.cimports.limitkeeper.stores.shared.log_rings import LogRings
else:
    from ...algorithms.limit import Answer, Limit
    from . import key_codec as codec
    from . import layout as lay
    from .log_rings import LogRings

from ...algorithms.sliding_log import read_log
from ...errors import StoreError
from .layout import Regions


@cython.cclass
class SharedCellTable(LogRings):
    """The cells of one file. Callers hold the file's lock."""

    def __init__(self, memory: Any, plan: Regions, max_keys: int, secret: int, other: int) -> None:
        super().__init__(memory, plan, max_keys)
        self.heads, self.cells = plan.heads, plan.cells
        self.blocks, self.blocks_room, self.mask = plan.blocks, plan.blocks_room, plan.mask
        self.secret, self.other = secret, other
        self.units: list[Limit] = []
        self.births: list[int] = []

    # Finding ---------------------------------------------------------------------------------------------------

    @cython.cfunc
    def find(self, limit_id: cython.longlong, key: str, hash: cython.longlong) -> cython.longlong:
        """The word at which the key's cell begins; 0 when there is none."""
        link: cython.longlong = self.words[self.heads + (hash & self.mask)]
        while link:
            cell: cython.longlong = self.cells + (link - 1) * lay.CELL
            if self.words[cell + lay.HASH] == hash and self.words[cell + lay.TAG] & 0xFFFF == limit_id and self.holds(cell, key):
                return cell
            link = self.words[cell + lay.LINK] & 0xFFFFFFFF
        return 0

    @cython.cfunc
    def holds(self, cell: cython.longlong, key: str) -> cython.bint:
        """Whether this is the key's cell."""
        size: cython.longlong = codec.size_of(key)
        if self.words[cell + lay.LINK] >> 32 != size or self.words[cell + lay.TAG] >> 32 != codec.kind_of(key):
            return False
        if size <= lay.INLINE:
            return codec.same_at(self.words, cell + lay.KEY, key, 0, size)
        offset: cython.longlong = 0
        block: cython.longlong = self.words[cell + lay.KEY]
        while offset < size:
            at: cython.longlong = self.blocks + (block - 1) * lay.BLOCK
            part: cython.longlong = size - offset if size - offset < lay.PAYLOAD else lay.PAYLOAD
            if not codec.same_at(self.words, at + 1, key, offset, part):
                return False
            offset += part
            block = self.words[at]
        return True

    @cython.cfunc
    def overflow_cell(self, limit_id: cython.longlong, hash: cython.longlong) -> cython.longlong:
        """The overflow cell of a key that has no cell of its own; 0 when it is not in use."""
        number: cython.longlong = (hash >> 20) & (lay.OVERFLOW_SLOTS - 1)
        shared: cython.longlong = overflow_hash(limit_id, number)
        link: cython.longlong = self.words[self.heads + (shared & self.mask)]
        while link:
            cell: cython.longlong = self.cells + (link - 1) * lay.CELL
            if (
                self.words[cell + lay.TAG] >> 32 == lay.OVERFLOW
                and self.words[cell + lay.TAG] & 0xFFFF == limit_id
                and self.words[cell + lay.KEY] == number
            ):
                return cell
            link = self.words[cell + lay.LINK] & 0xFFFFFFFF
        return 0

    @cython.cfunc
    def is_overflow(self, cell: cython.longlong) -> cython.bint:
        return bool(self.words[cell + lay.TAG] >> 32 == lay.OVERFLOW)

    # Adding ----------------------------------------------------------------------------------------------------

    @cython.cfunc
    def insert(self, limit_id: cython.longlong, unit: cython.longlong, key: str, hash: cython.longlong) -> cython.longlong:
        """A new cell for a key that is not there, with an empty state; 0 without room for it."""
        size: cython.longlong = codec.size_of(key)
        if self.words[lay.LIVE] >= self.max_keys or (size > lay.INLINE and not self.has_blocks(size)):
            return 0
        cell: cython.longlong = self.fresh_cell(self.max_keys + lay.RESERVE)
        if not cell:
            return 0
        if size <= lay.INLINE:
            self.words[cell + lay.KEY] = 0
            self.words[cell + lay.KEY + 1] = 0
            codec.copy_in(self.words, cell + lay.KEY, key, 0, size)
        else:
            self.words[cell + lay.KEY] = self.store_long(key, size)
        self.change(lay.LIVE, self.words[lay.LIVE] + 1)
        self.place(cell, hash, size, limit_id | (unit << 16) | (codec.kind_of(key) << 32))
        return cell

    @cython.cfunc
    def insert_overflow_cell(self, limit_id: cython.longlong, unit: cython.longlong, hash: cython.longlong) -> cython.longlong:
        """Creates the overflow cell of a key."""
        cell: cython.longlong = self.fresh_cell(self.max_keys + lay.RESERVE)
        if not cell:
            raise StoreError(
                "a shared file and its reserve are full: too many limits share it; raise max_keys, or use several files"
            )
        number: cython.longlong = (hash >> 20) & (lay.OVERFLOW_SLOTS - 1)
        self.words[cell + lay.KEY] = number
        self.change(lay.OVERFLOW_CELLS, self.words[lay.OVERFLOW_CELLS] + 1)
        kind: cython.longlong = lay.OVERFLOW
        self.place(cell, overflow_hash(limit_id, number), 0, limit_id | (unit << 16) | (kind << 32))
        return cell

    @cython.cfunc
    def fresh_cell(self, room: cython.longlong) -> cython.longlong:
        """A free cell; 0 when there is none."""
        cell: cython.longlong
        if self.words[lay.FREE]:
            cell = self.cells + (self.words[lay.FREE] - 1) * lay.CELL
            self.change(lay.FREE, self.words[cell + lay.LINK])
            return cell
        if self.words[lay.HIGH] >= room:
            return 0
        cell = self.cells + self.words[lay.HIGH] * lay.CELL
        self.change(lay.HIGH, self.words[lay.HIGH] + 1)
        return cell

    @cython.cfunc
    def place(self, cell: cython.longlong, hash: cython.longlong, size: cython.longlong, tag: cython.longlong) -> cython.int:
        """Puts a fresh cell into its chain."""
        head: cython.longlong = self.heads + (hash & self.mask)
        self.journal_word(cell + lay.LINK)
        self.journal_word(cell + lay.TAG)
        self.words[cell + lay.HASH] = hash
        self.words[cell + lay.STATE] = self.words[cell + lay.STATE + 1] = self.words[cell + lay.STATE + 2] = 0
        self.words[cell + lay.LINK] = self.words[head] | (size << 32)
        self.words[cell + lay.TAG] = tag
        return self.change(head, (cell - self.cells) // lay.CELL + 1)

    @cython.cfunc
    def has_blocks(self, size: cython.longlong) -> cython.bint:
        """Whether there is room for a key of this size, in blocks never used and in those that are free again."""
        needed: cython.longlong = (size + lay.PAYLOAD - 1) // lay.PAYLOAD
        block: cython.longlong = self.words[lay.BLOCKS_FREE]
        needed -= self.blocks_room - self.words[lay.BLOCKS_HIGH]
        while needed > 0 and block:
            needed -= 1
            block = self.words[self.blocks + (block - 1) * lay.BLOCK]
        return needed <= 0

    @cython.cfunc
    def store_long(self, key: str, size: cython.longlong) -> cython.longlong:
        """Writes a long key into blocks, the last one first; answers with the first."""
        following: cython.longlong = 0
        offset: cython.longlong = (size - 1) // lay.PAYLOAD * lay.PAYLOAD
        while offset >= 0:
            block: cython.longlong = self.words[lay.BLOCKS_FREE]
            at: cython.longlong = self.blocks + (block - 1) * lay.BLOCK
            if block:
                self.change(lay.BLOCKS_FREE, self.words[at])
                self.journal_word(at)
            else:
                block = self.words[lay.BLOCKS_HIGH] + 1
                at = self.blocks + (block - 1) * lay.BLOCK
                self.change(lay.BLOCKS_HIGH, block)
            self.words[at] = following
            codec.copy_in(self.words, at + 1, key, offset, size - offset if size - offset < lay.PAYLOAD else lay.PAYLOAD)
            following = block
            offset -= lay.PAYLOAD
        return following

    # Forgetting ------------------------------------------------------------------------------------------------

    @cython.cfunc
    def remove(self, cell: cython.longlong, logs: cython.bint) -> cython.int:
        """Takes a cell out of its chain; its blocks and its log are free again."""
        mine: cython.longlong = (cell - self.cells) // lay.CELL + 1
        at: cython.longlong = self.heads + (self.words[cell + lay.HASH] & self.mask)
        while self.words[at] & 0xFFFFFFFF != mine:
            at = self.cells + ((self.words[at] & 0xFFFFFFFF) - 1) * lay.CELL + lay.LINK
        size: cython.longlong = self.words[cell + lay.LINK] >> 32
        self.change(at, (self.words[at] >> 32 << 32) | (self.words[cell + lay.LINK] & 0xFFFFFFFF))
        if logs and self.words[cell + lay.STATE + 2]:
            self.free_log(self.words[cell + lay.STATE + 2])
        if self.is_overflow(cell):
            self.change(lay.OVERFLOW_CELLS, self.words[lay.OVERFLOW_CELLS] - 1)
        else:
            self.change(lay.LIVE, self.words[lay.LIVE] - 1)
            if size > lay.INLINE:
                self.free_long(self.words[cell + lay.KEY])
        self.change(cell + lay.TAG, 0)
        self.change(cell + lay.LINK, self.words[lay.FREE])
        return self.change(lay.FREE, mine)

    @cython.cfunc
    def free_long(self, first: cython.longlong) -> cython.int:
        """Adds the blocks of a key to the free list."""
        last: cython.longlong = self.blocks + (first - 1) * lay.BLOCK
        while self.words[last]:
            last = self.blocks + (self.words[last] - 1) * lay.BLOCK
        self.change(last, self.words[lay.BLOCKS_FREE])
        return self.change(lay.BLOCKS_FREE, first)

    @cython.cfunc
    def is_new(self, cell: cython.longlong, now_us: cython.longlong) -> cython.bint:
        """Whether the cell holds just what an unseen key would have; not, when its limit has not been read yet."""
        tag: cython.longlong = self.words[cell + lay.TAG]
        unit: cython.longlong = (tag >> 16) & 0xFFFF
        if unit == 0 or unit > len(self.units):
            return False
        limit: Limit = self.units[unit - 1]
        now: cython.longlong = now_us // limit.tick
        if limit.ramp > 0:
            birth: cython.longlong = self.births[(tag & 0xFFFF) - 1]
            if now < birth // limit.tick + limit.ramp:
                return False
        c: cython.longlong = self.words[cell + lay.STATE + 2]
        if limit.logs:
            c = self.log_at(c)
        answer: Answer = limit.rule(limit, self.words[cell + lay.STATE], self.words[cell + lay.STATE + 1], c, now, now, 0, 0)
        return answer[6] <= now

    @cython.cfunc
    def sweep(self, budget: cython.longlong, now_us: cython.longlong) -> cython.int:
        """Checks the next few cells and removes those that are as new."""
        high: cython.longlong = self.words[lay.HIGH]
        if budget > high:
            budget = high
        at: cython.longlong = self.words[lay.CURSOR]
        while budget > 0:
            budget -= 1
            if at >= high:
                at = 0
            cell: cython.longlong = self.cells + at * lay.CELL
            if self.words[cell + lay.TAG] and self.is_new(cell, now_us):
                limit: Limit = self.units[((self.words[cell + lay.TAG] >> 16) & 0xFFFF) - 1]
                self.remove(cell, limit.logs)
                self.commit()
            at += 1
        self.words[lay.CURSOR] = at
        return 0

    # Taking over ----------------------------------------------------------------------------------------------

    def adopt(self, limit_id: cython.longlong, unit: cython.longlong, key: str, state: Any) -> None:
        """Takes over a key with its state, if it is not there."""
        hashed: cython.longlong = codec.hashed(key, self.secret, self.other, limit_id)
        if self.find(limit_id, key, hashed):
            return
        cell: cython.longlong = self.insert(limit_id, unit, key, hashed)
        if cell and isinstance(state[0], tuple):
            self.fill(cell, state[0])
        elif cell:
            self.words[cell + lay.STATE], self.words[cell + lay.STATE + 1], self.words[cell + lay.STATE + 2] = state
        self.commit()

    # Looking ---------------------------------------------------------------------------------------------------

    def key_of(self, cell: cython.longlong) -> str:
        size: cython.longlong = self.words[cell + lay.LINK] >> 32
        kind: cython.longlong = self.words[cell + lay.TAG] >> 32
        if size <= lay.INLINE:
            return codec.text_of(kind, codec.copy_out(self.words, cell + lay.KEY, size))
        parts = []
        block: cython.longlong = self.words[cell + lay.KEY]
        while size > 0:
            if not 0 < block <= self.blocks_room:
                raise StoreError("a key's block is out of range")
            at: cython.longlong = self.blocks + (block - 1) * lay.BLOCK
            parts.append(codec.copy_out(self.words, at + 1, size if size < lay.PAYLOAD else lay.PAYLOAD))
            size -= lay.PAYLOAD
            block = self.words[at]
        return codec.text_of(kind, b"".join(parts))

    def is_whole(self, cell: cython.longlong) -> bool:
        """Whether the cell's hash is that of its key."""
        limit_id: cython.longlong = self.words[cell + lay.TAG] & 0xFFFF
        return bool(codec.hashed(self.key_of(cell), self.secret, self.other, limit_id) == self.words[cell + lay.HASH])

    def state_of(self, cell: cython.longlong, logs: bool) -> Any:
        """The state as plain data: three integers, or the entries of a log."""
        if not logs:
            return (self.words[cell + lay.STATE], self.words[cell + lay.STATE + 1], self.words[cell + lay.STATE + 2])
        number: cython.longlong = self.words[cell + lay.STATE + 2]
        if not number:
            return ((), 0, 0)
        at: cython.longlong = self.logs + (number - 1) * self.log_words
        if not 0 < number <= self.max_keys + lay.RESERVE or self.words[at + 2] != (self.log_words - 4) // 2:
            raise StoreError("a key's log is out of range")
        return (tuple(read_log([self.words[at + i] for i in range(self.log_words)])), 0, 0)


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def overflow_hash(limit_id: cython.longlong, number: cython.longlong) -> cython.longlong:
    """The hash under which an overflow cell is chained."""
    return limit_id * 7919 + number * 104729
