"""FastAPI: limits as dependencies, for single routes, routers or a whole app; or as decorators of single routes.

    @app.post("/checkout", dependencies=[Depends(RateLimit("5/s burst 10"))])

    @app.post("/checkout")
    @limit("5/s burst 10")
    async def checkout(): …

A limit without a name counts for each of its routes separately; with a name it is one limit for all of them. A rule of the policy
of RateLimitMiddleware (asgi.py) can be named too, and is not evaluated again where the middleware has done so.

`install(app)` sends refusals in our format (instead of FastAPI's {"detail": …}), adds the fields to responses that a handler made
itself, settles costs by outcome or size, and describes refusals in OpenAPI. A dependency can do none of that: it never sees the
response.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache, partial, wraps
from inspect import Parameter, iscoroutinefunction, signature
from typing import Annotated, Any, TypeVar, cast
from weakref import WeakSet

from ..decorators import is_kind
from ..errors import ConfigurationError

try:
    import fastapi.routing
    from fastapi import Depends, FastAPI, HTTPException, Request, Response, WebSocketException
    from fastapi.dependencies.models import Dependant
    from starlette.requests import HTTPConnection
except ModuleNotFoundError as error:
    raise ConfigurationError(
        f"limitkeeper.web.fastapi needs {error.name}, which is not installed: pip install fastapi"
    ) from error

from ..policy.evaluation import Evaluation
from ..policy.gate import Gate
from ..policy.model import Policy
from ..stores.memory import MemoryStore
from .asgi import (
    TRY_AGAIN_LATER,
    ASGIApp,
    AsgiRequestContext,
    Message,
    Receive,
    Scope,
    Send,
    SettlingSend,
    SettlingWebSocket,
    close_reason,
)
from .found_route import found_route
from .handler_limit import DEPTH, PARENTHESES, Handler, check_order, combined_fields, count_limit, located_name, rule_name
from .headers import fields, merge
from .refusal_body import body
from .response_settlement import EVALUATIONS, shutdown_after_requests
from .starlette import RequestEvaluations, RouteLimit, by_policy, degraded, evaluations_of, route_location

E = TypeVar("E", bound=Handler)

#: Fields that are lists, to which other dependencies may have added members.
JOINED = ("Access-Control-Expose-Headers", "Vary")
#: The routes of an app with those of included routers, which newer versions of FastAPI keep apart.
iter_routes = getattr(fastapi.routing, "iter_route_contexts", iter)
#: Apps whose routes were checked.
_checked: WeakSet[Any] = WeakSet()


REFUSAL_RESPONSES: dict[int | str, dict[str, Any]] = {
    429: {
        "description": "Too many requests: a rate limit refuses this one.",
        "headers": {"Retry-After": {"description": "Seconds until it is accepted.", "schema": {"type": "integer", "minimum": 0}}},
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["code", "message"],
                    "properties": {"code": {"const": "RATE_LIMITED"}, "message": {"type": "string"}},
                }
            }
        },
    }
}
"""The refusal in an app's OpenAPI description: `FastAPI(responses=REFUSAL_RESPONSES)`, of an APIRouter, or of a single route."""


class TooManyRequests(HTTPException):
    """A refusal, raised by a dependency. `evaluation` has its reason."""

    def __init__(self, evaluation: Evaluation, accept: str | None, fields: dict[str, str]) -> None:
        assert evaluation.refusal is not None
        self.evaluation = evaluation
        kind, self.content = body(evaluation, accept)
        self.media_type = kind.decode()
        text = self.content.decode()
        super().__init__(evaluation.refusal.status, json.loads(text) if self.media_type.endswith("json") else text, fields)


async def refusal_response(request: Request, refused: Exception) -> Response:
    """The response of a refusal: its rule's degrade handler, or our body."""
    assert isinstance(refused, TooManyRequests)
    refused.evaluation.declined = False
    degrade = refused.evaluation.degrade
    if degrade is not None:
        return cast(Response, degraded(degrade, request))  # any ASGI app will do
    return Response(refused.content, refused.status_code, dict(refused.headers or {}), refused.media_type)


