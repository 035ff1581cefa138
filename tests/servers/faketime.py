"""Clocks that are wrong: a Valkey whose time is stepped back and forth while it runs, and clients that are off by some seconds.

libfaketime comes with a wheel. It reads the offset from a file at every read of the clock, so rewriting the file steps the time
of a running process. The monotonic clock is left alone: a server whose wall clock jumps still has timers that run.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from .valkey import Valkey

#: How near to the wanted time the server's answer has to be, in seconds.
SEEN = 0.2


def faketime_library() -> str | None:
    """The library's path; None where it is not installed."""
    found = importlib.util.find_spec("libfaketime")
    if found is None or found.origin is None:
        return None
    for path in sorted(Path(found.origin).parent.rglob("libfaketime.so.1")):
        return str(path)
    return None


class Skew:
    """An offset to the real time, in a file that processes under `env` read."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.library = faketime_library()
        if self.library is None:
            raise RuntimeError("libfaketime is not installed: pip install libfaketime")
        handle, self.path = tempfile.mkstemp(prefix="limitkeeper-clock-")
        os.close(handle)
        self.seconds = seconds
        self.set(seconds)

    @property
    def env(self) -> dict[str, str]:
        assert self.library is not None
        return {
            "LD_PRELOAD": self.library,
            "FAKETIME_TIMESTAMP_FILE": self.path,
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }

    def set(self, seconds: float) -> None:
        """Puts the clocks that many seconds ahead (or behind, when negative)."""
        self.seconds = seconds
        fresh = f"{self.path}.new"
        Path(fresh).write_text(f"{seconds:+.6f}\n")
        os.replace(fresh, self.path)

    def step(self, seconds: float) -> None:
        """Moves the clocks by so much from where they are."""
        self.set(self.seconds + seconds)

    def close(self) -> None:
        Path(self.path).unlink(missing_ok=True)


class FaketimeValkey(Valkey):
    """A server whose clock is stepped: `server.step(-3600)` sets it back an hour and waits until its process has read that."""

    def __init__(self, *options: str, **more: Any) -> None:
        self.skew = Skew()
        super().__init__(*options, env={**more.pop("env", {}), **self.skew.env}, **more)

    def set_clock(self, seconds: float) -> None:
        """Sets the server's clock that many seconds ahead of ours, and waits until the server has read it."""
        self.skew.set(seconds)
        end = time.monotonic() + 30
        with self.client() as client:
            while True:
                now, micros = client.time()
                if abs(now + micros / 1e6 - time.time() - seconds) < SEEN:
                    return
                if time.monotonic() > end:
                    raise RuntimeError(f"the server's clock does not follow: it says {now}")

    def step(self, seconds: float) -> None:
        """Moves the server's clock by so much from where it is."""
        self.set_clock(self.skew.seconds + seconds)

    def close(self) -> None:
        super().close()
        self.skew.close()
