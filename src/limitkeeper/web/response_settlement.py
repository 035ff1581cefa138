"""Settles evaluations when their response is known: its status, and how many bytes were sent.

A Settlement is settled once, at the first of: the body is exhausted, closed, or raises. The settling bodies pass chunks on
unchanged and close what they wrap exactly once.
"""

from __future__ import annotations

import asyncio
from _thread import start_new_thread
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar
from weakref import WeakSet

from ..policy.evaluation import Evaluation
from ..policy.settlement import NOT_SENT, UNKNOWN

#: The status of a response that the application failed to produce.
FAILED = 500
#: How a response of UNKNOWN outcome is counted: its client disconnected before it began (nginx's number for it).
GONE = 499

#: The key, in a scope or an environ, of a request that was handed to a degrade handler: limits of the view that answers it are
#: evaluated after that, and do not change it.
DEGRADED = "limitkeeper.degraded"
#: The key, in a scope or an environ, of a refused request that a `DeferredRequests` runs: its response is not reduced, and the
#: client that sent it has its answer.
DEFERRED = "limitkeeper.deferred"
#: The scope keys of a request's RequestEvaluations; and for a degrade handler that runs the application again of the limits that
#: were evaluated before.
EVALUATIONS, EVALUATED = "limitkeeper.evaluations", "limitkeeper.evaluated"
#: The versions of policies that unsettled bodies need, by the settlement's id. A body that is garbage in a reference cycle is
#: settled by its finalizer; its store, if it were garbage in the same cycle, could be closed before that.
unsettled: dict[int, list[object]] = {}
#: The tasks whose requests are settled at their end; and for how many seconds a server that stops waits for those that it has
#: cancelled. A task within another one learns of that after `CANCELLATION`.
running: WeakSet[asyncio.Task[Any]] = WeakSet()
STOPPING, CANCELLATION = 5.0, 0.01

C = TypeVar("C", bound=str | bytes | memoryview)


def outcome_of(error: BaseException) -> int:
    """The outcome of a handler that raised before its response began: 500, or unknown where it was cancelled."""
    return FAILED if isinstance(error, Exception) else UNKNOWN


def is_cancelled() -> bool:
    """Whether this task is being cancelled, because its client has disconnected or its server stops. The application may have
    made an answer or another exception of that."""
    task = current_task()
    return task is not None and task.cancelling() > 0


def current_task() -> asyncio.Task[Any] | None:
    """The task that runs here; None in a thread without a loop."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def shutdown_after_requests(receive: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[Any]]:
    """The `receive` of a lifespan, in which the shutdown begins when the requests are settled that the server has cancelled. The
    end of the loop would cancel their settlements too, and they would count as running (`concurrent`) until their `hold` ends."""

    async def receive_later() -> Any:
        message = await receive()
        if message["type"] == "lifespan.shutdown" and running:
            await asyncio.sleep(CANCELLATION)
            loop = asyncio.get_running_loop()
            ending = [task for task in list(running) if task.get_loop() is loop and task.cancelling() and not task.done()]
            if ending:
                await asyncio.wait(ending, timeout=STOPPING)
        return message

    return receive_later


def outcome_after(disconnected: bool, status: int) -> int:
    """The outcome of a response that begins after its client has disconnected: an error may be due to that, and says nothing
    about the request, so it is unknown."""
    return UNKNOWN if disconnected and status >= 400 else status


def as_received(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The scope or environ of a request as it came, for a degrade handler after the application has run: applications change it
    where they are mounted, and would find another route. What limits have kept in it stays."""
    return {**before, **{name: value for name, value in now.items() if name.startswith("limitkeeper")}, DEGRADED: True}


def detach_request(evaluation: Evaluation, origin: bool) -> Evaluation:
    """Drops the request from its evaluation, unless settlement needs it, and keeps whether it had an Origin.

    The context holds the request, which holds the evaluation: a cycle would wait for the garbage collector.
    """
    evaluation.origin = origin
    if not (evaluation.allowed and evaluation.needs_settlement):
        evaluation.context = None
    return evaluation


