"""SharedStore: one limit for all worker processes of a host, without a server: a memory-mapped file, exact across processes.

    limiter = Limiter("100/s burst 200", store=SharedStore("/dev/shm/myapp-limits"))

A decision acquires the file's lock (one compare-and-swap), reads the clock, decides, records old values in the journal, writes
the new ones, and releases the lock. `kill -9` at any instant loses nothing but the call in flight: the next process rolls back
the unfinished change and takes over the lock (`owner_lock.py`). The clock is the machine's monotonic one plus an offset to UTC
that the file keeps, so all processes share one time, and steps of the wall clock have no effect.

Without the compiled core or /proc, the kernel's lock on a second file (`path.lock`) replaces the compare-and-swap. The file
records which of the two protects it; never both.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.algorithms.claim import NamedLimit
    from cython.cimports.limitkeeper.algorithms.limit import Limit, State
    from cython.cimports.limitkeeper.decision import Decision
    from cython.cimports.limitkeeper.monotonic import monotonic_us
    from cython.cimports.limitkeeper.stores.cell_store import CellStore, LimitHandle, blank
    from cython.cimports.limitkeeper.stores.shared import atomics
    from cython.cimports.limitkeeper.stores.shared import key_codec as codec
    from cython.cimports.limitkeeper.stores.shared import layout as lay
    from cython.cimports.limitkeeper.stores.shared.cell_table import SharedCellTable
    from cython.cimports.limitkeeper.stores.shared.owner_lock import OwnerLock
else:
    from ...algorithms.claim import NamedLimit
    from ...algorithms.limit import Limit, State
    from ...clock import monotonic_us
    from ...decision import Decision
    from ..cell_store import CellStore, LimitHandle, blank
    from . import atomics
    from . import key_codec as codec
    from . import layout as lay
    from .cell_table import SharedCellTable
    from .owner_lock import OwnerLock

    def row(handle: LimitHandle) -> SharedLimitHandle:
        assert isinstance(handle, SharedLimitHandle)
        return handle


from ...clock import Clock
from ...errors import ConfigurationError, StoreError
from ...rate import Duration, duration_us
from .limit_directory import LimitDirectory, entries
from .mapped_file import MappedFile
from .owner_lock import can_swap_words

log = logging.getLogger("limitkeeper")

#: The longest key in characters that is stored unchanged.
LONGEST = 16384
LONGEST_US = 86_400_000_000
#: Cells read in one critical section of `items`: about a millisecond.
AT_A_TIME = 2048


@cython.cclass
class SharedLimitHandle(LimitHandle):
    """A limit in a shared file: its number there, and since when the file knows it."""

    __slots__ = ("birth_us", "limit_id")

    def __init__(
        self,
        store: SharedStore,
        named: NamedLimit,
        limit_id: cython.longlong,
        birth_us: cython.longlong,
        unit: cython.int,
        since_us: cython.longlong,
    ) -> None:
        super().__init__(store, named, unit, since_us)
        self.limit_id = limit_id
        self.birth_us = birth_us


@cython.cclass
class SharedStore(CellStore):
    """`SharedStore("/dev/shm/limits")`: exact across the processes of a host. `max_keys` and `log_entries` (entries of a sliding
    log per key) belong to the file; `timeout` bounds the wait for a process that was stopped while it held the lock."""

    @cython.annotation_typing(False)
    def __init__(
        self,
        path: str | os.PathLike[str],
        max_keys: int = 100_000,
        log_entries: int = 256,
        timeout: Duration = 1.0,
        clock: Clock | None = None,
    ) -> None:
        for name, value, most in (("max_keys", max_keys, 2**31), ("log_entries", log_entries, 4096)):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise ConfigurationError(f"{name} must be an integer from 1 to {most}, got {value!r}")
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise ConfigurationError(f"expected the path of a file, such as '/dev/shm/limits', got {path!r}")
        timeout_us = duration_us(timeout)
        if timeout_us > LONGEST_US:
            raise ConfigurationError(f"timeout={timeout!r}: must be at most one day")
        super().__init__(clock)
        self.path = os.path.abspath(os.fspath(path))
        self.spare = self.other = None
        self.cached_key: str | None = None
        self.cached_limit = self.cached_cell = self.hash = 0
        self.in_change = self.closing = False
        self.depth = 0
        self.atomic = can_swap_words()
        self._file: MappedFile | None = None
        file = MappedFile(self.path, max_keys, log_entries, lay.ATOMIC if self.atomic else lay.LOCK_FILE)
        try:
            self.table = SharedCellTable(file.memory, file.plan, max_keys, file.words[lay.SECRET], file.words[lay.SECRET + 1])
        except BaseException:
            file.close()
            raise
        try:
            if self.system is not None:
                self.offset_us = file.words[lay.OFFSET]
            self._directory = LimitDirectory(self.path, file, self.table)
            self.file_lock = OwnerLock(self.path, self.table, timeout_us, self.atomic)
            if file.alone:
                self.table.roll_back()
                if file.old is not None:
                    self._adopt(file.old, max_keys)
            file.settle()
        except BaseException:
            self.table.close()
            file.close()
            raise
        self._file = file

    # The lock --------------------------------------------------------------------------------------------------

    @cython.cfunc
    def begin(self) -> cython.int:
        self._lock.acquire()
        if self.depth == 0:
            try:
                if self._file is None:
                    raise self._closed_error()
                self.file_lock.acquire()
            except BaseException:
                self._lock.release()
                raise
            self.cached_key = None
        self.depth += 1
        return 0

    @cython.cfunc
    def end(self) -> cython.int:
        self.depth -= 1
        dead: cython.longlong = 0
        closing: cython.bint = False
        try:
            if self.depth == 0:
                if self.table.words[lay.JOURNAL]:  # an exception interrupted the change
                    self.table.roll_back()
                self.file_lock.release()
                dead, closing = self.file_lock.dead_owner, self.closing
                self.file_lock.dead_owner = 0
        finally:
            self._lock.release()
        if dead:  # logged after the release: a log handler may use this store
            words = self.file_lock.restored
            log.info("%s: took over the lock of process %d, which died; rolled back %d words", self.path, dead >> 32, words)
        if closing:
            self.close()
        return 0

    def _closed_error(self) -> StoreError:
        return StoreError(f"the SharedStore on {self.path!r} is closed")

    # Limits ----------------------------------------------------------------------------------------------------

    def handle(self, named: NamedLimit) -> LimitHandle:
        limit, file = named.limit, self._file
        if file is None:
            raise self._closed_error()
        if limit.logs and limit.count > file.log_entries:
            log.warning(
                "%s: %s keeps at most %d entries of %s at a time, and refuses what does not fit; log_entries=%d keeps more",
                self.path, named.limiter, file.log_entries, limit, min(limit.count, 4096),
            )  # fmt: skip
        identity = json.dumps(named.identity)
        self.begin()
        try:
            limit_id, unit = self._directory.numbers_of(identity, limit.text, self.now())
            since_us = self._directory.since_us[unit - 1]
            return SharedLimitHandle(self, named, limit_id, self.table.births[limit_id - 1], unit, since_us)
        finally:
            self.end()

    def limit_of(self, handle: LimitHandle, unit: int) -> Limit:
        if unit > len(self.table.units):
            self._directory.read()
        return self.table.units[unit - 1]

    def _adopt(self, old: MappedFile, max_keys: int) -> None:
        """Takes over the cells of a file from before a reboot; skips those that fail their check."""
        table: SharedCellTable = SharedCellTable(old.memory, old.plan, max_keys, old.words[lay.SECRET], old.words[lay.SECRET + 1])
        try:
            table.mend(old.plan.end)
            for entry in entries(old, 0, old.words[lay.DIRECTORY]):
                self._directory.append(entry.kind, entry.limit_id, entry.time_us, entry.text)
            for i in range(min(table.get(lay.HIGH), max_keys + lay.RESERVE)):
                self._adopt_cell(table, old.plan.cells + i * lay.CELL)
        finally:
            table.close()

    def _adopt_cell(self, old: SharedCellTable, cell: cython.longlong) -> None:
        tag = old.get(cell + lay.TAG)
        limit_id, unit = tag & 0xFFFF, (tag >> 16) & 0xFFFF
        if not 0 < limit_id <= len(self.table.births) or not 0 < unit <= len(self.table.units) or tag >> 32 not in (1, 2, 4):
            return
        try:
            if old.is_whole(cell):
                self.table.adopt(limit_id, unit, old.key_of(cell), old.state_of(cell, self.table.units[unit - 1].logs))
        except (StoreError, ValueError, SystemError):
            self.table.roll_back()

    # Deciding --------------------------------------------------------------------------------------------------

    @cython.ccall
    def decide_one(
        self, named: NamedLimit, key: str, cost: cython.longlong, max_wait_us: cython.longlong, commit: cython.bint
    ) -> Decision:
        handle: LimitHandle = self.handle_of(named)
        decision: Decision = blank(self, handle)
        now_us: cython.longlong = 0
        if self.system is None:
            now_us = self.now()
        if cython.compiled:  # noqa: SIM102 - the plain build must not look inside
            if self.atomic and self._file is not None and atomics.swap_word(self.table.words + lay.LOCK, 0, self.file_lock.owner):
                try:
                    self.cached_key = None
                    if self.system is not None:
                        now_us = monotonic_us() + self.offset_us
                    if self.decide_cell(decision, handle, key, cost, max_wait_us, commit, now_us) >= 0 and commit:
                        self.sweep_sometimes(now_us)
                finally:
                    if self.table.words[lay.JOURNAL]:
                        self.table.roll_back()
                    atomics.publish(self.table.words, lay.LOCK, 0)
                return decision
        self.begin()
        try:
            if self.system is not None:
                now_us = self.now()
            if self.decide_cell(decision, handle, key, cost, max_wait_us, commit, now_us) >= 0 and commit:
                self.sweep_sometimes(now_us)
        finally:
            self.end()
        if not cython.compiled:
            decision.__class__ = Decision
        return decision

    @cython.cfunc
    def sweep_sometimes(self, now_us: cython.longlong) -> cython.int:
        """Every 64th call, checks a few other cells and removes those that are as new."""
        self.table.words[lay.LAST] = now_us
        self.table.words[lay.CALLS] += 1
        if self.table.words[lay.CALLS] & 63 == 0:
            self.cached_key = None
            self.table.sweep(16, now_us)
        return 0

    @cython.cfunc
    def charge(
        self,
        claims: list,  # type: ignore[type-arg]
        max_wait_us: cython.longlong,
        commit: cython.bint,
        now_us: cython.longlong,
        not_before_us: cython.longlong,
    ) -> cython.longlong:
        """The charges of all claims are one change of the journal: a crash rolls back all of them."""
        self.in_change = True
        try:
            start_us: cython.longlong = CellStore.charge(self, claims, max_wait_us, commit, now_us, not_before_us)
        finally:
            self.in_change = False
        self.table.commit()
        if start_us >= 0 and commit:
            self.sweep_sometimes(now_us)
        return start_us

    # Cells -----------------------------------------------------------------------------------------------------

    @cython.cfunc
    def is_full(self, handle: LimitHandle, needed: cython.longlong, now_us: cython.longlong) -> cython.bint:
        table: SharedCellTable = self.table
        if table.words[lay.LIVE] + needed <= table.max_keys:
            return False
        self.cached_key = None
        table.sweep(16, now_us)
        return bool(table.words[lay.LIVE] + needed > table.max_keys)

    @cython.cfunc
    def find(self, handle: LimitHandle, key: str, now_us: cython.longlong, full: cython.bint) -> cython.longlong:
        """The word at which the key's cell begins: its own, an overflow cell, or 0 for none."""
        table: SharedCellTable = self.table
        limit_id: cython.longlong = row(handle).limit_id
        if self.cached_key is key and self.cached_limit == limit_id:  # looked up before in this critical section
            return self.cached_cell
        self.hash = codec.hashed(key, table.secret, table.other, limit_id)
        cell: cython.longlong = table.find(limit_id, key, self.hash)
        if cell:
            self.cached_key = key
            self.cached_limit = limit_id
            self.cached_cell = cell
        if cell or (table.words[lay.OVERFLOW_CELLS] == 0 and not full):
            return cell
        cell = table.overflow_cell(limit_id, self.hash)
        if cell and (full or not table.is_new(cell, now_us)):
            return cell
        return 0

    @cython.cfunc
    def known(self, handle: LimitHandle, key: str, now_us: cython.longlong, full: cython.bint) -> cython.bint:
        return bool(self.find(handle, stored_key(key), now_us, full) != 0)

    @cython.cfunc
    def read(self, handle: LimitHandle, key: str, now_us: cython.longlong, full: cython.bint) -> State:
        table: SharedCellTable = self.table
        cell: cython.longlong = self.find(handle, stored_key(key), now_us, full)
        if not cell:
            if full:
                table.words[lay.OVERFLOWS] += 1
            return self.unseen_state(handle)
        if table.is_overflow(cell):
            table.words[lay.OVERFLOWS] += 1
            if table.is_new(cell, now_us):
                return self.unseen_state(handle)
        limit: Limit = handle.limit
        if limit.logs:
            return (0, 0, table.log_at(table.words[cell + lay.STATE + 2]))
        unit: cython.longlong = (table.words[cell + lay.TAG] >> 16) & 0xFFFF
        if unit == handle.unit:
            return (table.words[cell + lay.STATE], table.words[cell + lay.STATE + 1], table.words[cell + lay.STATE + 2])
        return self.converted(handle, cell, unit, now_us)

    @cython.cfunc
    def unseen_state(self, handle: LimitHandle) -> State:
        """The state of an unseen key."""
        return handle.limit.unseen(row(handle).birth_us)

    @cython.cfunc
    def converted(self, handle: LimitHandle, cell: cython.longlong, unit: cython.longlong, now_us: cython.longlong) -> State:
        """Converts a state written under another rate of this name. The collector is off: a finaliser could want the lock."""
        collecting = gc.isenabled()
        gc.disable()
        try:
            a, b, c = self.in_units(handle, unit, self.table.state_of(cell, False), now_us)
            return (a, b, c)
        finally:
            if collecting:
                gc.enable()

    @cython.cfunc
    def put(
        self,
        handle: LimitHandle,
        key: str,
        a: cython.longlong,
        b: cython.longlong,
        c: cython.longlong,
        now_us: cython.longlong,
        full: cython.bint,
    ) -> cython.int:
        table: SharedCellTable = self.table
        limit: Limit = handle.limit
        limit_id: cython.longlong = row(handle).limit_id
        text: str = stored_key(key)
        cell: cython.longlong = self.find(handle, text, now_us, full)
        if not cell and not full:
            cell = table.insert(limit_id, handle.unit, text, self.hash)
        if not cell:
            cell = table.overflow_cell(limit_id, self.hash)
            if not cell:
                cell = table.insert_overflow_cell(limit_id, handle.unit, self.hash)
        self.revision += 1
        tag: cython.longlong = table.words[cell + lay.TAG]
        unit: cython.longlong = handle.unit
        if (tag >> 16) & 0xFFFF != unit:
            table.change(cell + lay.TAG, (tag & 0xFFFF) | (unit << 16) | (tag >> 32 << 32))
        if not limit.logs:
            table.journal_state(cell + lay.STATE)
            table.words[cell + lay.STATE] = a
            table.words[cell + lay.STATE + 1] = b
            table.words[cell + lay.STATE + 2] = c
        elif b > 0:
            table.add(cell, a, b, now_us - limit.window)
        if not self.in_change:
            table.commit()
        return 0

    @cython.cfunc
    def expose(self, handle: LimitHandle, key: str, now_us: cython.longlong, full: cython.bint) -> cython.int:
        cell: cython.longlong = self.find(handle, stored_key(key), now_us, full)
        if cell and self.table.words[cell + lay.STATE + 2]:
            self.table.journal_log(self.table.words[cell + lay.STATE + 2])
        return 0

    @cython.cfunc
    def log_full_until(self, handle: LimitHandle, key: str, at: cython.longlong, now_us: cython.longlong) -> cython.longlong:
        cell: cython.longlong = self.find(handle, stored_key(key), now_us, self.table.words[lay.LIVE] >= self.table.max_keys)
        return self.table.log_full_until(cell, at, handle.limit.window, now_us) if cell else 0

    def discard(self, handle: LimitHandle, key: str) -> None:
        table: SharedCellTable = self.table
        limit_id: cython.longlong = row(handle).limit_id
        text: str = stored_key(key)
        cell: cython.longlong = table.find(limit_id, text, codec.hashed(text, table.secret, table.other, limit_id))
        if cell:
            self.cached_key = None
            table.remove(cell, handle.limit.logs)
            table.commit()

    def replace(self, handle: LimitHandle, key: str, state: Any, now_us: int) -> None:
        """Overwrites the state in~handle, as one change, so that a crash never leaves a key without a state. (A cell that is
        freed and reused within one change could not be rolled back.)"""
        if state is None:
            self.discard(handle, key)
        else:
            self.restore(handle, key, state, now_us)

    @cython.cfunc
    def restore(self, handle: LimitHandle, key: str, state: Any, now_us: cython.longlong) -> cython.int:
        if not handle.limit.logs:
            return CellStore.restore(self, handle, key, state, now_us)
        table: SharedCellTable = self.table
        text: str = stored_key(key)
        full: cython.bint = self.is_full(handle, 1, now_us)
        cell: cython.longlong = self.find(handle, text, now_us, full)
        if not cell and not full:
            cell = table.insert(row(handle).limit_id, handle.unit, text, self.hash)
        if not cell or table.is_overflow(cell):  # into an overflow cell, one entry at a time
            return CellStore.restore(self, handle, key, state, now_us)
        unit: cython.longlong = handle.unit
        tag: cython.longlong = table.words[cell + lay.TAG]
        table.change(cell + lay.TAG, (tag & 0xFFFF) | (unit << 16) | (tag >> 32 << 32))
        table.fill(cell, state[0])
        self.revision += 1
        return table.commit()

    def pairs(self, handle: LimitHandle) -> list[tuple[str, int, Any]]:
        table: SharedCellTable = self.table
        found: dict[str, tuple[int, Any]] = {}
        start = 0
        while start < table.get(lay.HIGH):  # in parts: other processes wait for the lock meanwhile
            self.begin()
            collecting = gc.isenabled()
            gc.disable()
            try:
                for i in range(start, min(start + AT_A_TIME, table.get(lay.HIGH))):
                    cell = table.cells + i * lay.CELL
                    tag = table.get(cell + lay.TAG)
                    if tag and tag & 0xFFFF == row(handle).limit_id and tag >> 32 != lay.OVERFLOW:
                        found[table.key_of(cell)] = ((tag >> 16) & 0xFFFF, table.state_of(cell, handle.limit.logs))
            finally:
                if collecting:
                    gc.enable()
                self.end()
            start += AT_A_TIME
        return [(key, unit, state) for key, (unit, state) in found.items()]

    def saved(self, handle: LimitHandle, key: str, now_us: int) -> Any:
        table: SharedCellTable = self.table
        limit_id: cython.longlong = row(handle).limit_id
        text: str = stored_key(key)
        cell: cython.longlong = table.find(limit_id, text, codec.hashed(text, table.secret, table.other, limit_id))
        if not cell:
            return None
        return self.in_units(
            handle, (table.words[cell + lay.TAG] >> 16) & 0xFFFF, table.state_of(cell, handle.limit.logs), now_us
        )

    def sweep(self, budget: int = 1_000_000) -> None:
        """Removes idle keys now, instead of a few with each call."""
        self.begin()
        try:
            self._directory.read()
            self.cached_key = None
            self.table.sweep(budget, self.now())
        finally:
            self.end()

    def _reset_after_fork(self) -> None:
        CellStore._reset_after_fork(self)
        self.in_change = self.closing = False
        self.depth = 0
        if self._file is not None:
            self.file_lock.identify()

    def answers_within(self, budget_us: int) -> bool:
        """Bounds every wait for the lock, also for a process that was stopped while it held it."""
        self.file_lock.timeout_us = min(self.file_lock.timeout_us, max(1000, budget_us))
        return True

    @property
    def overflow(self) -> int:
        return self.table.get(lay.OVERFLOWS)

    def stats(self) -> dict[str, int]:
        """Counters of the file: live keys, decisions on overflow cells, locks taken over, refusals because a log was full."""
        if self._file is None:
            raise self._closed_error()
        words = {"keys": lay.LIVE, "overflow": lay.OVERFLOWS, "takeovers": lay.TAKEOVERS, "crowded": lay.LOG_FULL}
        return {name: self.table.get(word) for name, word in words.items()}

    def __len__(self) -> int:
        return self.table.get(lay.LIVE)

    def close(self) -> None:
        """Closes the file, which stays for other processes and for the next start."""
        with self._lock:
            if self._file is None:
                return
            if self.depth > 0:  # called by a signal handler in the middle of a call of this thread: close after that call
                self.closing = True
                return
            self.file_lock.wait_for_hot_path()
            file, self._file = self._file, None
            self.table.close()
            file.close()
            self.file_lock.close()


@cython.cfunc
@cython.inline
def stored_key(key: str) -> str:
    """The key as stored: unchanged up to LONGEST characters, else a prefix and a digest."""
    if len(key) <= LONGEST:
        return key
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=24).hexdigest()
    return f"{key[:64]}…{digest}"
