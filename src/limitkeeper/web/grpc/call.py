"""One call that was let pass: what it owes at its end, and the context that its handler sees.

The handler gets a context that is gRPC's own but for three things: what the call was told of its limits goes out with the initial
metadata, whoever sends that; the status that the handler sets is noted; and (in aio) messages that are read and written one by
one are counted like those of iterators.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import grpc

from ...policy.evaluation import Evaluation
from ..response_settlement import UNKNOWN
from .status import Code, http_of, metadata_of

log = logging.getLogger("limitkeeper")


class Call:
    """A passage and what became of it."""

    def __init__(self, passage: Evaluation, context: Any) -> None:
        self.passage = passage
        self.context = context
        self.metadata: Any = metadata_of(passage)
        self.told = not self.metadata
        self.code: Any = None
        self.size = 0

    def first_metadata(self, own: Any = ()) -> Any:
        """The initial metadata to send: the handler's and ours; what the handler says of its quota stands."""
        self.told = True
        names = {name.lower() for name, _ in own or ()}
        return (*(own or ()), *(pair for pair in self.metadata if pair[0] not in names))

    def status(self, error: BaseException | None) -> int:
        """The HTTP status of how it ended: what the handler set. Without it an exception is its fault; where the client has gone
        the outcome is unknown."""
        if error is not None and self.code is None:
            return UNKNOWN if gone(self.context, error) else http_of(Code.UNKNOWN)
        return http_of(self.code or Code.OK)


def gone(context: Any, error: BaseException) -> bool:
    """Whether a call ended because its client went away or its deadline passed."""
    if not isinstance(error, Exception):  # CancelledError in aio, GeneratorExit of an abandoned stream
        return True
    active = getattr(context, "is_active", None)
    return active is not None and not active()


class Seen:
    """The context as the handler sees it."""

    __slots__ = ("_call", "_context")

    def __init__(self, context: Any, call: Call) -> None:
        self._context = context
        self._call = call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def set_code(self, code: Any) -> None:
        self._call.code = code
        self._context.set_code(code)


class SeenInThread(Seen):
    """The same for handlers that run in threads."""

    __slots__ = ()

    def send_initial_metadata(self, metadata: Any) -> None:
        self._context.send_initial_metadata(self._call.first_metadata(metadata))

    def tell(self) -> None:
        """Sends what the call is told, unless the handler has sent its metadata already."""
        if not self._call.told:
            self._context.send_initial_metadata(self._call.first_metadata())

    def abort(self, code: Any, details: str = "") -> None:
        self._call.code = code
        self.tell()
        self._context.abort(code, details)

    def abort_with_status(self, status: Any) -> None:
        self._call.code = status.code
        self.tell()
        self._context.abort_with_status(status)


class SeenInTask(Seen):
    """The same for coroutines. `read` and `write` are those of the guard, which counts messages and bytes."""

    __slots__ = ("_read", "_write")

    def __init__(self, context: Any, call: Call, read: Callable[..., Any], write: Callable[..., Any]) -> None:
        super().__init__(context, call)
        self._read = read
        self._write = write

    async def send_initial_metadata(self, metadata: Any) -> None:
        await self._context.send_initial_metadata(self._call.first_metadata(metadata))

    async def tell(self) -> None:
        if not self._call.told:
            await self._context.send_initial_metadata(self._call.first_metadata())

    async def abort(self, code: Any, details: str = "", trailing_metadata: Any = ()) -> None:
        self._call.code = code
        await self.tell()
        await self._context.abort(code, details, trailing_metadata)

    async def abort_with_status(self, status: Any) -> None:
        await self.abort(status.code, status.details, status.trailing_metadata)

    async def read(self) -> Any:
        return await self._read(self)

    async def write(self, message: Any) -> None:
        await self._write(self, message)


#: Libraries ask whether a context is one.
grpc.ServicerContext.register(SeenInThread)
grpc.aio.ServicerContext.register(SeenInTask)
