"""SharedStore: one limit for all worker processes of a host, without a server. A memory-mapped file, exact across processes.

    limiter = Limiter("100/s burst 200", store=SharedStore("/dev/shm/myapp-limits"))

A decision takes the file's lock (one compare-and-swap), reads the clock, decides, notes what it changes in the journal,
changes it, and lets go. Whoever waits longer than a moment looks whether the holder still lives; a dead holder's unfinished
change is taken back and its lock taken over, so `kill -9` at any instant costs nobody anything but the call in flight. The
clock is the machine's monotonic one plus an offset to UTC that the file keeps: all processes share one time, and no step of
the wall clock reaches it.

Where the package is not compiled, or there is no /proc, the kernel's lock on a second file (`path.lock`) takes the place of the
compare-and-swap. The file says which of the two it is used with; never both.
"""

from __future__ import annotations

import gc
import hashlib
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
    from cython.cimports.limitkeeper.stores.shared import key_codec as w
    from cython.cimports.limitkeeper.stores.shared import layout as lay
    from cython.cimports.limitkeeper.stores.shared.cell_table import SharedCellTable
    from cython.cimports.limitkeeper.stores.shared.locked_file import LockedFile
else:
    from ...algorithms.claim import NamedLimit
    from ...algorithms.limit import Limit, State
    from ...clock import monotonic_us
    from ...decision import Decision
    from ..cell_store import CellStore, LimitHandle, blank
    from . import key_codec as w
    from . import layout as lay
    from .cell_table import SharedCellTable
    from .locked_file import LockedFile

    def row(place: LimitHandle) -> Any:
        """A place in a shared file."""
        return place


from ...clock import Clock
from ...errors import ConfigurationError
from ...rate import Duration, duration_us
from .mapped_file import MappedFile

#: Characters of a key that are kept as they are; of a longer one, its beginning and a digest.
LONGEST = 16384
LONGEST_US = 86_400_000_000
#: Cells that are read in one go when all of them are: about a millisecond.
AT_A_TIME = 2048


