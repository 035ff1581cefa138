"""A background thread that does its work at intervals, or at once when it is woken. A forked child starts its own."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

from .fork import reset_after_fork
from .stores.guarded.deadline_store import StartThread, start_daemon
from .stores.sans_io import WakeEvent


class PeriodicThread(ABC):
    """Calls `work(False)` every `interval_us` and `work(True)` after `wake()`, until `stop()`. `at_once` wakes it at its start.

    A subclass calls this constructor last, since the thread starts here: by `start_thread`, which a simulator replaces.
    """

    def __init__(self, name: str, interval_us: int, start_thread: StartThread = start_daemon, at_once: bool = False) -> None:
        self.name = name
        self.interval_us = interval_us
        self.stopped = False
        self._start_thread = start_thread
        self._at_once = at_once
        self._start()
        reset_after_fork(self)

    @abstractmethod
    def work(self, woken: bool) -> None: ...

    def wake(self) -> None:
        self._woken.set()

    def stop(self, timeout: float = 5.0) -> None:
        """Ends the thread, and waits for that up to `timeout` seconds."""
        self.stopped = True
        self._woken.set()
        if self.thread is not threading.current_thread():
            self.thread.join(timeout)

    def _start(self) -> None:
        self._woken = WakeEvent()  # a signal handler may set it
        if self._at_once:
            self.wake()
        self.thread = self._start_thread(self._run, self.name)

    def _reset_after_fork(self) -> None:
        """Starts the thread again: a child has none of its parent's threads."""
        if not self.stopped:
            self._start()

    def _run(self) -> None:
        while not self.stopped:
            woken = self._woken.wait(self.interval_us / 1e6)
            if woken:
                self._woken.clear()
            if not self.stopped:
                self.work(woken)
