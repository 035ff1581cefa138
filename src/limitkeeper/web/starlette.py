"""Starlette: limits on single routes, as decorators of their endpoints.

    @limit("5/s burst 10")
    async def checkout(request): …

For functions (async or not), methods of an HTTPEndpoint, and websocket endpoints. Limits are per client address by default; a
limit goes by the endpoint's name, and several on one endpoint are evaluated from the outermost in. RateLimitMiddleware (asgi.py)
applies a policy to a whole site; a rule of that policy can be named here, and is not evaluated again where the middleware has
done so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps
from inspect import iscoroutinefunction
from types import NoneType
from typing import TypeVar, Unpack, cast

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException, WebSocketException
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from ..errors import ConfigurationError
from ..policy.evaluation import Evaluation
from ..policy.gate import Gate, gate_of
from ..policy.model import Policy
from ..policy.path_matcher import limits_host
from ..stores import Store
from ..stores.urls import store_from_url
from .asgi import SettlingSend
from .asgi_fast import ASGIApp, AsgiRequestContext, HeaderSend, Receive, Scope, Send, has_origin
from .asgi_websocket import ACCEPTED, TRY_AGAIN_LATER, close_reason
from .handler_limit import (
    CALLER,
    DEPTH,
    Handler,
    HandlerGates,
    HandlerLimit,
    Key,
    LimitSpec,
    RuleOptions,
    combined_fields,
    handler_name,
    located_name,
    shares_name,
)
from .ratelimit_fields import Fields, merge
from .refusal_body import body
from .response_settlement import GONE, UNKNOWN, outcome_of

E = TypeVar("E", bound=Handler)

#: The scope key of a request's RequestEvaluations.
EVALUATIONS = "limitkeeper.evaluations"


class RequestEvaluations:
    """The evaluations of one request by its route's limits. `settles`: a middleware settles them with the response."""

    __slots__ = ("all", "settles")

    def __init__(self, settles: bool = False) -> None:
        self.all: list[Evaluation] = []
        self.settles = settles

    def fields(self, scope: Scope) -> list[tuple[str, str]]:
        """The fields of all these limits, and of the policy's middleware."""
        first: Evaluation | None = scope.get("limitkeeper")
        others = [evaluation for evaluation in self.all if evaluation is not first]
        return combined_fields([first, *others] if first is not None else others)

    def encoded_fields(self, scope: Scope) -> Fields:
        return [(name.lower().encode(), value.encode()) for name, value in self.fields(scope)]


def evaluations_of(scope: Scope) -> RequestEvaluations:
    found: RequestEvaluations = scope.setdefault(EVALUATIONS, RequestEvaluations())
    return found


class PolicyRule:
    """One rule of a policy on its own, for a route that names it, whatever the rule matches; counted with the policy's rules."""

    def __init__(self, gate: Gate, name: str) -> None:
        self.policy_gate = gate
        self.name = name
        self._policy: Policy | None = None
        self._gate: Gate | None = None
        self.gate()

    def gate(self) -> Gate:
        """A gate of that rule alone, on the same store; made again after a reload."""
        policy = self.policy_gate.policy
        if self._gate is None or policy is not self._policy:
            self._gate = self.policy_gate.for_rule(self.name)
            self._policy = policy
        return self._gate

    def was_evaluated(self, scope: Scope) -> bool:
        """Whether the policy's middleware has evaluated this rule for this request."""
        evaluation: Evaluation | None = scope.get("limitkeeper")
        if evaluation is None or evaluation.gate is not self.policy_gate:
            return False
        context = AsgiRequestContext(scope)
        matched = evaluation.compiled.match(context)
        return any(
            rule.name == self.name and (not hosts or limits_host(hosts, context))
            for rule, hosts in zip(matched.rules, matched.hosts or [()] * len(matched.rules), strict=True)
        )


