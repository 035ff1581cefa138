"""Lock and undo journal of a mapped file, so that a process may be killed between any two instructions.

    journal_words   journal ← (word, old value), then its length      before words change
    commit          journal's length ← 0                               the change is complete
    roll_back       restores the old values, the last one first        by a process that finds the journal of a dead one

Words that nothing points to yet (a new cell, a new block) are not recorded: restoring the pointer undoes them. The lock is one
word with the pid and the start time of its owner (a pid is reused sooner or later). A process that waits longer than a moment
rolls back the change of a dead owner and takes over its lock; one that is alive but stopped keeps it, and others raise
StoreTimeout: a first call after the timeout, later ones at once while the owner stays stopped (so that an event loop is blocked
once, not by every task). Threads of one process wait for each other on a thread lock of the store, which counts in the timeout,
except on its hot path (`SharedStore.decide_one`), which holds the word only while no other code of this process can run. Without
atomic operations or /proc, `flock` on `path.lock` replaces the word. Compiled, `words` is a pointer into the file; plain, a
memoryview on it.

Rejected: lock stripes, because undoing a decision on several limits would be a protocol between journals; a decision holds the
lock for about 0.1 µs, so a million decisions a second keep it busy for a tenth of the time.
"""

from __future__ import annotations

import fcntl
import gc
import os
from collections.abc import Generator
from contextlib import suppress
from functools import cache
from threading import get_ident
from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.algorithms.limit import I64
    from cython.cimports.limitkeeper.monotonic import monotonic_us
    from cython.cimports.limitkeeper.stores.shared import layout as lay
else:
    from ...algorithms.limit import I64
    from ...clock import monotonic_us
    from ...garbage_collection import PAUSING
    from . import layout as lay
    from .mapped_file import allocate_space

    HAS_ATOMICS = False

    def critical_section(store: Any) -> Generator[None]:
        """The lock of the plain build, held from `next` to `close`; it nests in the thread that holds it.

        A signal handler may raise after any call and where a function begins. So the result of `acquire` is kept in C (`map`),
        the end is a generator's `close`, which has no such moment before its `finally`, and each step of it is made whatever
        the one before it raises.
        """
        lock, file_lock, outer = store._lock, store.file_lock, store.end
        held: list[bool] = []
        is_nested = is_waiting = is_deeper = is_collecting = False
        try:
            is_nested = lock._is_owned() and not (store.waiting and store.depth == 0)  # a handler, while a call waits
            if not is_nested:
                deadline_us = 0
                held.extend(map(lock.acquire, (False,)))
                if not held[0]:
                    deadline_us = monotonic_us() + file_lock.timeout_us
                    held.extend(map(lock.acquire, (True,), (file_lock.timeout_us / 1e6,)))
                if not held[-1]:
                    raise file_lock.timed_out()
                if store._file is None:
                    raise store._closed_error()
                store.waiting += 1
                is_waiting = True
                file_lock.acquire(deadline_us)
                store.cached_key = None
                is_collecting = gc.isenabled()
                if is_collecting:
                    PAUSING.add(get_ident())
                gc.disable()  # a finaliser that decides would move cells
            store.depth += 1
            is_deeper = True
            yield
        finally:
            if is_deeper:
                store.end = outer
                store.depth -= 1
            if is_waiting:
                store.waiting -= 1
            if held and held[-1]:
                try:
                    if is_deeper and file_lock.table.words[lay.JOURNAL]:  # an exception interrupted the change
                        file_lock.table.roll_back()
                finally:
                    try:
                        if file_lock.fd >= 0:
                            fcntl.flock(file_lock.fd, fcntl.LOCK_UN)
                    finally:
                        try:
                            lock.release()
                        finally:
                            if is_collecting:
                                gc.enable()
                                PAUSING.discard(get_ident())
                if store.closing:
                    store.close()

    def enter_section(store: Any) -> int:
        """Begins a critical section; `store.end` ends it."""
        section = critical_section(store)
        try:
            next(section)
            store.end = section.close
            return 0
        except BaseException:
            section.close()
            raise

    def publish(words: memoryview, at: int, value: int) -> None:
        """Writes a word after everything written before it. Plain: the lock file keeps other processes out."""
        words[at] = value


from ...clock import SYSTEM
from ...errors import StoreError, StoreTimeout, StoreUnavailable

