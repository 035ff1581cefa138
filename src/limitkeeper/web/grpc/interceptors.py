"""Server interceptors that limit calls by a policy, with threads and with `grpc.aio` (plain functions run in threads).

A wrapped handler exchanges bytes with the server and calls the handler's own (de)serialisers after the evaluation, so that a
refused message is never deserialised, and the bytes of responses can be counted.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import grpc

from ...policy.evaluation import Evaluation
from ...policy.gate import Gate, gate_of
from ...policy.model import Policy
from ...stores.contract import Store
from ..handler_limit import Handler
from ..response_settlement import UNKNOWN
from .call import AsyncHandlerContext, Call, Connection, GrpcRequestContext, HandlerContext, current_evaluation, is_gone
from .status_mapping import Code, refusal_status

T = TypeVar("T")
AsyncRequest = bytes | AsyncIterator[bytes]

log = logging.getLogger("limitkeeper")

#: (requests are a stream, responses are a stream) -> the attribute of the handler's function, and the constructor of a handler.
SHAPES = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}
END = object()
#: Seconds; a call without a deadline reports a longer time than a thread can wait.
MAX_WAIT = 1e8
LOOP_LOCK = threading.Lock()


class Interceptor:
    """`policy` is a policy, the path of its file, or a `Gate`; `store` and `handlers` are for a gate made here (`.gate`)."""

    def __init__(
        self,
        policy: Policy | str | Path | Gate,
        *,
        store: Store | None = None,
        handlers: Mapping[str, Handler] | None = None,
    ) -> None:
        self.gate = gate_of(policy, store=store, handlers=handlers)


class RateLimitInterceptor(Interceptor, grpc.ServerInterceptor):  # type: ignore[misc]
    """`grpc.server(pool, interceptors=[RateLimitInterceptor("limitkeeper.yaml")])`.

    `policy` is a policy, the path of its file, or a `Gate`; `store` and `handlers` are for a gate made here (`.gate`).
    """

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = continuation(handler_call_details)
        if handler is None:  # no such method: gRPC answers UNIMPLEMENTED
            return None
        return ThreadHandlerWrapper(self.gate, handler_call_details.method, handler).wrapped()


class AsyncRateLimitInterceptor(Interceptor, grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """`grpc.aio.server(interceptors=[AsyncRateLimitInterceptor("limitkeeper.yaml")])`.

    `policy` is a policy, the path of its file, or a `Gate`; `store` and `handlers` are for a gate made here (`.gate`).
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        wrapper = TaskHandlerWrapper(self.gate, handler_call_details.method, handler)
        if inspect.isasyncgenfunction(wrapper.function):
            return wrapper.make_handler(wrapper.stream)
        if inspect.iscoroutinefunction(wrapper.function):
            return wrapper.make_handler(wrapper.run if wrapper.response_streaming else wrapper.respond)
        return ThreadHandlerWrapper(self.gate, handler_call_details.method, handler, asyncio.current_task()).wrapped()


class HandlerWrapper:
    """One RPC handler behind a gate."""

    def __init__(self, gate: Gate, path: str, handler: grpc.RpcMethodHandler) -> None:
        self.gate = gate
        self.path = path
        self.response_streaming = bool(handler.response_streaming)
        attribute, self.make_handler = SHAPES[bool(handler.request_streaming), self.response_streaming]
        self.function: Callable[..., Any] = getattr(handler, attribute)
        self._deserialize = handler.request_deserializer
        self._serialize = handler.response_serializer

    def function_for(self, evaluation: Evaluation) -> Callable[..., Any]:
        """The handler's function, or the rule's degrade handler."""
        degrade = None if evaluation.allowed else evaluation.degrade
        return self.function if degrade is None else degrade

    def is_refused(self, evaluation: Evaluation, context: GrpcRequestContext) -> bool:
        """Whether the call ends here. A degrade handler answers calls, not messages."""
        return evaluation.refusal is not None and (evaluation.degrade is None or context.method != "POST")

    def deserialize(self, data: bytes) -> object:
        try:
            return data if self._deserialize is None else self._deserialize(data)
        except Exception:
            log.exception("%s: deserialising a message failed", self.path)
            raise

    def serialize(self, message: object, call: Call) -> bytes | None:
        """The bytes of a response, which are counted."""
        try:
            data: bytes | None = message if self._serialize is None else self._serialize(message)  # type: ignore[assignment]
        except Exception:
            log.exception("%s: serialising a response failed", self.path)
            raise
        call.settlement.size += len(data) if data is not None else 0
        return data


