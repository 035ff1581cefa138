"""Middlewares that bound the requests in progress: by a bulkhead, an adaptive bulkhead, or a load shedder with classes.

    app = AsgiConcurrencyMiddleware(app, AdaptiveBulkhead(Gradient2()))
    app = RateLimitMiddleware(AsgiConcurrencyMiddleware(app, LoadShedder(Bulkhead(400))), policy)  # classes: `criticality`

A request holds its place until its response has ended. One that gets none is answered 503 with Retry-After; no handler runs. The
class of a request (of a shedder) or its partition (of an adaptive bulkhead) is `classify(request)`; by default the `criticality`
of the first rule of the policy that applies to it, and `default` where there is none or the shedder does not have it. To an
adaptive bulkhead a response time is a sample when the response is a success or a redirection; 503 and 504 are drops; other errors
say nothing (as in Netflix's concurrency-limits). A request that is cancelled says nothing either: its client decides that, and
one that cancels a request in each window would bring the limit to its minimum for all. (There it is a drop.)
"""

from __future__ import annotations

import logging
from asyncio import CancelledError
from collections.abc import Callable, Iterable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from typing import Any, TypeAlias

from ..concurrency import AdaptiveBulkhead, AdaptiveCall, Bulkhead, LoadShedder
from ..concurrency.bulkhead import PlaceContext
from ..errors import BulkheadFull, ConfigurationError
from ..policy.evaluation import Evaluation
from .asgi import while_connected
from .degrade.reduced_response import evaluation_of
from .headers import ASGIApp, Message, Receive, Scope, Send
from .refusal_body import encode_json
from .wsgi import Application, Environ, ExcInfo, StartResponse, Write, status_line

log = logging.getLogger("limitkeeper")

Limit: TypeAlias = PlaceContext | AdaptiveBulkhead | LoadShedder
#: Messages that send a part of a response's body.
BODIES = frozenset({"http.response.body", "http.response.pathsend", "http.response.zerocopysend"})
#: So many seconds of a wait for a place are not watched for the client's disconnection: nothing of its body is read in them.
UNWATCHED = 0.01
#: Statuses of responses that say that the server is overloaded.
DROPPED = frozenset({503, 504})


def criticality_of(evaluation: Evaluation | None) -> str | None:
    """The `criticality` of the first rule of the policy that applies to a request; None: no rule names one. Also of a rule that
    charges nothing: for a repetition (`once`), with a capacity, in shadow mode."""
    if evaluation is None:
        return None
    rules = [entry.rule for entry in evaluation.entries]
    if evaluation.special:
        apart = (*(evaluation.idempotent or ()), *(evaluation.capacity or ()), *(evaluation.shadow or ()))
        names = {rule.name for rule in (*rules, *[one.rule.config for one in apart])}
        rules = [rule for rule in evaluation.policy.rules if rule.name in names]
    return next((rule.criticality for rule in rules if rule.criticality is not None), None)


class ConcurrencyLimit:
    """What the middlewares of all frameworks share: the context of a request, and the response without a place."""

    def __init__(
        self, limit: Limit, classify: Callable[[Any], str | None] | None = None, default: str = "normal", retry_after: int = 1
    ) -> None:
        if not isinstance(limit, Limit):
            expected = "a Bulkhead, an AdaptiveBulkhead or a LoadShedder"
            raise ConfigurationError(f"limit: expected {expected}, got {type(limit).__name__}")
        self.limit, self.default, self.retry_after = limit, default, retry_after
        self._warned = False
        self.classify = classify or (lambda request: criticality_of(evaluation_of(request)))
        if isinstance(limit, LoadShedder):
            limit.call(default)  # raises where it is unknown

    def call(self, request: Any) -> Any:
        """The context that the request holds, sync and async."""
        if isinstance(self.limit, PlaceContext):
            return self.limit
        named = self.classify(request)
        if named is not None and isinstance(self.limit, LoadShedder) and named not in self.limit.shed:
            self._warn(named, self.limit)
            named = None
        return self.limit.call(self.default if named is None else named)

    def _warn(self, named: str, shedder: LoadShedder) -> None:
        """Warns once: a policy that is loaded later may name a class that the shedder does not have."""
        if not self._warned:
            self._warned = True
            known = ", ".join(shedder.shed)
            log.warning("unknown class %r of a request: it is taken for %r; the load shedder has %s", named, self.default, known)

    def content(self) -> bytes:
        message = f"The service is at its capacity. Retry after {self.retry_after}s."
        return encode_json({"code": "OVERLOADED", "message": message})


