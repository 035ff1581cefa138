"""The lock of a shared file: one word that holds the process that owns it, or the kernel's lock on a second file.

A process that waits longer than a moment checks whether the owner is still alive; the unfinished change of a dead owner is rolled
back and its lock taken over. A process that is alive but stopped keeps its lock: others raise StoreTimeout after `timeout_us`.
Threads of one process wait for each other on a thread lock of the store, except on its hot path (`SharedStore.decide_one`), which
holds the word only while no other code of this process can run.

Without atomic operations or /proc, `flock` on `path.lock` replaces the word; the kernel releases it when its owner dies.
"""

from __future__ import annotations

import fcntl
import os

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.monotonic import monotonic_us
    from cython.cimports.limitkeeper.stores.shared import atomics
    from cython.cimports.limitkeeper.stores.shared import layout as lay
    from cython.cimports.limitkeeper.stores.shared.cell_table import SharedCellTable
else:
    from ...clock import monotonic_us
    from . import atomics
    from . import layout as lay
    from .cell_table import SharedCellTable

from ...clock import SYSTEM
from ...errors import StoreError, StoreTimeout, StoreUnavailable
from .lock_owner import has_proc, is_alive, owner_word


def can_swap_words() -> bool:
    """Whether this build can compare and swap a word of a file, and find out whether its owner is alive."""
    return bool(cython.compiled and atomics.HAS_ATOMICS and has_proc())


@cython.cclass
class OwnerLock:
    """The lock of one file. After `acquire`, `dead_owner` is the word of a dead process whose lock was taken over, or 0, and
    `restored` the number of words that its unfinished change had written."""

    @cython.annotation_typing(False)
    def __init__(self, path: str, table: SharedCellTable, timeout_us: int, atomic: bool) -> None:
        self.path, self.table, self.timeout_us, self.atomic = path, table, timeout_us, atomic
        self.dead_owner = self.restored = self.owner = 0
        self.fd = -1
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
    def acquire(self) -> cython.int:
        """Waits for the lock, at most `timeout_us`; takes over that of a dead process."""
        if not self.atomic:
            return self.acquire_file()
        deadline_us: cython.longlong = monotonic_us() + self.timeout_us
        attempts: cython.int = 0
        while True:
            if cython.compiled:
                word: cython.p_longlong = self.table.words + lay.LOCK
                mine: cython.longlong = self.owner
                won: cython.bint
                with cython.nogil:
                    won = atomics.spin_for(word, mine, 640)
                if won:
                    return 0
                other: cython.longlong = atomics.load_word(word)
                if attempts > 0 and other and not is_alive(other) and atomics.swap_word(word, other, mine):
                    self.table.words[lay.TAKEOVERS] += 1
                    self.dead_owner, self.restored = other, self.table.roll_back()
                    return 0
            if monotonic_us() > deadline_us:
                raise StoreTimeout(
                    f"shared file {self.path!r}: process {self.table.get(lay.LOCK) >> 32} has held the lock for "
                    f"{self.timeout_us / 1e6:g} s and is alive; is it stopped?"
                )
            SYSTEM.sleep(0.00005 if attempts < 20 else 0.001)
            attempts += 1

    def acquire_file(self) -> int:
        """Waits for the kernel's lock on the second file."""
        deadline_us = monotonic_us() + self.timeout_us
        pause = 0.00002
        while True:
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if monotonic_us() > deadline_us:
                    raise StoreTimeout(
                        f"shared file {self.path!r}: another process has held the lock for {self.timeout_us / 1e6:g} s; "
                        "is it stopped?"
                    ) from None
            SYSTEM.sleep(pause)
            pause = min(pause * 2, 0.001)
        if self.table.words[lay.JOURNAL]:
            self.table.set(lay.TAKEOVERS, self.table.get(lay.TAKEOVERS) + 1)
            self.table.roll_back()
        return 0

    @cython.cfunc
    def release(self) -> cython.int:
        if self.atomic:
            atomics.publish(self.table.words, lay.LOCK, 0)
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
