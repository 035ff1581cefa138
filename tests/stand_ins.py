"""Replacements of time and of stores: manual clocks, a store that records its calls, async driven as sync."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import limitkeeper
from limitkeeper import Decision, MemoryStore, StoreUnavailable
from limitkeeper.stores import Store
from limitkeeper.testing import ManualClock

#: 12:00:00 UTC of some day: a round minute, hour and day half.
NOON = datetime(2026, 1, 10, 12, tzinfo=UTC).timestamp()


@contextmanager
def no_room_for_threads() -> Iterator[None]:
    """Threads can't be started: the system has no memory for stacks of 64 TiB."""
    size = threading.stack_size(1 << 46)
    try:
        yield
    finally:
        threading.stack_size(size)


class HeldClock(ManualClock):
    """A manual clock on which sleepers really stay asleep until another thread advances it (or wakes them)."""

    def __init__(self, start: float = NOON) -> None:
        super().__init__(start)
        self.sleeps: list[float] = []
        self._moved = threading.Condition()
        self._interrupted: set[int | None] = set()

    def interrupt(self, thread: threading.Thread) -> None:
        """Does to a thread that sleeps on this clock what Ctrl-C does."""
        self._interrupted.add(thread.ident)

    def advance(self, seconds: float) -> None:
        super().advance(seconds)
        with self._moved:
            self._moved.notify_all()

    def sleep(self, seconds: float, wake: threading.Event | None = None) -> None:
        end = self.now_us() + round(seconds * 1_000_000)
        self.sleeps.append(seconds)
        with self._moved:
            while self.now_us() < end and not (wake is not None and wake.is_set()):
                if threading.get_ident() in self._interrupted:
                    raise KeyboardInterrupt
                self._moved.wait(0.002)

    async def asleep(self, seconds: float, wake: asyncio.Event | None = None) -> None:
        end = self.now_us() + round(seconds * 1_000_000)
        self.sleeps.append(seconds)
        iterations = 0
        while self.now_us() < end and not (wake is not None and wake.is_set()):
            iterations += 1
            await asyncio.sleep(0 if iterations < 1000 else 0.001)  # a busy loop could keep other threads from running


class WrappedStore(Store):
    """A third-party store: the contract over a MemoryStore, with its calls recorded.

    Verbs named in `failing` raise StoreUnavailable. `local` is settable, to be a local or a remote store.
    """

    def __init__(self, inner: MemoryStore, local: bool = False) -> None:
        self.inner = inner
        self.local = local
        self.calls: list[str] = []
        self.failing: set[str] = set()

    @property
    def clock(self) -> Any:
        return self.inner.clock

    def _noted(self, verb: str) -> MemoryStore:
        self.calls.append(verb)
        if verb in self.failing:
            raise StoreUnavailable(f"{verb}: nobody answers")
        return self.inner

    def decide(self, claims: Any, max_wait_us: int | None = 0, **options: Any) -> Decision:
        return self._noted("decide").decide(claims, max_wait_us, **options)

    def decide_many(self, asks: Any, max_wait_us: int | None = 0) -> list[Decision]:
        return self._noted("decide_many").decide_many(asks, max_wait_us)

    def give_back(self, claims: Any, charged_at: int = -1, source: str = "store") -> bool:
        return self._noted("give_back").give_back(claims, charged_at)

    def reset(self, claims: Any) -> None:
        self._noted("reset").reset(claims)

    def items(self, limit: Any) -> Any:
        return self._noted("items").items(limit)

    def load(self, limit: Any, items: Any) -> None:
        self._noted("load").load(limit, items)


class Driven:
    """An async object whose coroutines are run to their end, each in an event loop of its own."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __bool__(self) -> bool:
        return bool(self.inner)

    def __repr__(self) -> str:
        return repr(self.inner)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        return self._driving(found) if inspect.ismethod(found) else found

    def _driving(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            answer = method(*args, **kwargs)
            return driven(answer) if inspect.isawaitable(answer) else answer

        return call

    def __enter__(self) -> Driven:
        driven(self.inner.__aenter__())
        return self

    def __exit__(self, *exc: Any) -> Any:
        return driven(self.inner.__aexit__(*exc))


def driven(awaitable: Awaitable[Any]) -> Any:
    """The end of an awaitable, run by an event loop that lives just that long."""

    async def main() -> Any:
        return await awaitable

    answer = asyncio.run(main())
    return Driven(answer) if isinstance(answer, limitkeeper.reservation.AsyncReservation) else answer


class Loop:
    """A loop in a thread of its own, so that an async limiter keeps its connection from call to call."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    def call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(90)

    def __enter__(self) -> Loop:
        return self

    def __exit__(self, *exc: object) -> None:
        self.call(self.loop.shutdown_asyncgens())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()