#: State letters of a process that was stopped by a signal or a debugger.
STOPPED = ("T", "t")
TOO_LARGE = "one change of a shared file is larger than its journal; use shorter keys, or fewer limits at once"


@cython.cclass
class Journal:
    """The words of one file. Callers hold the file's lock."""

    def __init__(self, memory: Any, journal: int, fd: int) -> None:
        self.memory = memory
        self.journal = journal
        self.fd = fd
        if cython.compiled:
            view: cython.uchar[::1] = memory
            self.words = cython.cast(cython.p_longlong, cython.address(view[0]))
        else:
            self.words: Any = memoryview(memory).cast("q")

    @cython.cfunc
    def journal_words(self, at: I64, count: I64) -> cython.int:
        """Records the values of `count` words before they change, with one write of the length."""
        n: I64 = self.words[lay.JOURNAL]
        if n > lay.JOURNAL_ROOM - count:
            raise StoreError(TOO_LARGE)
        i: I64
        for i in range(count):
            self.words[self.journal + 2 * (n + i)] = at + i
            self.words[self.journal + 2 * (n + i) + 1] = self.words[at + i]
        publish(self.words, lay.JOURNAL, n + count)
        return 0

    @cython.cfunc
    def change(self, at: I64, value: I64) -> cython.int:
        """Records and changes a word."""
        self.journal_words(at, 1)
        self.words[at] = value
        return 0

    @cython.cfunc
    def commit(self) -> cython.int:
        """Ends the change."""
        publish(self.words, lay.JOURNAL, 0)
        return 0

    @cython.cfunc
    def roll_back(self) -> I64:
        """Undoes an unfinished change; returns the number of restored words."""
        n: I64 = self.words[lay.JOURNAL]
        i: I64 = n
        while i > 0:
            i -= 1
            self.words[self.words[self.journal + 2 * i]] = self.words[self.journal + 2 * i + 1]
        publish(self.words, lay.JOURNAL, 0)
        return n

    @cython.cfunc
    def allocate(self, ready: I64, number: I64, base: I64, size: I64, room: I64) -> cython.int:
        """Allocates disk space for item `number` of a region before it is first touched: touching a hole of the file when the
        file system is full would kill the process (SIGBUS). Allocates 256 KiB at once; the word `ready` counts the items."""
        have: I64 = self.words[ready]
        if number <= have:
            return 0
        upto: I64 = have + 32768 // size + 1
        if upto > room:
            upto = room
        error: cython.int = allocate_space(self.fd, (base + have * size) * 8, (upto - have) * size * 8)
        if error:
            raise StoreError(f"no space for a new key in a shared file ({os.strerror(error)}): free space on its file system")
        publish(self.words, ready, upto)
        return 0

    def mend(self, end: int) -> None:
        """Rolls back the journal of a file from before a reboot, if its entries are in range."""
        n: I64 = self.words[lay.JOURNAL]
        if 0 < n <= lay.JOURNAL_ROOM and all(0 < self.words[self.journal + 2 * i] < end for i in range(n)):
            self.roll_back()

    def get(self, at: I64) -> int:
        return self.words[at] if self.words else 0

    def set(self, at: I64, value: I64) -> None:
        publish(self.words, at, value)

    def close(self) -> None:
        """Releases the memory."""
        if cython.compiled:
            self.words = cython.NULL
        else:
            self.words.release()
            self.words = None
        self.memory = None


def process_stat(pid: int) -> tuple[str, int] | None:
    """The state letter and the start time of a process; None when there is no such process. Raises OSError where that is
    unknown: in a process that has no file descriptor left, for example."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(b")") + 2 :].split()  # the name before may hold anything
    return fields[0].decode(), int(fields[19])


def owner_word(pid: int) -> int:
    """The word that a process writes into a lock that it owns; with 0 for a start time that can't be read."""
    found = None
    with suppress(OSError):
        found = process_stat(pid)
    return pid << 32 | (found[1] & 0xFFFFFFFF if found is not None else 0)


def owner_state(word: int) -> str:
    """The state letter of the process that wrote this word; "" when it is dead, "?" when that is unknown."""
    try:
        found = process_stat(word >> 32)
    except OSError:
        return "?"
    is_alive = found is not None and found[0] not in "ZXx" and word & 0xFFFFFFFF in (0, found[1] & 0xFFFFFFFF)
    return found[0] if found is not None and is_alive else ""


