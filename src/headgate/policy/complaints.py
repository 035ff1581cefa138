"""Complaints in the log that can't flood it: the first at once, then at most one each ten seconds, all of them counted."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field

from ..clock import steady_us

log = logging.getLogger("headgate")
EVERY_US = 10_000_000


@dataclass(slots=True, eq=False)
class Complaints:
    """`count` is how many there were; `tell` writes a line unless one was written a moment ago."""

    every_us: int = EVERY_US
    count: int = 0
    _told_us: int | None = None
    _untold: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def tell(self, text: str, *args: object) -> None:
        with self._lock:
            self.count += 1
            now = steady_us()
            if self._told_us is not None and now - self._told_us < self.every_us:
                self._untold += 1
                return
            self._told_us, untold, self._untold = now, self._untold, 0
        more = f" (and {untold} more since the last line)" if untold else ""
        log.warning(text + "%s", *args, more)
