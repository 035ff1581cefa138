"""Starlette: limits on single routes, as decorators of their endpoints.

    @limit("5/s burst 10")
    async def checkout(request): …

For functions (async or not), methods of an HTTPEndpoint, and websocket endpoints. Limits are per client address by default; a
limit goes by the endpoint's name, and several on one endpoint are evaluated from the outermost in. A rule of the policy of
RateLimitMiddleware (asgi.py) can be named too, and is not evaluated again where the middleware has done so.
"""

from __future__ import annotations

import asyncio
import logging
from _thread import start_new_thread
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from copy import copy
from functools import wraps
from inspect import iscoroutinefunction
from types import NoneType
from typing import TypeVar, Unpack, cast
from urllib.parse import urlencode

from ..decorators import is_kind
from ..errors import ConfigurationError

try:
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException, WebSocketException
    from starlette.requests import ClientDisconnect, HTTPConnection, Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute
    from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState
except ModuleNotFoundError as error:
    raise ConfigurationError(
        f"limitkeeper.web.starlette needs {error.name}, which is not installed: pip install starlette"
    ) from error

from ..policy.callback_errors import check_parameters
from ..policy.evaluation import Evaluation
from ..policy.gate import Gate
from ..policy.identity.body import BODY, BodyNeeded, check_size
from ..policy.identity.identify import Called, trimmed
from ..policy.model import Policy
from ..stores import Store
from .asgi import (
    ACCEPTED,
    CLOSED,
    TRY_AGAIN_LATER,
    SettlingSend,
    SettlingWebSocket,
    ask_connected,
    close_reason,
    disconnected,
    read_body,
    receive_after,
)
from .found_route import found_route
from .handler_limit import (
    CALLER,
    DEFAULT_NAME,
    PARENTHESES,
    ClientAddress,
    Handler,
    HandlerGates,
    HandlerLimit,
    Key,
    LimitSource,
    RuleOptions,
    caller_identity,
    combined_fields,
    count_limit,
    handler_name,
    has_own_limit,
    located_name,
    shared_gate,
    shared_store,
    shares_name,
)
from .headers import ASGIApp, AsgiRequestContext, Fields, HeaderSend, Receive, Scope, Send, add_fields, has_origin, merge
from .refusal_body import body
from .response_settlement import (
    DEGRADED,
    EVALUATED,
    EVALUATIONS,
    GONE,
    NOT_SENT,
    UNKNOWN,
    detach_request,
    is_cancelled,
    outcome_after,
    outcome_of,
)

E = TypeVar("E", bound=Handler)

log = logging.getLogger("limitkeeper")
#: The scope key of the evaluation by the policy's middleware, whose place in the scope a limit may take.
BY_POLICY = "limitkeeper.by_policy"


class RequestEvaluations:
    """The evaluations of one request by its route's limits. `settles`: a middleware settles them with the response."""

    __slots__ = ("all", "limits", "settles")

    def __init__(self, settles: bool = False) -> None:
        self.all: list[Evaluation] = []
        self.limits: list[RouteLimit] = []
        self.settles = settles

    def fields(self, scope: Scope) -> list[tuple[str, str]]:
        """The fields of all these limits, and of the policy's middleware."""
        first = by_policy(scope)
        return combined_fields([first, *self.all] if first is not None else self.all)

    def encoded_fields(self, scope: Scope) -> Fields:
        return [(name.lower().encode(), value.encode()) for name, value in self.fields(scope)]


def by_policy(scope: Scope) -> Evaluation | None:
    """The evaluation of the policy's middleware; None: there is none."""
    found: Evaluation | None = scope.setdefault(BY_POLICY, scope.get("limitkeeper"))
    return found


def evaluations_of(scope: Scope) -> RequestEvaluations:
    found: RequestEvaluations = scope.setdefault(EVALUATIONS, RequestEvaluations())
    return found