class DependencyMiddleware:
    """Adds the fields of all limits in dependencies to the response, and settles them."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            check_routes(scope.get("app"))
        except ConfigurationError as error:
            if scope["type"] == "lifespan":  # a server may take the exception alone for an app without lifespan
                await send({"type": "lifespan.startup.failed", "message": str(error)})
            raise
        if scope["type"] == "lifespan":
            await self.app(scope, shutdown_after_requests(receive), send)
            return
        scope[EVALUATIONS] = evaluations = RequestEvaluations(settles=True)

        def start(message: Message) -> Message:
            """Replaces the fields of inner limits, since ours include them; the handler's own stay, and lists are joined. The
            response of an exception handler to a refusal gets the fields that it lacks."""
            refused = next((evaluation for evaluation in evaluations.all if not evaluation.allowed), None)
            if refused is not None and refused.degrade is None:
                return {**message, "headers": merge(list(message.get("headers") or ()), fields(refused))}
            if not evaluations.all or refused is not None:
                return message
            added = evaluations.encoded_fields(scope)
            first = by_policy(scope)
            inner = {*added, *(fields(first) if first is not None else ())}
            own = [(name, value) for name, value in message.get("headers") or () if (name.lower(), value) not in inner]
            return {**message, "headers": merge(own, added)}

        if scope["type"] == "websocket":
            await SettlingWebSocket(evaluations.all, scope, receive, send, start).run(self.app)
        else:
            await SettlingSend(evaluations.all, scope, send, start).run(self.app, scope, receive)


def install(app: FastAPI) -> None:
    """Prepares an app for limits in dependencies: refusals in our format, fields on every response, settlement, and the refusals
    of limited routes in OpenAPI. Idempotent."""
    app.exception_handlers.setdefault(TooManyRequests, refusal_response)
    if not any(getattr(middleware, "cls", None) is DependencyMiddleware for middleware in app.user_middleware):
        app.add_middleware(DependencyMiddleware)
        app.openapi = partial(describe_refusals, app, app.openapi)  # type: ignore[method-assign]


def describe_refusals(app: FastAPI, generate: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The OpenAPI description, with the refusal of each limited route that does not describe its own."""
    schema = generate()
    for route in iter_routes(app.routes):
        if limits_of(getattr(route, "dependant", None)):
            operations = schema["paths"].get(getattr(route, "path_format", None), {})
            for method in getattr(route, "methods", None) or ():
                if method.lower() in operations:
                    operations[method.lower()].setdefault("responses", {}).setdefault("429", REFUSAL_RESPONSES[429])
    return schema


def limits_of(dependant: Dependant | None) -> list[RouteLimit]:
    """The limits among the dependencies of a route."""
    if dependant is None:
        return []
    found = getattr(dependant.call, "__self__", dependant.call)
    inner = [limit for one in dependant.dependencies for limit in limits_of(one)]
    return [found, *inner] if isinstance(found, RouteLimit) else inner


@cache
def unlimited_gate() -> Gate:
    """Evaluates requests to which no limit applies."""
    return Gate(Policy(), store=MemoryStore())


class RateLimit(RouteLimit):
    """A limit as a dependency: `dependencies=[Depends(RateLimit("5/s burst 10"))]`. The arguments are those of `RouteLimit`."""

    async def __call__(self, connection: HTTPConnection, response: Response) -> Evaluation:
        return await self.check(connection, response)

    async def check(
        self, connection: HTTPConnection, response: Response | None = None, *, key: str | int | None = None
    ) -> Evaluation:
        """Evaluates the limit within another dependency or a handler; `key` replaces its key: `check(request, key=user.id)`."""
        scope = connection.scope
        check_routes(scope.get("app"))
        if self.was_evaluated(scope, key is not None):
            policy = by_policy(scope)
            return cast(Evaluation, current(connection) if policy is None else policy)
        if self.default and self._is_replaced(found_route(scope)):
            return unlimited_gate().ask(AsgiRequestContext(scope))
        evaluations = evaluations_of(scope)
        context = AsgiRequestContext(scope)
        evaluation = await self.evaluate(connection, context, self._name_on(scope), key)
        if not evaluation.allowed:
            if scope["type"] == "websocket":
                raise WebSocketException(TRY_AGAIN_LATER, close_reason(evaluation))
            evaluation.declined = True  # unless `refusal_response` calls the degrade handler
            raise TooManyRequests(evaluation, context.header("accept"), dict(combined_fields([evaluation])))
        if evaluation.needs_settlement and not evaluations.settles:
            raise ConfigurationError("a cost or charge that depends on the response needs limitkeeper.web.fastapi.install(app)")
        if response is not None and not evaluations.settles:
            for name, value in evaluations.fields(scope):
                present = response.headers.get(name) if name in JOINED else None
                response.headers[name] = value if present is None else merge([(name, present)], [(name, value)])[0][1]
        return evaluation

    def _is_replaced(self, route: object) -> bool:
        """Whether a route has a limit that is no default."""
        return any(not limit.default for limit in limits_of(getattr(route, "dependant", None)))

    @property
    def dependency(self) -> object:
        """FastAPI reads this where `Depends` is missing."""
        raise ConfigurationError("expected dependencies=[Depends(RateLimit(…))], got RateLimit(…) alone; wrap it in Depends(…)")

    def __deepcopy__(self, _: object) -> RateLimit:
        """FastAPI copies the default of a parameter."""
        raise ConfigurationError("expected Depends(RateLimit(…)) as the default of a parameter, got RateLimit(…) alone")

    def _name_on(self, scope: Scope) -> str:
        """The rule's name on the request's route, by the limit's place among the route's dependencies, or by its text where other
        code checks it. Rejected: its place among the evaluations, since a client may choose which of them are made."""
        if self.name is not None:
            return self.name
        route = found_route(scope)
        found = self.names.get(id(route))
        if found is None or found[0] is not route:
            limits = limits_of(getattr(route, "dependant", None))
            name = route_name(scope, limits.index(self) + 1 if self in limits else 1)
            if self not in limits and self._rule is None:
                name = located_name(name, str(self._limit.rule["limit"]))
            found = self.names[id(route)] = (route, name)
        return found[1]


