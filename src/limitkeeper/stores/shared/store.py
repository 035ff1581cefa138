"""SharedStore: one limit for all worker processes of a host, without a server: a memory-mapped file, exact across processes.

    limiter = Limiter("100/s burst 200", store=SharedStore("/dev/shm/myapp-limits"))

A decision acquires the file's lock (one compare-and-swap), reads the clock, decides, records old values in the journal, writes
the new ones, and releases the lock. `kill -9` at any instant loses nothing but the call in flight (`journal.py`). The clock is
the monotonic one plus an offset to UTC that the file keeps, so all processes share one time. The file records whether it is
protected by the compare-and-swap or, without the compiled core or /proc, by the kernel's lock on a second file (`path.lock`).
"""

from __future__ import annotations

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
    from cython.cimports.limitkeeper.algorithms.limit import I64, Limit, State
    from cython.cimports.limitkeeper.decision import Decision
    from cython.cimports.limitkeeper.monotonic import monotonic_us
    from cython.cimports.limitkeeper.stores.cell_store import CellStore, blank
    from cython.cimports.limitkeeper.stores.cell_table import CHECKS_PER_INSERT, CHECKS_WHEN_FULL, SEVERAL
    from cython.cimports.limitkeeper.stores.several_rates_per_key import CellRates, LimitHandle
    from cython.cimports.limitkeeper.stores.shared import layout as lay
    from cython.cimports.limitkeeper.stores.shared.cell_table import SharedCellTable
    from cython.cimports.limitkeeper.stores.shared.journal import OwnerLock, publish, swap_word
else:
    from ...algorithms.claim import NamedLimit
    from ...algorithms.limit import I64, Limit, State
    from ...clock import monotonic_us
    from ...decision import Decision, fresh
    from ..cell_store import CellStore
    from ..cell_table import CHECKS_PER_INSERT, CHECKS_WHEN_FULL, SEVERAL
    from ..several_rates_per_key import CellRates, LimitHandle
    from . import layout as lay
    from .cell_table import SharedCellTable
    from .journal import OwnerLock, enter_section

from ...clock import Clock
from ...errors import ConfigurationError, StoreError
from ...garbage_collection import uncollected
from ...rate import MAX_COUNT, Duration, duration_us
from ..cell_store import turnover_us
from ..several_rates_per_key import UnitStates
from ..store_hash import FileHash
from .cell_table import LONGEST_KEY, shortened
from .journal import can_swap_words
from .limit_directory import RATE, LimitDirectory, entries
from .mapped_file import MappedFile