class RouteLimit:
    """A limit on a route, or a rule of a policy; `limit` and FastAPI's `RateLimit` document the arguments."""

    #: How it is written, for the error message of wrong arguments.
    usage = 'RateLimit("5/s burst 10"), or name a rule: RateLimit(policy=gate, rule="checkout")'

    def __init__(
        self,
        limit: LimitSpec | None = None,
        *,
        key: Key = "ip",
        name: str | None = None,
        policy: Gate | Policy | None = None,
        rule: str | None = None,
        store: Store | str | None = None,
        **options: Unpack[RuleOptions],
    ) -> None:
        if (limit is None) == (policy is None) or (policy is None) != (rule is None):
            raise ConfigurationError(f"expected a limit or a rule of a policy; write {self.usage}")
        self.name = name
        #: FastAPI: rule names by route and depth, with the route itself, since an id may be used again.
        self.names: dict[tuple[int, int], tuple[object, str]] = {}
        opened = store_from_url(store) if isinstance(store, str) else store
        if not isinstance(opened, (Store, NoneType)):
            raise ConfigurationError(f"expected a store or its URL, got store={store!r}")
        self._async_key = None
        if iscoroutinefunction(key) or iscoroutinefunction(getattr(key, "__call__", None)):  # noqa: B004
            self._async_key = cast(Callable[[HTTPConnection], Awaitable[object]], key)
        self._rule: PolicyRule | None = None
        if policy is not None and rule is not None:
            self._rule = PolicyRule(gate_of(policy, store=opened), rule)
            return
        # A key that is passed in, or awaited, takes the place of the address.
        sync_key: Key = no_caller if key == "ip" or self._async_key is not None else key
        self._limit = HandlerLimit(name or "limit", limit, sync_key, options)
        self._limit.policy(self._limit.name)  # errors of the key are raised here
        self._gates = HandlerGates(None, opened)

    def was_evaluated(self, scope: Scope) -> bool:
        """Whether the policy's middleware has evaluated this rule for this request."""
        return self._rule is not None and self._rule.was_evaluated(scope)

    async def evaluate(
        self, connection: HTTPConnection, context: AsgiRequestContext, name: str, key: str | int | None = None
    ) -> Evaluation:
        """Evaluates the limit, and keeps the evaluation in the scope. `name` is the rule's; `key` replaces the limit's key."""
        scope = connection.scope
        gate = self._rule.gate() if self._rule is not None else self._gates.gate_for(self._limit, name)
        context.raw = connection
        context.captured = {name: str(value) for name, value in connection.path_params.items()}
        if key is not None:
            context.identities[CALLER] = str(key)
        elif self._async_key is not None:
            awaited_key = await self._async_key(connection)
            context.identities[CALLER] = None if awaited_key is None else str(awaited_key)
        evaluation = gate.ask_nowait(context)
        if evaluation is None:
            evaluation = await gate.aask(context)
        evaluation.origin = has_origin(scope)
        evaluations_of(scope).all.append(evaluation)
        if not evaluation.needs_settlement:
            evaluation.context = None  # the context holds the request, which holds the evaluation: no reference cycle
        if getattr(scope.get("limitkeeper"), "decision", None) is None:
            scope["limitkeeper"] = evaluation
        return evaluation


def no_caller(request: object) -> None:
    """The key of clients that are identified by their address."""


class Limit(RouteLimit):
    """A limit around one endpoint."""

    usage = '@limit("5/s burst 10"), or name a rule: @limit(policy=gate, rule="checkout")'

    async def run(self, name: str, connection: HTTPConnection, call: Callable[[], Awaitable[object]]) -> object:
        """Evaluates the limit, and returns the endpoint's response or the refusal."""
        scope = connection.scope
        if self.was_evaluated(scope):
            return await call()
        context = AsgiRequestContext(scope)
        evaluation = await self.evaluate(connection, context, name)
        if isinstance(connection, WebSocket):
            return await run_websocket(evaluation, connection, call)
        if not evaluation.allowed:
            return refusal_response(evaluation, context, scope)
        depth = len(evaluations_of(scope).all)
        try:
            response = await call()
        except BaseException as error:
            status = status_of(error)
            evaluation.count_response(status or GONE)
            await asyncio.shield(asyncio.ensure_future(evaluation.asettle(status)))
            raise
        return finish_response(evaluation, response, scope, len(evaluations_of(scope).all) == depth)


async def run_websocket(evaluation: Evaluation, websocket: WebSocket, call: Callable[[], Awaitable[object]]) -> object:
    if not evaluation.allowed:
        raise WebSocketException(TRY_AGAIN_LATER, close_reason(evaluation))
    evaluation.count_response(ACCEPTED)
    status = ACCEPTED
    try:
        return await call()
    except BaseException as error:
        status = status_of(error)
        if status == UNKNOWN and websocket.application_state is WebSocketState.CONNECTED:
            status = ACCEPTED
        raise
    finally:
        await asyncio.shield(asyncio.ensure_future(evaluation.asettle(status)))