class PolicyRule:
    """One rule of a policy on its own, for a route that names it, whatever the rule matches; counted with the policy's rules."""

    def __init__(self, gate: Gate, name: str) -> None:
        self.policy_gate = gate
        self.name = name
        self._policy: Policy | None = None
        self._gates: dict[bool, Gate] = {}
        self.gate()

    def gate(self, keyed: bool = False) -> Gate:
        """A gate of that rule alone, on the same store; made again after a reload. `keyed`: by the key that the caller gives.
        Where the new version has no such rule, the old one stays in force: a route must not fail by a reload."""
        policy = self.policy_gate.policy
        if policy is not self._policy:
            try:
                self._gates = {False: self.policy_gate.for_rule(self.name)}
            except ConfigurationError as error:
                if self._policy is None:
                    raise
                log.error("%s; routes that name the rule are limited by its old version", error)
            self._policy = policy
        if keyed and True not in self._gates:
            self._gates[True] = self._gates[False].for_rule(self.name, ((CALLER,),))
        return self._gates[keyed]

    def was_evaluated(self, scope: Scope) -> bool:
        """Whether the policy's middleware has evaluated this rule for this request, by the path that it had there, with this gate
        or another one of the same Policy. Where another rule refused it, and its degrade handler runs the application, this one
        was not charged: it is evaluated now."""
        evaluation = by_policy(scope)
        if evaluation is None or evaluation.matched is None:
            return False
        if evaluation.gate is not self.policy_gate and evaluation.policy is not self.policy_gate.policy:
            return False
        if evaluation.refusal is not None:
            return evaluation.refusal.rule is not None and evaluation.refusal.rule.name == self.name
        return any(rule.name == self.name for rule in evaluation.matched.rules)


class RouteLimit:
    """A limit on a route: the arguments of `RateLimit` (FastAPI) and `Limit` (Starlette).

    Args:
        limit: the text of one or several limits (`"5/s burst 10"`), or a callable that is given the request and returns it.
        key: "ip", or a callable that is given the request (async too). Where it returns None or "", the client's address counts.
        name: limits of the same name and store are one; by default each route has its own.
        policy: a policy or gate, of which `rule` names a rule, whatever that matches; instead of `limit`.
        rule: the name of that rule.
        store: a store or its URL (limits of one URL share its connections); by default a MemoryStore of this limit.
        client_ip: the fields of a policy's `client_ip`: `{"trusted_proxies": ["10.0.0.0/8"]}`; by default the address is that of
            RateLimitMiddleware's policy, if any.
        enabled: False limits nothing.
        default: True for a limit that does not apply to routes with another one.
        options: all other fields of a rule: `cost=`, `message=`, `on_refusal=`, `status=`, `charge=`, …; and `methods=`,
            `per_method=`, `exempt_when=`, `on_breach=`.
    """

    #: How it is written, for the error message of wrong arguments.
    usage = 'RateLimit("5/s burst 10"), or name a rule: RateLimit(policy=gate, rule="checkout")'

    def __init__(
        self,
        limit: LimitSource | None = None,
        *,
        key: Key = "ip",
        name: str | None = None,
        policy: Gate | Policy | None = None,
        rule: str | None = None,
        store: Store | str | None = None,
        client_ip: ClientAddress | None = None,
        enabled: bool = True,
        default: bool = False,
        **options: Unpack[RuleOptions],
    ) -> None:
        if (limit is None) == (policy is None) or (policy is None) != (rule is None):
            raise ConfigurationError(f"expected a limit or a rule of a policy; write {self.usage}")
        self.name = name
        self.default = default
        #: FastAPI: rule names by route, with the route itself, since an id may be used again.
        self.names: dict[int, tuple[object, str]] = {}
        opened = shared_store("memory://" if store is None and name is not None else store)
        if not isinstance(opened, (Store, NoneType)):
            raise ConfigurationError(f"expected a store or its URL, got store={store!r}")
        self._async_key = None
        if is_kind(key, iscoroutinefunction):
            self._async_key = cast(Callable[[HTTPConnection], Awaitable[object]], key)
            check_parameters(self._async_key, "request", option="key")
        self._rule: PolicyRule | None = None
        if policy is not None and rule is not None:
            given = [*options, *(["name"] if name else []), *(["client_ip"] if client_ip else [])]
            if given or not (key == "ip" or callable(key)):
                raise ConfigurationError(
                    f"{', '.join(given) or 'key'}= belongs to the policy, which defines {rule!r}; write it there"
                )
            if not enabled:
                raise ConfigurationError("enabled= has no effect on a rule of a policy; leave out the middleware and this limit")
            self._rule = PolicyRule(shared_gate(policy, opened), rule)
            self._rule_key = Called(caller_identity(key)) if callable(key) and self._async_key is None else None
            return
        # A key that is passed in, or awaited, takes the place of the address.
        sync_key: Key = no_caller if key == "ip" or self._async_key is not None else key
        self._limit = HandlerLimit(name or "limit", limit, sync_key, options, declared_by=self.usage.partition("(")[0])
        self._limit.policy(self._limit.name)  # errors of the key are raised here
        self._gates = HandlerGates(None, opened, client_ip=client_ip, enabled=enabled)

    def was_evaluated(self, scope: Scope, keyed: bool = False) -> bool:
        """Whether this limit was evaluated before its degrade handler ran the application, or its rule by the middleware of the
        policy, by the rule's own key (not `keyed`)."""
        if self in scope.get(EVALUATED, ()):
            return True
        own_key = not keyed and self._rule is not None and self._rule_key is None and self._async_key is None
        return own_key and self._rule.was_evaluated(scope)  # type: ignore[union-attr]

    async def evaluate(
        self, connection: HTTPConnection, context: AsgiRequestContext, name: str, key: str | int | None = None
    ) -> Evaluation:
        """Evaluates the limit, and keeps the evaluation in the scope. `name` is the rule's; `key` replaces the limit's key."""
        scope = connection.scope
        context.raw = connection
        if key is None and self._async_key is not None:
            key = await self._async_key(connection)  # type: ignore[assignment]
        elif key is None and self._rule is not None and self._rule_key is not None:
            key = self._rule_key.of(context)
        caller = None if key is None else trimmed(str(key), None)
        if self._rule is not None:
            gate = self._rule.gate(caller is not None)
        else:
            gate = self._gates.gate_for(self._limit, name, connection)
        policy = by_policy(scope)
        if self._rule is None and self._gates.ip is None and policy is not None:
            context.identities["ip"] = policy.compiled.identities["ip"].of(context)  # this policy knows the proxies
        context.captured = {name: str(value) for name, value in connection.path_params.items()}
        if key is not None or self._async_key is not None:
            context.identities[CALLER] = caller
        try:
            evaluation = gate.ask_nowait(context)
        except BodyNeeded:
            await read_request_body(connection)
            evaluation = gate.ask_nowait(context)
        if evaluation is None and isinstance(connection, (Request, WebSocket)):
            is_read = getattr(connection, "_stream_consumed", False)
            evaluation, connection._receive = await ask_connected(gate, context, connection._receive, is_read)
            if evaluation is None:
                raise client_gone(connection)
        elif evaluation is None:
            evaluation = await gate.aask(context)
        detach_request(evaluation, has_origin(scope))
        accepted = isinstance(connection, WebSocket) and connection.application_state is WebSocketState.CONNECTED
        if not accepted or evaluation.needs_settlement:  # a connection may have any number of messages
            evaluations_of(scope).all.append(evaluation)
            evaluations_of(scope).limits.append(self)
        if not evaluation.allowed or getattr(scope.get("limitkeeper"), "decision", None) is None:
            scope["limitkeeper"] = evaluation
        return evaluation


