"""The lock of a shared file, and the limits that live in it.

The lock is a word: free, or the process that holds it. Whoever waits longer than a moment looks whether that process still
lives; a dead one's unfinished change is taken back and its lock taken over. A process that is alive but stopped is not robbed:
others give up after `timeout`. Threads of this process wait for each other on a lock of their own, except on the quick way
(`SharedStore.one`), which holds the word only while nothing else of this process can run.

The directory gives limits numbers that mean the same in every process: a table for (limiter, name, algorithm), units for each
rate under it. It is only ever appended to, under the lock; every process reads what it has not read yet.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterator
from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.algorithms.claim import NamedLimit
    from cython.cimports.limitkeeper.algorithms.limit import Limit
    from cython.cimports.limitkeeper.monotonic import monotonic_us
    from cython.cimports.limitkeeper.stores.cell_store import CellStore, LimitHandle
    from cython.cimports.limitkeeper.stores.shared import key_codec as w
    from cython.cimports.limitkeeper.stores.shared import layout as lay
    from cython.cimports.limitkeeper.stores.shared.cell_table import SharedCellTable
else:
    from ...algorithms.claim import NamedLimit
    from ...algorithms.limit import Limit
    from ...clock import monotonic_us
    from ..cell_store import CellStore, LimitHandle
    from . import key_codec as w
    from . import layout as lay
    from .cell_table import SharedCellTable

from ...algorithms.limit_parser import parse_limit
from ...clock import SYSTEM, Clock
from ...errors import ConfigurationError, StoreError, StoreTimeout, StoreUnavailable
from .lock_owner import has_proc, is_alive, word_of

log = logging.getLogger("limitkeeper")


@cython.cclass
class RowHandle(LimitHandle):
    """A place in a shared file: the number of its table there."""

    __slots__ = ("birth_us", "table")

    def __init__(
        self,
        store: LockedFile,
        named: NamedLimit,
        table: cython.longlong,
        birth_us: cython.longlong,
        unit: cython.int,
        since_us: cython.longlong,
    ) -> None:
        super().__init__(store, named, unit, since_us)
        self.table = table
        self.birth_us = birth_us


@cython.cclass
class LockedFile(CellStore):
    """A store in a file that is held by one process at a time."""

    @cython.annotation_typing(False)
    def __init__(self, path: str, timeout_us: int, clock: Clock | None) -> None:
        self._mapped: Any = None
        super().__init__(clock)
        self.path, self.timeout_us = path, timeout_us
        self.spare = self.other = None
        self.atomic = cython.compiled and atomics() and has_proc()
        self.closing = False
        self.dead = self.undone = 0
        self.seen: str | None = None
        self.seen_table = self.seen_cell = 0

    def _open_sheet(self, mapped: Any, max_keys: int) -> None:
        """Begins to use a file, which nobody else can come into yet if this process found it alone."""
        words = mapped.words
        self._lock_fd = -1
        self.me = self.depth = 0
        self._known = 0
        self._tables: dict[str, int] = {}
        self._units: dict[tuple[int, str], int] = {}
        self._since: list[int] = []
        self.sheet = SharedCellTable(mapped.memory, mapped.plan, max_keys, words[lay.SECRET], words[lay.SECRET + 1])
        if self.system is not None:
            self.offset_us = words[lay.OFFSET]
        self._mapped = mapped
        self._introduce()

    def _introduce(self) -> None:
        """Who this process is, for others who wait for its lock."""
        self.depth = 0
        if self.atomic:
            self.me = word_of(os.getpid())
        else:
            if self._lock_fd >= 0:
                os.close(self._lock_fd)
            try:
                self._lock_fd = os.open(self.path + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                self._lock_fd = -1
                raise StoreUnavailable(f"lock file {self.path + '.lock'!r}: {error}; it must be writable") from error

    # The lock --------------------------------------------------------------------------------------------------

    @cython.cfunc
    def begin(self) -> cython.int:
        self._lock.acquire()
        if self.depth == 0:
            try:
                self.take()
            except BaseException:
                self._lock.release()
                raise
            self.seen = None
        self.depth += 1
        return 0

    @cython.cfunc
    def end(self) -> cython.int:
        self.depth -= 1
        owner: cython.longlong = 0
        undone: cython.longlong = 0
        closing: cython.bint = False
        try:
            if self.depth == 0:
                if self.sheet.words[lay.JOURNAL]:  # an exception came in between
                    self.sheet.roll_back()
                self.leave()
                owner, undone, closing = self.dead, self.undone, self.closing
                self.dead = 0
        finally:
            self._lock.release()
        if owner:  # told only now: whoever listens may want the lock
            log.info("%s: took over the lock of process %d, which died; %d words put back", self.path, owner >> 32, undone)
        if closing:
            self.close()
        return 0

    @cython.cfunc
    def take(self) -> cython.int:
        """Waits for the lock; a dead holder's is taken over."""
        if self._mapped is None:
            raise self._is_closed()
        if not self.atomic:
            return self.take_file()
        deadline_us: cython.longlong = monotonic_us() + self.timeout_us
        turns: cython.int = 0
        while True:
            if cython.compiled:
                word: cython.p_longlong = self.sheet.words + lay.LOCK
                me: cython.longlong = self.me
                won: cython.bint
                with cython.nogil:
                    won = w.spin_for(word, me, 640)
                if won:
                    return 0
                owner: cython.longlong = w.load_word(word)
                if turns > 0 and owner and not is_alive(owner) and w.swap_word(word, owner, me):
                    self.sheet.words[lay.TAKEOVERS] += 1
                    self.dead, self.undone = owner, self.sheet.roll_back()
                    return 0
            if monotonic_us() > deadline_us:
                raise StoreTimeout(
                    f"shared file {self.path!r}: process {self.sheet.get(lay.LOCK) >> 32} has held the lock for "
                    f"{self.timeout_us / 1e6:g} s and is alive; is it stopped?"
                )
            SYSTEM.sleep(0.00005 if turns < 20 else 0.001)
            turns += 1

    def _is_closed(self) -> StoreError:
        return StoreError(f"the SharedStore on {self.path!r} is closed")

    def _wait_for_threads(self) -> None:
        """Waits while another thread is on the quick way, which holds nothing but the file's lock."""
        deadline_us = monotonic_us() + self.timeout_us
        while self.me and self.sheet.get(lay.LOCK) == self.me:
            if monotonic_us() > deadline_us:
                raise StoreError(f"the SharedStore on {self.path!r} can't be closed in the middle of a decision")
            SYSTEM.sleep(0.00005)

    def take_file(self) -> int:
        """The kernel's lock on a second file: let go of when its holder dies, however it dies."""
        deadline_us = monotonic_us() + self.timeout_us
        pause = 0.00002
        while True:
            try:
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if monotonic_us() > deadline_us:
                    raise StoreTimeout(
                        f"shared file {self.path!r}: another process has held the lock for {self.timeout_us / 1e6:g} s; "
                        "is it stopped?"
                    ) from None
            SYSTEM.sleep(pause)
            pause = min(pause * 2, 0.001)
        if self.sheet.words[lay.JOURNAL]:
            self.sheet.set(lay.TAKEOVERS, self.sheet.get(lay.TAKEOVERS) + 1)
            self.sheet.roll_back()
        return 0

    @cython.cfunc
    def leave(self) -> cython.int:
        if self.atomic:
            w.publish(self.sheet.words, lay.LOCK, 0)
        else:
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
        return 0

    # The directory ---------------------------------------------------------------------------------------------

    def place(self, named: NamedLimit) -> LimitHandle:
        limit, mapped = named.limit, self._mapped
        if mapped is None:
            raise self._is_closed()
        if limit.logs and limit.count > mapped.log_entries:
            log.warning(
                "%s: %s keeps at most %d entries of %s at a time, and refuses what does not fit; log_entries=%d keeps more",
                self.path, named.limiter, mapped.log_entries, limit, min(limit.count, 4096),
            )  # fmt: skip
        identity = json.dumps(named.identity)
        self.begin()
        try:
            now_us = self.now()
            self.learn()
            table = self._tables.get(identity) or self._enter(1, 0, now_us, identity)
            unit = self._units.get((table, limit.text)) or self._enter(2, table, now_us, limit.text)
            return RowHandle(self, named, table, self.sheet.births[table - 1], unit, self._since[unit - 1])
        finally:
            self.end()

    def _enter(self, kind: int, table: int, now_us: int, text: str) -> int:
        """Appends an entry to the directory: a table (1), or the units of a limit (2)."""
        data = text.encode()
        if kind == 2:
            parse_limit(text)  # what nobody can read must not get in
        used, base = self.sheet.get(lay.DIRECTORY), self._mapped.plan.directory
        size = 4 + (len(data) + 7) // 8
        if used + size > lay.DIRECTORY_ROOM or len(self.sheet.units) >= 0xFFFF:
            raise ConfigurationError(f"shared file {self.path!r}: its directory of limits is full; use several files")
        words = self._mapped.words
        words[base + used : base + used + 4] = memoryview(
            b"".join(n.to_bytes(8, "little") for n in (kind, table, now_us, len(data)))
        ).cast("q")
        padded = data.ljust((size - 4) * 8, b"\0")
        words[base + used + 4 : base + used + size] = memoryview(padded).cast("q")
        self.sheet.set(lay.DIRECTORY, used + size)
        self.learn()
        return len(self.sheet.births) if kind == 1 else len(self.sheet.units)

    def learn(self) -> None:
        """Reads what was appended to the directory since."""
        end = self.sheet.get(lay.DIRECTORY)
        for kind, table, moment, text, following in entries(self._mapped, self._known, end):
            limit = parse_limit(text) if kind == 2 else None  # may be interrupted; what follows is done once, or not at all
            if limit is None:
                self.sheet.births.append(moment)
                self._tables[text] = len(self.sheet.births)
            else:
                self.sheet.units.append(limit)
                self._since.append(moment)
                self._units[table, text] = len(self.sheet.units)
            self._known = following

    def limit_of(self, place: LimitHandle, unit: int) -> Limit:
        if unit > len(self.sheet.units):
            self.learn()
        return self.sheet.units[unit - 1]

    def _bring_over(self, old: Any, max_keys: int) -> None:
        """Takes over the cells of a file from before the machine was started anew; what does not check out is left behind."""
        sheet: SharedCellTable = SharedCellTable(old.memory, old.plan, max_keys, old.words[lay.SECRET], old.words[lay.SECRET + 1])
        try:
            sheet.mend(old.plan.end)
            for kind, table, moment, text, _ in entries(old, 0, old.words[lay.DIRECTORY]):
                self._enter(kind, table, moment, text)
            for i in range(min(sheet.get(lay.HIGH), max_keys + lay.RESERVE)):
                self._bring_cell(sheet, old.plan.cells + i * lay.CELL)
        finally:
            sheet.close()

    def _bring_cell(self, old: SharedCellTable, cell: cython.longlong) -> None:
        tag = old.get(cell + lay.TAG)
        table, unit = tag & 0xFFFF, (tag >> 16) & 0xFFFF
        if not 0 < table <= len(self.sheet.births) or not 0 < unit <= len(self.sheet.units) or tag >> 32 not in (1, 2, 4):
            return
        try:
            if old.is_whole(cell):
                self.sheet.adopt(table, unit, old.key_of(cell), old.state_of(cell, self.sheet.units[unit - 1].logs))
        except (StoreError, ValueError, SystemError):
            self.sheet.roll_back()

    def _reset_after_fork(self) -> None:
        CellStore._reset_after_fork(self)
        self.closing = False
        if self._mapped is not None:
            self._introduce()


def entries(mapped: Any, start: int, end: int) -> Iterator[tuple[int, int, int, str, int]]:
    """What stands in a file's directory: (kind, table, moment, text, where the next begins). What can't be read ends it."""
    base = mapped.plan.directory
    while start < min(end, lay.DIRECTORY_ROOM):
        kind, table, moment, size = mapped.words[base + start : base + start + 4].tolist()
        count = (size + 7) // 8
        data = mapped.words[base + start + 4 : base + start + 4 + count].tobytes()[:size]
        start += 4 + count
        try:
            yield kind, table, moment, data.decode(), start
        except UnicodeDecodeError:
            return


def atomics() -> bool:
    """Whether this build can compare and swap a word of a file."""
    if cython.compiled:
        return bool(w.HAS_ATOMICS)
    return False
