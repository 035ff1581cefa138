"""Creates, opens, checks and maps the file of a SharedStore.

Every process that has the file open holds a shared `flock` on it. A process that gets the exclusive lock is alone: it may create
the file, roll back the change of a dead process, or replace the file after a reboot. All others only check that the file is
what they expect. Pages may reach the disk in any order before a crash of the machine, so after a reboot cells are checked and
copied one by one into a new file.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import stat
from contextlib import suppress
from functools import cache
from typing import Any

from ...clock import SYSTEM, steady_us, utc_us
from ...errors import ConfigurationError, StoreTimeout, StoreUnavailable
from . import layout as at
from .layout import Regions, regions

#: The boot id without /proc.
UNKNOWN_BOOT = (0, 0)
PROTOCOLS = {at.ATOMIC: "compare-and-swap (compiled)", at.LOCK_FILE: "a lock file (not compiled)"}


class MappedFile:
    """An open file: its memory, its layout, and whether this process has it alone."""

    def __init__(self, path: str, max_keys: int, log_entries: int, protocol: int, timeout_us: int = 1_000_000) -> None:
        self.path, self.timeout_us = os.path.abspath(path), timeout_us
        self.max_keys, self.log_entries, self.protocol = max_keys, log_entries, protocol
        self.plan: Regions = regions(max_keys, log_entries)
        self.memory: Any = None
        self.words: Any = None
        self.old: MappedFile | None = None
        self.fd, self.alone = self._open()
        try:
            if made := self.alone and self._is_unmade():
                self._make()
            self._check()
            self._map()
            if self.alone:
                self._take_over(made)
        except BaseException:
            self.close()
            raise

    def _open(self) -> tuple[int, bool]:
        """Opens and locks the file; again, when the path was replaced meanwhile, or its creator died before it began."""
        deadline_us = 0
        while True:
            fd = self._open_path(self.path)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                raise ConfigurationError(f"{self.path!r} is not a regular file; give the path of one, it is created when missing")
            alone = True
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                alone = False
                self._share(fd)
            try:
                same = os.stat(self.path).st_ino == os.fstat(fd).st_ino
            except FileNotFoundError:
                same = False
            if same and (alone or os.fstat(fd).st_size):
                return fd, alone
            os.close(fd)
            if same:
                deadline_us = deadline_us or steady_us() + self.timeout_us
                if steady_us() > deadline_us:
                    raise self._differs("is empty, but another process uses it: it was truncated")
                SYSTEM.sleep(0.001)

    def _open_path(self, path: str, flags: int = 0) -> int:
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flags, 0o600)
        except (OSError, ValueError) as error:
            raise StoreUnavailable(f"shared file {path!r}: {error}; give a path in a folder that can be written to") from error

    def _share(self, fd: int) -> None:
        """Waits while another process creates the file; after a reboot, as long as that takes cells over."""
        adopted, deadline_us = b"", 0
        while True:
            try:
                return fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                before, adopted = adopted, os.pread(fd, 8, at.ADOPTED * 8)
                if adopted != before or deadline_us == 0:
                    deadline_us = steady_us() + self.timeout_us
                if steady_us() > deadline_us:
                    os.close(fd)
                    seconds = f"{self.timeout_us / 1e6:g} s"
                    raise StoreTimeout(
                        f"shared file {self.path!r}: another process creates it for {seconds}; is it stopped?"
                    ) from None
            SYSTEM.sleep(0.001)

    # Making ----------------------------------------------------------------------------------------------------

    def _is_unmade(self) -> bool:
        """Whether the file is empty, the process that created it died before it was ready, or its header has not reached the disk
        before the machine stopped."""
        found = os.pread(self.fd, at.HEADER * 8, 0)
        if not found.strip(b"\0"):
            return os.fstat(self.fd).st_size in (0, self.plan.end * 8)
        return found[:8] == at.MAGIC_TEXT and found[at.READY * 8 :][:8] == bytes(8)

    def _make(self) -> None:
        """Creates a sparse file with a header; the magic text is written before the size, READY after it. Everything before the
        cells has disk space from the start."""
        self.require_space(self.plan.logs, "", "max_keys")
        words = memoryview(bytearray(at.HEADER * 8)).cast("q")
        words[at.LAYOUT], words[at.PROTOCOL] = at.VERSION, self.protocol
        words[at.MAX_KEYS], words[at.LOG_ENTRIES], words[at.SIZE] = self.max_keys, self.log_entries, self.plan.end
        words[at.UNGRANTED] = self.plan.overflow
        for word in (at.SECRET, at.SECRET + 1):
            words[word] = int.from_bytes(os.urandom(8), "little", signed=True)
        self._stamp(words, 0)
        words[at.MAGIC] = int.from_bytes(at.MAGIC_TEXT, "little")
        try:
            os.ftruncate(self.fd, 0)  # of a file that was made, pages may have reached the disk without its header
            os.pwrite(self.fd, words, 0)
            os.ftruncate(self.fd, self.plan.end * 8)
            failed = allocate_space(self.fd, 0, self.plan.cells * 8)
            if failed:
                raise OSError(failed, os.strerror(failed))
        except OSError as error:
            raise self._too_large(error, "give another path") from error
        os.pwrite(self.fd, (1).to_bytes(8, "little"), at.READY * 8)

    def _map(self) -> None:
        try:
            self.memory = mmap.mmap(self.fd, self.plan.end * 8)
        except OSError as error:  # of the address space (`ulimit -v`)
            raise self._too_large(error, "allow this process more address space") from error
        self.words = memoryview(self.memory).cast("q")

    def _too_large(self, error: OSError, remedy: str) -> StoreUnavailable:
        size = f"a file of {self.plan.end * 8 >> 20} MiB"
        return StoreUnavailable(f"shared file {self.path!r}: {size}: {error}; lower max_keys or log_entries, or {remedy}")

    def require_space(self, end: int, what: str, option: str) -> None:
        """Raises StoreUnavailable if the file system has less space than the words before `end` need at worst."""
        space = os.fstatvfs(self.fd)
        missing = end * 8 - os.fstat(self.fd).st_blocks * 512
        free = space.f_bavail * space.f_frsize
        if space.f_blocks and free < missing:
            raise StoreUnavailable(
                f"shared file {self.path!r}: {self.max_keys} keys{what} need up to {missing >> 20} MiB, "
                f"{free >> 20} MiB are free; lower {option}, or give another path"
            )

    def _stamp(self, words: Any, last_us: int) -> None:
        """Writes the boot id, the pid namespace and the offset to UTC; time never goes back."""
        words[at.BOOT], words[at.BOOT + 1] = boot_id()
        words[at.NAMESPACE] = pid_namespace()
        words[at.OFFSET] = max(utc_us(), last_us) - steady_us()

    # Opening ---------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Raises when the file is not what this process expects, with the difference and the remedy."""
        found = os.pread(self.fd, at.HEADER * 8, 0)
        words = memoryview(found.ljust(at.HEADER * 8, b"\0")).cast("q")
        if found[:8] != at.MAGIC_TEXT or not words[at.READY]:
            raise ConfigurationError(f"{self.path!r} is not a shared file of limitkeeper; give another path (it was not changed)")
        if words[at.LAYOUT] != at.VERSION:
            raise self._differs(f"has layout {words[at.LAYOUT]}, this version writes {at.VERSION}")
        if words[at.PROTOCOL] != self.protocol:
            raise self._differs(
                f"is locked by {PROTOCOLS.get(words[at.PROTOCOL], '?')}, this process uses {PROTOCOLS[self.protocol]}; "
                "run the same build of limitkeeper everywhere"
            )
        for name, word, mine in (("max_keys", at.MAX_KEYS, self.max_keys), ("log_entries", at.LOG_ENTRIES, self.log_entries)):
            if words[word] != mine:
                raise self._differs(f"was created with {name}={words[word]}, this process expects {mine}")
        if os.fstat(self.fd).st_size != self.plan.end * 8:
            raise self._differs("has the wrong size")
        if not self.alone and words[at.NAMESPACE] != pid_namespace():
            raise self._differs(
                "is in use in another container, where process numbers mean something else; "
                "use one file per container, or a RedisStore"
            )

    def _differs(self, what: str) -> ConfigurationError:
        return ConfigurationError(
            f"shared file {self.path!r} {what}; delete the file while no process uses it, or give another path"
        )

    def _take_over(self, made: bool) -> None:
        """No other process has the file open: a lock that is still held belongs to a dead one. Where the boot id is unknown, a
        file that was not `made` now may be from before a reboot: with its offset, time would go back."""
        boot = boot_id()
        if not made and (boot == UNKNOWN_BOOT or boot != (self.words[at.BOOT], self.words[at.BOOT + 1])):
            self._renew()
        self.words[at.NAMESPACE] = pid_namespace()
        if self.words[at.LOCK]:
            self.words[at.TAKEOVERS] += 1
        self.words[at.LOCK] = 0

    def _renew(self) -> None:
        """After a reboot: creates a new file; the store copies the cells of the old one."""
        old = self.old = MappedFile.__new__(MappedFile)
        old.path, old.plan, old.old = self.path, self.plan, None
        old.fd, old.memory, old.words = self.fd, self.memory, self.words
        self.fd, self.memory, self.words = -1, None, None
        self.replacing = f"{self.path}.{os.getpid()}"
        self.fd = self._open_path(self.replacing, os.O_TRUNC)
        fcntl.flock(self.fd, fcntl.LOCK_EX)
        self._make()
        self._map()
        self._stamp(self.words, old.words[at.LAST])
        self.words[at.SECRET], self.words[at.SECRET + 1] = old.words[at.SECRET], old.words[at.SECRET + 1]

    def settle(self) -> None:
        """Publishes the file: a new one replaces the old one, and other processes may open it."""
        if self.old is not None:
            os.rename(self.replacing, self.path)
            self.old.close()
            self.old = None
        fcntl.flock(self.fd, fcntl.LOCK_SH)

    def close(self) -> None:
        """Closes the file; the memory is unmapped when no view on it is left. Without `settle`, the old file stays."""
        if self.old is not None:
            with suppress(OSError):
                os.unlink(self.replacing)
            self.old.close()
        if self.words is not None:
            self.words.release()
        if self.memory is not None:
            try:
                self.memory.close()
            except BufferError:  # a view on it still exists; the mapping closes with the last view
                pass
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        """That of a store which is collected without `close` leaves neither a descriptor nor its lock on the file."""
        if getattr(self, "fd", -1) >= 0:
            os.close(self.fd)


def allocate_space(fd: int, offset: int, size: int) -> int:
    """Allocates disk space for a part of a file; an error number, 0 also where the file system can't do this."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, offset, size)
    except OSError as error:
        return 0 if error.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS) else error.errno or errno.EIO
    return 0


@cache
def boot_id() -> tuple[int, int]:
    """Two words that change with every boot; UNKNOWN_BOOT without /proc."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            digest = hashlib.blake2b(file.read().strip(), digest_size=16).digest()
    except OSError:
        return UNKNOWN_BOOT
    return int.from_bytes(digest[:8], "little", signed=True), int.from_bytes(digest[8:], "little", signed=True)


def pid_namespace() -> int:
    """The pid namespace of this process; containers have their own."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
