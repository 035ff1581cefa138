"""One evaluated call: its settlement, and the servicer context that its handler gets.

The handler's context differs from gRPC's own in three ways: our fields are sent with the initial metadata, whether the handler or
the interceptor sends it; the status that the handler sets is recorded; and (in aio) messages that are read and written one by one
are counted like those of iterators.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from ...policy.evaluation import Evaluation
from ..response_settlement import UNKNOWN, Settlement
from .status import Code, Metadata, evaluation_metadata, http_status


class Call:
    """An evaluated call: its initial metadata, its status code, and the size of its responses."""

    def __init__(self, evaluation: Evaluation, servicer: grpc.ServicerContext) -> None:
        self.evaluation = evaluation
        self.settlement = Settlement([evaluation])
        self.servicer = servicer
        self.metadata = evaluation_metadata(evaluation)
        self.metadata_sent = not self.metadata
        self.code: grpc.StatusCode | None = None

    def initial_metadata(self, own: Metadata | None = ()) -> Metadata:
        """The initial metadata to send: the handler's and ours; fields that the handler sets stay."""
        self.metadata_sent = True
        names = {name.lower() for name, _ in own or ()}
        return (*(own or ()), *(pair for pair in self.metadata if pair[0] not in names))

    def end(self, error: BaseException | None) -> Settlement:
        """Counts the call's status: the handler's code; without one, an exception is 500, or unknown if the client has gone."""
        if error is None or self.code is not None:
            status = http_status(self.code or Code.OK)
        else:
            status = UNKNOWN if is_gone(self.servicer, error) else http_status(Code.UNKNOWN)
        self.settlement.respond(status)
        return self.settlement


def is_gone(servicer: grpc.ServicerContext, error: BaseException) -> bool:
    """Whether a call ended because its client disconnected or its deadline passed."""
    if not isinstance(error, Exception):  # CancelledError in aio, GeneratorExit of an abandoned stream
        return True
    is_active = getattr(servicer, "is_active", None)
    return is_active is not None and not is_active()


class HandlerContext:
    """The servicer context of a handler that runs in a thread."""

    __slots__ = ("_call", "_servicer")

    def __init__(self, servicer: grpc.ServicerContext, call: Call) -> None:
        self._servicer = servicer
        self._call = call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._servicer, name)

    def set_code(self, code: grpc.StatusCode) -> None:
        self._call.code = code
        self._servicer.set_code(code)

    def send_initial_metadata(self, metadata: Metadata) -> None:
        self._servicer.send_initial_metadata(self._call.initial_metadata(metadata))

    def send_fields(self) -> None:
        """Sends our fields, unless the initial metadata was sent before."""
        if not self._call.metadata_sent:
            self._servicer.send_initial_metadata(self._call.initial_metadata())

    def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        self._call.code = code
        self.send_fields()
        self._servicer.abort(code, details)

    def abort_with_status(self, status: grpc.Status) -> None:
        self._call.code = status.code
        self.send_fields()
        self._servicer.abort_with_status(status)


Read = Callable[["AsyncHandlerContext"], Awaitable[object]]
Write = Callable[["AsyncHandlerContext", object], Awaitable[None]]


class AsyncHandlerContext:
    """The servicer context of a coroutine. `read` and `write` are the interceptor's, which counts messages and bytes."""

    __slots__ = ("_call", "_read", "_servicer", "_write")

    def __init__(self, servicer: grpc.aio.ServicerContext, call: Call, read: Read, write: Write) -> None:
        self._servicer = servicer
        self._call = call
        self._read = read
        self._write = write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._servicer, name)

    def set_code(self, code: grpc.StatusCode) -> None:
        self._call.code = code
        self._servicer.set_code(code)

    async def send_initial_metadata(self, metadata: Metadata) -> None:
        await self._servicer.send_initial_metadata(self._call.initial_metadata(metadata))

    async def send_fields(self) -> None:
        if not self._call.metadata_sent:
            await self._servicer.send_initial_metadata(self._call.initial_metadata())

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> None:
        self._call.code = code
        await self.send_fields()
        await self._servicer.abort(code, details, trailing_metadata)

    async def abort_with_status(self, status: grpc.Status) -> None:
        await self.abort(status.code, status.details, status.trailing_metadata)

    async def read(self) -> object:
        return await self._read(self)

    async def write(self, message: object) -> None:
        await self._write(self, message)


#: Libraries check whether a context is one.
grpc.ServicerContext.register(HandlerContext)
grpc.aio.ServicerContext.register(AsyncHandlerContext)