async def read_request_body(connection: HTTPConnection) -> None:
    """Reads the body of a request for an identity from it. FastAPI may have read it already, for the handler's parameters."""
    if not getattr(connection, "_stream_consumed", False):
        connection._receive = await read_body(connection.scope, connection._receive)  # type: ignore[attr-defined]
        return
    found, form = getattr(connection, "_body", None), getattr(connection, "_form", None)
    if found is None and form is not None:
        found = urlencode([(name, value) for name, value in form.multi_items() if isinstance(value, str)]).encode()
    connection.scope[BODY] = None if found is None else check_size(found)


def client_gone(connection: HTTPConnection) -> Exception:
    """Ends a request whose client disconnected while it waited: its endpoint is not called, and no response is sent."""
    return WebSocketException(TRY_AGAIN_LATER) if isinstance(connection, WebSocket) else HTTPException(GONE)


def no_caller(request: object) -> None:
    """The key of clients that are identified by their address."""


class Limit(RouteLimit):
    """A limit around endpoints, as a decorator: `@limit("5/s burst 10")`. The arguments are those of `RouteLimit`."""

    usage = '@limit("5/s burst 10"), or name a rule: @limit(policy=gate, rule="checkout")'

    def __call__(self, endpoint: E, *arguments: object) -> E:
        if arguments:  # Starlette calls it as an ASGI application
            raise ConfigurationError(f"expected a function under @limit, got none; {PARENTHESES}")
        if isinstance(endpoint, type) or not callable(endpoint):
            raise ConfigurationError(f"expected a function or method under @limit, got {endpoint!r}: put it on its methods")
        own = self.name or handler_name(endpoint)
        per_location = self.name is None and shares_name(endpoint)

        @wraps(endpoint)
        async def limited(*args: object, **named: object) -> object:
            async def call() -> object:
                if is_kind(endpoint, iscoroutinefunction):
                    return await cast(Callable[..., Awaitable[object]], endpoint)(*args, **named)
                return await run_in_threadpool(endpoint, *args, **named)

            connection = find_connection(endpoint, *args, *named.values())
            location = route_location(connection.scope) if per_location else None
            return await self.run(own if location is None else located_name(own, location), connection, call)

        count_limit(limited, endpoint)
        return limited  # type: ignore[return-value]

    def default_for(self, routes: Iterable[BaseRoute], prefix: str = "") -> None:
        """Limits each of these routes, and of those that are mounted there, that has no limit of its own. Each counts
        separately, unless this limit has a name. `prefix` is where the routes are mounted."""
        for route in routes:
            path: str = prefix + getattr(route, "path", getattr(route, "host", ""))
            if getattr(route, "routes", None):
                self.default_for(route.routes, path)  # type: ignore[attr-defined]
            elif not (getattr(route, "endpoint", None) is None or has_own_limit(route.endpoint)):  # type: ignore[attr-defined]
                location = " ".join([*sorted(getattr(route, "methods", None) or ()), path])
                route.app = self._limit_app(route.app, self.name or located_name(DEFAULT_NAME, location))  # type: ignore[attr-defined]

    def _limit_app(self, app: ASGIApp, name: str) -> ASGIApp:
        async def limited(scope: Scope, receive: Receive, send: Send) -> None:
            websocket = scope["type"] == "websocket"
            connection = (WebSocket if websocket else Request)(scope, receive, send)

            async def call() -> object:
                if not websocket:
                    return app
                await app(scope, connection._receive, connection._send)
                return None

            response = cast("ASGIApp | None", await self.run(name, connection, call))
            if response is not None:
                await response(scope, connection._receive, send)

        return limited

    async def run(self, name: str, connection: HTTPConnection, call: Callable[[], Awaitable[object]]) -> object:
        """Evaluates the limit, and returns the endpoint's response or the refusal."""
        scope = connection.scope
        if self.was_evaluated(scope):
            return await call()
        context = AsgiRequestContext(scope)
        evaluation = await self.evaluate(connection, context, name)
        if isinstance(connection, WebSocket):
            await run_websocket(evaluation, connection, call)
            return None
        if not evaluation.allowed:
            return refusal_response(evaluation, context, connection)
        depth = len(evaluations_of(scope).all)
        try:
            response = await call()
            finished = finish_response(evaluation, response, scope, len(evaluations_of(scope).all) == depth)
        except BaseException as error:
            evaluation.count_response(status_of(error) or GONE)
            known = isinstance(error, HTTPException)  # what a handler of other exceptions answers is not known here
            status = outcome_after(has_disconnected(connection), status_of(error)) if known else UNKNOWN
            await asyncio.shield(asyncio.ensure_future(evaluation.asettle(status, NOT_SENT)))
            raise
        if isinstance(finished, SettlingResponse):
            finished.disconnected = has_disconnected(connection)
        return finished