class ThreadHandlerWrapper(HandlerWrapper):
    """One handler that runs in a thread; in grpc.aio, `task` ends with the call."""

    def __init__(self, gate: Gate, path: str, handler: grpc.RpcMethodHandler, task: asyncio.Task[Any] | None = None) -> None:
        super().__init__(gate, path, handler)
        self.task = task

    def wrapped(self) -> grpc.RpcMethodHandler:
        return self.make_handler(self.stream if self.response_streaming else self.respond)

    def respond(self, request: bytes | Iterator[bytes], servicer: grpc.ServicerContext) -> bytes | None:
        """Handles a call with one response."""
        context = self.begin(servicer)
        if context is None:
            return b""
        with context.call:
            message = self.read_request(request, context)
            evaluation = context.call.evaluation
            return self.write_response(self.run(evaluation, self.function_for(evaluation), message, context), context)

    def stream(self, request: bytes | Iterator[bytes], servicer: grpc.ServicerContext) -> Iterator[bytes | None]:
        """Handles a call whose responses are a stream."""
        context = self.begin(servicer)
        if context is None:
            return
        with context.call:
            message = self.read_request(request, context)
            evaluation = context.call.evaluation
            with suppress(StreamEnded), ExitStack() as ending:
                responses = iter(self.run(evaluation, self.function_for(evaluation), message, context))
                ending.callback(getattr(responses, "close", tuple))  # gRPC keeps its errors, and with them this frame
                while (response := self.run(evaluation, next, responses, END)) is not END:
                    yield self.write_response(response, context)
                context.send_fields()

    def evaluate(self, context: GrpcRequestContext, servicer: grpc.ServicerContext | HandlerContext) -> Evaluation:
        """Evaluates a call or message; ends the call where it is refused."""
        evaluation = self.gate.ask_nowait(context)
        if evaluation is None:
            evaluation = evaluate_waiting(self.gate, context, servicer) if self.gate.compiled.waits else self.gate.ask(context)
        if self.is_refused(evaluation, context):
            self.refuse(evaluation, servicer)
        return evaluation

    def refuse(self, evaluation: Evaluation, servicer: grpc.ServicerContext | HandlerContext) -> NoReturn:
        code, message, metadata = refusal_status(evaluation)
        servicer.set_trailing_metadata(metadata)
        self.abort(servicer, code, message)

    def abort(self, servicer: grpc.ServicerContext | HandlerContext, code: grpc.StatusCode, message: str) -> NoReturn:
        """Ends the call. In grpc.aio a response of this stream may still be on its way, and `abort` would fail then and leave the
        client waiting: the status is set, and sent when the stream ends."""
        if self.task is not None and self.response_streaming and isinstance(servicer, HandlerContext):
            servicer.set_code(code)
            servicer.set_details(message)
            raise StreamEnded(message)
        abort(servicer, code, message)

    def run(self, evaluation: Evaluation, function: Callable[..., T], *arguments: object) -> T:
        """Runs a step of the handler, in which `current()` is this evaluation."""
        token = current_evaluation.set(evaluation)
        try:
            return function(*arguments)
        finally:
            current_evaluation.reset(token)

    def read_request(self, request: bytes | Iterator[bytes], context: HandlerContext) -> object:
        return self.read_message(request, context) if isinstance(request, bytes) else self.read_messages(request, context)

    def read_messages(self, messages: Iterator[bytes], context: HandlerContext) -> Iterator[object]:
        """The messages of a stream, each of them evaluated where a rule applies to messages."""
        for data in messages:
            if self.gate.compiled.limits_messages:
                self.evaluate(context.call.context.message(), context).settle(200, len(data))
            yield self.read_message(data, context)

    def read_message(self, data: bytes, context: HandlerContext) -> object:
        try:
            return self.deserialize(data)
        except Exception:
            self.abort(context, Code.INTERNAL, "Exception deserializing request!")

    def write_response(self, response: object, context: HandlerContext) -> bytes | None:
        try:
            data = self.serialize(response, context.call)
        except Exception:
            self.abort(context, Code.INTERNAL, "Failed to serialize response!")
        refusing = None if self.response_streaming else context.call.answered().afford(len(data or b""))
        if refusing is not None:
            self.refuse(refusing, context)
        context.send_fields()
        return data

    def begin(self, servicer: grpc.ServicerContext) -> HandlerContext | None:
        """Evaluates a call. None: it is over, and may have no peer any more."""
        if self.task is not None and self.task.done():
            return None
        connection = Connection(servicer)
        if not connection.peer() or is_gone(servicer, None):
            return None
        context = GrpcRequestContext("POST", self.path, servicer, connection)
        evaluation = self.evaluate(context, servicer)
        context.identities |= self.gate.message_identities(context.message())
        return HandlerContext(servicer, Call(context, evaluation, servicer))


