"""Creates, opens, checks and maps the file of a SharedStore.

Every process that has the file open holds a shared `flock` on it. A process that gets the exclusive lock is alone: it may create
the file, roll back the change of a dead process, or replace the file after a reboot. All others only check that the file is
what they expect. Pages may reach the disk in any order before a crash of the machine, so after a reboot cells are checked and
copied one by one into a new file.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
from typing import Any

from ...clock import steady_us, utc_us
from ...errors import ConfigurationError, StoreUnavailable
from . import layout as at
from .layout import Regions, regions
from .lock_owner import boot_id, pid_namespace

PROTOCOLS = {at.ATOMIC: "compare-and-swap (compiled)", at.LOCK_FILE: "a lock file (not compiled)"}


class MappedFile:
    """An open file: its memory, its layout, and whether this process has it alone."""

    def __init__(self, path: str, max_keys: int, log_entries: int, protocol: int) -> None:
        self.path = os.path.abspath(path)
        self.max_keys, self.log_entries, self.protocol = max_keys, log_entries, protocol
        self.plan: Regions = regions(max_keys, log_entries)
        self.fd, self.alone = self._open()
        try:
            self.words: Any = None
            self.old: MappedFile | None = None
            if self.alone and self._is_unmade():
                self._make()
            self._check()
            self.memory = self._map(self.plan.end * 8)
            self.words = memoryview(self.memory).cast("q")
            if self.alone:
                self._take_over()
        except BaseException:
            self.close()
            raise

    def _open(self) -> tuple[int, bool]:
        """Opens and locks the file; again, when the path was replaced meanwhile."""
        while True:
            try:
                fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except (OSError, ValueError) as error:
                raise StoreUnavailable(
                    f"shared file {self.path!r}: {error}; give a path in a folder that can be written to"
                ) from error
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                raise ConfigurationError(f"{self.path!r} is not a regular file; give the path of one, it is created when missing")
            alone = True
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                alone = False
                fcntl.flock(fd, fcntl.LOCK_SH)  # waits while another process creates the file
            try:
                same = os.stat(self.path).st_ino == os.fstat(fd).st_ino
            except FileNotFoundError:
                same = False
            if same and (alone or os.fstat(fd).st_size):
                return fd, alone
            os.close(fd)

    def _map(self, size: int) -> mmap.mmap:
        return mmap.mmap(self.fd, size)

    # Making ----------------------------------------------------------------------------------------------------

    def _is_unmade(self) -> bool:
        """Whether the file is empty, or the process that created it died before it was ready."""
        found = os.pread(self.fd, at.HEADER * 8, 0)
        if not found:
            return True
        return found[:8] == at.MAGIC_TEXT and found[at.READY * 8 :][:8] == bytes(8)

    def _make(self) -> None:
        """Creates a sparse file with a header; the magic text is written before the size, READY after it."""
        space = os.statvfs(self.path)
        needed = (self.plan.blocks - self.plan.heads) * 8
        if space.f_bavail * space.f_frsize < needed:
            raise StoreUnavailable(
                f"shared file {self.path!r}: {needed >> 20} MiB are needed for {self.max_keys} keys, "
                f"{space.f_bavail * space.f_frsize >> 20} MiB are free; lower max_keys, or give another path"
            )
        words = memoryview(bytearray(at.HEADER * 8)).cast("q")
        words[at.LAYOUT], words[at.PROTOCOL] = at.VERSION, self.protocol
        words[at.MAX_KEYS], words[at.LOG_ENTRIES], words[at.SIZE] = self.max_keys, self.log_entries, self.plan.end
        for word in (at.SECRET, at.SECRET + 1):
            words[word] = int.from_bytes(os.urandom(8), "little", signed=True)
        self._stamp(words, 0)
        words[at.MAGIC] = int.from_bytes(at.MAGIC_TEXT, "little")
        os.pwrite(self.fd, words, 0)
        os.ftruncate(self.fd, self.plan.end * 8)
        os.pwrite(self.fd, (1).to_bytes(8, "little"), at.READY * 8)

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
            f"shared file {self.path!r} {what}; or delete the file while no process uses it, or give another path"
        )

    def _take_over(self) -> None:
        """No other process has the file open: a lock that is still held belongs to a dead one."""
        if (self.words[at.BOOT], self.words[at.BOOT + 1]) != boot_id():
            self._renew()
        self.words[at.NAMESPACE] = pid_namespace()
        if self.words[at.LOCK]:
            self.words[at.TAKEOVERS] += 1
        self.words[at.LOCK] = 0

    def _renew(self) -> None:
        """After a reboot: creates a new file; the store copies the cells of the old one."""
        old_fd, old_memory, old_words = self.fd, self.memory, self.words
        fresh = f"{self.path}.{os.getpid()}"
        self.fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        fcntl.flock(self.fd, fcntl.LOCK_EX)
        self._make()
        self.memory = self._map(self.plan.end * 8)
        self.words = memoryview(self.memory).cast("q")
        self._stamp(self.words, old_words[at.LAST])
        self.words[at.SECRET], self.words[at.SECRET + 1] = old_words[at.SECRET], old_words[at.SECRET + 1]
        self.old = MappedFile.__new__(MappedFile)
        self.old.path, self.old.fd, self.old.memory, self.old.words = self.path, old_fd, old_memory, old_words
        self.old.plan, self.old.old = self.plan, None
        self.replacing = fresh

    def settle(self) -> None:
        """Publishes the file: a new one replaces the old one, and other processes may open it."""
        if self.old is not None:
            os.rename(self.replacing, self.path)
            self.old.close()
            self.old = None
        fcntl.flock(self.fd, fcntl.LOCK_SH)

    def close(self) -> None:
        """Closes the file; the memory is unmapped when no view on it is left."""
        if getattr(self, "words", None) is not None:
            self.words.release()
        memory = getattr(self, "memory", None)
        if memory is not None:
            try:
                memory.close()
            except BufferError:  # a view on it still exists; the mapping closes with the last view
                pass
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
