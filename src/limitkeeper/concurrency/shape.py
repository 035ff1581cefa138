"""shape: the messages of any iterator, handed over at a steady pace.

    async for message in shape(consumer, "100/s", capacity=500):
        await write(message)

A source that can wait is never refused: at most `capacity` messages are read ahead, and then the source is not asked for more
until one has been handed over. Without a capacity nothing is read ahead: a message is read when the loop asks for it. A task
reads ahead from an async source, a daemon thread from a sync one; that thread also keeps it from blocking the event loop.

The source is ahead of the loop: acknowledge or commit each message by itself, after processing it, never "everything so far".
An iterator that is closed, garbage collected or left by an exception stops reading; `close` returns what was read in vain. In a
forked child an iterator that reads ahead raises a RuntimeError.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from typing import Any, Generic, Self, TypeVar

from ..algorithms import Limit
from ..errors import ConfigurationError
from ..fork import reset_after_fork
from ..observe.events import Publisher
from ..stores import Store
from ..stores.sans_io import Call, Plan, arun, run, start_task
from .paced_queue import PacedQueue, QueueClosed

T = TypeVar("T")
_END: Any = object()


class Reader(Generic[T]):
    """Reads a source into a queue. It has no reference to the iterator that it reads for."""

    def __init__(
        self,
        source: Iterable[T] | AsyncIterable[T],
        queue: PacedQueue[T],
        cost: int | Callable[[T], int],
        pause: Callable[[], object] | None,
        resume: Callable[[], object] | None,
    ) -> None:
        self._source: Iterable[T] | AsyncIterable[T] = source
        self.queue, self._cost = queue, cost
        self.is_async = isinstance(source, AsyncIterable)
        self._pause, self._resume = pause, resume
        self._paused = False
        self._iterator: Iterator[T] | None = None
        self._aiterator: AsyncIterator[T] | None = None
        self._started: tuple[asyncio.AbstractEventLoop, asyncio.Task[None]] | bool = False
        reset_after_fork(self)

    def _reset_after_fork(self) -> None:
        """Its task or thread is not in a child, which must not read what the parent reads."""
        if self._started:
            self._started = True
            self.queue.close(RuntimeError(f"{self.queue.name!r} is read by the parent process; call shape() in the child"))

    def cost_of(self, item: T) -> int:
        return self._cost(item) if callable(self._cost) else self._cost

    def next(self) -> T:
        if self._iterator is None:
            assert isinstance(self._source, Iterable)
            self._iterator = iter(self._source)
        return next(self._iterator, _END)

    async def anext(self) -> T:
        if self._aiterator is None:
            assert isinstance(self._source, AsyncIterable)
            self._aiterator = aiter(self._source)
        return await anext(self._aiterator, _END)

    def read_one(self) -> Plan[None]:
        """Reads a message without a task or thread, unless one is left of a call that was interrupted."""
        if not self.queue and not self.queue.closed:
            item: T = yield Call(self, "next")
            if item is _END:
                self.queue.close()
            else:
                self.queue.put_nowait(item, self.cost_of(item))

    def start(self) -> None:
        """Starts a task or a thread on first use."""
        if not self._started:
            if self.is_async:
                loop = asyncio.get_running_loop()
                self._started = (loop, start_task(arun(self._read()), loop))
            else:
                self._started = True
                name = f"limitkeeper {self.queue.name}"
                thread = threading.Thread(target=run, args=(self._read(),), name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no room for a thread: the next call tries again
                    self._started = False
                    raise

    def _read(self) -> Plan[None]:
        try:
            while True:
                yield Call(self.queue, "wait_for_room")
                item: T = yield Call(self, "next")
                if item is _END:
                    break
                yield Call(self.queue, "put", (item, self.cost_of(item)))
                self.pause_if_full()
            self.queue.close()
        except QueueClosed:
            pass
        except BaseException as error:  # the loop raises it, after the messages before it
            self.queue.close(error)
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:  # a generator that nobody else has is closed now
            self._source, self._iterator, self._aiterator = (), None, None

    def pause_if_full(self) -> None:
        """Pauses the source when one more message fills the queue: that one may be on its way."""
        capacity = self.queue.capacity
        if self._pause is not None and not self._paused and capacity is not None and self.queue.units >= capacity - 1:
            self._paused = True
            self._pause()

    def resume_if_half_empty(self) -> None:
        capacity = self.queue.capacity
        if self._paused and capacity is not None and self.queue.units <= capacity // 2:
            self._paused = False
            assert self._resume is not None
            self._resume()

    def stop(self) -> list[T]:
        """Ends reading and returns what is in the queue. A thread that waits for the source ends with its next message."""
        self.queue.close()
        left = self.queue.clear()
        if isinstance(self._started, tuple):
            loop, task = self._started
            try:
                loop.call_soon_threadsafe(task.cancel)
            except RuntimeError:  # the loop is closed
                pass
        return left


class ShapedIterator(Generic[T]):
    """The iterator that `shape` returns, for `for` and `async for`; also a context manager that closes it."""

    def __init__(self, reader: Reader[T]) -> None:
        self._reader, self._queue = reader, reader.queue
        self._finalizer = weakref.finalize(self, reader.stop)
        self._finalizer.atexit = False

    def __repr__(self) -> str:
        return repr(self._queue).replace("PacedQueue", type(self).__name__)

    @property
    def queued(self) -> int:
        """The cost of the messages that were read and not handed over yet; the number, where each costs 1."""
        return self._queue.units

    @property
    def events(self) -> Publisher:
        """The publisher of the limiter's events: "allowed" has a decision with the start of a message."""
        return self._queue.events

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        reader = self._reader
        if reader.is_async:
            raise TypeError(f"{self!r} can only be iterated with `async for`: its source is async")
        if self._queue.one_by_one:
            run(reader.read_one())
        else:
            reader.start()
        reader.resume_if_half_empty()
        try:
            return self._queue.get()
        except QueueClosed:
            raise StopIteration from None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        reader = self._reader
        if self._queue.one_by_one and reader.is_async:
            await arun(reader.read_one())
        else:
            reader.start()
        reader.resume_if_half_empty()
        try:
            return await self._queue.aget()
        except QueueClosed:
            raise StopAsyncIteration from None

    def close(self) -> list[T]:
        """Ends the iteration; returns the messages that were read and not handed over."""
        self._finalizer.detach()
        left = self._reader.stop()
        self._queue.limiter.close()
        return left

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()


def shape(
    source: Iterable[T] | AsyncIterable[T],
    rate: str | Limit,
    capacity: int | None = None,
    *,
    cost: int | Callable[[T], int] = 1,
    pause: Callable[[], object] | None = None,
    resume: Callable[[], object] | None = None,
    store: Store | str | None = None,
    name: str = "shape",
) -> ShapedIterator[T]:
    """Iterates over `source` at a steady pace. A bare rate is strict: messages are at least an interval apart.

    `capacity` is how many are read ahead at most, in units of `cost` (None: none). `cost` is what a message costs, or a function
    of it, such as `len` for bytes. `pause` and `resume` are called when the queue is full and when half of it is free, for
    consumers that must be polled while they wait. Iterators with the same `store` and `name` share one rate.
    """
    if not isinstance(source, Iterable | AsyncIterable):
        raise TypeError(f"shape() expects an iterable or an async iterable, got {type(source).__name__}: {source!r}")
    if (pause is None) != (resume is None):
        raise ConfigurationError("pause= and resume= belong together: give both or neither")
    queue: PacedQueue[T] = PacedQueue(rate, capacity, name, store)
    queue.one_by_one = queue.capacity is None
    return ShapedIterator(Reader(source, queue, cost, pause, resume))
