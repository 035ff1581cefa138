"""Layout of a shared file: regions and header words, all 8-byte words counted from the start.

    header · journal · directory · heads · cells · blocks · logs

The header holds the parameters, the lock and the counters; the journal, (word, old value) pairs of the change in progress; the
directory, which is only appended to, the limits of this file. Heads are the chains of a hash table; a cell is one key's state;
blocks hold keys longer than 16 bytes; logs are the ring buffers of sliding logs, all of one length. Unused parts take no space.

`layout.pxd` holds the same numbers for the C compiler; a test compares the two.
"""

from __future__ import annotations

from typing import NamedTuple

MAGIC_TEXT = b"limitkpr"
VERSION = 2

# Words of the header. The lock and the journal's length have cache lines of their own.
MAGIC, LAYOUT, PROTOCOL, MAX_KEYS, LOG_ENTRIES, SIZE, SECRET = range(7)  # SECRET: and 7
OFFSET, BOOT, NAMESPACE, READY = 8, 9, 11, 12  # BOOT: and 10
LOCK, JOURNAL = 16, 24
LIVE, HIGH, UNGRANTED, BLOCKS_HIGH, BLOCKS_FREE, LOGS_HIGH, LOGS_FREE, OVERFLOW_CELLS = range(32, 40)
CURSOR, OVERFLOWS, DIRECTORY, LAST, TAKEOVERS, LOG_FULL, CALLS = range(40, 47)
ERA, ERA_END, ERA_WINDOW = range(47, 50)  # of the secret of overflow cells
CELLS_READY, BLOCKS_READY, LOGS_READY = range(50, 53)  # how many of each have space in the file system
CHECKED, SOONEST = 53, 54  # cells checked in rotation, and before when none of them is as new
UNMARKED_RESET = 55  # the last reset that found no room for a marker on its key
ADOPTED = 56  # of a file from before a reboot: how many of its cells were looked at for the new file

HEADER = 512
JOURNAL_ROOM = 16384  # changes
DIRECTORY_ROOM = 131072  # words
NEVER_US = 2**62
FEWEST = 64  # overflow cells that a limit gets when most are granted
TAIL = 4096  # cells for such limits

# Words of a cell.
HASH = 0
STATE = 1
LINK = 4  # next cell of the chain + 1, and the key's size in bytes << 32
TAG = 5  # limit_id, unit << 16, kind << 32; of a key with several rates the unit is SEVERAL, and STATE its first block of Rates
KEY = 6
CELL = 8
INLINE = 16  # bytes of a key that fit into its cell
BLOCK = 8
RATES_BLOCKS = 3  # blocks that hold the rates of a key
PAYLOAD = 56  # bytes of a key in a block, behind the word that links to the next
OVERFLOW = 255  # the kind of an overflow cell

#: How the file is locked: compare-and-swap on the lock's word, or the kernel's lock on a second file.
ATOMIC = 1
LOCK_FILE = 2


class Regions(NamedTuple):
    """Where each region begins, in words."""

    journal: int
    directory: int
    heads: int
    cells: int
    blocks: int
    logs: int
    end: int
    mask: int
    log_words: int
    blocks_room: int
    cells_room: int
    overflow: int


def regions(max_keys: int, log_entries: int) -> Regions:
    """The layout of a file with these parameters."""
    heads_room = 1024
    while heads_room < max_keys:
        heads_room *= 2
    log_words = 4 + 2 * log_entries
    blocks_room = 4096 + 2 * max_keys
    overflow = max_keys // 2 + 2048
    cells_room = max_keys + overflow + TAIL
    journal = HEADER
    directory = journal + 2 * JOURNAL_ROOM
    heads = directory + DIRECTORY_ROOM
    cells = heads + heads_room
    blocks = cells + cells_room * CELL
    logs = blocks + blocks_room * BLOCK
    end = logs + cells_room * log_words
    return Regions(
        journal, directory, heads, cells, blocks, logs, end, heads_room - 1, log_words, blocks_room, cells_room, overflow
    )
