"""The interceptor for `grpc.aio` servers. Handlers that are plain functions run in threads there, and are guarded as such."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from ...policy.evaluation import Evaluation
from ...policy.gate import Gate, gate_of
from ...policy.model import Policy
from ...stores.contract import Store
from ..response_settlement import GONE
from .call import Call, SeenInTask
from .handler_wrapper import HandlerWrapper, PolicyFlags, log
from .request_context import GrpcRequestContext, passing
from .status import Code, refused_status
from .threads import threaded


class AsyncRateLimitInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """`grpc.aio.server(interceptors=[AsyncRateLimitInterceptor("limitkeeper.yaml")])`.

    `policy` is a policy, the path of its file, or a `Gate`; `store` and `handlers` are for a gate that is made here (`.gate`).
    """

    def __init__(
        self,
        policy: Policy | str | Path | Gate,
        *,
        store: Store | None = None,
        handlers: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        self.gate = policy if isinstance(policy, Gate) else gate_of(policy, store=store, handlers=handlers)
        self._desk = PolicyFlags(self.gate)

    async def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        guard = TaskHandlerWrapper(self._desk, handler_call_details.method, handler)
        if inspect.isasyncgenfunction(guard.behaviour):
            return guard.handler(guard.stream)
        if inspect.iscoroutinefunction(guard.behaviour):
            return guard.handler(guard.write_all if guard.streams else guard.answer)
        return threaded(self._desk, handler_call_details.method, handler)


class TaskHandlerWrapper(HandlerWrapper):
    async def answer(self, raw: Any, context: Any) -> Any:
        """A call with one response."""
        facts = self.facts(context)
        passage = await self.ask(facts, context)
        async with self.call(passage, context) as call:
            seen = self.seen(context, call, facts)
            response = await self.behaviour_of(passage)(await self.request(raw, facts, seen), seen)
            data = await self.data(response, call, seen) if call.code in (None, Code.OK) else b""
            await seen.tell()
            return data

    async def stream(self, raw: Any, context: Any) -> AsyncIterator[Any]:
        """A call whose handler is an async generator."""
        facts = self.facts(context)
        passage = await self.ask(facts, context)
        async with self.call(passage, context) as call:
            seen = self.seen(context, call, facts)
            async for response in self.behaviour_of(passage)(await self.request(raw, facts, seen), seen):
                data = await self.data(response, call, seen)
                await seen.tell()
                yield data
            await seen.tell()

    async def write_all(self, raw: Any, context: Any) -> None:
        """A call whose handler writes its responses to the context."""
        facts = self.facts(context)
        passage = await self.ask(facts, context)
        async with self.call(passage, context) as call:
            seen = self.seen(context, call, facts)
            await self.behaviour_of(passage)(await self.request(raw, facts, seen), seen)
            await seen.tell()

    async def ask(self, facts: GrpcRequestContext, context: Any) -> Evaluation:
        """Lets pass, or ends the call. A client that goes away while it waits gives its place back."""
        passage = self.gate.ask_nowait(facts)
        if passage is None:
            passage = await self.gate.aask(facts)
        if passage.refusal is not None and (passage.degrade is None or facts.method != "POST"):
            await context.abort(*refused_status(passage, passage.refusal))
        return passage

    def behaviour_of(self, passage: Evaluation) -> Any:
        return self.behaviour if passage.allowed else passage.degrade

    async def request(self, raw: Any, facts: GrpcRequestContext, seen: SeenInTask) -> Any:
        return self.messages(raw, facts, seen) if self.streamed else await self.taken(raw, seen)

    async def messages(self, raws: AsyncIterator[bytes], facts: GrpcRequestContext, seen: SeenInTask) -> AsyncIterator[Any]:
        async for raw in raws:
            yield await self.message(raw, facts, seen)

    async def message(self, raw: bytes, facts: GrpcRequestContext, seen: SeenInTask) -> Any:
        """One message of a stream, asked for where a rule is meant by messages."""
        if self.desk.messages:
            passage = await self.ask(facts.message(), seen)
            await passage.asettle(200, len(raw))
        return await self.taken(raw, seen)

    async def taken(self, raw: bytes, seen: SeenInTask) -> Any:
        try:
            return self.read(raw)
        except Exception:
            log.exception("%s: a message could not be deserialised", self.path)
            return await seen.abort(Code.INTERNAL, "Exception deserializing request!")

    async def data(self, response: Any, call: Call, seen: SeenInTask) -> Any:
        try:
            data = self.written(response)
        except Exception:
            log.exception("%s: a response could not be serialised", self.path)
            return await seen.abort(Code.INTERNAL, "Failed to serialize response!")
        call.size += len(data) if data is not None else 0
        return data

    def seen(self, context: Any, call: Call, facts: GrpcRequestContext) -> SeenInTask:
        """The handler's context; what it reads and writes there is guarded too."""

        async def read(seen: SeenInTask) -> Any:
            raw = await context.read()
            return raw if raw is grpc.aio.EOF else await self.message(raw, facts, seen)

        async def write(seen: SeenInTask, message: Any) -> None:
            data = await self.data(message, call, seen)
            await seen.tell()
            await context.write(data)

        return SeenInTask(context, call, read, write)

    @asynccontextmanager
    async def call(self, passage: Evaluation, context: Any) -> AsyncIterator[Call]:
        """Counts and settles a call at its end, however it ends; to the handler `current()` is its passage."""
        call = Call(passage, context)
        error: BaseException | None = None
        passing.set(passage)  # every call is a task of its own, with a context of its own
        try:
            yield call
        except BaseException as raised:
            error = raised
            raise
        finally:
            if passage.allowed:
                status = call.status(error)
                passage.count_response(status or GONE)
                await passage.asettle(status, call.size)
