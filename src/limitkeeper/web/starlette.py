"""Starlette: limits on single routes, as decorators of their endpoints.

    @limit("5/s burst 10")
    async def checkout(request): …

For functions (async or not), methods of an HTTPEndpoint, and websocket endpoints. Per client by default, never one bucket for
all; a limit goes by the endpoint's name, and several on one endpoint are asked from the outside in. The policy of a whole site
is RateLimitMiddleware's (asgi.py); a rule of it can be named here, and where the middleware has asked it already it is not asked
again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException, WebSocketException
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.responses import Response
from starlette.websockets import WebSocketDisconnect, WebSocketState

from ..errors import ConfigurationError
from ..policy.evaluation import Evaluation
from ..policy.gate import Gate
from ..policy.model import Policy
from ..stores import Store
from .asgi import SettlingSend
from .asgi_fast import AsgiRequestContext, HeaderSend
from .asgi_websocket import ACCEPTED, TRY_LATER, reason
from .dependency_limits import asked_of
from .headers import merge
from .refusal_body import body
from .response_settlement import GONE, UNKNOWN, outcome
from .route_limit import AnyKey, RouteLimit
from .view_identity import has_siblings, place_of, placed
from .view_limit import DEPTH, name_of

E = TypeVar("E", bound=Callable[..., Any])


class Limit(RouteLimit):
    """What `limit` was told."""

    written = '@limit("5/s burst 10"), or name a rule: @limit(policy=gate, rule="checkout")'

    async def around(self, name: str, connection: HTTPConnection, run: Callable[[], Any]) -> Any:
        """Asks, and answers or lets the endpoint answer."""
        scope = connection.scope
        if self.was_asked(scope):
            return await run()
        facts = AsgiRequestContext(scope)
        passage = await self.ask(connection, facts, name)
        socket = scope["type"] == "websocket"
        if not passage.allowed:
            if socket:
                raise WebSocketException(TRY_LATER, reason(passage))
            return refusal(passage, facts, scope)
        if socket:
            passage.responded(101)
        innermost = len(asked_of(scope).passages)
        try:
            response = await run()
        except BaseException as error:
            status = status_of(error)
            if not socket:
                passage.responded(status or GONE)
            elif status == UNKNOWN and connection.application_state is WebSocketState.CONNECTED:  # type: ignore[attr-defined]
                status = ACCEPTED
            await asyncio.shield(asyncio.ensure_future(passage.adone(status)))
            raise
        if socket:
            await passage.adone(101)
            return response
        return answered(passage, response, scope, len(asked_of(scope).passages) == innermost)


def limit(
    limit: Any = None,
    *,
    key: AnyKey = "ip",
    name: str | None = None,
    policy: Gate | Policy | None = None,
    rule: str | None = None,
    store: Store | str | None = None,
    **words: Any,
) -> Callable[[E], E]:
    """A limit for an endpoint. `key` is "ip", or a callable that is given the request (async too); None of it: the address.

    Every other word of a rule may follow: cost=, message=, on_refusal=, status=, charge=, … `policy` and `rule` name a rule of a
    policy instead, whatever it matches. `store` is a store or its URL; without one, this limit has a memory of its own. Limits of
    the same `name` and store are one.
    """
    question = Limit(limit, key=key, name=name, policy=policy, rule=rule, store=store, **words)

    def decorate(endpoint: E) -> E:
        if isinstance(endpoint, type) or not callable(endpoint):
            raise ConfigurationError(f"@limit stands on functions and methods; put it on the methods of {endpoint!r}")
        own = name or name_of(endpoint)
        apart = name is None and has_siblings(endpoint)
        awaited = iscoroutinefunction(endpoint)

        @wraps(endpoint)
        async def asking(*args: Any, **named: Any) -> Any:
            async def run() -> Any:
                return await (endpoint(*args, **named) if awaited else run_in_threadpool(endpoint, *args, **named))

            connection = connection_in(endpoint, *args, *named.values())
            place = place_of(connection.scope) if apart else None
            return await question.around(own if place is None else placed(own, place), connection, run)

        setattr(asking, DEPTH, getattr(endpoint, DEPTH, 0) + 1)
        return asking  # type: ignore[return-value]

    return decorate


def connection_in(endpoint: Any, *given: Any) -> HTTPConnection:
    for one in given[:2]:
        if isinstance(one, HTTPConnection):
            return one
    raise ConfigurationError(
        f"@limit stands on endpoints of Starlette, which are given a request: {getattr(endpoint, '__name__', endpoint)}(request)"
    )


def status_of(error: BaseException) -> int:
    """What becomes of an exception; a client that has disconnected gets no response."""
    if isinstance(error, (ClientDisconnect, WebSocketDisconnect)):
        return UNKNOWN
    return error.status_code if isinstance(error, HTTPException) else outcome(error)


def refusal(passage: Evaluation, facts: AsgiRequestContext, scope: Any) -> Any:
    """The rule's own answer, or why and when to come back, with the fields of every limit that was asked."""
    if passage.degrade is not None:
        return Following(passage.degrade, passage)
    assert passage.refusal is not None
    kind, content = body(passage, facts.header("accept"))
    return Response(content, passage.refusal.status, dict(asked_of(scope).fields(scope)), kind.decode())


def answered(passage: Evaluation, response: Any, scope: Any, innermost: bool) -> Any:
    """The endpoint's response with the fields; what the outcome or the size decides is settled when it has gone."""
    if not isinstance(response, Response):
        if not callable(response):
            raise ConfigurationError(
                f"@limit is for endpoints that return a Response, not {type(response).__name__}; FastAPI's depend on a RateLimit"
            )
        return Following(response, passage)
    if innermost:  # all others were asked before it
        told = [(name.lower().encode(), value.encode()) for name, value in asked_of(scope).fields(scope)]
        response.raw_headers[:] = merge(response.raw_headers, told)
    if passage.owes:
        return Following(response, passage)
    passage.responded(response.status_code)
    return response


class Following:
    """A response that its passage follows to the end."""

    def __init__(self, app: Any, passage: Evaluation) -> None:
        self.app = app
        self.passage = passage

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self.passage.owes and self.passage.allowed:
            await SettlingSend(self.passage, send).run(self.app, scope, receive)
        else:
            await self.app(scope, receive, HeaderSend(self.passage, send))
