"""Watches a policy file: when it changes on disk it is loaded and enforced; a version with errors is refused.

A thread reads inode, size and modification time of the file each second, and the contents when they differ. So editors may save
in place or rename a new file over the old one, and Kubernetes may swap the link to a folder. A file that is being written is
waited for; a missing one changes nothing. A version that can't be loaded is reported once, and tried again when it changes.
SIGHUP loads the file at once, changed or not.

Rejected: inotify and its siblings, which miss network file systems and swapped links, and would be one more dependency to save
one `stat` per second.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from ..clock import utc_us
from ..errors import ConfigurationError
from ..fork import reset_after_fork
from ..rate import Duration, duration_us
from .model import Policy

if TYPE_CHECKING:
    from .gate import Gate

log = logging.getLogger("limitkeeper")

MIN_INTERVAL_US = 10_000
#: Seconds between two checks whether a file is still being written, and the most checks.
SETTLED, TRIES = 0.05, 20
#: A file that changed so recently may change again with the same modification time.
RECENT_US = 2_000_000
Stamp = tuple[int, int, int] | None
STOP, RELOAD = "stop", "reload"
#: In the place of a file's contents.
MISSING = b""


class FileWatcher:
    """Calls `on_change()` in its own thread when a file, or one of the files that `more()` returns, has changed.

    `hang_up=True` also handles SIGHUP where that is possible: in the main thread, on systems that have it (`hangs_up`).
    """

    def __init__(
        self,
        path: str | Path,
        on_change: Callable[[], object],
        interval: Duration = "1s",
        *,
        more: Callable[[], Iterable[str | Path]] = tuple,
        hang_up: bool = False,
    ) -> None:
        self.path = Path(os.path.abspath(path))  # a program may change its folder; links stay as they are
        self.interval_us = duration_us(interval)
        if self.interval_us < MIN_INTERVAL_US:
            raise ConfigurationError(f"interval: {interval!r} is too short; write at least 10ms")
        self._on_change = on_change
        self._more = more
        self._stopped = False
        self._missing_before = False
        self.wanted: tuple[Path, ...] = ()
        self._stamps: dict[Path, Stamp] | None = None
        self._contents = self._read()
        self.hangs_up = False
        self._before: Callable[[int, FrameType | None], object] | int | None = None
        self._terminal = False
        self._start()
        reset_after_fork(self)
        if hang_up:
            self._listen()

    def stop(self) -> None:
        """Ends the thread, and restores the handler of SIGHUP."""
        self._stopped = True
        self._commands.put(STOP)
        if self.hangs_up and threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGHUP) == self._on_hang_up:
                signal.signal(signal.SIGHUP, self._before)
            self.hangs_up = False
        if self._thread is not threading.current_thread():
            self._thread.join(5)

    def _reset_after_fork(self) -> None:
        """Starts the watching thread again: a child has none of its parent's threads."""
        if not self._stopped:
            self._start()

    # Checking ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        # A SimpleQueue: a signal handler may put into it, where no lock may be taken.
        self._commands: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, args=(self._commands,), name="limitkeeper watch", daemon=True)
        self._thread.start()

    def _watch(self, commands: queue.SimpleQueue[str]) -> None:
        while not self._stopped:
            try:
                word = commands.get(timeout=self.interval_us / 1e6)
            except queue.Empty:
                word = ""
            if word != STOP and not self._stopped:
                self._check(word == RELOAD)

    def _check(self, asked: bool) -> None:
        try:
            if self.look(asked):
                self._on_change()
        except Exception:
            log.exception("%s has changed, and could not be loaded", self.path)

    def look(self, asked: bool = False) -> bool:
        """Whether the file is there and is not what it was; `asked`: whether it is there."""
        stamps = self._read_stamps()
        if stamps == self._stamps and not asked:
            return False
        stamps = self._wait_until_written(stamps)
        self._warn_missing(stamps[self.path] is None)
        contents = self._read(self._contents)
        known, self._contents = self._contents, {**self._contents, **contents}
        self._stamps = None if _recent(stamps) else stamps
        if self.path not in contents:
            return False
        return asked or self.path not in known or any(known.get(path, now) != now != MISSING for path, now in contents.items())

    def want(self, files: Iterable[Path]) -> None:
        """Watches these files too: a refused version names them, and a missing one may be created."""
        self.wanted = tuple(files)
        for path in self.wanted:
            if not path.exists():
                self._contents.setdefault(path, MISSING)

    def _warn_missing(self, gone: bool) -> None:
        if gone and not self._missing_before:
            log.warning("%s is missing: the version loaded from it stays in force", self.path)
        self._missing_before = gone

    def _wait_until_written(self, stamps: dict[Path, Stamp]) -> dict[Path, Stamp]:
        """Waits while a file is being written."""
        pause: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(TRIES):
            if self._stopped:
                break
            try:
                pause.get(timeout=SETTLED)
            except queue.Empty:
                pass
            before, stamps = stamps, self._read_stamps()
            if stamps == before:
                break
        return stamps

    def _files(self) -> list[Path]:
        return list(dict.fromkeys([self.path, *(Path(os.path.abspath(one)) for one in (*self._more(), *self.wanted))]))

    def _read_stamps(self) -> dict[Path, Stamp]:
        return {path: _stamp(path) for path in self._files()}

    def _read(self, known: Mapping[Path, bytes] = {}) -> dict[Path, bytes]:
        """Hashes of the files' contents. One that can't be read is left out, or MISSING if it never was: it may be created."""
        found = {}
        for path in self._files():
            try:
                found[path] = hashlib.sha256(path.read_bytes()).digest()
            except OSError:
                if path != self.path and path not in known:
                    found[path] = MISSING
        return found

    # SIGHUP ----------------------------------------------------------------------------------------------------

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
        if not self._stopped:
            self._commands.put(RELOAD)


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


def _recent(stamps: dict[Path, Stamp]) -> bool:
    now = utc_us()
    return any(stamp is not None and abs(now - stamp[0] // 1000) < RECENT_US for stamp in stamps.values())


def watch_policy(gate: Gate, path: str | Path | None = None, interval: Duration = "1s", *, hang_up: bool = True) -> FileWatcher:
    """Watches the file of a gate's policy, and the files that it names, until `stop()`.

    A version that loads is passed to `gate.reload`; the error of one that does not, to `gate.reload_refused`.
    """
    source = path if path is not None else gate.policy.source
    if source is None:
        raise ConfigurationError(
            "this policy was not read from a file: pass the file, as in watch_policy(gate, 'limitkeeper.yaml')"
        )
    source = Path(os.path.abspath(source))

    def changed() -> None:
        watch.wanted = ()
        try:
            gate.reload(Policy.load(source))
        except Exception as error:
            watch.want(getattr(error, "files", ()))
            gate.reload_refused(error)

    watch = FileWatcher(source, changed, interval, more=lambda: gate.policy.files, hang_up=hang_up)
    return watch
