"""FastAPI: limits as dependencies, for single routes, routers or a whole app.

    @app.post("/checkout", dependencies=[Depends(RateLimit("5/s burst 10"))])

Per client by default, never one bucket for all. A limit without a name counts for each route it stands on; with a name it is one
limit wherever it stands. The policy of a whole site is RateLimitMiddleware's (asgi.py); a rule of it can be named here, and where
the middleware has asked it already it is not asked again.

`install(app)` makes refusals exactly ours (otherwise they are in FastAPI's {"detail": …}), puts the fields on responses that a
handler made itself, and settles costs by outcome or size; none of that can be done from within a dependency.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Request, Response, WebSocketException
from starlette.requests import HTTPConnection

from ..errors import ConfigurationError
from ..policy.evaluation import Evaluation
from .asgi_fast import AsgiRequestContext
from .asgi_websocket import TRY_LATER, reason
from .dependency_limits import DependencyMiddleware, asked_of
from .refusal_body import body
from .route_limit import RouteLimit
from .view_identity import place_of, placed
from .view_limit import fitting, told


class TooManyRequests(HTTPException):
    """A refusal, on its way to the client. `passage` says why."""

    def __init__(self, passage: Evaluation, accept: str | None, fields: dict[str, str]) -> None:
        assert passage.refusal is not None
        self.passage = passage
        kind, self.content = body(passage, accept)
        self.media_type = kind.decode()
        detail: Any = self.content.decode()
        if self.media_type.endswith("json"):
            detail = json.loads(detail)
        super().__init__(passage.refusal.status, detail, fields)


async def answer(request: Request, refused: TooManyRequests) -> Any:
    """The response of a refusal: its rule's degrade handler, or why and when to come back."""
    degrade = refused.passage.degrade
    if degrade is not None:
        return degrade
    return Response(refused.content, refused.status_code, dict(refused.headers or {}), refused.media_type)


def install(app: FastAPI) -> None:
    """Prepares an app for limits in dependencies: exact refusals, fields on every response, settling. Once is enough."""
    if TooManyRequests not in app.exception_handlers:
        app.add_exception_handler(TooManyRequests, answer)  # type: ignore[arg-type]
        app.add_middleware(DependencyMiddleware)


class RateLimit(RouteLimit):
    """A limit to depend on. `key` is "ip", or a callable that is given the request (async too); None from it means the address.

    Every other word of a rule may follow: cost=, message=, on_refusal=, status=, charge=, … `policy` and `rule` name a rule of a
    policy instead, whatever it matches. `store` is a store or its URL; without one, this limit has a memory of its own.
    """

    def __init__(self, *said: Any, **words: Any) -> None:
        super().__init__(*said, **words)
        #: By route and depth: the name, and the route, so that nobody else is taken for it.
        self._names: dict[tuple[int, int], tuple[Any, str]] = {}

    async def __call__(self, connection: HTTPConnection, response: Response) -> Evaluation:
        return await self.check(connection, response)

    async def check(
        self, connection: HTTPConnection, response: Response | None = None, *, key: str | int | None = None
    ) -> Evaluation:
        """Asks from within another dependency or a handler; `key` says outright who it is: `check(request, key=user.id)`."""
        scope = connection.scope
        if self.was_asked(scope):
            return scope["limitkeeper"]  # type: ignore[no-any-return]
        asked = asked_of(scope)
        facts = AsgiRequestContext(scope)
        passage = await self.ask(connection, facts, self._named(scope, len(asked.passages)), key)
        if not passage.allowed:
            if scope["type"] == "websocket":
                raise WebSocketException(TRY_LATER, reason(passage))
            raise TooManyRequests(passage, facts.header("accept"), dict(told([passage])))
        if passage.owes and not asked.settles:
            raise ConfigurationError("a cost or charge that the response decides needs limitkeeper.web.fastapi.install(app)")
        if response is not None and not asked.settles:
            for name, value in asked.fields(scope):
                response.headers[name] = value
        return passage

    def _named(self, scope: Any, depth: int) -> str:
        if self.name is not None:
            return self.name
        route = scope.get("route")
        found = self._names.get((id(route), depth))
        if found is None or found[0] is not route:
            found = self._names[id(route), depth] = (route, name_of(scope, depth))
        return found[1]


def name_of(scope: Any, depth: int) -> str:
    """`shop.routes.checkout`; a second limit on the way to it is `shop.routes.checkout.2`. Where the endpoint's name does not say
    which route it is, the route's own place says it: `shop.routes.crud.index@GET /orders`."""
    given = endpoint = scope.get("endpoint")
    while isinstance(endpoint, partial):
        endpoint = endpoint.func
    if not hasattr(endpoint, "__qualname__"):  # an object with __call__
        endpoint = type(endpoint)
    whole = f"{endpoint.__module__}.{endpoint.__qualname__}"
    name = fitting(whole.replace("<locals>.", "") + (f".{depth + 1}" if depth else ""))
    place = place_of(scope)
    says_it = given is endpoint and "<locals>" not in whole and standing(scope.get("app"), given) == 1
    return name if says_it or place is None else placed(name, place)


def standing(app: Any, endpoint: Any) -> int:
    """On how many routes of an app an endpoint stands, as far as can be seen: included routers keep theirs to themselves."""
    routes = getattr(app, "routes", None) or ()
    return sum(getattr(route, "endpoint", None) is endpoint or standing(route, endpoint) for route in routes)


def current(connection: HTTPConnection) -> Evaluation | None:
    """What was decided about this request: the policy's answer, or the first limit's. None: nobody was asked."""
    passage: Evaluation | None = connection.scope.get("limitkeeper")
    return passage


#: `def handler(passage: CurrentPassage)`: the decision, for handlers that want to look.
CurrentPassage = Annotated[Evaluation | None, Depends(current)]
