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
from collections.abc import Awaitable, Callable
from functools import partial
from hashlib import sha256
from inspect import iscoroutinefunction
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Request, Response, WebSocketException
from starlette.requests import HTTPConnection

from ..errors import ConfigurationError
from ..policy.gate import Gate, gate_of
from ..policy.model import Policy
from ..policy.passage import Passage
from ..stores import MemoryStore, Store
from ..stores.urls import store_from_url
from .answers import body
from .asgi_socket import TRY_LATER, reason
from .asgi_wire import AsgiFacts, has_origin
from .dependencies import DependencyMiddleware, RuleOf, asked_of
from .routes import CALLER, Key, Route, fitting, told

AnyKey = Key | Callable[[Any], Awaitable[Any]]


class TooManyRequests(HTTPException):
    """A refusal, on its way to the client. `passage` says why."""

    def __init__(self, passage: Passage, accept: str | None, fields: dict[str, str]) -> None:
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


class RateLimit:
    """A limit to depend on. `key` is "ip", or a callable that is given the request (async too); None from it means the address.

    Every other word of a rule may follow: cost=, message=, on_refusal=, status=, charge=, … `policy` and `rule` name a rule of a
    policy instead, whatever it matches. `store` is a store or its URL; without one, this limit has a memory of its own.
    """

    def __init__(
        self,
        limit: Any = None,
        *,
        key: AnyKey = "ip",
        name: str | None = None,
        policy: Gate | Policy | None = None,
        rule: str | None = None,
        store: Store | str | None = None,
        **words: Any,
    ) -> None:
        if (limit is None) == (policy is None) or (policy is None) != (rule is None):
            raise ConfigurationError('write RateLimit("5/s burst 10"), or name a rule: RateLimit(policy=gate, rule="checkout")')
        self.limit = limit
        self.key = key
        self.name = name
        self.words = words
        self.awaited = iscoroutinefunction(key) or iscoroutinefunction(getattr(key, "__call__", None))  # noqa: B004
        self._store = store_from_url(store) if isinstance(store, str) else store
        self._gates: dict[str, Gate] = {}
        self._rule: RuleOf | None = None
        if policy is None or rule is None:
            self._route(name or "limit")  # what is wrong with the words is said where they stand
        else:
            self._rule = RuleOf(gate_of(policy, store=self._store), rule)

    async def __call__(self, connection: HTTPConnection, response: Response) -> Passage:
        return await self.check(connection, response)

    async def check(
        self, connection: HTTPConnection, response: Response | None = None, *, key: str | int | None = None
    ) -> Passage:
        """Asks from within another dependency or a handler; `key` says outright who it is: `check(request, key=user.id)`."""
        scope = connection.scope
        if self._rule is not None and self._rule.was_asked(scope):
            return scope["headgate"]  # type: ignore[no-any-return]
        asked = asked_of(scope)
        gate = self._rule.gate() if self._rule is not None else self._gate(scope, len(asked.passages))
        facts = await self._facts(connection, key)
        passage = gate.quick(facts)
        if passage is None:
            passage = await gate.aask(facts)
        passage.origin = has_origin(scope)
        asked.passages.append(passage)
        if not passage.owes:
            passage.facts = None  # they hold the request, which holds the passage: no circle
        if getattr(scope.get("headgate"), "decision", None) is None:
            scope["headgate"] = passage
        if not passage.allowed:
            raise self._refusal(passage, facts, scope)
        if passage.owes and not asked.settles:
            raise ConfigurationError("a cost or charge that the response decides needs headgate.web.fastapi.install(app)")
        if response is not None and not asked.settles:
            for name, value in asked.fields(scope):
                response.headers[name] = value
        return passage

    async def _facts(self, connection: HTTPConnection, key: str | int | None) -> AsgiFacts:
        facts = AsgiFacts(connection.scope)
        facts.raw = connection
        facts.captured = {name: str(value) for name, value in connection.path_params.items()}
        if key is None and self.awaited:
            key = await self.key(connection)  # type: ignore[operator]
            facts.found[CALLER] = None if key is None else str(key)
        elif key is not None:
            facts.found[CALLER] = str(key)
        return facts

    def _refusal(self, passage: Passage, facts: AsgiFacts, scope: Any) -> Exception:
        if scope["type"] == "websocket":
            return WebSocketException(TRY_LATER, reason(passage))
        return TooManyRequests(passage, facts.header("accept"), dict(told([passage])))

    # Names and gates -------------------------------------------------------------------------------------------------

    def _route(self, name: str) -> Route:
        key: Any = self.key
        if key == "ip" or self.awaited:  # a key that is said outright takes the place of the address
            key = nobody
        return Route(name, self.limit, key, self.words)

    def _gate(self, scope: Any, depth: int) -> Gate:
        """The gate of this limit on this route; its state in the store goes by the name."""
        name = self.name or name_of(scope, depth)
        gate = self._gates.get(name)
        if gate is None:
            if self._store is None:
                self._store = MemoryStore()
            gate = self._gates[name] = Gate(self._route(name).policy(None), store=self._store)
        return gate


def nobody(request: Any) -> None:
    """A key for those who are known by their address."""


def name_of(scope: Any, depth: int) -> str:
    """`shop.routes.checkout`; a second limit on the way to it is `shop.routes.checkout.2`."""
    endpoint = scope.get("endpoint")
    where = ""
    if not hasattr(endpoint, "__qualname__"):  # a partial or an object with __call__, of which several routes may have one
        while isinstance(endpoint, partial):
            endpoint = endpoint.func
        endpoint = endpoint if hasattr(endpoint, "__qualname__") else type(endpoint)
        route = str(getattr(scope.get("route"), "path", ""))  # never the path itself, which a client chooses
        where = "-" + sha256(route.encode("utf-8", "replace")).hexdigest()[:8]
    whole = f"{endpoint.__module__}.{endpoint.__qualname__}{where}"
    return fitting(whole.replace("<locals>.", "") + (f".{depth + 1}" if depth else ""))


def current(connection: HTTPConnection) -> Passage | None:
    """What was decided about this request: the policy's answer, or the first limit's. None: nobody was asked."""
    passage: Passage | None = connection.scope.get("headgate")
    return passage


#: `def handler(passage: CurrentPassage)`: the decision, for handlers that want to look.
CurrentPassage = Annotated[Passage | None, Depends(current)]
