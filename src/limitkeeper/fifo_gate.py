"""FifoGate: for limits that can't reserve (the sliding window counter), one queue per key: the first waiter decides again after
`retry_after`, the others wait until they are first."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Hashable

from .fork import reset_after_fork
from .garbage_collection import without_finalisers


class AsyncEvent(asyncio.Event):
    """An event that a plan can wait for."""

    await_ = asyncio.Event.wait


Event = threading.Event | AsyncEvent


class FifoGate:
    """Queues of waiters by key, in order of arrival; only the first of a queue may decide, the others wait for their event."""

    def __init__(self) -> None:
        self._reset_after_fork()
        reset_after_fork(self)

    def _reset_after_fork(self) -> None:
        """Starts empty."""
        self.lock = threading.RLock()
        self._queues: dict[Hashable, deque[Event]] = {}

    @without_finalisers
    def enter(self, key: Hashable, event: Event) -> bool:
        """Adds a waiter's event to the queue of a key; True if it is the first."""
        with self.lock:
            queue = self._queues.setdefault(key, deque())
            queue.append(event)
            return queue[0] is event

    @without_finalisers
    def leave(self, key: Hashable, event: Event) -> None:
        """Removes a waiter's event and wakes the one that is first then. Called again after an interrupt it completes that."""
        with self.lock:
            queue = self._queues.get(key) or deque([event])
            is_behind = event in queue and queue[0] is not event
            if event in queue:
                queue.remove(event)
            if not queue:
                self._queues.pop(key, None)
            elif not is_behind:
                queue[0].set()

    @without_finalisers
    def waiting(self, key: Hashable = None) -> int:
        with self.lock:
            return sum(len(queue) for name, queue in self._queues.items() if key is None or name == key)
