"""One gRPC call: its RequestContext, its evaluation and settlement, and the servicer context that its handler gets.

The handler's context differs from gRPC's own in three ways: our fields are sent with the initial metadata, whether the handler or
the interceptor sends it; the status that the handler sets is recorded; and (in aio) messages that are read and written one by one
are counted like those of iterators.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import Any
from urllib.parse import unquote

import grpc

from ...policy.evaluation import Evaluation
from ...policy.path_matcher import MESSAGE
from ...policy.request_context import RequestContext
from ..response_settlement import UNKNOWN, Settlement, is_cancelled
from .status_mapping import Code, Metadata, evaluation_metadata, http_status

current_evaluation: ContextVar[Evaluation | None] = ContextVar("limitkeeper.web.grpc", default=None)


def current() -> Evaluation | None:
    """The evaluation of the call that is being handled; None outside of a handler, or without an interceptor."""
    return current_evaluation.get()


class GrpcRequestContext(RequestContext):
    """A call is a POST to its method's path; metadata are its headers, except binary ones. `raw` is the servicer context, which
    also knows the `connection`, unless that was read before."""

    __slots__ = ("connection",)

    def __init__(self, method: str, path: str, raw: Any = None, connection: Connection | None = None) -> None:
        super().__init__(method, path, raw)
        self.connection = raw if connection is None else connection

    def header(self, name: str) -> str | None:
        if name.endswith("-bin"):
            return None
        found = [value for key, value in self.raw.invocation_metadata() or () if key == name]
        if len(set(found)) == 1:  # an entry that is repeated says nothing new: it makes no other value
            del found[1:]
        return ", ".join([decode(value) for value in found]) if found else None

    def differs(self, kind: str, name: str) -> bool:
        return kind == "header" and len({value for key, value in self.raw.invocation_metadata() or () if key == name}) > 1

    def may_have_body(self) -> bool:
        """Messages are not read for identities, whatever the metadata announce."""
        return False

    def peer(self) -> str | None:
        return parse_peer(self.connection.peer())

    def certificate(self) -> Mapping[str, Any] | None:
        auth = self.connection.auth_context() or {}
        names = [decode(name) for name in auth.get("x509_subject_alternative_name", ())]
        subject = [decode(name) for name in auth.get("x509_subject", ())]
        subject = subject or [f"CN={decode(name)}" for name in auth.get("x509_common_name", ())]
        return {"subject": subject[0] if subject else "", "san": names} if subject or names else None

    def message(self) -> GrpcRequestContext:
        """The context of one message of the call's stream, with the identities found so far."""
        context = GrpcRequestContext(MESSAGE, self.path, self.raw, self.connection)
        context.identities.update(self.identities)
        return context


class Connection:
    """Peer and certificate of a call, read when it begins. The peer of a call that is over is "", and the call has no address to
    be limited by; where a thread asks for it, grpc.aio (1.85) may end the process with a segmentation fault."""

    __slots__ = ("_auth_context", "_peer")

    def __init__(self, servicer: grpc.ServicerContext) -> None:
        self._peer: str | None = servicer.peer()
        self._auth_context: Mapping[str, Any] | None = servicer.auth_context()

    def peer(self) -> str | None:
        return self._peer

    def auth_context(self) -> Mapping[str, Any] | None:
        return self._auth_context