class Settlement:
    """The response to one request so far, and the evaluations that it settles.

    status   0 before the response has begun
    counted  the status was reported to the gates
    size     bytes of the body so far; a response to HEAD has none, whatever the application writes
    gone     the server could not read from the client, or write to it
    """

    __slots__ = ("counted", "evaluations", "gone", "head", "settled", "size", "status")

    def __init__(self, evaluations: Sequence[Evaluation], status: int = 0, head: bool = False) -> None:
        self.evaluations = evaluations
        self.status = status
        self.counted = status != 0
        self.head = head
        self.gone = False
        self.size = 0
        self.settled = False

    @property
    def holds_place(self) -> bool:
        """Whether a rule may count this request as running (`concurrent`): then it is settled at the end of a streamed body."""
        return any(one.needs_settlement and one.compiled.concurrent for one in self.evaluations)

    @property
    def costs_by_size(self) -> bool:
        """Whether the size of the response is charged: then it may be refused before its first byte is sent."""
        entries = [entry for one in self.evaluations if one.needs_settlement for entry in one.entries]
        return any(entry.rule.cost.source == "response" for entry in entries)

    def respond(self, status: int) -> None:
        """Reports the status to the gates, once. FAILED or UNKNOWN when no response began."""
        if not self.counted:
            self.counted = True
            self.status = status
            for evaluation in self.evaluations:
                if evaluation.allowed:
                    evaluation.count_response(status or GONE)

    def afford(self, size: int) -> Evaluation | None:
        """Charges a size that is known before a byte is sent. Returns the evaluation that refuses it, if any; then all are
        settled, and the refusal is sent instead."""
        for evaluation in () if self.head else self.evaluations:
            if not evaluation.afford(self.status, size):
                self.size = NOT_SENT
                self.settle()
                return evaluation
        return None

    async def aafford(self, size: int) -> Evaluation | None:
        for evaluation in () if self.head else self.evaluations:
            if not await evaluation.aafford(self.status, size):
                self.size = NOT_SENT
                await self.asettle()
                return evaluation
        return None

    def settle(self, failed: bool = False) -> None:
        for evaluation, status, size in self._finish(failed):
            evaluation.settle(status, size)

    async def asettle(self, failed: bool = False) -> None:
        await settle_all(self._finish(failed))

    def drop(self) -> None:
        """Settles a response that is neither sent nor closed: its outcome is unknown. In a thread of its own: this one may hold
        any lock, or run an event loop."""
        if not self.settled:
            self.status = UNKNOWN
            with suppress(RuntimeError):  # the interpreter is ending
                start_new_thread(self.settle, ())

    def drop_with(self, task: asyncio.Task[Any]) -> None:
        """Drops a response whose task has failed. Its body is in a reference cycle then, with the exception and its frames, and
        may not be garbage for long."""
        if not self.settled and (task.cancelled() or task.exception() is not None):
            self.drop()

    async def run(self, handler: Callable[[], Awaitable[None]], outcome: int, disconnected: Callable[[], bool]) -> None:
        """Runs a handler, and settles however it ends; `outcome` is that of a handler which returned without a response."""
        task = current_task()
        if task is not None:
            running.add(task)
        try:
            await handler()
        except BaseException as error:
            outcome = outcome_of(error)
            raise
        finally:
            if outcome == FAILED and not self.counted:
                self.size = NOT_SENT  # the server, or code around this, makes the response
            self.respond(outcome_after(disconnected() or is_cancelled(), outcome))
            if not self.settled:
                # A task that is being cancelled can't await a store: another task completes the settlement.
                await asyncio.shield(asyncio.ensure_future(self.asettle()))

    def _finish(self, failed: bool) -> list[tuple[Evaluation, int, int]]:
        """What to settle, at the first call. The outcome is 500 where the application failed, otherwise the status, if any."""
        if self.settled:
            return []
        self.settled = True
        unsettled.pop(id(self), None)
        if failed and self.status == UNKNOWN and self.size == 0:
            self.size = NOT_SENT
        outcome = outcome_after(self.gone, FAILED if failed and not self.gone else self.status)
        self.respond(outcome)
        for evaluation in self.evaluations:
            if not evaluation.needs_settlement:
                evaluation.context = None
        return [(one, outcome, 0 if self.head else self.size) for one in self.evaluations if one.needs_settlement]


