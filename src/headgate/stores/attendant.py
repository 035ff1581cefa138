"""Who calls `tend` of a leased store: a daemon thread, or a timer on the loop of async callers."""

from __future__ import annotations

import threading
import weakref
from typing import Any


class Attendant:
    """Wakes up when a lease runs low or ends."""

    def __init__(self, store: Any) -> None:
        self._store = weakref.ref(store)
        self._bell = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False

    def ring(self) -> None:
        """There is something to do."""

    def close(self) -> None:
        self._closed = True
        self._bell.set()
        if self._thread is not None:
            self._thread.join()
