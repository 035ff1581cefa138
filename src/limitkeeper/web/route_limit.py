"""A limit that an app asks from within, on one of its routes: what was said of it, its gate, and how it is asked.

FastAPI's dependency and Starlette's decorator are questions; each has its own way to refuse.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from inspect import iscoroutinefunction
from types import NoneType
from typing import Any

from starlette.requests import HTTPConnection

from ..errors import ConfigurationError
from ..policy.evaluation import Evaluation
from ..policy.gate import Gate, gate_of
from ..policy.model import Policy
from ..stores import MemoryStore, Store
from ..stores.urls import store_from_url
from .asgi_fast import AsgiRequestContext, has_origin
from .dependency_limits import SingleRule, asked_of
from .view_limit import CALLER, Key, ViewLimit

AnyKey = Key | Callable[[Any], Awaitable[Any]]


class RouteLimit:
    """A limit, or a rule of a policy; `RateLimit` and `limit` say what the words mean."""

    #: How it is written, for whoever wrote it wrong.
    written = 'RateLimit("5/s burst 10"), or name a rule: RateLimit(policy=gate, rule="checkout")'

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
            raise ConfigurationError(f"write {self.written}")
        self.limit = limit
        self.key = key
        self.name = name
        self.words = words
        self.awaited = iscoroutinefunction(key) or iscoroutinefunction(getattr(key, "__call__", None))  # noqa: B004
        self._store = store_from_url(store) if isinstance(store, str) else store
        self._gates: dict[str, Gate] = {}
        self._rule: SingleRule | None = None
        if not isinstance(self._store, (Store, NoneType)):
            raise ConfigurationError(f"store must be a store or its URL, not {store!r}")
        if policy is None or rule is None:
            self._route(name or "limit").policy(None)  # what is wrong with the words is said where they stand
        else:
            self._rule = SingleRule(gate_of(policy, store=self._store), rule)

    def was_asked(self, scope: Any) -> bool:
        """Whether the policy's middleware has asked this rule already for this request."""
        return self._rule is not None and self._rule.was_asked(scope)

    async def ask(
        self, connection: HTTPConnection, facts: AsgiRequestContext, name: str, key: str | int | None = None
    ) -> Evaluation:
        """Asks, and keeps the answer with the request. `name` says which route; `key` says outright who it is."""
        scope = connection.scope
        gate = self._rule.gate() if self._rule is not None else self._gate(name)
        facts.raw = connection
        facts.captured = {name: str(value) for name, value in connection.path_params.items()}
        if key is None and self.awaited:
            key = await self.key(connection)  # type: ignore[operator]
            facts.found[CALLER] = None if key is None else str(key)
        elif key is not None:
            facts.found[CALLER] = str(key)
        passage = gate.quick(facts)
        if passage is None:
            passage = await gate.aask(facts)
        passage.origin = has_origin(scope)
        asked_of(scope).passages.append(passage)
        if not passage.owes:
            passage.facts = None  # they hold the request, which holds the passage: no circle
        if getattr(scope.get("limitkeeper"), "decision", None) is None:
            scope["limitkeeper"] = passage
        return passage

    def _route(self, name: str) -> ViewLimit:
        key: Any = self.key
        if key == "ip" or self.awaited:  # a key that is said outright takes the place of the address
            key = nobody
        return ViewLimit(name, self.limit, key, self.words)

    def _gate(self, name: str) -> Gate:
        """The gate of this limit on this route; its state in the store goes by the name."""
        gate = self._gates.get(name)
        if gate is None:
            if self._store is None:
                self._store = MemoryStore()
            gate = self._gates[name] = Gate(self._route(name).policy(None), store=self._store)
        return gate


def nobody(request: Any) -> None:
    """A key for those who are known by their address."""
