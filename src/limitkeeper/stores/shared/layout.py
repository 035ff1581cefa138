"""Layout of a shared file: regions and header words, all 8-byte words counted from the start.

    header · journal · directory · heads · cells · blocks · logs

The header holds the parameters, the lock and the counters. The journal holds (word, old value) pairs of the change in progress,
so that it can be rolled back. The directory lists the limits of this file; it is only appended to. Heads are the chains of a hash
table; a cell is one key's state; blocks hold keys longer than 16 bytes; logs are the ring buffers of sliding logs, all of one
length. The file is sparse: unused parts take no space.

`layout.pxd` holds the same numbers for the C compiler; a test compares the two.
"""

from __future__ import annotations

from typing import NamedTuple

MAGIC_TEXT = b"limitkpr"
VERSION = 1

# Words of the header. The lock and the journal's length have cache lines of their own.
MAGIC = 0
LAYOUT = 1
PROTOCOL = 2
MAX_KEYS = 3
LOG_ENTRIES = 4
SIZE = 5
SECRET = 6  # and 7
OFFSET = 8
BOOT = 9  # and 10
NAMESPACE = 11
READY = 12
LOCK = 16
JOURNAL = 24
LIVE = 32
HIGH = 33
FREE = 34
BLOCKS_HIGH = 35
BLOCKS_FREE = 36
LOGS_HIGH = 37
LOGS_FREE = 38
OVERFLOW_CELLS = 39
CURSOR = 40
OVERFLOWS = 41
DIRECTORY = 42
LAST = 43
TAKEOVERS = 44
LOG_FULL = 45
CALLS = 46

HEADER = 512
JOURNAL_ROOM = 16384  # changes
DIRECTORY_ROOM = 131072  # words
RESERVE = 16384  # cells beyond max_keys, for overflow
OVERFLOW_SLOTS = 1024  # overflow cells per limit

# Words of a cell.
HASH = 0
STATE = 1
LINK = 4  # next cell of the chain + 1, and the key's size in bytes << 32
TAG = 5  # limit_id, unit << 16, kind << 32
KEY = 6
CELL = 8
INLINE = 16  # bytes of a key that fit into its cell
BLOCK = 8
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


def regions(max_keys: int, log_entries: int) -> Regions:
    """The layout of a file with these parameters."""
    heads_room = 1024
    while heads_room < max_keys:
        heads_room *= 2
    log_words = 4 + 2 * log_entries
    blocks_room = 4096 + 2 * max_keys
    journal = HEADER
    directory = journal + 2 * JOURNAL_ROOM
    heads = directory + DIRECTORY_ROOM
    cells = heads + heads_room
    blocks = cells + (max_keys + RESERVE) * CELL
    logs = blocks + blocks_room * BLOCK
    end = logs + (max_keys + RESERVE) * log_words
    return Regions(journal, directory, heads, cells, blocks, logs, end, heads_room - 1, log_words, blocks_room)