limit = Limit


async def run_websocket(evaluation: Evaluation, websocket: WebSocket, call: Callable[[], Awaitable[object]]) -> None:
    """Runs a websocket endpoint: its outcome, and the bytes that it sends, are those of the middleware (asgi.py)."""
    if not evaluation.allowed:
        raise WebSocketException(TRY_AGAIN_LATER, close_reason(evaluation))
    scope, own = websocket.scope, (websocket._receive, websocket._send)
    settling = SettlingWebSocket(
        [evaluation], scope, *own, lambda message: add_fields(message, evaluations_of(scope).encoded_fields(scope))
    )
    if websocket.application_state is WebSocketState.CONNECTED:  # a method that is given one message
        settling.settlement.respond(ACCEPTED)

    async def settled() -> None:
        try:
            await call()
        except BaseException as error:
            settling.settlement.respond(outcome_after(settling.disconnected, status_of(error)))
            raise

    websocket._receive, websocket._send = settling.receive, settling.send
    try:
        await settling.settlement.run(settled, CLOSED, lambda: settling.disconnected)
    finally:
        websocket._receive, websocket._send = own


def route_location(scope: Scope) -> str | None:
    """The location of the endpoint of a request: `POST /orders/{order}`. Not the path, which clients choose."""
    route = found_route(scope)
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


def has_disconnected(connection: HTTPConnection) -> bool:
    """Whether the endpoint could know that its client has disconnected."""
    return is_cancelled() or bool(getattr(connection, "_is_disconnected", False))


def status_of(error: BaseException) -> int:
    """The outcome of an endpoint that raised; a client that has disconnected gets no response."""
    if isinstance(error, (ClientDisconnect, WebSocketDisconnect)):
        return UNKNOWN
    if isinstance(error, WebSocketException):
        return CLOSED
    return error.status_code if isinstance(error, HTTPException) else outcome_of(error)


