"""The interceptor for `grpc.aio` servers. Handlers that are plain functions run in threads there, and are wrapped for threads."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from ...policy.evaluation import Evaluation
from ...policy.gate import Gate, gate_of
from ...policy.model import Policy
from ...stores.contract import Store
from ..handler_limit import Handler
from ..policy_flags import PolicyFlags
from .call import AsyncHandlerContext, Call
from .handler_wrapper import HandlerWrapper
from .request_context import GrpcRequestContext, current_evaluation
from .status import Code, refusal_status
from .threads import wrap_in_thread

Request = bytes | AsyncIterator[bytes]


class AsyncRateLimitInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """`grpc.aio.server(interceptors=[AsyncRateLimitInterceptor("limitkeeper.yaml")])`.

    `policy` is a policy, the path of its file, or a `Gate`; `store` and `handlers` are for a gate that is made here (`.gate`).
    """

    def __init__(
        self,
        policy: Policy | str | Path | Gate,
        *,
        store: Store | None = None,
        handlers: Mapping[str, Handler] | None = None,
    ) -> None:
        self.gate = policy if isinstance(policy, Gate) else gate_of(policy, store=store, handlers=handlers)
        self._flags = PolicyFlags(self.gate)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        wrapper = TaskHandlerWrapper(self._flags, handler_call_details.method, handler)
        if inspect.isasyncgenfunction(wrapper.function):
            return wrapper.make_handler(wrapper.stream)
        if inspect.iscoroutinefunction(wrapper.function):
            return wrapper.make_handler(wrapper.run if wrapper.response_streaming else wrapper.respond)
        return wrap_in_thread(self._flags, handler_call_details.method, handler)


class TaskHandlerWrapper(HandlerWrapper):
    """One handler that is a coroutine function or an async generator."""

    async def respond(self, request: Request, servicer: grpc.aio.ServicerContext) -> bytes | None:
        """Handles a call with one response."""
        async with self.settled_call(servicer) as (call, context, handler_context):
            function: Callable[..., Awaitable[object]] = self.function_for(call.evaluation)  # type: ignore[assignment]
            response = await function(await self.read_request(request, context, handler_context), handler_context)
            data: bytes | None = b""
            if call.code in (None, Code.OK):
                data = await self.write_response(response, call, handler_context)
            await handler_context.send_fields()
            return data

    async def stream(self, request: Request, servicer: grpc.aio.ServicerContext) -> AsyncIterator[bytes | None]:
        """Handles a call whose handler is an async generator."""
        async with self.settled_call(servicer) as (call, context, handler_context):
            function: Callable[..., AsyncIterator[object]] = self.function_for(call.evaluation)  # type: ignore[assignment]
            async for response in function(await self.read_request(request, context, handler_context), handler_context):
                data = await self.write_response(response, call, handler_context)
                await handler_context.send_fields()
                yield data
            await handler_context.send_fields()

    async def run(self, request: Request, servicer: grpc.aio.ServicerContext) -> None:
        """Handles a call whose handler writes its responses to the context."""
        async with self.settled_call(servicer) as (call, context, handler_context):
            function: Callable[..., Awaitable[object]] = self.function_for(call.evaluation)  # type: ignore[assignment]
            await function(await self.read_request(request, context, handler_context), handler_context)
            await handler_context.send_fields()

    async def evaluate(self, context: GrpcRequestContext, servicer: grpc.aio.ServicerContext) -> Evaluation:
        """Evaluates a call or message; ends the call where it is refused. A client that disconnects gives its place back."""
        evaluation = self.gate.ask_nowait(context)
        if evaluation is None:
            evaluation = await self.gate.aask(context)
        if self.is_refused(evaluation, context):
            await servicer.abort(*refusal_status(evaluation))
        return evaluation

    async def read_request(self, request: Request, context: GrpcRequestContext, handler_context: AsyncHandlerContext) -> object:
        if isinstance(request, bytes):
            return await self.deserialize_or_abort(request, handler_context)
        return self.read_messages(request, context, handler_context)

    async def read_messages(
        self, messages: AsyncIterator[bytes], context: GrpcRequestContext, handler_context: AsyncHandlerContext
    ) -> AsyncIterator[object]:
        async for data in messages:
            yield await self.read_message(data, context, handler_context)

    async def read_message(self, data: bytes, context: GrpcRequestContext, handler_context: AsyncHandlerContext) -> object:
        """One message of a stream, evaluated where a rule applies to messages."""
        if self.flags.limits_messages:
            evaluation = await self.evaluate(context.message(), handler_context)
            await evaluation.asettle(200, len(data))
        return await self.deserialize_or_abort(data, handler_context)

    async def deserialize_or_abort(self, data: bytes, handler_context: AsyncHandlerContext) -> object:
        try:
            return self.deserialize(data)
        except Exception:
            await handler_context.abort(Code.INTERNAL, "Exception deserializing request!")
            return None

    async def write_response(self, response: object, call: Call, handler_context: AsyncHandlerContext) -> bytes | None:
        try:
            data = self.serialize(response)
        except Exception:
            await handler_context.abort(Code.INTERNAL, "Failed to serialize response!")
            return None
        call.settlement.size += len(data) if data is not None else 0
        return data

    def handler_context(self, servicer: grpc.aio.ServicerContext, call: Call, context: GrpcRequestContext) -> AsyncHandlerContext:
        """The handler's context; messages that it reads and writes there are counted too."""

        async def read(handler_context: AsyncHandlerContext) -> object:
            data = await servicer.read()
            return data if data is grpc.aio.EOF else await self.read_message(data, context, handler_context)

        async def write(handler_context: AsyncHandlerContext, message: object) -> None:
            data = await self.write_response(message, call, handler_context)
            await handler_context.send_fields()
            await servicer.write(data)

        return AsyncHandlerContext(servicer, call, read, write)

    @asynccontextmanager
    async def settled_call(
        self, servicer: grpc.aio.ServicerContext
    ) -> AsyncIterator[tuple[Call, GrpcRequestContext, AsyncHandlerContext]]:
        """Evaluates a call, and counts and settles it at its end, however it ends; `current()` is its evaluation."""
        context = self.context_of(servicer)
        call = Call(await self.evaluate(context, servicer), servicer)
        error: BaseException | None = None
        current_evaluation.set(call.evaluation)  # every call is a task of its own, with context variables of its own
        try:
            yield call, context, self.handler_context(servicer, call, context)
        except BaseException as raised:
            error = raised
            raise
        finally:
            await call.end(error).asettle()