class TaskHandlerWrapper(HandlerWrapper):
    """One handler that is a coroutine function or an async generator."""

    async def respond(self, request: AsyncRequest, servicer: grpc.aio.ServicerContext) -> bytes | None:
        """Handles a call with one response."""
        context = await self.begin(servicer)
        async with context.call:
            message = await self.read_request(request, context)
            response = await self.function_for(context.call.evaluation)(message, context)
            if context.call.code in (None, Code.OK):
                return await self.write_response(response, context)
            await context.send_fields()
            return b""

    async def stream(self, request: AsyncRequest, servicer: grpc.aio.ServicerContext) -> AsyncIterator[bytes | None]:
        """Handles a call whose handler is an async generator."""
        context = await self.begin(servicer)
        async with context.call:
            message = await self.read_request(request, context)
            async for response in self.function_for(context.call.evaluation)(message, context):
                yield await self.write_response(response, context)
            await context.send_fields()

    async def run(self, request: AsyncRequest, servicer: grpc.aio.ServicerContext) -> None:
        """Handles a call whose handler writes its responses to the context."""
        context = await self.begin(servicer)
        async with context.call:
            message = await self.read_request(request, context)
            await self.function_for(context.call.evaluation)(message, context)
            await context.send_fields()

    async def evaluate(self, context: GrpcRequestContext, servicer: grpc.aio.ServicerContext) -> Evaluation:
        """Evaluates a call or message; ends the call where it is refused. A client that disconnects gives its place back."""
        evaluation = self.gate.ask_nowait(context)
        if evaluation is None:
            evaluation = await self.gate.aask(context)
        if self.is_refused(evaluation, context):
            await servicer.abort(*refusal_status(evaluation))
        return evaluation

    async def read_request(self, request: AsyncRequest, context: AsyncHandlerContext) -> object:
        if not isinstance(request, bytes):
            return self.read_messages(request, context)
        try:
            return self.deserialize(request)
        except Exception:
            await context.abort(Code.INTERNAL, "Exception deserializing request!")
            return None

    async def read_messages(self, messages: AsyncIterator[bytes], context: AsyncHandlerContext) -> AsyncIterator[object]:
        async for data in messages:
            yield await self.read_message(data, context)

    async def read_message(self, data: bytes, context: AsyncHandlerContext) -> object:
        """One message of a stream, evaluated where a rule applies to messages."""
        if self.gate.compiled.limits_messages:
            evaluation = await self.evaluate(context.call.context.message(), context)
            await evaluation.asettle(200, len(data))
        return await self.read_request(data, context)

    async def write_response(self, response: object, context: AsyncHandlerContext) -> bytes | None:
        try:
            data = self.serialize(response, context.call)
        except Exception:
            await context.abort(Code.INTERNAL, "Failed to serialize response!")
            return None
        refusing = None if self.response_streaming else await context.call.answered().aafford(len(data or b""))
        if refusing is not None:
            await context.abort(*refusal_status(refusing))
        await context.send_fields()
        return data

    async def begin(self, servicer: grpc.aio.ServicerContext) -> AsyncHandlerContext:
        """Evaluates a call; `current()` is its evaluation. One that is over may have no peer any more."""
        connection = Connection(servicer)
        if not connection.peer() or is_gone(servicer, None):
            raise asyncio.CancelledError
        context = GrpcRequestContext("POST", self.path, servicer, connection)
        evaluation = await self.evaluate(context, servicer)
        context.identities |= self.gate.message_identities(context.message())
        call = Call(context, evaluation, servicer)
        current_evaluation.set(call.evaluation)  # every call is a task of its own, with context variables of its own
        return AsyncHandlerContext(servicer, call, self.read_message, self.write_response)


