"""The interceptor for servers whose handlers run in threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TypeVar

import grpc

from ...policy.evaluation import Evaluation
from ...policy.gate import Gate, gate_of
from ...policy.model import Policy
from ...stores.contract import Store
from ..handler_limit import Handler
from ..policy_flags import PolicyFlags
from .call import Call, HandlerContext
from .handler_wrapper import HandlerWrapper
from .request_context import GrpcRequestContext, current_evaluation
from .status import Code, refusal_status

T = TypeVar("T")


class RateLimitInterceptor(grpc.ServerInterceptor):  # type: ignore[misc]
    """`grpc.server(pool, interceptors=[RateLimitInterceptor("limitkeeper.yaml")])`.

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

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = continuation(handler_call_details)
        if handler is None:  # no such method: gRPC answers UNIMPLEMENTED
            return None
        return wrap_in_thread(self._flags, handler_call_details.method, handler)


def wrap_in_thread(flags: PolicyFlags, path: str, handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
    """Wraps a handler that runs in a thread."""
    wrapper = ThreadHandlerWrapper(flags, path, handler)
    return wrapper.make_handler(wrapper.stream if wrapper.response_streaming else wrapper.respond)


class ThreadHandlerWrapper(HandlerWrapper):
    """One handler that runs in a thread."""

    def respond(self, request: bytes | Iterator[bytes], servicer: grpc.ServicerContext) -> bytes | None:
        """Handles a call with one response."""
        context = self.context_of(servicer)
        evaluation = self.evaluate(context, servicer)
        with self.settled_call(evaluation, servicer) as call:
            handler_context = HandlerContext(servicer, call)
            message = self.read_request(request, context, handler_context)
            response = self.run(evaluation, self.function_for(evaluation), message, handler_context)
            data = self.write_response(response, call, handler_context)
            handler_context.send_fields()
            return data

    def stream(self, request: bytes | Iterator[bytes], servicer: grpc.ServicerContext) -> Iterator[bytes | None]:
        """Handles a call whose responses are a stream."""
        context = self.context_of(servicer)
        evaluation = self.evaluate(context, servicer)
        with self.settled_call(evaluation, servicer) as call:
            handler_context = HandlerContext(servicer, call)
            message = self.read_request(request, context, handler_context)
            function: Callable[..., Iterator[object]] = self.function_for(evaluation)  # type: ignore[assignment]
            responses = iter(self.run(evaluation, function, message, handler_context))
            while True:
                response = self.run(evaluation, next, responses, END)
                if response is END:
                    break
                data = self.write_response(response, call, handler_context)
                handler_context.send_fields()
                yield data
            handler_context.send_fields()

    def evaluate(self, context: GrpcRequestContext, servicer: grpc.ServicerContext) -> Evaluation:
        """Evaluates a call or message; ends the call where it is refused."""
        evaluation = self.gate.ask_nowait(context)
        if evaluation is None:
            evaluation = evaluate_waiting(self.gate, context, servicer) if self.flags.waits else self.gate.ask(context)
        if self.is_refused(evaluation, context):
            code, message, metadata = refusal_status(evaluation)
            servicer.set_trailing_metadata(metadata)
            abort(servicer, code, message)
        return evaluation

    def run(self, evaluation: Evaluation, function: Callable[..., T], *arguments: object) -> T:
        """Runs a step of the handler, in which `current()` is this evaluation."""
        token = current_evaluation.set(evaluation)
        try:
            return function(*arguments)
        finally:
            current_evaluation.reset(token)

    def read_request(
        self, request: bytes | Iterator[bytes], context: GrpcRequestContext, handler_context: HandlerContext
    ) -> object:
        if isinstance(request, bytes):
            return self.read_message(request, handler_context)
        return self.read_messages(request, context, handler_context)

    def read_messages(
        self, messages: Iterator[bytes], context: GrpcRequestContext, handler_context: HandlerContext
    ) -> Iterator[object]:
        """The messages of a stream, each of them evaluated where a rule applies to messages."""
        for data in messages:
            if self.flags.limits_messages:
                self.evaluate(context.message(), handler_context).settle(200, len(data))
            yield self.read_message(data, handler_context)

    def read_message(self, data: bytes, handler_context: HandlerContext) -> object:
        try:
            return self.deserialize(data)
        except Exception:
            abort(handler_context, Code.INTERNAL, "Exception deserializing request!")

    def write_response(self, response: object, call: Call, handler_context: HandlerContext) -> bytes | None:
        try:
            data = self.serialize(response)
        except Exception:
            abort(handler_context, Code.INTERNAL, "Failed to serialize response!")
        call.settlement.size += len(data) if data is not None else 0
        return data

    @contextmanager
    def settled_call(self, evaluation: Evaluation, servicer: grpc.ServicerContext) -> Iterator[Call]:
        """Counts and settles a call at its end, however it ends."""
        call = Call(evaluation, servicer)
        error: BaseException | None = None
        try:
            yield call
        except BaseException as raised:
            error = raised
            raise
        finally:
            call.end(error).settle()


END = object()
#: Seconds; a call without a deadline reports a longer time than a thread can wait.
MAX_WAIT = 1e8


class CallAborted(Exception):
    """The call is over. In some versions of grpc.aio `abort` does not raise in threads: no handler may run after it."""


def abort(servicer: grpc.ServicerContext, code: grpc.StatusCode, message: str) -> NoReturn:
    servicer.abort(code, message)
    raise CallAborted(message)


class WaitingLoop:
    """An event loop in which calls of threads wait: a sleeping thread can't be cancelled when its client disconnects."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    def loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="limitkeeper-grpc-waiting", daemon=True).start()
            return self._loop


WAITING_LOOP = WaitingLoop()


def evaluate_waiting(gate: Gate, context: GrpcRequestContext, servicer: grpc.ServicerContext) -> Evaluation:
    """Evaluates a call that may wait; cancelled, with its place given back, when the client disconnects or its deadline passes.

    grpc.aio reports only deadlines to threads: there a disconnected client waits to the end."""
    future = asyncio.run_coroutine_threadsafe(gate.aask(context), WAITING_LOOP.loop())
    if servicer.add_callback(future.cancel) is False:
        future.cancel()
    remaining = servicer.time_remaining()
    try:
        return future.result(remaining if remaining is not None and remaining < MAX_WAIT else None)
    except TimeoutError:
        future.cancel()
        abort(servicer, Code.DEADLINE_EXCEEDED, "the deadline passed while the call waited")
    except CancelledError:
        abort(servicer, Code.CANCELLED, "the client disconnected while the call waited")
