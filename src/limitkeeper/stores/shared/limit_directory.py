"""The directory of a shared file: numbers for limits that mean the same in every process.

A limit (limiter, name, algorithm) has a `limit_id`, each rate under it a `unit`. Entries are only appended, under the file's
lock; every process reads those that it has not read yet.

    entry: kind (1 limit, 2 rate) · limit_id of a rate, overflow cells of a limit · time (µs) · bytes of the text · the text
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

from ...algorithms import Limit
from ...algorithms.limit_parser import parse_limit
from ...errors import ConfigurationError, StoreError
from ..cell_table import MOST_UNITS
from . import layout as lay
from .cell_table import SharedCellTable
from .mapped_file import MappedFile

LIMIT, RATE = 1, 2


class Entry(NamedTuple):
    """One entry; `limit` is that of a rate, `end` is where the next one begins, in words of the directory."""

    kind: int
    limit_id: int
    time_us: int
    text: str
    limit: Limit | None
    end: int


class LimitDirectory:
    """What this process has read of the directory. Callers hold the file's lock."""

    def __init__(self, path: str, file: MappedFile, table: SharedCellTable) -> None:
        self.path, self.file, self.table = path, file, table
        #: Where the next entry begins, and how many limits and rates come before it.
        self._read = (0, 0, 0)
        self._limit_ids: dict[str, int] = {}
        self._units: dict[tuple[int, str], int] = {}

    def numbers_of(self, identity: str, rate: str, now_us: int) -> tuple[int, int]:
        """(limit_id, unit), appended when they are new."""
        self.read()
        limit_id = self._limit_ids.get(identity) or self.append(LIMIT, 0, now_us, identity)
        return limit_id, self._units.get((limit_id, rate)) or self.append(RATE, limit_id, now_us, rate)

    def read(self) -> None:
        """Reads the entries that were appended since."""
        start, limits, rates = self._read
        for entry in entries(self.file, start, self.table.get(lay.DIRECTORY)):
            if entry.limit is None:  # each step gives the same again: a signal handler may raise after any of them, or call this
                self.table.births[limits : limits + 1] = [entry.time_us]
                self.table.entries[limits : limits + 1] = [self.file.plan.directory + start + 1]
                limits += 1
                self._limit_ids[entry.text] = limits
            else:
                self.table.units[rates : rates + 1] = [entry.limit]
                rates += 1
                self._units[entry.limit_id, entry.text] = rates
            start = entry.end
            self._read = max(self._read, (start, limits, rates))
        self.table.unread = False

    def append(self, kind: int, limit_id: int, time_us: int, text: str) -> int:
        """Appends an entry and returns its number."""
        data = text.encode()
        if kind == RATE:
            parse_limit(text)  # other processes must be able to read it
        used, base = self.table.get(lay.DIRECTORY), self.file.plan.directory
        size = 4 + (len(data) + 7) // 8
        if self._read[0] < used:
            raise StoreError(f"shared file {self.path!r}: its directory of limits is damaged; delete the file and restart")
        if used + size > lay.DIRECTORY_ROOM or len(self.table.units) >= MOST_UNITS:
            raise ConfigurationError(f"shared file {self.path!r}: its directory of limits is full; use several files")
        head = b"".join(number.to_bytes(8, "little") for number in (kind, limit_id, time_us, len(data)))
        padded = head + data.ljust((size - 4) * 8, b"\0")
        self.file.words[base + used : base + used + size] = memoryview(padded).cast("q")
        self.table.set(lay.DIRECTORY, used + size)
        self.read()
        return self._limit_ids[text] if kind == LIMIT else self._units[limit_id, text]


def entries(file: MappedFile, start: int, end: int) -> Iterator[Entry]:
    """The entries of a file's directory from `start` to `end`. A damaged one ends the iteration: those behind it would get other
    numbers, and cells the rates of other limits."""
    base = file.plan.directory
    end = min(end, lay.DIRECTORY_ROOM)
    while start + 4 <= end:
        kind, limit_id, time_us, size = file.words[base + start : base + start + 4].tolist()
        text_at, start = start + 4, start + 4 + (size + 7) // 8
        if kind not in (LIMIT, RATE) or min(limit_id, time_us, size) < 0 or start > end:
            return
        try:
            text = file.words[base + text_at : base + start].tobytes()[:size].decode()
            limit = parse_limit(text) if kind == RATE else None
            if limit is None:
                json.loads(text)
        except ValueError:  # also of UTF-8, of JSON, and of a limit
            return
        yield Entry(kind, limit_id, time_us, text, limit, start)
