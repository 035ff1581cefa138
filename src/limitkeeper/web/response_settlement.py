"""Settles evaluations when their response is known: its status, and how many bytes were sent.

A Settlement is settled once, at the first of: the body is exhausted, closed, or raises. The settling bodies pass chunks on
unchanged and close what they wrap exactly once.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from ..policy.evaluation import Evaluation
from ..policy.settlement import UNKNOWN

#: The status of a response that the application failed to produce.
FAILED = 500
#: How a response of UNKNOWN outcome is counted: its client disconnected before it began (nginx's number for it).
GONE = 499

C = TypeVar("C", bound=str | bytes | memoryview)


def outcome_of(error: BaseException) -> int:
    """The outcome of a handler that raised before its response began: 500, or unknown where it was cancelled."""
    return FAILED if isinstance(error, Exception) else UNKNOWN


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
    gone     the server could not write to the client
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

    def respond(self, status: int) -> None:
        """Reports the status to the gates, once. FAILED or UNKNOWN when no response began."""
        if not self.counted:
            self.counted = True
            self.status = status
            for evaluation in self.evaluations:
                if evaluation.allowed:
                    evaluation.count_response(status or GONE)

    def settle(self, failed: bool = False) -> None:
        for evaluation, status, size in self._finish(failed):
            evaluation.settle(status, size)

    async def asettle(self, failed: bool = False) -> None:
        for evaluation, status, size in self._finish(failed):
            await evaluation.asettle(status, size)

    def _finish(self, failed: bool) -> list[tuple[Evaluation, int, int]]:
        """What to settle, at the first call. The outcome is 500 where the application failed, otherwise the status, if any."""
        if self.settled:
            return []
        self.settled = True
        outcome = FAILED if failed and not self.gone else self.status
        self.respond(outcome)
        for evaluation in self.evaluations:
            if not evaluation.needs_settlement:
                evaluation.context = None
        return [(one, outcome, 0 if self.head else self.size) for one in self.evaluations if one.needs_settlement]


def byte_length(chunk: str | bytes | memoryview) -> int:
    """How many bytes a chunk has when sent; frameworks accept text too."""
    return len(chunk.encode("utf-8", "replace")) if isinstance(chunk, str) else len(chunk)


class ClosingBody:
    """Closes the wrapped body once, and settles then at the latest."""

    __slots__ = ("_close", "_settlement")

    def __init__(self, chunks: object, settlement: Settlement) -> None:
        self._settlement = settlement
        self._close: Callable[[], object] | None = getattr(chunks, "close", None)

    def close(self) -> None:
        close, self._close = self._close, None
        try:
            if close is not None:
                close()
        finally:
            self._settlement.settle()


class SettlingBody(ClosingBody, Generic[C]):
    """An iterable body that counts its bytes, and settles at its end."""

    __slots__ = ("_chunks", "_next")

    def __init__(self, chunks: Iterable[C], settlement: Settlement) -> None:
        super().__init__(chunks, settlement)
        self._chunks = chunks
        self._next: Callable[[], C] | None = None

    def __iter__(self) -> Iterator[C]:
        return self

    def __next__(self) -> C:
        try:
            if self._next is None:
                self._next = iter(self._chunks).__next__
            chunk = self._next()
        except StopIteration:
            self._settlement.settle(failed=not self._settlement.status)  # servers answer 500 where no status was given
            raise
        except BaseException as error:
            self._settlement.settle(failed=isinstance(error, Exception))
            raise
        self._settlement.size += byte_length(chunk)
        return chunk


class AsyncSettlingBody(ClosingBody, Generic[C]):
    """The same for an asynchronous body. `close` is for a server that gives up; it may block: call it in a thread."""

    __slots__ = ("_chunks", "_next")

    def __init__(self, chunks: AsyncIterable[C], settlement: Settlement) -> None:
        super().__init__(chunks, settlement)
        self._chunks = chunks
        self._next: AsyncIterator[C] | None = None

    def __aiter__(self) -> AsyncIterator[C]:
        return self

    async def __anext__(self) -> C:
        try:
            if self._next is None:
                self._next = aiter(self._chunks)
            chunk = await anext(self._next)
        except StopAsyncIteration:
            await self._settlement.asettle(failed=not self._settlement.status)
            raise
        except Exception:
            await self._settlement.asettle(failed=True)
            raise
        self._settlement.size += byte_length(chunk)
        return chunk

    async def aclose(self) -> None:
        await self._settlement.asettle()
