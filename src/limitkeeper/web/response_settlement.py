"""What a passage owes when its response has gone, and bodies that notice when that is.

An `Account` is settled once, whichever comes first: the body is exhausted, closed, or breaks. The bodies hand on chunk by chunk
what they are given, and close it exactly once.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from typing import Any

from ..policy.evaluation import Evaluation
from ..policy.settlement import UNKNOWN

#: The status of a response that never came, or broke.
FAILED = 500
#: How a response of UNKNOWN outcome is counted: its client disconnected before it began (nginx's number for it).
GONE = 499


def outcome(error: BaseException) -> int:
    """The outcome of a handler that raised before its response began: 500, or unknown where it was cancelled."""
    return FAILED if isinstance(error, Exception) else UNKNOWN


def let_go(passage: Evaluation, origin: bool) -> Evaluation:
    """Parts a passage from its request, unless that is needed to settle it; `origin` is the one thing to remember of it.

    The facts hold the request, which holds the passage: a circle would wait for the garbage collector.
    """
    passage.origin = origin
    if not (passage.allowed and passage.owes):
        passage.facts = None
    return passage


class Settlement:
    """The response of one passage so far: its status (0: none yet) and how many bytes went. `head`: whatever an application
    answers, the server sends nothing of it, and it costs nothing. `gone`: the server could not write to the client."""

    __slots__ = ("gone", "head", "passage", "settled", "size", "status")

    def __init__(self, passage: Evaluation, status: int = 0, head: bool = False) -> None:
        self.passage = passage
        self.status = status
        self.head = head
        self.gone = False
        self.size = 0
        self.settled = False

    def settle(self, failed: bool = False) -> None:
        if not self.settled:
            self.settled = True
            self.passage.done(self.outcome(failed), 0 if self.head else self.size)
            self.passage.facts = None

    async def asettle(self, failed: bool = False) -> None:
        if not self.settled:
            self.settled = True
            await self.passage.adone(self.outcome(failed), 0 if self.head else self.size)
            self.passage.facts = None

    def outcome(self, failed: bool) -> int:
        """How it ended: 500 where the application failed, else the status, if there was one; what had none is counted here."""
        known = FAILED if failed and not self.gone else self.status
        if not self.status:
            self.status = known or GONE
            self.passage.responded(self.status)
        return known


def length(chunk: Any) -> int:
    """How many bytes a chunk is on the wire; frameworks take text too."""
    return len(chunk.encode("utf-8", "replace")) if isinstance(chunk, str) else len(chunk)


class Body:
    """Chunks one by one as they come, counted to an account that is settled at their end."""

    __slots__ = ("_account", "_chunks", "_close", "_next")

    def __init__(self, chunks: Iterable[Any], account: Settlement) -> None:
        self._chunks = chunks
        self._account = account
        self._next: Callable[[], Any] | None = None
        self._close: Callable[[], object] | None = getattr(chunks, "close", None)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            if self._next is None:
                self._next = iter(self._chunks).__next__
            chunk = self._next()
        except StopIteration:
            self._account.settle(failed=not self._account.status)  # servers answer 500 where no status was given
            raise
        except BaseException as error:
            self._account.settle(failed=isinstance(error, Exception))
            raise
        self._account.size += length(chunk)
        return chunk

    def close(self) -> None:
        """Closes what it was given, once, and settles whatever that does."""
        close, self._close = self._close, None
        try:
            if close is not None:
                close()
        finally:
            self._account.settle()


class AsyncBody:
    """The same for chunks that are awaited. `close` is for whoever gives up; it may wait for the store: call it in a thread."""

    __slots__ = ("_account", "_chunks", "_close", "_next")

    def __init__(self, chunks: AsyncIterable[Any], account: Settlement) -> None:
        self._chunks = chunks
        self._account = account
        self._next: AsyncIterator[Any] | None = None
        self._close: Callable[[], object] | None = getattr(chunks, "close", None)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        try:
            if self._next is None:
                self._next = aiter(self._chunks)
            chunk = await anext(self._next)
        except StopAsyncIteration:
            await self._account.asettle(failed=not self._account.status)
            raise
        except Exception:
            await self._account.asettle(failed=True)
            raise
        self._account.size += length(chunk)
        return chunk

    async def aclose(self) -> None:
        await self._account.asettle()

    def close(self) -> None:
        close, self._close = self._close, None
        try:
            if close is not None:
                close()
        finally:
            self._account.settle()
