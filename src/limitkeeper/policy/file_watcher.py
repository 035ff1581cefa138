"""A policy file that is watched: changed on disk, it is loaded and enforced; with mistakes, it is refused and the old one stays.

A thread looks at the file's number, size and time of change each second; when they differ, at its contents. So it does not matter
how an editor saves (in place, or a new file renamed over the old), nor that Kubernetes swaps a link to a folder. A file that is
being written is waited for; one that is gone changes nothing, until it is back with something else in it. One that can't be
loaded is told of once, and tried again when it changes. SIGHUP looks at once, and loads even what did not change.

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
from typing import Any

from ..clock import utc_us
from ..errors import ConfigurationError
from ..fork import reset_after_fork
from ..rate import Duration, duration_us
from .model import Policy

log = logging.getLogger("limitkeeper")

LEAST_INTERVAL_US = 10_000
#: A file is left alone for so long after it changed, in seconds; and it is waited for at most so often.
SETTLED, TRIES = 0.05, 20
#: A file that changed so recently may change again without its time of change showing it.
RECENT_US = 2_000_000
Stamp = tuple[int, int, int] | None
STOP, HANG_UP = "stop", "hang up"
#: In the place of a file's contents.
MISSING = b""


class FileWatcher:
    """Calls `on_change()` in a thread of its own when a file has changed (or one of `more()`, other files that belong to it).

    `hang_up=True` also listens to SIGHUP where that is possible: in the main thread, on systems that have it (`hangs_up` says).
    """

    def __init__(
        self,
        path: str | Path,
        on_change: Callable[[], Any],
        interval: Duration = "1s",
        *,
        more: Callable[[], Iterable[str | Path]] = tuple,
        hang_up: bool = False,
    ) -> None:
        self.path = Path(os.path.abspath(path))  # a program may change its folder; links stay as they are
        self.interval_us = duration_us(interval)
        if self.interval_us < LEAST_INTERVAL_US:
            raise ConfigurationError(f"interval: {interval!r} is too often to look at a file; write at least 10ms")
        self._on_change = on_change
        self._more = more
        self._stopped = False
        self._gone = False
        self.wanted: tuple[Path, ...] = ()
        self._stamps: dict[Path, Stamp] | None = None
        self._contents = self._read()
        self.hangs_up = False
        self._before: Any = None
        self._terminal = False
        self._start()
        reset_after_fork(self)
        if hang_up:
            self._listen()

    def stop(self) -> None:
        """Ends the thread, and gives SIGHUP back to whom it belonged."""
        self._stopped = True
        self._bell.put(STOP)
        if self.hangs_up and threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGHUP) == self._hung_up:
                signal.signal(signal.SIGHUP, self._before)
            self.hangs_up = False
        if self._thread is not threading.current_thread():
            self._thread.join(5)

    def _reset_after_fork(self) -> None:
        """Starts the watching thread again: a child has none of its parent's threads."""
        if not self._stopped:
            self._start()

    # Looking ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._bell: queue.SimpleQueue[str] = (
            queue.SimpleQueue()
        )  # may be rung from a signal handler, where a lock may not be taken
        self._thread = threading.Thread(target=self._watch, args=(self._bell,), name="limitkeeper watch", daemon=True)
        self._thread.start()

    def _watch(self, bell: queue.SimpleQueue[str]) -> None:
        while not self._stopped:
            try:
                word = bell.get(timeout=self.interval_us / 1e6)
            except queue.Empty:
                word = ""
            if word != STOP and not self._stopped:
                self._look_again(word == HANG_UP)

    def _look_again(self, asked: bool) -> None:
        try:
            if self.look(asked):
                self._on_change()
        except Exception:
            log.exception("%s has changed, and could not be taken over", self.path)

    def look(self, asked: bool = False) -> bool:
        """Whether the file is there and is not what it was; `asked`: whether it is there."""
        stamps = self._stamps_now()
        if stamps == self._stamps and not asked:
            return False
        stamps = self._settled(stamps)
        self._tell_gone(stamps[self.path] is None)
        contents = self._read(self._contents)
        known, self._contents = self._contents, {**self._contents, **contents}
        self._stamps = None if _recent(stamps) else stamps
        if self.path not in contents:
            return False
        return asked or self.path not in known or any(known.get(path, now) != now != MISSING for path, now in contents.items())

    def want(self, files: Iterable[Path]) -> None:
        """Looks at these files too: a version was refused that names them, and one that is missing may come yet."""
        self.wanted = tuple(files)
        for path in self.wanted:
            if not path.exists():
                self._contents.setdefault(path, MISSING)

    def _tell_gone(self, gone: bool) -> None:
        if gone and not self._gone:
            log.warning("%s is gone: what was loaded from it stays in force", self.path)
        self._gone = gone

    def _settled(self, stamps: dict[Path, Stamp]) -> dict[Path, Stamp]:
        """Waits while somebody is writing."""
        pause: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(TRIES):
            if self._stopped:
                break
            try:
                pause.get(timeout=SETTLED)
            except queue.Empty:
                pass
            before, stamps = stamps, self._stamps_now()
            if stamps == before:
                break
        return stamps

    def _files(self) -> list[Path]:
        return list(dict.fromkeys([self.path, *(Path(os.path.abspath(one)) for one in (*self._more(), *self.wanted))]))

    def _stamps_now(self) -> dict[Path, Stamp]:
        return {path: _stamp(path) for path in self._files()}

    def _read(self, known: Mapping[Path, bytes] = {}) -> dict[Path, bytes]:
        """What is in the files, as hashes. One that can't be read is left out, or, where nobody knew it, missing: it may come."""
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
            log.info("%s is watched, without SIGHUP: only the main thread can listen to it", self.path)
            return
        self._terminal = _has_terminal()
        self._before = signal.getsignal(signal.SIGHUP)
        signal.signal(signal.SIGHUP, self._hung_up)
        self.hangs_up = True

    def _hung_up(self, number: int, frame: Any) -> None:
        if callable(self._before):
            self._before(number, frame)
        elif self._before == signal.SIG_DFL and self._terminal and not _has_terminal():
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the window was closed: the program ends with it, as ever
            os.kill(os.getpid(), signal.SIGHUP)
            return
        if not self._stopped:
            self._bell.put(HANG_UP)


def _has_terminal() -> bool:
    """Whether somebody sits before this program, and has not left."""
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


def watch_policy(gate: Any, path: str | Path | None = None, interval: Duration = "1s", *, hang_up: bool = True) -> FileWatcher:
    """Watches the file of a gate's policy, and the files that it names, until `stop()`.

    A file that loads is handed to `gate.reload`; one that does not, to `gate.reload_refused`, and the gate goes on as it was.
    """
    source = path if path is not None else gate.policy.source
    if source is None:
        raise ConfigurationError(
            "this policy came from no file: say which one to watch, as in watch_policy(gate, 'limitkeeper.yaml')"
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