async def settle_all(found: list[tuple[Evaluation, int, int]]) -> None:
    """Settles evaluations with their status and size, one after the other; all of them, also where this task is cancelled."""
    if found:
        evaluation, status, size = found[0]
        try:
            await evaluation.asettle(status, size)
        finally:
            await settle_all(found[1:])


class WatchedInput:
    """`wsgi.input` that notices a client which disconnects before `left` bytes have come."""

    def __init__(self, stream: Any, left: str | None, settlement: Settlement) -> None:
        self._stream = stream
        self._left = int(left) if left and left.isdecimal() and len(left) < 19 else 0
        self._settlement = settlement

    def _watch(self, read: Callable[[int], bytes], size: int | None, line: bool = False) -> bytes:
        size = -1 if size is None else size
        try:
            data = read(size)
        except OSError:
            self._settlement.gone = True
            raise
        self._left -= len(data)
        whole_line = line and data.endswith(b"\n")  # more may follow
        if self._left > 0 and size and not whole_line and (size < 0 or not data):
            self._settlement.gone = True
        return data

    def read(self, size: int | None = -1) -> bytes:
        return self._watch(self._stream.read, size)

    def readline(self, size: int | None = -1) -> bytes:
        return self._watch(self._stream.readline, size, line=True)

    def readlines(self, hint: int | None = -1) -> list[bytes]:
        return list(self)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.readline, b"")


def byte_length(chunk: str | bytes | memoryview) -> int:
    """How many bytes a chunk has when sent; frameworks accept text too."""
    if isinstance(chunk, memoryview):
        return chunk.nbytes
    return len(chunk.encode("utf-8", "replace")) if isinstance(chunk, str) else len(chunk)


class ClosingBody:
    """Closes the wrapped body once, and settles then at the latest."""

    __slots__ = ("_chunks", "_close", "_next", "_settlement")

    def __init__(self, chunks: Any, settlement: Settlement) -> None:
        self._chunks = chunks
        self._settlement = settlement
        self._next: Any = None
        self._close: Callable[[], object] | None = getattr(chunks, "close", None)
        unsettled[id(settlement)] = [one.compiled.version for one in settlement.evaluations]

    def close(self) -> None:
        close, self._close = self._close, None
        try:
            if close is not None:
                close()
        finally:
            self._settlement.settle()

    def __del__(self) -> None:
        """Settles a body that was neither sent nor closed, when it is garbage: Django under ASGI drops the response of a view in
        a thread whose client has disconnected."""
        self._settlement.drop()

    def count(self, chunk: C) -> C:
        self._settlement.size += byte_length(chunk)
        return chunk


class SettlingBody(ClosingBody, Generic[C]):
    """An iterable body that counts its bytes, and settles at its end."""

    __slots__ = ()

    def __iter__(self) -> Iterator[C]:
        return self

    def __next__(self) -> C:
        try:
            if self._next is None:
                self._next = iter(self._chunks)
            return self.count(next(self._next))  # type: ignore[no-any-return]
        except StopIteration:
            self._settlement.settle(failed=not self._settlement.status)  # servers answer 500 where no status was given
            raise
        except BaseException as error:
            self._settlement.settle(failed=isinstance(error, Exception))
            raise


class AsyncSettlingBody(ClosingBody, Generic[C]):
    """The same for an asynchronous body. `close` is for a server that gives up; it may block: call it in a thread."""

    __slots__ = ()

    def __aiter__(self) -> AsyncIterator[C]:
        return self

    async def __anext__(self) -> C:
        try:
            if self._next is None:
                self._next = aiter(self._chunks)
            return self.count(await anext(self._next))  # type: ignore[no-any-return]
        except StopAsyncIteration:
            await self._settlement.asettle(failed=not self._settlement.status)
            raise
        except Exception:
            await self._settlement.asettle(failed=True)
            raise

    async def aclose(self) -> None:
        await self._settlement.asettle()
