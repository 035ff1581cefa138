"""Hands the state of slots from one shard to others, so that no counter starts again.

One shard hands over at a time, and only the slots whose home changes. Their gates are closed, decisions in progress end,
every limit's keys in these slots are read from the old home, loaded into the new ones and reset in the old; then the table
points to the new homes and the gates open. So a key is decided in one home at any moment. Callers of such a key wait at the gate:
for as long as the old home needs to list its keys and the new ones to load theirs, and no longer than `pause`; then they get
StoreTimeout. All other keys are decided as usual.

When a shard fails on the way, its slots stay where they were and the gates open; `rebalance()` continues later. Times in a state
are those of the old home's clock: shards whose clocks differ by d may grant rate × d more or less, once.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from ...algorithms.claim import Claim, NamedLimit
from ...clock import Clock
from ...errors import StoreError, StoreTimeout
from .router import Router, Shard
from .slots import slot_of

log = logging.getLogger("limitkeeper")
#: Keys per call of `load` and `reset`.
BATCH = 1000
KeyState = tuple[str, Any]


class Progress(NamedTuple):
    """Progress of a move: the shard that hands over, keys moved so far, slots moved, slots in all."""

    shard: str
    keys: int
    slots: int
    of: int


Listener = Callable[[Progress], object]


class KeyGate:
    """What callers of a key that is being moved wait at, sync and async."""

    def __init__(self, shard: str, clock: Clock) -> None:
        self.shard = shard
        self._clock = clock
        self._opened = threading.Event()
        self._lock = threading.Lock()
        self._tasks: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def open(self) -> None:
        with self._lock:
            self._opened.set()
            tasks, self._tasks = self._tasks, []
        for loop, event in tasks:
            try:
                loop.call_soon_threadsafe(event.set)
            except RuntimeError:  # the loop is closed
                pass

    def wait_open(self, seconds: float) -> bool:
        self._clock.sleep(seconds, self._opened)
        return self._opened.is_set()

    async def await_open(self, seconds: float) -> bool:
        event = asyncio.Event()
        with self._lock:
            if self._opened.is_set():
                return True
            self._tasks.append((asyncio.get_running_loop(), event))
        await self._clock.asleep(seconds, event)
        return event.is_set()


def drain(callers: Callable[[], int], seconds: float, clock: Clock) -> None:
    """Waits until no caller is left, looking at intervals that double up to 10 ms."""
    wait = 0.000_05
    while callers():
        if seconds <= 0:
            raise StoreTimeout("decisions that began before the move are still in progress; call rebalance() later")
        clock.sleep(min(wait, seconds))
        seconds -= wait
        wait = min(2 * wait, 0.01)


def batches(pairs: Iterable[KeyState]) -> Iterator[list[KeyState]]:
    remaining = iter(pairs)
    while batch := list(islice(remaining, BATCH)):
        yield batch


class Copy:
    """The keys copied from one shard to others, so that they can be reset in the old home or in the new ones."""

    def __init__(self, source: Shard, targets: dict[int, Shard], router: Router) -> None:
        self.source = source
        self.targets = targets
        self.keys = 0
        self._router = router
        self._copied: list[tuple[NamedLimit, Shard, list[str]]] = []

    def copy_limit(self, named: NamedLimit, progress: Callable[[int], object]) -> None:
        """Loads one limit's keys into their new homes."""
        found = self.source.store.items(self._router.limit_at(named, self.source))
        for batch in batches((key, state) for key, state in found if slot_of(key) in self.targets):
            by_home: dict[Shard, list[KeyState]] = {}
            for key, state in batch:
                by_home.setdefault(self.targets[slot_of(key)], []).append((key, state))
            for target, pairs in by_home.items():
                self._copied.append((named, target, [key for key, _ in pairs]))
                target.store.load(self._router.limit_at(named, target), pairs)
            self.keys += len(batch)
            progress(self.keys)

    def reset(self, new_homes: bool) -> None:
        """Resets what was copied: in the new homes after a failure, in the old one after a success."""
        for named, target, keys in self._copied:
            shard = target if new_homes else self.source
            try:
                shard.store.reset([Claim(self._router.limit_at(named, shard), key, 0) for key in keys])
            except StoreError as error:  # what stays there are charges that were made: it only errs on the strict side
                log.warning("shard %r kept %d keys that have moved: %s", shard.name, len(keys), error)
