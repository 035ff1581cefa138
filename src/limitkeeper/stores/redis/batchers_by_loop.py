"""Which loop has which coach. Whatever a loop had ends with it; a store outlives any number of them."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

from ...fork import reset_after_fork
from .batcher import Batcher, BatcherHost

_inherited: list[Any] = []


class BatchersByLoop:
    """The coaches of a store, one for each running loop."""

    def __init__(self, store: BatcherHost) -> None:
        self._store = weakref.ref(store)
        self._coaches: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Batcher] = weakref.WeakKeyDictionary()
        self._last: Any = None  # of the loop that asked last: a dictionary of weak keys is slow to ask
        reset_after_fork(self)

    def coach(self) -> Batcher:
        """The coach of the running loop."""
        loop = asyncio.get_running_loop()
        last: Batcher | None = self._last
        if last is not None and last.loop is loop:
            return last
        found = self._coaches.get(loop)
        if found is None:
            self._tidy()
            store = self._store()
            assert store is not None
            found = self._coaches[loop] = Batcher(store, store.streams(loop))
        self._last = found
        return found

    def _tidy(self) -> None:
        """Lets go of loops that were closed."""
        for loop, coach in list(self._coaches.items()):
            if loop.is_closed():
                coach.streams.close()
                del self._coaches[loop]

    def close(self) -> None:
        """Hangs up everywhere; in a loop that runs elsewhere, as soon as it comes to it."""
        for loop, coach in list(self._coaches.items()):
            if loop.is_running() and loop is not _running():
                loop.call_soon_threadsafe(coach.streams.close)
            else:
                coach.streams.close()
        self._coaches.clear()
        self._last = None

    async def aclose(self) -> None:
        self.close()
        await asyncio.sleep(0)  # the transports end in the next turn

    def _reset_after_fork(self) -> None:
        """In a child process: its parent's loops stay untouched, and are never used."""
        _inherited.append((self._coaches, self._last))
        self._coaches = weakref.WeakKeyDictionary()
        self._last = None


def _running() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
