"""gRPC server interceptors that bound the calls in progress, as `concurrency_middleware` does for HTTP; UNAVAILABLE when full."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import grpc

from ...concurrency import AdaptiveCall
from ...errors import BulkheadFull
from ..concurrency_middleware import ConcurrencyLimit, Limit, criticality_of, ignoring_cancellation
from .call import current
from .interceptors import SHAPES, abort

#: Status codes of calls that say that the server is overloaded.
DROPPED = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED})
FULL = "the service is at its capacity; retry later"


def report(call: object, context: Any) -> None:
    """Reports the status code of a call to an adaptive bulkhead."""
    code = context.code() if hasattr(context, "code") else None
    if isinstance(call, AdaptiveCall) and code not in (None, 0, grpc.StatusCode.OK):
        (call.drop if code in DROPPED else call.ignore)()


class ConcurrencyInterceptor(ConcurrencyLimit, grpc.ServerInterceptor):  # type: ignore[misc]
    """`grpc.server(pool, interceptors=[ConcurrencyInterceptor(Bulkhead(40, 0))])`. `classify` is given the call's details, with
    `method` and `invocation_metadata`; by default, a call has the `criticality` of its rule, where a RateLimitInterceptor comes
    before this one."""

    def __init__(self, limit: Limit, classify: Callable[[Any], str | None] | None = None, **options: Any) -> None:
        super().__init__(limit, classify or (lambda details: criticality_of(current())), **options)

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        handler = continuation(handler_call_details)
        return None if handler is None else self.wrapped(handler, handler_call_details)

    def wrapped(self, handler: Any, details: Any) -> Any:
        attribute, make = SHAPES[bool(handler.request_streaming), bool(handler.response_streaming)]
        function = getattr(handler, attribute)

        def enter(stack: ExitStack, context: Any) -> Any:
            try:
                return stack.enter_context(self.call(details))
            except BulkheadFull:
                abort(context, grpc.StatusCode.UNAVAILABLE, FULL)

        def respond(request: Any, context: Any) -> Any:
            with ExitStack() as stack:
                call = enter(stack, context)
                answered = function(request, context)
                report(call, context)
                return answered

        def stream(request: Any, context: Any) -> Iterator[Any]:
            with ExitStack() as stack:
                call = enter(stack, context)
                yield from function(request, context)
                report(call, context)

        return make(stream if handler.response_streaming else respond, handler.request_deserializer, handler.response_serializer)


class AsyncConcurrencyInterceptor(ConcurrencyInterceptor, grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """The same for `grpc.aio.server`; handlers that are plain functions run in threads."""

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        attribute, make = SHAPES[bool(handler.request_streaming), bool(handler.response_streaming)]
        function = getattr(handler, attribute)

        async def enter(stack: AsyncExitStack, context: Any) -> Any:
            try:
                return await stack.enter_async_context(self.call(handler_call_details))
            except BulkheadFull:
                await context.abort(grpc.StatusCode.UNAVAILABLE, FULL)

        async def respond(request: Any, context: Any) -> Any:
            async with AsyncExitStack() as stack:
                call = await enter(stack, context)
                with ignoring_cancellation(call):
                    answered = await function(request, context)
                report(call, context)
                return answered

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            async with AsyncExitStack() as stack:
                call = await enter(stack, context)
                with ignoring_cancellation(call):
                    async for response in function(request, context):
                        yield response
                report(call, context)

        if inspect.isasyncgenfunction(function):
            chosen: Any = stream
        elif inspect.iscoroutinefunction(function):
            chosen = respond
        else:
            return self.wrapped(handler, handler_call_details)
        return make(chosen, handler.request_deserializer, handler.response_serializer)