@cache
def has_proc() -> bool:
    """Whether there is a /proc."""
    return os.path.exists(f"/proc/{os.getpid()}/stat")  # without a file descriptor


def can_swap_words() -> bool:
    """Whether this build can compare and swap a word of a file, and find out whether its owner is alive."""
    return bool(cython.compiled and HAS_ATOMICS and has_proc())


@cython.cclass
class OwnerLock:
    """The lock of one file. After `acquire`, `dead_owner` is the word of a dead process whose lock was taken over, or 0, and
    `restored` the number of words that its unfinished change had written."""

    @cython.annotation_typing(False)
    def __init__(self, path: str, table: Journal, timeout_us: int, atomic: bool) -> None:
        self.fd = -1
        self.path, self.table, self.timeout_us, self.atomic = path, table, timeout_us, atomic
        self.dead_owner = self.restored = self.owner = self.stopped_owner = 0
        self.identify()

    def identify(self) -> None:
        """Reads the identity of this process, which others check while they wait; called again in a forked child."""
        if self.atomic:
            self.owner = owner_word(os.getpid())
            return
        self.close()
        try:
            self.fd = os.open(self.path + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreUnavailable(f"lock file {self.path + '.lock'!r}: {error}; it must be writable") from error

    @cython.cfunc
    def acquire(self, deadline_us: I64) -> cython.int:
        """Waits for the lock until `deadline_us` (0: for `timeout_us`); takes over that of a dead process."""
        attempts: cython.int = 0
        while not (self.swap_in(attempts > 0) if self.atomic else self.lock_file()):
            if deadline_us == 0:
                deadline_us = monotonic_us() + self.timeout_us
            if monotonic_us() > deadline_us or self.is_still_stopped():
                raise self.timed_out()
            SYSTEM.sleep(0.00005 if attempts < 20 else 0.001)
            attempts += 1
        self.stopped_owner = 0
        return 0

    def is_still_stopped(self) -> bool:
        """Whether the owner for which a call waited in vain is stopped and holds the lock still."""
        word = self.stopped_owner
        return bool(word and word == self.table.get(lay.LOCK) and owner_state(word) in STOPPED)

    def timed_out(self) -> StoreTimeout:
        word = self.table.get(lay.LOCK) if self.atomic else 0
        self.stopped_owner = word if word and owner_state(word) in STOPPED else 0
        holder = f"process {word >> 32} is alive and" if self.atomic else "another process"
        seconds = f"{self.timeout_us / 1e6:g} s"
        return StoreTimeout(f"shared file {self.path!r}: {holder} has held the lock for {seconds}; is it stopped?")

    @cython.cfunc
    def swap_in(self, check_owner: cython.bint) -> cython.bint:
        """Tries for a moment to swap this process into the lock's word; then, if asked to, takes it over from a dead owner."""
        if cython.compiled:
            word: cython.p_longlong = self.table.words + lay.LOCK
            mine: I64 = self.owner
            won: cython.bint
            with cython.nogil:
                won = spin_for(word, mine, 640)  # noqa: F821 - in journal.pxd, as the two below
            if won:
                return True
            other: I64 = load_word(word)  # noqa: F821
            if check_owner and other and not owner_state(other) and swap_word(word, other, mine):  # noqa: F821
                self.table.words[lay.TAKEOVERS] += 1
                self.dead_owner, self.restored = other, self.table.roll_back()
                return True
        return False

    def lock_file(self) -> bool:
        """Tries to get the kernel's lock on the second file, and undoes the change of a dead owner."""
        if self.fd < 0:  # it could not be opened after a fork
            self.identify()
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        if self.table.words[lay.JOURNAL]:
            self.table.set(lay.TAKEOVERS, self.table.get(lay.TAKEOVERS) + 1)
            self.table.roll_back()
        return True

    @cython.cfunc
    def release(self) -> cython.int:
        if self.atomic:
            publish(self.table.words, lay.LOCK, 0)
        else:
            fcntl.flock(self.fd, fcntl.LOCK_UN)
        return 0

    def wait_for_hot_path(self) -> None:
        """Waits while another thread of this process is on the hot path, which holds nothing but the word."""
        deadline_us = monotonic_us() + self.timeout_us
        while self.owner and self.table.get(lay.LOCK) == self.owner:
            if monotonic_us() > deadline_us:
                raise StoreError(f"the SharedStore on {self.path!r} can't be closed in the middle of a decision")
            SYSTEM.sleep(0.00005)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()
