"""The interceptor for servers whose handlers run in threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import grpc

from ...policy.evaluation import Evaluation
from ...policy.gate import Gate, gate_of
from ...policy.model import Policy
from ...stores.contract import Store
from ..response_settlement import GONE
from .call import Call, SeenInThread
from .handler_wrapper import HandlerWrapper, PolicyFlags, log
from .request_context import GrpcRequestContext, passing
from .status import Code, refused_status


class RateLimitInterceptor(grpc.ServerInterceptor):  # type: ignore[misc]
    """`grpc.server(pool, interceptors=[RateLimitInterceptor("limitkeeper.yaml")])`.

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

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        handler = continuation(handler_call_details)
        if handler is None:  # nobody serves it: UNIMPLEMENTED, as without us
            return None
        return threaded(self._desk, handler_call_details.method, handler)


def threaded(desk: PolicyFlags, path: str, handler: Any) -> Any:
    """A handler that runs in a thread, guarded."""
    guard = ThreadHandlerWrapper(desk, path, handler)
    return guard.handler(guard.stream if guard.streams else guard.answer)


class ThreadHandlerWrapper(HandlerWrapper):
    def answer(self, raw: Any, context: Any) -> Any:
        """A call with one response."""
        facts = self.facts(context)
        passage = self.ask(facts, context)
        with self.call(passage, context) as call:
            seen = SeenInThread(context, call)
            response = self.within(passage, self.behaviour_of(passage), self.request(raw, facts, seen), seen)
            data = self.write(response, call, seen)
            seen.tell()
            return data

    def stream(self, raw: Any, context: Any) -> Iterator[Any]:
        """A call whose responses are a stream."""
        facts = self.facts(context)
        passage = self.ask(facts, context)
        with self.call(passage, context) as call:
            seen = SeenInThread(context, call)
            responses = iter(self.within(passage, self.behaviour_of(passage), self.request(raw, facts, seen), seen))
            while True:
                response = self.within(passage, next, responses, END)
                if response is END:
                    break
                data = self.write(response, call, seen)
                seen.tell()
                yield data
            seen.tell()

    def ask(self, facts: GrpcRequestContext, context: Any) -> Evaluation:
        """Lets pass, or ends the call. A client that goes away while it waits gives its place back."""
        passage = self.gate.ask_nowait(facts)
        if passage is None:
            passage = waited(self.gate, facts, context) if self.desk.waits else self.gate.ask(facts)
        if passage.refusal is not None and (passage.degrade is None or facts.method != "POST"):
            code, message, metadata = refused_status(passage, passage.refusal)
            context.set_trailing_metadata(metadata)
            end(context, code, message)
        return passage

    def behaviour_of(self, passage: Evaluation) -> Any:
        return self.behaviour if passage.allowed else passage.degrade

    def within(self, passage: Evaluation, behaviour: Any, *arguments: Any) -> Any:
        """Runs a step of the handler, to whom `current()` is this passage."""
        token = passing.set(passage)
        try:
            return behaviour(*arguments)
        finally:
            passing.reset(token)

    def request(self, raw: Any, facts: GrpcRequestContext, seen: SeenInThread) -> Any:
        return self.messages(raw, facts, seen) if self.streamed else self.taken(raw, seen)

    def messages(self, raws: Iterator[bytes], facts: GrpcRequestContext, seen: SeenInThread) -> Iterator[Any]:
        """The messages of a stream, each of them asked for where a rule is meant by messages."""
        for raw in raws:
            if self.desk.messages:
                passage = self.ask(facts.message(), seen)
                passage.settle(200, len(raw))
            yield self.taken(raw, seen)

    def taken(self, raw: bytes, seen: SeenInThread) -> Any:
        try:
            return self.read(raw)
        except Exception:
            log.exception("%s: a message could not be deserialised", self.path)
            return end(seen, Code.INTERNAL, "Exception deserializing request!")

    def write(self, response: Any, call: Call, seen: SeenInThread) -> Any:
        try:
            data = self.written(response)
        except Exception:
            log.exception("%s: a response could not be serialised", self.path)
            return end(seen, Code.INTERNAL, "Failed to serialize response!")
        call.size += len(data) if data is not None else 0
        return data

    @contextmanager
    def call(self, passage: Evaluation, context: Any) -> Iterator[Call]:
        """Counts and settles a call at its end, however it ends."""
        call = Call(passage, context)
        error: BaseException | None = None
        try:
            yield call
        except BaseException as raised:
            error = raised
            raise
        finally:
            if passage.allowed:
                status = call.status(error)
                passage.count_response(status or GONE)
                passage.settle(status, call.size)


END = object()
#: Seconds; a call without a deadline has more left than a thread can wait.
FOREVER = 1e8


class Ended(Exception):
    """The call is over. Some versions of grpc.aio have an `abort` for threads that does not raise: no handler runs after it."""


def end(context: Any, code: Any, message: str) -> NoReturn:
    context.abort(code, message)
    raise Ended(message)


class Lobby:
    """Where calls of threads wait their turn: an event loop of its own, because a sleeping thread can't be told that its client
    has gone, and a task can."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    def loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="limitkeeper-grpc-waiting", daemon=True).start()
            return self._loop


LOBBY = Lobby()


def waited(gate: Gate, facts: GrpcRequestContext, context: Any) -> Evaluation:
    """Asks and waits; cancelled, and its place given back, when the client goes away or its deadline passes.

    grpc.aio tells a thread of a deadline only: there a client that goes away is waited for."""
    asking = asyncio.run_coroutine_threadsafe(gate.aask(facts), LOBBY.loop())
    if context.add_callback(asking.cancel) is False:
        asking.cancel()
    left = context.time_remaining()
    try:
        return asking.result(left if left is not None and left < FOREVER else None)
    except TimeoutError:
        asking.cancel()
        end(context, Code.DEADLINE_EXCEEDED, "the deadline passed while it waited")
    except CancelledError:
        end(context, Code.CANCELLED, "the client went away while it waited")
