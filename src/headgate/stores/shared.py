"""SharedStore: one limit for all worker processes of a host, without a server. A memory-mapped file, exact across processes.

    limiter = Limiter("100/s burst 200", store=SharedStore("/dev/shm/myapp-limits"))

A decision takes the file's lock (one compare-and-swap), reads the clock, decides, notes what it changes in the journal, changes it,
and lets go. Whoever waits longer than a moment looks whether the holder still lives; a dead holder's unfinished change is taken
back and its lock taken over, so `kill -9` at any instant costs nobody anything but the call in flight. The clock is the machine's
monotonic one plus an offset to UTC that the file keeps, so all processes share one time, and no step of the wall clock reaches it.

Where the package is not compiled, or there is no /proc, the kernel's lock on a second file (`path.lock`) takes the place of the
compare-and-swap. The file says which of the two it is used with; never both.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import json
import logging
import os
import time
import weakref
from collections.abc import Iterator
from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from headgate import _plain as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.headgate.algorithms.claim import NamedLimit
    from cython.cimports.headgate.algorithms.limit import Limit, State
    from cython.cimports.headgate.decision import Decision
    from cython.cimports.headgate.monotonic import monotonic_us
    from cython.cimports.headgate.stores import words as w
    from cython.cimports.headgate.stores.layout import (
        ATOMIC,
        CALLS,
        CELL,
        DIRECTORY,
        HASH,
        HIGH,
        JOURNAL,
        LAST,
        LIVE,
        LOCK,
        LOCK_FILE,
        STRANGE,
        STRANGER,
        STRANGERS,
        TAG,
        TAKEOVERS,
        A,
    )
    from cython.cimports.headgate.stores.near import Near, Place, blank
    from cython.cimports.headgate.stores.returns import Returns
    from cython.cimports.headgate.stores.sheet import Sheet
else:
    from ..algorithms.claim import NamedLimit
    from ..algorithms.limit import Limit, State
    from ..clock import monotonic_us
    from ..decision import Decision
    from . import words as w
    from .layout import (
        ATOMIC,
        CALLS,
        CELL,
        DIRECTORY,
        HASH,
        HIGH,
        JOURNAL,
        LAST,
        LIVE,
        LOCK,
        LOCK_FILE,
        STRANGE,
        STRANGER,
        STRANGERS,
        TAG,
        TAKEOVERS,
        A,
    )
    from .near import Near, Place, blank
    from .returns import Returns
    from .sheet import Sheet

    def row(place: Place) -> Any:
        """A place in a shared file."""
        return place


from ..algorithms.text import parse_limit
from ..clock import Clock
from ..errors import ConfigurationError, StoreError, StoreTimeout
from ..rate import Duration, duration_us
from . import layout as words_of
from .mapped import Mapped
from .owner import has_proc, is_alive, word_of

log = logging.getLogger("headgate")
#: Bytes of a key that are kept as they are; of a longer one, its beginning and a digest.
LONGEST = 16384
_open: weakref.WeakSet[SharedStore] = weakref.WeakSet()


@cython.cclass
class Row(Place):
    """A place in a shared file: the number of its table there."""

    __slots__ = ("birth_us", "table")

    def __init__(
        self,
        store: SharedStore,
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
class SharedStore(Returns):
    """`SharedStore("/dev/shm/limits")`: exact across the processes of a host. `max_keys` and `log_entries` (places of a
    sliding log per key) belong to the file; `timeout` is how long a call waits for a process that is stopped while it holds the lock."""

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
        super().__init__(clock)
        self.timeout_us = duration_us(timeout)
        self.spare = self.other = None
        self.atomic = cython.compiled and atomics() and has_proc()
        self.path = os.path.abspath(os.fspath(path))
        self._mapped: Any = Mapped(self.path, max_keys, log_entries, ATOMIC if self.atomic else LOCK_FILE)
        self._lock_fd = -1
        self.depth = 0
        self.holding = False
        self.me = self.hash = 0
        self._known = 0
        self._tables: dict[str, int] = {}
        self._units: dict[tuple[int, str], int] = {}
        self._since: list[int] = []
        self._open_sheet(max_keys)
        _open.add(self)

    def _open_sheet(self, max_keys: int) -> None:
        mapped = self._mapped
        words = mapped.words
        self.sheet = Sheet(mapped.memory, mapped.plan, max_keys, words[words_of.SECRET], words[words_of.SECRET + 1])
        if self.system is not None:
            self.offset_us = words[words_of.OFFSET]
        self._introduce()
        try:
            if mapped.alone:
                self.sheet.roll_back()
                if mapped.old is not None:
                    self._bring_over(mapped.old, max_keys)
            mapped.settle()
        except BaseException:
            self.close()
            raise

    def _introduce(self) -> None:
        """Who this process is, for others who wait for its lock."""
        self.depth = 0
        self.holding = False
        if self.atomic:
            self.me = word_of(os.getpid())
        else:
            if self._lock_fd >= 0:
                os.close(self._lock_fd)
            self._lock_fd = os.open(self.path + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

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
        self.depth += 1
        return 0

    @cython.cfunc
    def end(self) -> cython.int:
        self.depth -= 1
        try:
            if self.depth == 0:
                if self.sheet.words[JOURNAL]:  # an exception came in between
                    self.sheet.roll_back()
                self.leave()
        finally:
            self._lock.release()
        return 0

    @cython.cfunc
    def take(self) -> cython.int:
        """Waits for the lock; a dead holder's is taken over."""
        if self._mapped is None:
            raise StoreError(f"the SharedStore on {self.path!r} is closed")
        if not self.atomic:
            return self.take_file()
        deadline_us: cython.longlong = monotonic_us() + self.timeout_us
        turns: cython.int = 0
        while True:
            if cython.compiled:
                word: cython.p_longlong = self.sheet.words + LOCK
                me: cython.longlong = self.me
                won: cython.bint
                with cython.nogil:
                    won = w.spin_for(word, me, 640)
                if won:
                    return 0
                owner: cython.longlong = w.load_word(word)
                if turns > 0 and owner and not is_alive(owner) and w.swap_word(word, owner, me):
                    self.sheet.words[TAKEOVERS] += 1
                    changed = self.sheet.roll_back()
                    log.warning(
                        "%s: took over the lock of process %d, which died; %d words put back", self.path, owner >> 32, changed
                    )
                    return 0
            if monotonic_us() > deadline_us:
                raise StoreTimeout(
                    f"shared file {self.path!r}: process {self.sheet.get(LOCK) >> 32} has held the lock for "
                    f"{self.timeout_us / 1e6:g} s and is alive; is it stopped?"
                )
            time.sleep(0.00005 if turns < 20 else 0.001)
            turns += 1

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
                        f"shared file {self.path!r}: another process has held the lock for {self.timeout_us / 1e6:g} s; is it stopped?"
                    ) from None
            time.sleep(pause)
            pause = min(pause * 2, 0.001)
        if self.sheet.words[JOURNAL]:
            self.sheet.set(TAKEOVERS, self.sheet.get(TAKEOVERS) + 1)
            self.sheet.roll_back()
        return 0

    @cython.cfunc
    def leave(self) -> cython.int:
        if self.atomic:
            w.publish(self.sheet.words, LOCK, 0)
        else:
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
        return 0

    # Deciding --------------------------------------------------------------------------------------------------

    @cython.ccall
    def one(
        self, named: NamedLimit, key: str, cost: cython.longlong, max_wait_us: cython.longlong, commit: cython.bint
    ) -> Decision:
        place: Place = self.place_of(named)
        decision: Decision = blank(self, place)
        now_us: cython.longlong = 0
        if self.system is None:
            now_us = self.now()
        if cython.compiled:
            if self.atomic and self._mapped is not None and w.swap_word(self.sheet.words + LOCK, 0, self.me):
                try:
                    if self.system is not None:
                        now_us = monotonic_us() + self.offset_us
                    self.decide_one(decision, place, key, cost, max_wait_us, commit, now_us)
                    self.tidy(now_us)
                finally:
                    if self.sheet.words[JOURNAL]:
                        self.sheet.roll_back()
                    w.publish(self.sheet.words, LOCK, 0)
                return decision
        self.begin()
        try:
            if self.system is not None:
                now_us = self.now()
            self.decide_one(decision, place, key, cost, max_wait_us, commit, now_us)
            self.tidy(now_us)
        finally:
            self.end()
        if not cython.compiled:
            decision.__class__ = Decision
        return decision

    @cython.cfunc
    def tidy(self, now_us: cython.longlong) -> cython.int:
        """Now and then looks at a few other cells, to forget those that are as new."""
        self.sheet.words[CALLS] += 1
        if self.sheet.words[CALLS] & 63 == 0:
            self.sheet.words[LAST] = now_us
            self.sheet.sweep(16, now_us)
        return 0

    # Cells -----------------------------------------------------------------------------------------------------

    @cython.cfunc
    def is_full(self, place: Place, needed: cython.longlong, now_us: cython.longlong) -> cython.bint:
        sheet: Sheet = self.sheet
        if sheet.words[LIVE] + needed <= sheet.max_keys:
            return False
        sheet.sweep(16, now_us)
        return sheet.words[LIVE] + needed > sheet.max_keys

    @cython.cfunc
    def find(self, place: Place, key: str, now_us: cython.longlong, full: cython.bint) -> cython.longlong:
        """The word at which the key's cell begins: its own, one that strangers share, or 0 for none."""
        sheet: Sheet = self.sheet
        table: cython.longlong = row(place).table
        self.hash = w.hashed(key, sheet.secret, sheet.other, table)
        cell: cython.longlong = sheet.find(table, key, self.hash)
        if cell or (sheet.words[STRANGE] == 0 and not full):
            return cell
        cell = sheet.stranger(table, self.hash)
        if cell and (full or not sheet.is_new(cell, now_us)):
            return cell
        return 0

    @cython.cfunc
    def known(self, place: Place, key: str, now_us: cython.longlong, full: cython.bint) -> cython.bint:
        return self.find(place, shortened(key), now_us, full) != 0

    @cython.cfunc
    def read(self, place: Place, key: str, now_us: cython.longlong, full: cython.bint) -> State:
        sheet: Sheet = self.sheet
        cell: cython.longlong = self.find(place, shortened(key), now_us, full)
        if not cell:
            return self.first(place)
        if sheet.is_shared(cell):
            sheet.words[STRANGERS] += 1
            if sheet.is_new(cell, now_us):
                return self.first(place)
        limit: Limit = place.limit
        if limit.logs:
            return (0, 0, sheet.log_at(sheet.words[cell + A + 2]))
        unit: cython.longlong = (sheet.words[cell + TAG] >> 16) & 0xFFFF
        if unit == place.unit:
            return (sheet.words[cell + A], sheet.words[cell + A + 1], sheet.words[cell + A + 2])
        return self.converted(place, cell, unit, now_us)

    @cython.cfunc
    def first(self, place: Place) -> State:
        """What an unseen key has."""
        return place.limit.unseen(row(place).birth_us)

    @cython.cfunc
    def converted(self, place: Place, cell: cython.longlong, unit: cython.longlong, now_us: cython.longlong) -> State:
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
        place: Place,
        key: str,
        a: cython.longlong,
        b: cython.longlong,
        c: cython.longlong,
        now_us: cython.longlong,
        full: cython.bint,
    ) -> cython.int:
        sheet: Sheet = self.sheet
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
        self.stamp += 1
        tag: cython.longlong = sheet.words[cell + TAG]
        unit: cython.longlong = place.unit
        if (tag >> 16) & 0xFFFF != unit:
            sheet.change(cell + TAG, (tag & 0xFFFF) | (unit << 16) | (tag >> 32 << 32))
        if not limit.logs:
            sheet.note_state(cell + A)
            sheet.words[cell + A] = a
            sheet.words[cell + A + 1] = b
            sheet.words[cell + A + 2] = c
        elif b > 0:
            sheet.add(cell, a, b, now_us - limit.window)
        if not self.holding:
            sheet.commit()
        return 0

    @cython.cfunc
    def charge(
        self,
        claims: list,  # type: ignore[type-arg]
        max_wait_us: cython.longlong,
        commit: cython.bint,
        now_us: cython.longlong,
    ) -> cython.longlong:
        """All of it is one change: whoever finds it half made takes all of it back."""
        self.holding = True
        try:
            start_us: cython.longlong = Near.charge(self, claims, max_wait_us, commit, now_us)
        finally:
            self.holding = False
        self.sheet.commit()
        self.tidy(now_us)
        return start_us

    @cython.cfunc
    def expose(self, place: Place, key: str, now_us: cython.longlong, full: cython.bint) -> cython.int:
        cell: cython.longlong = self.find(place, shortened(key), now_us, full)
        if cell and self.sheet.words[cell + A + 2]:
            self.sheet.note_log(self.sheet.words[cell + A + 2])
        return 0

    @cython.cfunc
    def crowded_until(self, place: Place, key: str, at: cython.longlong, now_us: cython.longlong) -> cython.longlong:
        cell: cython.longlong = self.find(place, shortened(key), now_us, self.is_full(place, 1, now_us))
        return self.sheet.crowded_until(cell, at, place.limit.window, now_us) if cell else 0

    def discard(self, place: Place, key: str) -> None:
        sheet: Sheet = self.sheet
        table: cython.longlong = row(place).table
        text: str = shortened(key)
        cell: cython.longlong = sheet.find(table, text, w.hashed(text, sheet.secret, sheet.other, table))
        if cell:
            sheet.remove(cell, place.limit.logs)
            sheet.commit()

    # The directory ---------------------------------------------------------------------------------------------

    def place(self, named: NamedLimit) -> Place:
        limit = named.limit
        if limit.logs and limit.count > self._mapped.log_entries:
            log.warning(
                "%s: %s keeps at most %d entries of %s at a time, and refuses what does not fit; SharedStore(…, log_entries=%d) keeps all",
                self.path, named.limiter, self._mapped.log_entries, limit, min(limit.count, 4096),
            )  # fmt: skip
        identity = json.dumps(named.identity)
        self.begin()
        try:
            now_us = self.now()
            self.learn()
            table = self._tables.get(identity) or self._enter(1, 0, now_us, identity)
            unit = self._units.get((table, limit.text)) or self._enter(2, table, now_us, limit.text)
            return Row(self, named, table, self.sheet.births[table - 1], unit, self._since[unit - 1])
        finally:
            self.end()

    def _enter(self, kind: int, table: int, now_us: int, text: str) -> int:
        """Appends an entry to the directory: a table (1), or the units of a limit (2)."""
        data = text.encode()
        used, base = self.sheet.get(DIRECTORY), self._mapped.plan.directory
        size = 4 + (len(data) + 7) // 8
        if used + size > words_of.DIRECTORY_ROOM or len(self.sheet.units) >= 0xFFFF:
            raise ConfigurationError(f"shared file {self.path!r}: its directory of limits is full; use several files")
        words = self._mapped.words
        words[base + used : base + used + 4] = memoryview(
            b"".join(n.to_bytes(8, "little") for n in (kind, table, now_us, len(data)))
        ).cast("q")
        padded = data.ljust((size - 4) * 8, b"\0")
        words[base + used + 4 : base + used + size] = memoryview(padded).cast("q")
        self.sheet.set(DIRECTORY, used + size)
        self.learn()
        return len(self.sheet.births) if kind == 1 else len(self.sheet.units)

    def learn(self) -> None:
        """Reads what was appended to the directory since."""
        end = self.sheet.get(DIRECTORY)
        for kind, table, moment, text in entries(self._mapped, self._known, end):
            if kind == 1:
                self.sheet.births.append(moment)
                self._tables[text] = len(self.sheet.births)
            else:
                self.sheet.units.append(parse_limit(text))
                self._since.append(moment)
                self._units[table, text] = len(self.sheet.units)
        self._known = end

    def limit_of(self, place: Place, unit: int) -> Limit:
        if unit > len(self.sheet.units):
            self.learn()
        return self.sheet.units[unit - 1]  # type: ignore[no-any-return]

    # Keeping house ---------------------------------------------------------------------------------------------

    def pairs(self, place: Place) -> list[tuple[str, int, Any]]:
        sheet: Sheet = self.sheet
        found = []
        self.begin()
        collecting = gc.isenabled()
        gc.disable()
        try:
            for i in range(sheet.get(HIGH)):
                cell = sheet.cells + i * CELL
                tag = sheet.get(cell + TAG)
                if tag and tag & 0xFFFF == row(place).table and tag >> 32 != STRANGER:
                    found.append((sheet.key_of(cell), (tag >> 16) & 0xFFFF, sheet.state_of(cell, place.limit.logs)))
        finally:
            if collecting:
                gc.enable()
            self.end()
        return found

    def saved(self, place: Place, key: str, now_us: int) -> Any:
        sheet: Sheet = self.sheet
        table: cython.longlong = row(place).table
        text: str = shortened(key)
        cell: cython.longlong = sheet.find(table, text, w.hashed(text, sheet.secret, sheet.other, table))
        if not cell:
            return None
        return self.in_units(place, (sheet.words[cell + TAG] >> 16) & 0xFFFF, sheet.state_of(cell, place.limit.logs), now_us)

    def _bring_over(self, old: Any, max_keys: int) -> None:
        """Takes over the cells of a file from before the machine was started anew; what does not check out is left behind."""
        sheet: Sheet = Sheet(old.memory, old.plan, max_keys, old.words[words_of.SECRET], old.words[words_of.SECRET + 1])
        try:
            sheet.mend(old.plan.end)
            for kind, table, moment, text in entries(old, 0, old.words[DIRECTORY]):
                self._enter(kind, table, moment, text)
            for i in range(min(sheet.get(HIGH), max_keys + words_of.RESERVE)):
                self._bring_cell(sheet, sheet.cells + i * CELL)
        finally:
            sheet.close()

    def _bring_cell(self, old: Sheet, cell: cython.longlong) -> None:
        tag: cython.longlong = old.words[cell + TAG]
        table: cython.longlong = tag & 0xFFFF
        unit: cython.longlong = (tag >> 16) & 0xFFFF
        if not 0 < table <= len(self.sheet.births) or not 0 < unit <= len(self.sheet.units) or tag >> 32 not in (1, 2, 4):
            return
        try:
            key: str = old.key_of(cell)
            state = old.state_of(cell, self.sheet.units[unit - 1].logs)
        except (StoreError, ValueError):
            return
        hash: cython.longlong = w.hashed(key, old.secret, old.other, table)
        if hash != old.words[cell + HASH] or self.sheet.find(table, key, hash):
            return
        fresh: cython.longlong = self.sheet.insert(table, unit, key, hash)
        if fresh and self.sheet.units[unit - 1].logs:
            for moment, cost in state[0]:
                self.sheet.add(fresh, moment, cost, 0)
        elif fresh:
            self.sheet.words[fresh + A], self.sheet.words[fresh + A + 1], self.sheet.words[fresh + A + 2] = state
        self.sheet.commit()

    def sweep(self, budget: int = 1_000_000) -> None:
        """Forgets idle keys now, rather than a few at a time as calls come in."""
        self.begin()
        try:
            self.learn()
            self.sheet.sweep(budget, self.now())
        finally:
            self.end()

    @property
    def strangers(self) -> int:
        return self.sheet.get(STRANGERS)

    def stats(self) -> dict[str, int]:
        """What the file has seen: keys now, decisions on shared cells, locks taken over from the dead, entries that found no place."""
        words = self._mapped.words
        return {
            "keys": words[LIVE],
            "strangers": words[STRANGERS],
            "takeovers": words[TAKEOVERS],
            "crowded": words[words_of.CROWDED],
        }

    def __len__(self) -> int:
        return self.sheet.get(LIVE)

    def _renew_lock(self) -> None:
        Returns._renew_lock(self)
        if self._mapped is not None:
            self._introduce()

    def close(self) -> None:
        """Lets go of the file, which stays: other processes go on, and so does whoever opens it next."""
        with self._lock:
            mapped, self._mapped = self._mapped, None
            if mapped is None:
                return
            self.sheet.close()
            mapped.close()
            if self._lock_fd >= 0:
                os.close(self._lock_fd)
                self._lock_fd = -1


def entries(mapped: Any, start: int, end: int) -> Iterator[tuple[int, int, int, str]]:
    """What stands in a file's directory: (kind, table, moment, text). What can't be read ends it."""
    base = mapped.plan.directory
    while start < min(end, words_of.DIRECTORY_ROOM):
        kind, table, moment, size = mapped.words[base + start : base + start + 4].tolist()
        count = (size + 7) // 8
        data = mapped.words[base + start + 4 : base + start + 4 + count].tobytes()[:size]
        start += 4 + count
        try:
            yield kind, table, moment, data.decode()
        except UnicodeDecodeError:
            return


@cython.cfunc
@cython.inline
def shortened(key: str) -> str:
    """The key as it is kept: as it is, unless it is enormous."""
    if len(key) <= LONGEST:
        return key
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=24).hexdigest()
    return f"{key[:64]}…{digest}"


def atomics() -> bool:
    """Whether this build can compare and swap a word of a file."""
    if cython.compiled:
        return bool(w.HAS_ATOMICS)
    return False