log = logging.getLogger("limitkeeper")
LONGEST_US = 86_400_000_000
#: Cells read in one critical section of `items`, fewer with logs, or checked in one of `sweep`: about a millisecond.
AT_A_TIME = 2048


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
        if (timeout_us := duration_us(timeout)) > LONGEST_US:
            raise ConfigurationError(f"timeout={timeout!r}: must be at most one day")
        super().__init__(clock, max_keys)
        self.path = os.path.abspath(os.fspath(path))
        self.spare = self.other = None
        self.cached_key: str | None = None
        self.cached_limit = self.cached_cell = self.hash = self.depth = self.waiting = self.inserted = 0
        self.in_change = self.closing = False
        self.atomic = can_swap_words()
        self._file: MappedFile | None = None
        file = MappedFile(self.path, max_keys, log_entries, lay.ATOMIC if self.atomic else lay.LOCK_FILE, timeout_us)
        try:
            self.table = table_of(file, max_keys)
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

    @property
    def never_waits(self) -> bool:
        return False

    def open_hash(self, name: str) -> FileHash:
        return FileHash(self.path, name)

    # The lock --------------------------------------------------------------------------------------------------

    @cython.cfunc
    def begin(self) -> cython.int:
        """Waits for the threads of this process and then for other processes, `timeout` in all."""
        if not cython.compiled:
            return enter_section(self)
        deadline_us: I64 = 0
        if not self._lock.acquire(False):
            deadline_us = monotonic_us() + self.file_lock.timeout_us
            if not self._lock.acquire(timeout=self.file_lock.timeout_us / 1e6):
                raise self.file_lock.timed_out()
        if self.depth == 0:
            self.waiting += 1
            try:
                if self._file is None:
                    raise self._closed_error()
                self.file_lock.acquire(deadline_us)
            except BaseException:
                self.waiting -= 1
                self._lock.release()
                if self.closing:
                    self.close()
                raise
            self.waiting -= 1
            self.cached_key = None
        self.depth += 1
        return 0

    @cython.cfunc
    def end(self) -> cython.int:
        self.depth -= 1
        dead: I64 = 0
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
        if limit.logs and file.log_entries < limit.count < MAX_COUNT:  # MAX_COUNT is not meant to be reached
            log.warning(
                "%s: %s keeps at most %d entries of %s at a time, and refuses what does not fit; log_entries=%d keeps more",
                self.path, named.limiter, file.log_entries, limit, min(limit.count, 4096),
            )  # fmt: skip
        if limit.logs:
            file.require_space(file.plan.end, f" with sliding logs of {file.log_entries} entries", "log_entries or max_keys")
        self.begin()
        try:
            limit_id, unit = self._directory.numbers_of(json.dumps(named.identity), limit.text, self.now())
            self.table.widen(turnover_us(limit))
            return LimitHandle(self, named, unit, self.table.births[limit_id - 1], None, limit_id)
        finally:
            self.end()

    @cython.cfunc
    def limit_at(self, handle: LimitHandle, unit: I64) -> Limit:
        if unit > len(self.table.units):  # of another process
            uncollected(self._directory.read)  # a finaliser could want the lock
        return self.table.units[unit - 1]

    def _adopt(self, old: MappedFile, max_keys: int) -> None:
        """Takes over the cells of a file from before a reboot; skips those that fail their check."""
        table: SharedCellTable = table_of(old, max_keys)
        try:
            table.mend(old.plan.end)
            for entry in entries(old, 0, old.words[lay.DIRECTORY]):
                self._directory.append(entry.kind, entry.limit_id if entry.kind == RATE else 0, entry.time_us, entry.text)
            self.table.adopt_all(table)
        finally:
            table.close()

    # Deciding --------------------------------------------------------------------------------------------------

    @cython.ccall
    def decide_one(self, named: NamedLimit, key: str, cost: I64, max_wait_us: I64, commit: cython.bint) -> Decision:
        handle: LimitHandle = named.handle if isinstance(named.handle, LimitHandle) else self.handle_of(named)
        if handle.store is not self:
            handle = self.handle_of(named)
        if self.table.unread:
            self.run_locked(self._directory.read)  # the limits that other processes have registered since
        decision: Decision
        if cython.compiled:
            decision = blank(self, handle)
        else:
            decision = fresh(handle.name)
        now_us: I64 = self.now() if self.system is None else 0
        if cython.compiled:  # noqa: SIM102 - the plain build must not look inside
            if self.atomic and self._file is not None and swap_word(self.table.words + lay.LOCK, 0, self.file_lock.owner):
                try:
                    self.cached_key = None
                    self.decide_cell(decision, handle, key, cost, max_wait_us, commit, now_us)
                finally:
                    if self.table.words[lay.JOURNAL]:
                        self.table.roll_back()
                    publish(self.table.words, lay.LOCK, 0)
                return decision
        self.begin()
        try:
            self.decide_cell(decision, handle, key, cost, max_wait_us, commit, now_us)
        finally:
            self.end()
        if not cython.compiled:
            decision.__class__ = Decision
        return decision

    @cython.cfunc
    def decide_cell(
        self, decision: Decision, handle: LimitHandle, key: str, cost: I64, max_wait_us: I64, commit: cython.bint, now_us: I64
    ) -> cython.int:
        """Under the lock; the system clock is read here: other processes may have decided while this one waited."""
        now_us = now_us if self.system is None else monotonic_us() + self.offset_us
        CellStore.decide_cell(self, decision, handle, key, cost, max_wait_us, commit, now_us)
        if decision.allowed and commit:
            self.sweep_sometimes(now_us)
        return 0

    @cython.cfunc
    def sweep_sometimes(self, now_us: I64) -> cython.int:
        """Every 64th call, checks a few other cells and removes those that are as new."""
        self.table.words[lay.LAST] = now_us
        self.table.words[lay.CALLS] += 1
        if self.table.words[lay.CALLS] & 63 == 0:
            self.cached_key = None
            self.table.sweep(16, now_us)
        return 0

    @cython.cfunc
    def sweep_inserted(self, now_us: I64) -> cython.int:
        """Checks four cells for each one inserted, so of n active keys at most n / 3 more are kept; between changes, because it
        commits."""
        if self.inserted > 0:
            self.cached_key = None
            self.table.sweep(CHECKS_PER_INSERT * self.inserted, now_us)
            self.inserted = 0
        return 0

    @cython.cfunc
    def charge(self, claims: list, max_wait_us: I64, commit: cython.bint, now_us: I64, not_before_us: I64) -> I64:
        """The charges of all claims are one change of the journal: a crash rolls back all of them."""
        if self.table.unread:
            self._directory.read()
        self.in_change = True
        try:
            start_us: I64 = CellStore.charge(self, claims, max_wait_us, commit, now_us, not_before_us)
            self.table.commit()
        except BaseException:
            if self.table.words[lay.JOURNAL]:  # the charges will be rolled back: the caller must not give them back
                for claim in claims:
                    claim.forget_charge()
            raise
        finally:
            self.in_change = False
        self.sweep_inserted(now_us)
        if start_us >= 0 and commit:
            self.sweep_sometimes(now_us)
        return start_us

    # Cells -----------------------------------------------------------------------------------------------------

    @cython.cfunc
    def is_full(self, handle: LimitHandle, key: str, needed: I64, now_us: I64) -> cython.bint:
        table: SharedCellTable = self.table
        if table.words[lay.LIVE] + needed <= table.max_keys or self.own_cell(handle, key):
            return False
        self.cached_key = None
        if table.words[lay.CHECKED] >= table.words[lay.HIGH]:
            if now_us < table.words[lay.SOONEST]:  # nothing can be as new yet
                return True
            table.unsettle()
        checks: cython.int = 0
        while checks < CHECKS_WHEN_FULL and table.words[lay.LIVE] + needed > table.max_keys:
            table.sweep(16, now_us)
            checks += 16
        return bool(table.words[lay.LIVE] + needed > table.max_keys)

    @cython.cfunc
    def unsettle(self) -> cython.int:
        return self.table.unsettle()

    @cython.cfunc
    def find(self, handle: LimitHandle, key: str, now_us: I64, full: cython.bint) -> I64:
        """The word at which the key's cell begins: its own, an overflow cell, or 0 for none."""
        table: SharedCellTable = self.table
        limit_id: I64 = handle.limit_id
        if self.cached_key is key and self.cached_limit == limit_id:  # looked up before in this critical section
            return self.cached_cell
        self.hash = table.hash_of(key, limit_id)
        cell: I64 = table.find(limit_id, key, self.hash)
        if cell:
            self.cached_key = key
            self.cached_limit = limit_id
            self.cached_cell = cell
        if cell or (table.words[lay.OVERFLOW_CELLS] == 0 and not full):
            return cell
        cell = table.overflow_cell(limit_id, key, now_us)
        if cell and (full or not table.is_new(cell, now_us)):
            return cell
        return 0

    @cython.cfunc
    def read(self, handle: LimitHandle, key: str, now_us: I64, full: cython.bint) -> State:
        table: SharedCellTable = self.table
        cell: I64 = self.find(handle, stored_key(key), now_us, full)
        if not cell:
            if full:
                table.words[lay.OVERFLOWS] += 1
            return handle.limit.unseen(handle.birth_us)
        if table.is_overflow(cell):
            table.words[lay.OVERFLOWS] += 1
            if table.is_new(cell, now_us):
                return handle.limit.unseen(handle.birth_us)
        unit: I64 = (table.words[cell + lay.TAG] >> 16) & 0xFFFF
        if handle.limit.logs:
            if unit != handle.unit:
                self.read_rates(handle, key, now_us, full)
            return (0, 0, table.log_at(table.words[cell + lay.STATE + 2]))
        if unit != handle.unit:
            return self.read_rates(handle, key, now_us, full)
        return (table.words[cell + lay.STATE], table.words[cell + lay.STATE + 1], table.words[cell + lay.STATE + 2])

    @cython.cfunc
    def can_keep(self, handle: LimitHandle, key: str, now_us: I64, full: cython.bint) -> cython.bint:
        cell: I64 = self.find(handle, stored_key(key), now_us, full)
        return cell > 0 and (self.table.unit_of(cell) == SEVERAL or self.table.has_blocks(lay.RATES_BLOCKS * lay.PAYLOAD))

    @cython.cfunc
    def last_unmarked_reset(self, number: I64) -> I64:
        self.table.words[lay.UNMARKED_RESET] = number or self.table.words[lay.UNMARKED_RESET]
        return self.table.words[lay.UNMARKED_RESET]  # type: ignore[no-any-return]

    @cython.cfunc
    def fetch_rates(self, handle: LimitHandle, key: str, now_us: I64, full: cython.bint) -> cython.int:
        cell: I64 = self.find(handle, stored_key(key), now_us, full)
        if not cell or (self.table.is_overflow(cell) and self.table.is_new(cell, now_us)):
            return 0
        if cython.compiled:
            self.rates = self.table.read_rates(cell)[0]
        else:
            self.rates = self.table.read_rates(cell)
        return 0

    @cython.cfunc
    def save_rates(self, handle: LimitHandle, key: str, now_us: I64, full: cython.bint) -> cython.int:
        table: SharedCellTable = self.table
        self.revision += 1
        if self.rates.n == 0 and self.rates.reset_id == 0:
            self.discard(handle, key)
            return 0
        text: str = stored_key(key)
        cell: I64 = self.find(handle, text, now_us, full)
        if not cell or (not full and table.is_overflow(cell)):
            cell = self.new_cell(handle, text, cell if self.rates.n > 0 else 0, now_us, full)
        stored: cython.bint = self.rates.n == 0 and table.is_overflow(cell)
        if stored:  # there was no room for a cell with the reset
            self.last_unmarked_reset(self.rates.reset_id)
        elif cython.compiled:
            stored = table.write_rates(cell, cython.address(self.rates), handle.limit.logs)
        else:
            stored = table.write_rates(cell, self.rates, handle.limit.logs)
        if not stored:  # no room for several: the state of this rate takes the place of the others
            self.last_unmarked_reset(self.rates.reset_id)
            if self.rates.n == 0:
                table.commit()
                self.discard(handle, key)
            for i in range(self.rates.n):
                if self.rates.unit[i] == handle.unit:
                    table.set_state(cell, handle.unit, self.rates.a[i], self.rates.b[i], self.rates.c[i])
            self.rates.n = 1
        if not self.in_change:
            table.commit()
        return 0

    @cython.cfunc
    def new_cell(self, handle: LimitHandle, text: str, shared: I64, now_us: I64, full: cython.bint) -> I64:
        """A new cell for the key that was looked for last, with the states of the overflow cell `shared`; in a full file that."""
        table: SharedCellTable = self.table
        cell: I64 = 0
        if not full:
            cell = table.insert(handle.limit_id, handle.unit, text, self.hash)
            self.inserted += 1
            if cell and shared:
                table.copy_cell(shared, cell, handle.limit.logs)
        if not cell:
            cell = shared or table.overflow_cell(handle.limit_id, text, now_us)
        return cell or table.insert_overflow_cell(handle.limit_id, handle.unit, text, now_us)

    @cython.cfunc
    def hold_mapping(self, handle: LimitHandle, key: str, start_us: I64, now_us: I64, full: cython.bint) -> cython.int:
        cell: I64 = self.find(handle, stored_key(key), now_us, full)
        if cell and self.table.is_overflow(cell) and self.table.words[lay.ERA_END] < start_us:
            self.table.words[lay.ERA_END] = start_us
        return 0

    @cython.cfunc
    def put(self, handle: LimitHandle, key: str, a: I64, b: I64, c: I64, now_us: I64, full: cython.bint) -> cython.int:
        table: SharedCellTable = self.table
        limit: Limit = handle.limit
        text: str = stored_key(key)
        cell: I64 = self.find(handle, text, now_us, full)
        if not cell or (not full and table.is_overflow(cell)):
            cell = self.new_cell(handle, text, cell, now_us, full)
        own: cython.bint = (table.words[cell + lay.TAG] >> 16) & 0xFFFF == handle.unit
        self.revision += 1
        if own and not limit.logs:
            table.set_state(cell, handle.unit, a, b, c)
        elif limit.logs:
            if b > 0:
                window: I64 = limit.window if own else self.log_window(handle, key, now_us, full, True)
                table.add(cell, a, b, now_us - window, now_us - limit.window)
        elif self.put_rate(handle, key, a, b, c, now_us, full):
            return 1
        if not self.in_change:
            table.commit()
            self.sweep_inserted(now_us)
        return 0

    @cython.cfunc
    def put_rate(self, handle: LimitHandle, key: str, a: I64, b: I64, c: I64, now_us: I64, full: cython.bint) -> cython.int:
        """When it returns 1 the change is still open: the other rates are part of it."""
        change: cython.bint = self.in_change
        self.in_change = True
        try:
            return CellRates.put_rate(self, handle, key, a, b, c, now_us, full)
        finally:
            self.in_change = change

    @cython.cfunc
    def expose(self, handle: LimitHandle, key: str, now_us: I64, full: cython.bint) -> cython.int:
        cell: I64 = self.find(handle, stored_key(key), now_us, full)
        return self.table.journal_log(self.table.words[cell + lay.STATE + 2]) if cell else 0

    @cython.cfunc
    def log_full_until(self, handle: LimitHandle, key: str, at: I64, retry: I64, now_us: I64) -> I64:
        full: cython.bint = self.table.words[lay.LIVE] >= self.table.max_keys
        cell: I64 = self.find(handle, stored_key(key), now_us, full)
        if not cell:
            return 0
        own: cython.bint = self.table.unit_of(cell) == handle.unit
        window: I64 = handle.limit.window if own else self.log_window(handle, key, now_us, full, False)
        return self.table.log_full_until(cell, at, window, handle.limit.window, retry, now_us)

    @cython.cfunc
    def own_cell(self, handle: LimitHandle, key: str) -> I64:
        """The key's own cell; 0 when there is none."""
        text: str = stored_key(key)
        return self.table.find(handle.limit_id, text, self.table.hash_of(text, handle.limit_id))

    def discard(self, handle: LimitHandle, key: str) -> None:
        cell: I64 = self.own_cell(handle, key)
        if cell:
            self.cached_key = None
            self.table.unsettle()
            self.table.remove(cell, handle.limit.logs)
            self.table.commit()

    def replace(self, handle: LimitHandle, key: str, state: Any, now_us: int) -> None:
        """Overwrites the state in place, as one change, so that a crash never leaves a key without a state. (A cell that is
        freed and reused within one change could not be rolled back.)"""
        if not handle.limit.logs:
            CellStore.replace(self, handle, key, state, now_us)
            return
        table: SharedCellTable = self.table
        text: str = stored_key(key)
        table.unsettle()
        full: cython.bint = self.is_full(handle, key, 1, now_us)
        cell: I64 = self.find(handle, text, now_us, full)
        if not full and (not cell or table.is_overflow(cell)):
            cell = table.insert(handle.limit_id, handle.unit, text, self.hash) or cell
            self.inserted += 1
        if not cell or table.is_overflow(cell):  # into an overflow cell, one entry at a time
            for moment, cost in state[0]:
                self.put(handle, key, moment, cost, 0, now_us, full)
            return
        self.log_window(handle, key, now_us, full, True)
        table.fill(cell, state[0])
        self.revision += 1
        table.commit()
        self.sweep_inserted(now_us)

    def pairs(self, handle: LimitHandle) -> list[tuple[str, UnitStates]]:
        found, end = dict[str, UnitStates](), self.table.get(lay.HIGH)
        while end > 0:  # in parts: other processes wait for the lock meanwhile; from the last cell on, because cells move down
            items, end = uncollected(self.run_locked, self._items_before, handle, end)
            found.update(items)
        return list(found.items())

    def _items_before(self, handle: LimitHandle, end: int) -> tuple[list[tuple[str, UnitStates]], int]:
        """The keys of a limit in the last cells before `end`, and where these begin."""
        self._directory.read()  # while locked: the caller looks up the limits of what it gets without the lock
        end = min(end, self.table.get(lay.HIGH))
        size: I64 = lay.CELL + self.table.log_words if handle.limit.logs else lay.CELL
        begin = max(0, end - max(1, AT_A_TIME * lay.CELL // size))
        return self.table.items_between(begin, end, handle.limit_id, handle.limit.logs), begin

    def states(self, handle: LimitHandle, key: str) -> UnitStates:
        cell: I64 = self.own_cell(handle, key)
        return self.table.states_of(cell, handle.limit.logs) if cell else []

    def sweep(self, budget: int = 1_000_000) -> None:
        """Removes idle keys now, instead of a few with each call; in parts: other processes wait for the lock meanwhile."""
        at = 0  # the last cell, which fills a gap, is checked after it
        for left in range(max(1, min(budget, self.table.get(lay.HIGH))), 0, -AT_A_TIME):
            at = self.run_locked(self._sweep_from, at, min(left, AT_A_TIME))

    def _sweep_from(self, at: int, budget: int) -> int:
        self._directory.read()
        self.cached_key, self.table.words[lay.CURSOR] = None, at
        self.table.sweep(budget, self.now())
        return self.table.get(lay.CURSOR)

    def _reset_after_fork(self) -> None:
        CellStore._reset_after_fork(self)
        self.depth, self.waiting, self.in_change, self.closing = 0, 0, False, False
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
        words = {"keys": lay.LIVE, "overflow": lay.OVERFLOWS, "takeovers": lay.TAKEOVERS, "log_full": lay.LOG_FULL}
        return {name: self.table.get(word) for name, word in words.items()}

    def __len__(self) -> int:
        return self.table.get(lay.LIVE)

    def close(self) -> None:
        """Closes the file, which stays for other processes and for the next start."""
        with self._lock:
            if self._file is None:
                return
            if self.depth > 0 or self.waiting:  # called by a signal handler in a call of this thread: close after that call
                self.closing = True
                return
            self.file_lock.wait_for_hot_path()
            file, self._file = self._file, None
            self.table.close()
            file.close()
            self.file_lock.close()


def table_of(file: MappedFile, max_keys: int) -> SharedCellTable:
    return SharedCellTable(file.memory, file.plan, max_keys, file.words[lay.SECRET], file.words[lay.SECRET + 1], file.fd)


@cython.cfunc
@cython.inline
def stored_key(key: str) -> str:
    """The key as stored."""
    return key if len(key) <= LONGEST_KEY else shortened(key)