class limit(RateLimit):  # noqa: N801  # a decorator
    """A limit of one route, as a decorator below `@app.get(…)`; the arguments are those of `RouteLimit`."""

    usage = '@limit("5/s burst 10"), or name a rule: @limit(policy=gate, rule="checkout")'

    def __call__(self, endpoint: E) -> E:  # type: ignore[override]
        if isinstance(endpoint, type) or not callable(endpoint):
            raise ConfigurationError(f"expected a function under @limit, got {endpoint!r}; as a dependency write RateLimit(…)")
        return add_dependency(endpoint, self._evaluate)

    @property
    def __signature__(self) -> object:
        """FastAPI reads this of an endpoint, and of a dependency."""
        raise ConfigurationError(f"expected a function under @limit, got none; {PARENTHESES}; as a dependency write RateLimit(…)")

    async def _evaluate(self, connection: HTTPConnection, response: Response) -> Evaluation:
        return await self.check(connection, response)


def add_dependency(endpoint: E, dependency: Callable[..., object]) -> E:
    """An endpoint with one more dependency, of which the function itself is not told."""
    depth: int = getattr(endpoint, DEPTH, 0) + 1
    added = Parameter(f"limitkeeper_{depth}", Parameter.KEYWORD_ONLY, annotation=Annotated[Evaluation, Depends(dependency)])
    limited: Any
    if is_kind(endpoint, iscoroutinefunction):

        @wraps(endpoint)
        async def limited(*args: object, **named: object) -> object:
            named.pop(added.name, None)
            return await cast(Any, endpoint)(*args, **named)
    else:

        @wraps(endpoint)
        def limited(*args: object, **named: object) -> object:
            named.pop(added.name, None)
            return endpoint(*args, **named)

    try:
        own = signature(endpoint, eval_str=True)
    except NameError:  # a name that is defined later, or only for type checkers: left to FastAPI
        own = signature(endpoint)
    by_kind = sorted([*own.parameters.values(), added], key=lambda one: one.kind)
    limited.__signature__ = own.replace(parameters=by_kind)
    count_limit(limited, endpoint)
    return limited  # type: ignore[no-any-return]


def route_name(scope: Scope, depth: int) -> str:
    """The name of the endpoint's rule, as `handler_name`; the second limit of a route has another one. Where the endpoint's name
    does not identify the route, its location does."""
    declared: object = scope.get("endpoint")
    endpoint = declared
    while isinstance(endpoint, partial):
        endpoint = endpoint.func
    named = endpoint if hasattr(endpoint, "__qualname__") else type(endpoint)  # an object with __call__ has no name
    qualified = named.__qualname__
    name = rule_name(qualified, named.__module__, depth)
    location = route_location(scope)
    unique = declared is named and "<locals>" not in qualified and count_routes(scope.get("app"), declared) == 1
    return name if unique or location is None else located_name(name, location)


def count_routes(app: object, endpoint: object) -> int:
    """How many routes of an app have an endpoint, as far as visible: included routers may hide theirs."""
    routes = getattr(app, "routes", None) or ()
    return sum(getattr(route, "endpoint", None) is endpoint or count_routes(route, endpoint) for route in routes)


def all_endpoints(app: object) -> Iterator[object]:
    """The endpoints of an app's routes, of routers that it includes, and of apps that are mounted there."""
    for route in iter_routes(getattr(app, "routes", None) or ()):
        yield getattr(route, "endpoint", None)
        yield from all_endpoints(getattr(route, "original_route", route))


def check_routes(app: object) -> None:
    """Checks once that no route of an app was declared below its limit."""
    if app is not None and app not in _checked:
        check_order(all_endpoints(app))
        _checked.add(app)


def current(connection: HTTPConnection) -> Evaluation | None:
    """The evaluation of this request: the policy's, or the first limit's. None: nothing was evaluated."""
    evaluation: Evaluation | None = connection.scope.get("limitkeeper")
    return evaluation


#: `def handler(evaluation: CurrentEvaluation)`: the evaluation as a dependency.
CurrentEvaluation = Annotated[Evaluation | None, Depends(current)]