def report(call: object, status: int) -> None:
    """Reports the status of a response to an adaptive bulkhead."""
    if isinstance(call, AdaptiveCall) and status >= 400:
        (call.drop if status in DROPPED else call.ignore)()


@contextmanager
def ignoring_cancellation(call: object) -> Iterator[None]:
    """A request that is cancelled within says nothing to an adaptive bulkhead."""
    try:
        yield
    except CancelledError:
        if isinstance(call, AdaptiveCall):
            call.ignore()
        raise


class AsgiConcurrencyMiddleware(ConcurrencyLimit):
    """For ASGI: requests hold a place of `limit`, or are answered with 503. Websockets and the lifespan pass; `concurrent:` in a
    policy bounds websockets.

    `limit` is a `Bulkhead`, an `AdaptiveBulkhead` or a `LoadShedder`. Options: `classify`, which returns the class or partition
    of a request; `default`, the class of requests without one; `retry_after`, in seconds.
    """

    def __init__(self, app: ASGIApp, limit: Limit, **options: Any) -> None:
        super().__init__(limit, **options)
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        async with AsyncExitStack() as stack:
            try:
                call, receive = await self.enter(stack, scope, receive)
            except BulkheadFull:
                await self.refuse(scope, send)
                return
            if call is None:
                return

            async def reporting(message: Message) -> None:
                if message["type"] == "http.response.start":
                    report(call, message["status"])
                await send(message)
                if message["type"] in BODIES and not message.get("more_body", False):
                    await stack.aclose()  # the response has ended; background tasks may follow

            with ignoring_cancellation(call):
                await self.app(scope, receive, reporting)
            if isinstance(call, AdaptiveCall):  # without the end of a response: its client has disconnected
                call.ignore()

    async def enter(self, stack: AsyncExitStack, scope: Scope, receive: Receive) -> tuple[Any, Receive]:
        """Takes a place, and returns the `receive` of the application. A request whose client disconnects while it waits for one
        leaves the queue, and gets None."""
        entering = stack.enter_async_context(self.call(scope))
        bulkhead = getattr(self.limit, "bulkhead", self.limit)
        if isinstance(bulkhead, Bulkhead) and (bulkhead.max_waiting == 0 or bulkhead.in_use < bulkhead.max_concurrent):
            return await entering, receive

        async def leave(call: object) -> None:
            if isinstance(call, AdaptiveCall):
                call.ignore()
            await stack.aclose()

        return await while_connected(entering, leave, receive, UNWATCHED)

    async def refuse(self, scope: Scope, send: Send) -> None:
        content = self.content()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(content)),
            (b"retry-after", b"%d" % self.retry_after),
            (b"cache-control", b"no-store"),
        ]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else content})


class WsgiConcurrencyMiddleware(ConcurrencyLimit):
    """For WSGI, Flask (`app.wsgi_app = …`) and Django's WSGI application. A request that waits holds its thread. The arguments
    are those of `AsgiConcurrencyMiddleware`."""

    def __init__(self, app: Application, limit: Limit, **options: Any) -> None:
        super().__init__(limit, **options)
        self.app = app

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        with ExitStack() as stack:
            try:
                call = stack.enter_context(self.call(environ))
            except BulkheadFull:
                content = self.content()
                headers = [("Content-Type", "application/json"), ("Content-Length", str(len(content)))]
                start_response(
                    status_line(503), [*headers, ("Retry-After", str(self.retry_after)), ("Cache-Control", "no-store")]
                )
                return [] if environ["REQUEST_METHOD"] == "HEAD" else [content]

            def reporting(status: str, headers: list[tuple[str, str]], exc_info: ExcInfo | None = None) -> Write:
                report(call, int(status[:3]))
                return start_response(status, headers) if exc_info is None else start_response(status, headers, exc_info)

            chunks = self.app(environ, reporting if isinstance(call, AdaptiveCall) else start_response)
            return HeldBody(chunks, stack.pop_all())


class HeldBody:
    """The body of a response; its place is released when the server closes it."""

    def __init__(self, chunks: Iterable[bytes], held: ExitStack) -> None:
        self._chunks, self._held = chunks, held

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._chunks)

    def close(self) -> None:
        with self._held:
            getattr(self._chunks, "close", tuple)()