def limit(
    limit: LimitSpec | None = None,
    *,
    key: Key = "ip",
    name: str | None = None,
    policy: Gate | Policy | None = None,
    rule: str | None = None,
    store: Store | str | None = None,
    **options: Unpack[RuleOptions],
) -> Callable[[E], E]:
    """A limit for an endpoint. `key` is "ip", or a callable that is given the request (async too); None: the client's address.

    All other fields of a rule are options: cost=, message=, on_refusal=, status=, charge=, … `policy` and `rule` name a rule of a
    policy instead, whatever it matches. `store` is a store or its URL; without it, this limit has a MemoryStore of its own.
    Limits of the same `name` and store are one.
    """
    declared = Limit(limit, key=key, name=name, policy=policy, rule=rule, store=store, **options)

    def decorate(endpoint: E) -> E:
        if isinstance(endpoint, type) or not callable(endpoint):
            raise ConfigurationError(f"expected a function or method under @limit, got {endpoint!r}: put it on its methods")
        own = name or handler_name(endpoint)
        per_location = name is None and shares_name(endpoint)

        @wraps(endpoint)
        async def limited(*args: object, **named: object) -> object:
            async def call() -> object:
                if iscoroutinefunction(endpoint):
                    return await endpoint(*args, **named)
                return await run_in_threadpool(endpoint, *args, **named)

            connection = find_connection(endpoint, *args, *named.values())
            location = route_location(connection.scope) if per_location else None
            return await declared.run(own if location is None else located_name(own, location), connection, call)

        setattr(limited, DEPTH, getattr(endpoint, DEPTH, 0) + 1)
        return limited  # type: ignore[return-value]

    return decorate


def route_location(scope: Scope) -> str | None:
    """The location of the endpoint of a request: `POST /orders/{order}`. Not the path, which clients choose."""
    route = scope.get("route")
    path = getattr(route, "path", None)
    if path is None:
        return None
    return " ".join([*sorted(getattr(route, "methods", None) or ()), path])


def find_connection(endpoint: Handler, *arguments: object) -> HTTPConnection:
    for argument in arguments[:2]:
        if isinstance(argument, HTTPConnection):
            return argument
    name = getattr(endpoint, "__name__", endpoint)
    raise ConfigurationError(f"expected an endpoint of Starlette under @limit, which is given a request: {name}(request)")


def status_of(error: BaseException) -> int:
    """The outcome of an endpoint that raised; a client that has disconnected gets no response."""
    if isinstance(error, (ClientDisconnect, WebSocketDisconnect)):
        return UNKNOWN
    return error.status_code if isinstance(error, HTTPException) else outcome_of(error)


def refusal_response(evaluation: Evaluation, context: AsgiRequestContext, scope: Scope) -> ASGIApp:
    """The rule's degrade handler, or the refusal with the fields of every limit of the request."""
    if evaluation.degrade is not None:
        return SettlingResponse(evaluation.degrade, evaluation)
    assert evaluation.refusal is not None
    kind, content = body(evaluation, context.header("accept"))
    return Response(content, evaluation.refusal.status, dict(evaluations_of(scope).fields(scope)), kind.decode())


def finish_response(evaluation: Evaluation, response: object, scope: Scope, innermost: bool) -> ASGIApp:
    """The endpoint's response with the fields; settled when it has been sent, where that is needed."""
    if not isinstance(response, Response):
        if not callable(response):
            kind = type(response).__name__
            raise ConfigurationError(f"expected a Response from an endpoint under @limit, got {kind}; in FastAPI use RateLimit")
        return SettlingResponse(cast(ASGIApp, response), evaluation)
    if innermost:  # all other limits were evaluated before it
        response.raw_headers[:] = merge(response.raw_headers, evaluations_of(scope).encoded_fields(scope))
    if evaluation.needs_settlement:
        return SettlingResponse(response, evaluation)
    evaluation.count_response(response.status_code)
    return response


class SettlingResponse:
    """A response that adds its evaluation's fields, and settles it when it has been sent."""

    def __init__(self, app: ASGIApp, evaluation: Evaluation) -> None:
        self.app = app
        self.evaluation = evaluation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.evaluation.needs_settlement and self.evaluation.allowed:
            await SettlingSend([self.evaluation], scope, send).run(self.app, scope, receive)
        else:
            await self.app(scope, receive, HeaderSend(self.evaluation, send))