@cython.cclass
class SharedStore(LockedFile):
    """`SharedStore("/dev/shm/limits")`: exact across the processes of a host. `max_keys` and `log_entries` (places of a
    sliding log per key) belong to the file; `timeout` is how long a call waits for a process that was stopped while it held
    the lock."""

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
                raise ConfigurationError(f"{name} must be a whole number from 1 to {most}, not {value!r}")
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise ConfigurationError(f"a SharedStore needs the path of a file, such as '/dev/shm/limits', not {path!r}")
        timeout_us = duration_us(timeout)
        if timeout_us > LONGEST_US:
            raise ConfigurationError(f"timeout={timeout!r}: write at most a day")
        super().__init__(os.path.abspath(os.fspath(path)), timeout_us, clock)
        self.holding = False
        self.hash = 0
        mapped = MappedFile(self.path, max_keys, log_entries, lay.ATOMIC if self.atomic else lay.LOCK_FILE)
        try:
            self._open_sheet(mapped, max_keys)
            if mapped.alone:
                self.sheet.roll_back()
                if mapped.old is not None:
                    self._bring_over(mapped.old, max_keys)
            mapped.settle()
        except BaseException:
            mapped.close() if self._mapped is None else self.close()
            raise

    # Deciding --------------------------------------------------------------------------------------------------

    @cython.ccall
    def decide_one(
        self, named: NamedLimit, key: str, cost: cython.longlong, max_wait_us: cython.longlong, commit: cython.bint
    ) -> Decision:
        place: LimitHandle = self.place_of(named)
        decision: Decision = blank(self, place)
        now_us: cython.longlong = 0
        if self.system is None:
            now_us = self.now()
        if cython.compiled:  # noqa: SIM102 - the plain build must not look inside
            if self.atomic and self._mapped is not None and w.swap_word(self.sheet.words + lay.LOCK, 0, self.me):
                try:
                    self.seen = None
                    if self.system is not None:
                        now_us = monotonic_us() + self.offset_us
                    if self.decide_cell(decision, place, key, cost, max_wait_us, commit, now_us) >= 0 and commit:
                        self.tidy(now_us)
                finally:
                    if self.sheet.words[lay.JOURNAL]:
                        self.sheet.roll_back()
                    w.publish(self.sheet.words, lay.LOCK, 0)
                return decision
        self.begin()
        try:
            if self.system is not None:
                now_us = self.now()
            if self.decide_cell(decision, place, key, cost, max_wait_us, commit, now_us) >= 0 and commit:
                self.tidy(now_us)
        finally:
            self.end()
        if not cython.compiled:
            decision.__class__ = Decision
        return decision

    @cython.cfunc
    def tidy(self, now_us: cython.longlong) -> cython.int:
        """Now and then looks at a few other cells, to forget those that are as new."""
        self.sheet.words[lay.LAST] = now_us
        self.sheet.words[lay.CALLS] += 1
        if self.sheet.words[lay.CALLS] & 63 == 0:
            self.seen = None
            self.sheet.sweep(16, now_us)
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
        """All of it is one change: whoever finds it half made takes all of it back."""
        self.holding = True
        try:
            start_us: cython.longlong = CellStore.charge(self, claims, max_wait_us, commit, now_us, not_before_us)
        finally:
            self.holding = False
        self.sheet.commit()
        if start_us >= 0 and commit:
            self.tidy(now_us)
        return start_us

    # Cells -----------------------------------------------------------------------------------------------------

    @cython.cfunc
    def is_full(self, place: LimitHandle, needed: cython.longlong, now_us: cython.longlong) -> cython.bint:
        sheet: SharedCellTable = self.sheet
        if sheet.words[lay.LIVE] + needed <= sheet.max_keys:
            return False
        self.seen = None
        sheet.sweep(16, now_us)
        return bool(sheet.words[lay.LIVE] + needed > sheet.max_keys)

    @cython.cfunc
    def find(self, place: LimitHandle, key: str, now_us: cython.longlong, full: cython.bint) -> cython.longlong:
        """The word at which the key's cell begins: its own, one that strangers share, or 0 for none."""
        sheet: SharedCellTable = self.sheet
        table: cython.longlong = row(place).table
        if self.seen is key and self.seen_table == table:  # found a moment ago, and the lock is still held
            return self.seen_cell
        self.hash = w.hashed(key, sheet.secret, sheet.other, table)
        cell: cython.longlong = sheet.find(table, key, self.hash)
        if cell:
            self.seen = key
            self.seen_table = table
            self.seen_cell = cell
        if cell or (sheet.words[lay.STRANGE] == 0 and not full):
            return cell
        cell = sheet.stranger(table, self.hash)
        if cell and (full or not sheet.is_new(cell, now_us)):
            return cell
        return 0

    @cython.cfunc
    def known(self, place: LimitHandle, key: str, now_us: cython.longlong, full: cython.bint) -> cython.bint:
        return bool(self.find(place, shortened(key), now_us, full) != 0)

    @cython.cfunc
    def read(self, place: LimitHandle, key: str, now_us: cython.longlong, full: cython.bint) -> State:
        sheet: SharedCellTable = self.sheet
        cell: cython.longlong = self.find(place, shortened(key), now_us, full)
        if not cell:
            if full:
                sheet.words[lay.STRANGERS] += 1
            return self.first(place)
        if sheet.is_shared(cell):
            sheet.words[lay.STRANGERS] += 1
            if sheet.is_new(cell, now_us):
                return self.first(place)
        limit: Limit = place.limit
        if limit.logs:
            return (0, 0, sheet.log_at(sheet.words[cell + lay.STATE + 2]))
        unit: cython.longlong = (sheet.words[cell + lay.TAG] >> 16) & 0xFFFF
        if unit == place.unit:
            return (sheet.words[cell + lay.STATE], sheet.words[cell + lay.STATE + 1], sheet.words[cell + lay.STATE + 2])
        return self.converted(place, cell, unit, now_us)

    @cython.cfunc
    def first(self, place: LimitHandle) -> State:
        """What an unseen key has."""
        return place.limit.unseen(row(place).birth_us)

    @cython.cfunc
    def converted(self, place: LimitHandle, cell: cython.longlong, unit: cython.longlong, now_us: cython.longlong) -> State:
        """A state written under another rate of this name; no finaliser may run meanwhile, it could want the lock."""
        collecting = gc.isenabled()
        gc.disable()
        try:
            a, b, c = self.in_units(place, unit, self.sheet.state_of(cell, False), now_us)
            return (a, b, c)
        finally:
            if collecting:
                gc.enable()

    @cython.cfunc
    def put(
        self,
        place: LimitHandle,
        key: str,
        a: cython.longlong,
        b: cython.longlong,
        c: cython.longlong,
        now_us: cython.longlong,
        full: cython.bint,
    ) -> cython.int:
        sheet: SharedCellTable = self.sheet
        limit: Limit = place.limit
        table: cython.longlong = row(place).table
        text: str = shortened(key)
        cell: cython.longlong = self.find(place, text, now_us, full)
        if not cell and not full:
            cell = sheet.insert(table, place.unit, text, self.hash)
        if not cell:
            cell = sheet.stranger(table, self.hash)
            if not cell:
                cell = sheet.insert_stranger(table, place.unit, self.hash)
        self.revision += 1
        tag: cython.longlong = sheet.words[cell + lay.TAG]
        unit: cython.longlong = place.unit
        if (tag >> 16) & 0xFFFF != unit:
            sheet.change(cell + lay.TAG, (tag & 0xFFFF) | (unit << 16) | (tag >> 32 << 32))
        if not limit.logs:
            sheet.note_state(cell + lay.STATE)
            sheet.words[cell + lay.STATE] = a
            sheet.words[cell + lay.STATE + 1] = b
            sheet.words[cell + lay.STATE + 2] = c
        elif b > 0:
            sheet.add(cell, a, b, now_us - limit.window)
        if not self.holding:
            sheet.commit()
        return 0

    @cython.cfunc
    def expose(self, place: LimitHandle, key: str, now_us: cython.longlong, full: cython.bint) -> cython.int:
        cell: cython.longlong = self.find(place, shortened(key), now_us, full)
        if cell and self.sheet.words[cell + lay.STATE + 2]:
            self.sheet.note_log(self.sheet.words[cell + lay.STATE + 2])
        return 0

    @cython.cfunc
    def crowded_until(self, place: LimitHandle, key: str, at: cython.longlong, now_us: cython.longlong) -> cython.longlong:
        cell: cython.longlong = self.find(place, shortened(key), now_us, self.sheet.words[lay.LIVE] >= self.sheet.max_keys)
        return self.sheet.crowded_until(cell, at, place.limit.window, now_us) if cell else 0

    def discard(self, place: LimitHandle, key: str) -> None:
        sheet: SharedCellTable = self.sheet
        table: cython.longlong = row(place).table
        text: str = shortened(key)
        cell: cython.longlong = sheet.find(table, text, w.hashed(text, sheet.secret, sheet.other, table))
        if cell:
            self.seen = None
            sheet.remove(cell, place.limit.logs)
            sheet.commit()

    def replace(self, place: LimitHandle, key: str, state: Any, now_us: int) -> None:
        """Written over what is there, as one change: nobody who dies in between leaves a key without a state. (What is
        forgotten and used again within one change could not be taken back.)"""
        if state is None:
            self.discard(place, key)
        else:
            self.restore(place, key, state, now_us)

    @cython.cfunc
    def restore(self, place: LimitHandle, key: str, state: Any, now_us: cython.longlong) -> cython.int:
        if not place.limit.logs:
            return LockedFile.restore(self, place, key, state, now_us)
        sheet: SharedCellTable = self.sheet
        text: str = shortened(key)
        full: cython.bint = self.is_full(place, 1, now_us)
        cell: cython.longlong = self.find(place, text, now_us, full)
        if not cell and not full:
            cell = sheet.insert(row(place).table, place.unit, text, self.hash)
        if not cell or sheet.is_shared(cell):  # onto what strangers share, an entry at a time
            return LockedFile.restore(self, place, key, state, now_us)
        unit: cython.longlong = place.unit
        tag: cython.longlong = sheet.words[cell + lay.TAG]
        sheet.change(cell + lay.TAG, (tag & 0xFFFF) | (unit << 16) | (tag >> 32 << 32))
        sheet.fill(cell, state[0])
        self.revision += 1
        return sheet.commit()

    def pairs(self, place: LimitHandle) -> list[tuple[str, int, Any]]:
        sheet: SharedCellTable = self.sheet
        found: dict[str, tuple[int, Any]] = {}
        start = 0
        while start < sheet.get(lay.HIGH):  # a part at a time: others wait for the lock meanwhile
            self.begin()
            collecting = gc.isenabled()
            gc.disable()
            try:
                for i in range(start, min(start + AT_A_TIME, sheet.get(lay.HIGH))):
                    cell = sheet.cells + i * lay.CELL
                    tag = sheet.get(cell + lay.TAG)
                    if tag and tag & 0xFFFF == row(place).table and tag >> 32 != lay.STRANGER:
                        found[sheet.key_of(cell)] = ((tag >> 16) & 0xFFFF, sheet.state_of(cell, place.limit.logs))
            finally:
                if collecting:
                    gc.enable()
                self.end()
            start += AT_A_TIME
        return [(key, unit, state) for key, (unit, state) in found.items()]

    def saved(self, place: LimitHandle, key: str, now_us: int) -> Any:
        sheet: SharedCellTable = self.sheet
        table: cython.longlong = row(place).table
        text: str = shortened(key)
        cell: cython.longlong = sheet.find(table, text, w.hashed(text, sheet.secret, sheet.other, table))
        if not cell:
            return None
        return self.in_units(place, (sheet.words[cell + lay.TAG] >> 16) & 0xFFFF, sheet.state_of(cell, place.limit.logs), now_us)

    def sweep(self, budget: int = 1_000_000) -> None:
        """Forgets idle keys now, rather than a few at a time as calls come in."""
        self.begin()
        try:
            self.learn()
            self.seen = None
            self.sheet.sweep(budget, self.now())
        finally:
            self.end()

    def _reset_after_fork(self) -> None:
        LockedFile._reset_after_fork(self)
        self.holding = False

    def answers_within(self, budget_us: int) -> bool:
        """Nobody is waited for longer than that, not even a process that was stopped while it held the lock."""
        self.timeout_us = min(self.timeout_us, max(1000, budget_us))
        return True

    @property
    def overflow(self) -> int:
        return self.sheet.get(lay.STRANGERS)

    def stats(self) -> dict[str, int]:
        """What the file has seen: keys now, decisions on shared cells, locks of the dead taken over, entries without a place."""
        if self._mapped is None:
            raise self._is_closed()
        words = {"keys": lay.LIVE, "overflow": lay.STRANGERS, "takeovers": lay.TAKEOVERS, "crowded": lay.CROWDED}
        return {name: self.sheet.get(word) for name, word in words.items()}

    def __len__(self) -> int:
        return self.sheet.get(lay.LIVE)

    def close(self) -> None:
        """Lets go of the file, which stays: other processes go on, and so does whoever opens it next."""
        with self._lock:
            if self._mapped is None:
                return
            if self.depth > 0:  # a signal's handler, say, in the middle of a call of this very thread: right behind it
                self.closing = True
                return
            self._wait_for_threads()
            mapped, self._mapped = self._mapped, None
            self.sheet.close()
            mapped.close()
            if self._lock_fd >= 0:
                os.close(self._lock_fd)
                self._lock_fd = -1


@cython.cfunc
@cython.inline
def shortened(key: str) -> str:
    """The key as it is kept: as it is, unless it is enormous."""
    if len(key) <= LONGEST:
        return key
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=24).hexdigest()
    return f"{key[:64]}…{digest}"