class CallAborted(Exception):
    """The call is over. In some versions of grpc.aio `abort` does not raise in threads: no handler may run after it."""


class StreamEnded(Exception):
    """A stream of responses ends here, with the status that was set."""


def abort(servicer: grpc.ServicerContext | HandlerContext, code: grpc.StatusCode, message: str) -> NoReturn:
    servicer.abort(code, message)
    raise CallAborted(message)


@cache
def make_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="limitkeeper-grpc-waiting", daemon=True).start()
    return loop


def waiting_loop() -> asyncio.AbstractEventLoop:
    """An event loop in which calls of threads wait: a sleeping thread can't be cancelled when its client disconnects."""
    with LOOP_LOCK:
        return make_loop()


def evaluate_waiting(gate: Gate, context: GrpcRequestContext, servicer: grpc.ServicerContext | HandlerContext) -> Evaluation:
    """Evaluates a call that may wait; cancelled, with its place given back, when the client disconnects or its deadline passes.

    grpc.aio reports only deadlines to threads: there a disconnected client waits to the end."""
    answer: Future[Evaluation] = Future()
    asyncio.run_coroutine_threadsafe(evaluate_for_thread(gate, context, answer), waiting_loop())
    if servicer.add_callback(answer.cancel) is False:
        answer.cancel()
    remaining = servicer.time_remaining()
    try:
        return answer.result(remaining if remaining is not None and remaining < MAX_WAIT else None)
    except TimeoutError:
        if not answer.cancel():  # its turn came at this moment
            return answer.result()
        abort(servicer, Code.DEADLINE_EXCEEDED, "the deadline passed while the call waited")
    except CancelledError:
        abort(servicer, Code.CANCELLED, "the client disconnected while the call waited")


async def evaluate_for_thread(gate: Gate, context: GrpcRequestContext, answer: Future[Evaluation]) -> None:
    """Evaluates a call and hands the result over. If `answer` is cancelled first, the call leaves the queue; if its turn came at
    this moment, it is settled here, since no handler will: it would hold its place under `concurrent`."""
    asking = asyncio.ensure_future(gate.aask(context, in_thread=True))
    loop = asyncio.get_running_loop()
    answer.add_done_callback(lambda _: loop.call_soon_threadsafe(asking.cancel))
    await asyncio.wait({asking})
    error = None if asking.cancelled() else asking.exception()
    if answer.set_running_or_notify_cancel():  # it can't be cancelled any more
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(asking.result())
    elif error is None and not asking.cancelled():
        await asking.result().asettle(UNKNOWN)
