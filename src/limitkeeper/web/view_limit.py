"""A limit of one view: a policy of one rule, with a gate of its own, made when its first request comes.

    @limit("5/s burst 10")                              per client, whoever that is
    @limit("100/h", key="user | ip")                    identities of the site's policy
    @limit("100/h", key=lambda request: request.user.pk)    a callable; None falls back to the client's address

Every other word of a rule may follow: cost=, message=, on_refusal=, status=, charge=, … Views do not share: the rule's name is
the view's, and the state in the store goes by it. Those that shall share are given the same name=.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from hashlib import sha256
from threading import Lock
from typing import Any
from uuid import UUID

from ..policy.evaluation import Evaluation
from ..policy.gate import Gate
from ..policy.model import Policy
from ..stores import MemoryStore, Store
from .headers import text_fields

#: How a view's key is said: a policy's words, or a callable that is given the framework's request.
Key = str | Sequence[str] | Callable[[Any], Any]

#: The identity that stands for a callable key.
CALLER = "caller"
#: How many limits a view has already; `functools.wraps` carries it from one decorator to the next.
DEPTH = "limitkeeper_limits"
EXEMPT = "limitkeeper_exempt"
#: A policy's rules have names of at most so many letters.
LONGEST = 64
#: Letters that no rule's name has.
NEVER = frozenset('"\\')
LISTED = ("RateLimit-Policy", "RateLimit")


class ViewLimit:
    """One limit of one view, as it was said."""

    __slots__ = ("key", "name", "words")

    def __init__(self, name: str, limit: Any, key: Key, words: dict[str, Any]) -> None:
        self.name = name
        self.key = key
        self.words: dict[str, Any] = {**words, "limit": limit, "name": name}
        Policy.of(limits=[{**self.words, "key": "ip"}])  # what is wrong with the words is said where they stand

    def policy(self, site: Policy | None) -> Policy:
        """A policy of one rule, with the identities of the site's."""
        identify: dict[str, Any] = dict(site.identify) if site is not None else {}
        key: Any = self.key
        if callable(key):
            identify[CALLER] = {"call": caller(key)}
            key = f"{CALLER} | ip"
        policy = Policy.of(identify=identify, limits=[{**self.words, "key": key}])
        if site is None:
            return policy
        return replace(policy, name=site.name, headers=site.headers, problem=site.problem, budget_us=site.budget_us)


class ViewLimits:
    """What all views of one application share: the policy's gate where there is one, the store, and a gate for each route."""

    def __init__(self, gate: Gate | None, store: Store | None = None, handlers: Mapping[str, Any] | None = None) -> None:
        self.gate = gate
        self.store = store if store is not None else MemoryStore() if gate is None else gate.store
        self._owns = store is None and gate is None
        self.handlers = handlers
        #: Endpoints that the policy is not asked about; None: nobody has looked yet.
        self.exempt: frozenset[str] | None = None
        self._gates: dict[ViewLimit, Gate] = {}
        self._making = Lock()

    def gate_for(self, route: ViewLimit) -> Gate:
        """The route's own gate, made when its first request comes."""
        gate = self._gates.get(route)
        if gate is None:
            with self._making:
                gate = self._gates.get(route)
                if gate is None:
                    site = None if self.gate is None else self.gate.policy
                    gate = self._gates[route] = Gate(route.policy(site), store=self.store, handlers=self.handlers)
        return gate

    def close(self) -> None:
        for gate in (*self._gates.values(), *(() if self.gate is None else (self.gate,))):
            gate.close()
        if self._owns:
            self.store.close()


def caller(key: Callable[[Any], Any]) -> Callable[[Any], str | None]:
    """A key's callable as an identity: it is given the request; numbers and UUIDs, which users are known by, become texts."""

    @wraps(key)
    def identity(facts: Any) -> Any:
        value = key(facts.raw)
        return str(value) if isinstance(value, (int, UUID)) else value

    return identity


def name_of(view: Any) -> str:
    """`shop.views.checkout`; a second limit of the same view is `shop.views.checkout.2`."""
    depth = getattr(view, DEPTH, 0) + 1
    owner = bound_to(view)
    if owner is not None:  # a method of somebody's subclass: the class, not where the method was written
        module, own = type(owner).__module__, f"{type(owner).__qualname__}.{view.__name__}"
    else:
        module, own = view.__module__, view.__qualname__
    if "as_view.<locals>" in own:  # a class based view: all of them have the same inner function
        own = getattr(getattr(view, "view_class", None), "__qualname__", view.__name__)
    return fitting(f"{module}.{own}".replace("<locals>.", "") + (f".{depth}" if depth > 1 else ""))


def fitting(name: str) -> str:
    """A rule's name is printable ASCII and has an end: of others the last part that fits is kept, and a hash of the whole."""
    kept = "".join(letter for letter in name if " " <= letter <= "~" and letter not in NEVER)
    if kept == name and len(name) <= LONGEST:
        return name
    return kept[9 - LONGEST :].lstrip(". ") + "-" + sha256(name.encode("utf-8", "replace")).hexdigest()[:8]


def bound_to(view: Any) -> Any:
    """The instance that a view is a method of, also under decorators and `functools.partial`; None: it is a function."""
    while view is not None:
        owner = getattr(getattr(view, "func", view), "__self__", None)
        if owner is not None:
            return owner
        view = getattr(view, "__wrapped__", None)
    return None


def tightest(passages: Sequence[Evaluation]) -> Evaluation:
    """Of several answers to one request the one to speak of: who refused, or who has the smallest part left."""

    def left(passage: Evaluation) -> float:
        decision = passage.decision
        return -1.0 if not passage.allowed else 2.0 if decision is None else decision.remaining / max(1, decision.limit)

    return min(passages, key=left)


def told(passages: Sequence[Evaluation]) -> list[tuple[str, str]]:
    """The fields of a request that several gates were asked about: all limits are named, the tightest one speaks for them."""
    first = tightest(passages)
    if len(passages) == 1:
        return text_fields(first)
    spoken = dict(text_fields(first))
    others = [dict(text_fields(passage)) for passage in passages if passage is not first]
    for name in LISTED:
        lines = [fields[name] for fields in (spoken, *others) if fields.get(name, "").startswith('"')]
        if lines:
            spoken[name] = ", ".join(lines)
    return list(spoken.items())
