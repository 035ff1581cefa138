"""Watches a policy file and the files that it names: a change on disk, or SIGHUP, calls a function, which loads the new version.

A thread reads inode, size and modification time of the files each second, and the contents when they differ. So editors may save
in place or rename a new file over the old one, and Kubernetes may swap the link to a folder. A file that is being written is
waited for; a missing one changes nothing, and one that can't be read is tried again. SIGHUP loads the file at once, changed or
not. A folder changes with the names of its files.

Rejected: inotify and its siblings, which miss network file systems and swapped links, and would be one more dependency to save
one `stat` per second.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType

from ..clock import SYSTEM, utc_us
from ..errors import ConfigurationError
from ..periodic_thread import PeriodicThread
from ..rate import Duration, duration_us
from ..stores.guarded.deadline_store import StartThread, start_daemon

log = logging.getLogger("limitkeeper")

MIN_INTERVAL_US = 10_000
#: Seconds between two checks whether a file is still being written, and the most checks.
SETTLED, TRIES = 0.05, 20
#: A file that changed so recently may change again with the same modification time.
RECENT_US = 2_000_000
#: So many bytes of a file are compared: a policy has fewer, and of a key fewer are read.
MAX_READ = 1_000_000
Stamp = tuple[int, int, int] | None
#: In the place of a file's contents.
MISSING = b""


class FileWatcher(PeriodicThread):
    """Calls `on_change()` in its own thread when a file (or folder), or one of the files that `more()` returns, has changed.

    What it raises goes to `on_error`, or is logged. The `files` of that error are watched too: a missing one may be created.
    `hang_up=True` also handles SIGHUP where that is possible: in the main thread, on systems that have it (`hangs_up`).
    """

    def __init__(
        self,
        path: str | Path,
        on_change: Callable[[], object],
        interval: Duration = "1s",
        *,
        on_error: Callable[[Exception], object] | None = None,
        more: Callable[[], Iterable[str | Path]] = tuple,
        hang_up: bool = False,
        start_thread: StartThread = start_daemon,
        sleep: Callable[[float], None] = SYSTEM.sleep,
        utc_us: Callable[[], int] = utc_us,
    ) -> None:
        self.path = Path(os.path.abspath(path))  # a program may change its folder; links stay as they are
        if duration_us(interval) < MIN_INTERVAL_US:
            raise ConfigurationError(f"interval: {interval!r} is too short; write at least 10ms")
        self._on_change, self._on_error, self._more, self._sleep, self._utc_us = on_change, on_error, more, sleep, utc_us
        self._missing_before = False
        self._unread: list[Path] = []
        self._wanted: tuple[Path, ...] = ()
        self._stamps: dict[Path, Stamp] | None = None
        self._contents = self._read()
        self.hangs_up = False
        super().__init__("limitkeeper watch", duration_us(interval), start_thread)
        if hang_up:
            self._listen()

    def stop(self, timeout: float = 5.0) -> None:
        """Restores the handler of SIGHUP, and ends the thread."""
        self.stopped = True
        if self.hangs_up and threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGHUP) == self._on_hang_up:
                signal.signal(signal.SIGHUP, self._before)
            self.hangs_up = False
        super().stop(timeout)

    def work(self, woken: bool) -> None:
        try:
            if self.look(woken):
                self._wanted = ()
                try:
                    self._on_change()
                except Exception as error:
                    self._want(getattr(error, "files", ()))  # first: one may be created as soon as the error is known
                    if self._on_error is None:
                        raise
                    self._on_error(error)
        except Exception:
            log.exception("%s has changed, and could not be loaded", self.path)

    def look(self, asked: bool = False) -> bool:
        """Whether the file is there and is not what it was; `asked`: whether it is there."""
        stamps = self._read_stamps()
        if stamps == self._stamps and not asked:
            return False
        stamps = self._wait_until_written(stamps)
        gone = stamps[self.path] is None
        if gone and not self._missing_before:
            log.warning("%s is missing: the version loaded from it stays in force", self.path)
        self._missing_before = gone
        contents = self._read(self._contents)
        known, self._contents = self._contents, {**self._contents, **contents}
        before, self._unread = self._unread, [path for path in stamps if stamps[path] and not contents.get(path)]
        for path in set(self._unread).difference(before):
            log.warning("%s can't be read: the version loaded from it stays in force", path)
        now = self._utc_us()
        recent = any(stamp is not None and abs(now - stamp[0] // 1000) < RECENT_US for stamp in stamps.values())
        self._stamps = None if recent or self._unread else stamps  # permissions are no part of a stamp
        if self.path not in contents:
            return False
        return asked or self.path not in known or any(known.get(path, new) != new != MISSING for path, new in contents.items())

    def _want(self, files: Iterable[Path]) -> None:
        self._wanted = tuple(files)
        self._contents.update({path: MISSING for path in self._wanted if path not in self._contents and not path.exists()})

    def _wait_until_written(self, stamps: dict[Path, Stamp]) -> dict[Path, Stamp]:
        """Waits while a file is being written."""
        for _ in range(TRIES):
            if self.stopped:
                break
            self._sleep(SETTLED)
            before, stamps = stamps, self._read_stamps()
            if stamps == before:
                break
        return stamps

    def _files(self) -> list[Path]:
        return list(dict.fromkeys([self.path, *(Path(os.path.abspath(one)) for one in (*self._more(), *self._wanted))]))

    def _read_stamps(self) -> dict[Path, Stamp]:
        return {path: _stamp(path) for path in self._files()}

    def _read(self, known: Mapping[Path, bytes] = {}) -> dict[Path, bytes]:
        """Hashes of the files' contents. One that can't be read is left out, or MISSING if it never was: it may be created."""
        found = {}
        for path in self._files():
            try:
                found[path] = hashlib.sha256(_content(path)).digest()
            except OSError:
                if path != self.path and path not in known:
                    found[path] = MISSING
        return found

    def _listen(self) -> None:
        if not hasattr(signal, "SIGHUP") or threading.current_thread() is not threading.main_thread():
            log.info("%s is watched without SIGHUP, which only the main thread can handle", self.path)
            return
        self._terminal = _has_terminal()
        self._before = signal.getsignal(signal.SIGHUP)
        signal.signal(signal.SIGHUP, self._on_hang_up)
        self.hangs_up = True

    def _on_hang_up(self, number: int, frame: FrameType | None) -> None:
        if callable(self._before):
            self._before(number, frame)
        elif self._before == signal.SIG_DFL and self._terminal and not _has_terminal():
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the terminal was closed: the program ends with it
            os.kill(os.getpid(), signal.SIGHUP)
            return
        if not self.stopped:
            self.wake()


def _has_terminal() -> bool:
    """Whether this process has a terminal that is open."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _stamp(path: Path) -> Stamp:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _content(path: Path) -> bytes:
    """The bytes of a file that are compared; of a folder, the names in it."""
    if path.is_dir():
        return b"\0".join(sorted(os.listdir(os.fsencode(path))))
    with path.open("rb") as file:
        return file.read(MAX_READ)