def refusal_response(evaluation: Evaluation, context: AsgiRequestContext, connection: HTTPConnection) -> ASGIApp:
    """The rule's degrade handler, or the refusal with the fields of every limit of the request."""
    if evaluation.degrade is not None:
        return SettlingResponse(degraded(evaluation.degrade, connection), evaluation)
    assert evaluation.refusal is not None
    kind, content = body(evaluation, context.header("accept"))
    fields = evaluations_of(connection.scope).fields(connection.scope)
    return Response(content, evaluation.refusal.status, dict(fields), kind.decode())


def scope_of_application(scope: Scope) -> Scope:
    """The scope of a route as its application has received it, for a degrade handler that runs this again: below a `Mount` it
    would find another route. Where the application is mounted itself, that mount looks like its own, and stays."""
    if "app_root_path" not in scope or getattr(scope.get("app"), "router", None) is not scope.get("router"):
        return scope
    return {**scope, "root_path": scope["app_root_path"]}


def degraded(degrade: ASGIApp, connection: HTTPConnection) -> ASGIApp:
    """A degrade handler, which gets the body again that was read before. One that was read and not kept can't be had: then its
    client counts as disconnected."""

    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        scope[EVALUATED] = (*scope.get(EVALUATED, ()), *evaluations_of(scope).limits)
        scope[DEGRADED] = True
        scope = scope_of_application(scope)
        again: Receive = connection._receive  # type: ignore[attr-defined]
        if getattr(connection, "_stream_consumed", False):
            content = getattr(connection, "_body", None)
            read = {"type": "http.request", "body": content, "more_body": False}
            again = disconnected if content is None else receive_after(deque([read]), again)
        await degrade(scope, again, send)

    return handler


def finish_response(evaluation: Evaluation, response: object, scope: Scope, innermost: bool) -> ASGIApp:
    """The endpoint's response with the fields; settled when it has been sent, where that is needed."""
    if not isinstance(response, Response) or isinstance(response, SettlingResponse):
        if not callable(response):
            kind = type(response).__name__
            raise ConfigurationError(f"expected a Response from an endpoint under @limit, got {kind}; in FastAPI use RateLimit")
        return SettlingResponse(cast(ASGIApp, response), evaluation)
    if evaluation.needs_settlement:  # its fields are added when its size is charged
        return SettlingResponse(response, evaluation)
    if innermost:  # all other limits were evaluated before it
        response = with_fields(response, evaluations_of(scope).encoded_fields(scope))
    evaluation.count_response(response.status_code)
    return response


def with_fields(response: Response, fields: Fields) -> Response:
    """A copy of a response with these fields: an endpoint may send one response to several requests."""
    response = copy(response)
    vars(response).pop("_headers", None)  # MutableHeaders of the original's list
    response.raw_headers = merge(response.raw_headers, fields)
    return response


class SettlingResponse:
    """A response that adds its evaluation's fields, and settles it when it has been sent. For decorators above the limit it is
    the endpoint's response: attributes and class (headers, set_cookie, …) are those of that one."""

    app: ASGIApp
    evaluation: Evaluation
    disconnected: bool

    def __init__(self, app: ASGIApp, evaluation: Evaluation) -> None:
        vars(self).update(app=app, evaluation=evaluation, disconnected=False)

    @property  # type: ignore[misc]  # read-only
    def __class__(self) -> type:
        return self.app.__class__

    def __getattr__(self, name: str) -> object:
        if "app" not in vars(self):  # a copy that is being made
            raise AttributeError(name)
        return getattr(self.app, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name in vars(self):
            vars(self)[name] = value
        else:
            setattr(self.app, name, value)

    def __del__(self) -> None:
        """Settles a response that was not sent, since other code has replaced it, when it is garbage. Its outcome is unknown. In
        a thread of its own: this one may hold any lock."""
        if "app" in vars(self) and self.evaluation.needs_settlement:
            with suppress(RuntimeError):  # the interpreter is ending
                start_new_thread(self.evaluation.settle, (UNKNOWN,))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.evaluation.needs_settlement and self.evaluation.allowed:
            evaluations = evaluations_of(scope)
            settling = SettlingSend(
                [self.evaluation], scope, send, lambda message: add_fields(message, evaluations.encoded_fields(scope))
            )
            settling.before = scope_of_application(scope)
            settling.disconnected = self.disconnected
            await settling.run(self.app, scope, receive)
        else:
            await self.app(scope, receive, HeaderSend(self.evaluation, send))