def decode(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("utf-8", "replace")


def parse_peer(peer: str | None) -> str | None:
    """The address of gRPC's peer string, "ipv4:192.0.2.1:55" or "ipv6:%5B::1%5D:5"; None for a UNIX socket."""
    kind, _, address = unquote(peer or "").partition(":")
    if kind not in ("ipv4", "ipv6") or not address:
        return None
    host = address.rpartition(":")[0]
    return host.removeprefix("[").removesuffix("]").partition("%")[0] or None


class Call:
    """An evaluated call: its initial metadata, status and size. `with` counts and settles it, however it ends."""

    def __init__(self, context: GrpcRequestContext, evaluation: Evaluation, servicer: grpc.ServicerContext) -> None:
        self.context = context
        self.evaluation = evaluation
        self.settlement = Settlement([evaluation])
        self.servicer = servicer
        self.metadata_sent = not evaluation_metadata(evaluation)
        self.code: grpc.StatusCode | None = None

    def initial_metadata(self, own: Metadata | None = ()) -> Metadata:
        """The initial metadata to send: the handler's and ours; fields that the handler sets stay."""
        self.metadata_sent = True
        names = {name.lower() for name, _ in own or ()}
        return (*(own or ()), *(pair for pair in evaluation_metadata(self.evaluation) if pair[0] not in names))

    def __enter__(self) -> Call:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.end(error).settle()

    async def __aenter__(self) -> Call:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        await self.end(error).asettle()

    def answered(self) -> Settlement:
        """The settlement of a call whose one response is to be sent, with the status that it has then."""
        self.settlement.status = http_status(self.code or Code.OK)
        return self.settlement

    def end(self, error: BaseException | None) -> Settlement:
        """Counts the call's status: the handler's code, or 500 for an exception. It is unknown where the client has disconnected
        or its deadline has passed, whatever the handler made of that."""
        status = http_status(self.code or (Code.OK if error is None else Code.UNKNOWN))
        self.settlement.respond(UNKNOWN if is_gone(self.servicer, error) else status)
        return self.settlement


def is_gone(servicer: grpc.ServicerContext, error: BaseException | None) -> bool:
    """Whether a call ended because its client disconnected or its deadline passed."""
    if is_cancelled() or (error is not None and not isinstance(error, Exception)):  # GeneratorExit: an abandoned stream
        return True
    remaining = servicer.time_remaining()
    if remaining is not None and remaining <= 0:
        return True
    is_active, cancelled = getattr(servicer, "is_active", None), getattr(servicer, "cancelled", None)
    return not is_active() if is_active is not None else cancelled is not None and cancelled()


class ServicerContextProxy:
    """What both kinds of a handler's context share. What is not defined here is gRPC's own."""

    __slots__ = ("_servicer", "call")

    def __init__(self, servicer: grpc.ServicerContext, call: Call) -> None:
        self._servicer = servicer
        self.call = call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._servicer, name)

    def set_code(self, code: grpc.StatusCode) -> None:
        self.call.code = code
        self._servicer.set_code(code)

    def send_initial_metadata(self, metadata: Metadata | None = ()) -> Any:
        """In aio the result is awaitable, as gRPC's own."""
        return self._servicer.send_initial_metadata(self.call.initial_metadata(metadata))


class HandlerContext(ServicerContextProxy):
    """The servicer context of a handler that runs in a thread."""

    __slots__ = ()

    def send_fields(self) -> None:
        """Sends our fields, unless the initial metadata was sent before."""
        if not self.call.metadata_sent:
            self.send_initial_metadata()

    def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        self.call.code = code
        self.send_fields()
        self._servicer.abort(code, details)

    def abort_with_status(self, status: grpc.Status) -> None:
        self.call.code = status.code
        self.send_fields()
        self._servicer.abort_with_status(status)


class AsyncHandlerContext(ServicerContextProxy):
    """The servicer context of a coroutine. `decode` and `encode` are the interceptor's, which count messages and bytes."""

    __slots__ = ("_decode", "_encode")

    def __init__(self, servicer: grpc.aio.ServicerContext, call: Call, decode: Convert, encode: Convert) -> None:
        super().__init__(servicer, call)
        self._decode = decode
        self._encode = encode

    async def send_fields(self) -> None:
        if not self.call.metadata_sent:
            await self.send_initial_metadata()

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> None:
        self.call.code = code
        await self.send_fields()
        await self._servicer.abort(code, details, trailing_metadata)

    async def abort_with_status(self, status: grpc.Status) -> None:
        await self.abort(status.code, status.details, status.trailing_metadata)

    async def read(self) -> object:
        data = await self._servicer.read()
        return data if data is grpc.aio.EOF else await self._decode(data, self)

    async def write(self, message: object) -> None:
        await self._servicer.write(await self._encode(message, self))


Convert = Callable[[Any, AsyncHandlerContext], Awaitable[object]]
#: Libraries check whether a context is one.
grpc.ServicerContext.register(HandlerContext)
grpc.aio.ServicerContext.register(AsyncHandlerContext)
