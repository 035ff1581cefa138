"""Moving live state when a shard comes or goes by plan, so that no counter starts anew.

One shard hands over at a time, and only the slots that change home. Their doors are closed, decisions that are under way are
waited for, every limit's keys in these slots are read from the old home, loaded into the new one and forgotten in the
old; then the table points to the new home and the doors open. So a key is decided in one home at any moment, and never
in both. Who asks for it meanwhile waits at the door: for as long as its old home needs to list its keys and the new homes to
take theirs, and no longer than `pause`, after which it is told StoreTimeout. All other keys go on.

When a shard fails on the way, its slots stay where they were and the doors open; `rebalance()` carries on later.
Times in a state are those of the old home's clock: shards whose clocks differ by d may grant rate × d more or less, once.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from ...algorithms.claim import Claim, NamedLimit
from ...errors import StoreError, StoreTimeout
from .slots import slot_of

log = logging.getLogger("limitkeeper")
#: Keys per call of `load` and `reset`.
BATCH = 1000


class Progress(NamedTuple):
    """How far a move has come: the shard that hands over, keys moved so far, slots that have a new home, slots in all."""

    shard: str
    keys: int
    slots: int
    of: int


Listener = Callable[[Progress], object]


class KeyGate:
    """What those who ask for a key on its way wait at, in both colours."""

    def __init__(self) -> None:
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
            except RuntimeError:  # a loop that is closed has nobody left to wake
                pass

    def wait(self, seconds: float) -> bool:
        return self._opened.wait(seconds)

    async def await_open(self, seconds: float) -> bool:
        event = asyncio.Event()
        with self._lock:
            if self._opened.is_set():
                return True
            self._tasks.append((asyncio.get_running_loop(), event))
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            return False
        return True


def drain(inside: Callable[[], int], seconds: float) -> None:
    """Waits until those who were deciding when the doors closed are done."""
    pause = threading.Event()
    for wait in backing_off(seconds):
        if not inside():
            return
        pause.wait(wait)
    if inside():
        raise StoreTimeout(f"decisions that began before the move are not done after {seconds:g} s; call rebalance() later")


def backing_off(seconds: float) -> Iterator[float]:
    """Waits that double up to 10 ms, and in all make so many seconds."""
    wait = 0.000_05
    while seconds > 0:
        yield min(wait, seconds)
        seconds -= wait
        wait = min(2 * wait, 0.01)


def batches(items: Iterable[Any], size: int = BATCH) -> Iterator[list[Any]]:
    batch: list[Any] = []
    for item in items:
        batch.append(item)
        if len(batch) >= size:
            yield batch
            batch = []
    if batch:
        yield batch


class Copy:
    """What has been copied from one shard to others, so that it can be forgotten there or here."""

    def __init__(self, source: Any, targets: dict[int, Any], at: Callable[[NamedLimit, Any], NamedLimit]) -> None:
        self.source = source
        self.targets = targets
        self._at = at
        self._moved: list[tuple[NamedLimit, Any, list[str]]] = []
        self.keys = 0

    def take(self, named: NamedLimit, told: Callable[[int], object]) -> None:
        """Loads one limit's keys into their new homes."""
        found = self.source.store.items(self._at(named, self.source))
        for batch in batches((key, state) for key, state in found if slot_of(key) in self.targets):
            homes: dict[Any, list[tuple[str, Any]]] = {}
            for key, state in batch:
                homes.setdefault(self.targets[slot_of(key)].number, []).append((key, state))
            for pairs in homes.values():
                target = self.targets[slot_of(pairs[0][0])]
                self._moved.append((named, target, [key for key, _ in pairs]))
                target.store.load(self._at(named, target), pairs)
            self.keys += len(batch)
            told(self.keys)

    def forget(self, everywhere_new: bool) -> None:
        """Forgets what was copied: in the new homes when it failed, in the old one when it is done."""
        for named, target, keys in self._moved:
            shard = target if everywhere_new else self.source
            try:
                shard.store.reset([Claim(self._at(named, shard), key, 0) for key in keys])
            except StoreError as error:  # what is left there tells of charges that were made: it only errs on the strict side
                log.warning("shard %r kept %d keys that have moved: %s", shard.name, len(keys), error)
