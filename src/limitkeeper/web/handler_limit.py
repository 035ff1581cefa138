"""Limits declared on single handlers: Django and Flask views, Starlette endpoints, FastAPI routes.

    @limit("5/s burst 10")                                  per client address
    @limit("100/h", key="user | ip")                        identities of the site's policy
    @limit("100/h", key=lambda request: request.user.pk)    a callable; None falls back to the client's address

Each is a policy of one rule with a gate of its own, made at its first request. All other fields of a rule may be given as
options. The rule's name is the handler's name, and the state in the store goes by it: handlers share a limit only under the same
name=.

Several handlers can have one name: those made by one function, or of one class with different arguments. They are told apart by
their location (Flask's endpoint, Django's URL pattern, Starlette's route), which is the same in every process. Rejected:
numbering them, since the order in which they are made or called differs between processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, wraps
from hashlib import sha256
from threading import Lock
from typing import TypedDict
from uuid import UUID

from ..algorithms.limit import Limit
from ..policy.evaluation import Evaluation
from ..policy.gate import Gate
from ..policy.model import Identity, Policy
from ..policy.request_context import RequestContext
from ..stores import MemoryStore, Store
from .ratelimit_fields import text_fields

Handler = Callable[..., object]
#: A limit as the policy reads it: a Limit, its text, several of them, or limits by identity.
LimitSpec = Limit | str | Sequence[Limit | str] | Mapping[str, object]
#: A key: identities as in a policy ("user | ip"), or a callable that is given the framework's request.
Key = str | Sequence[str] | Callable[..., object]


class RuleOptions(TypedDict, total=False):
    """The other fields of a rule, as in a policy file."""

    description: str
    match: object
    when: Mapping[str, object]
    unidentified: str
    override: Mapping[str, object]
    overrides: object
    cost: object
    charge: object
    once: object
    on_refusal: object
    on_failure: str
    status: int
    message: str
    body: object
    problem: bool
    priority: int
    alert: object
    safe_concurrency: int


#: The identity of a callable key.
CALLER = "caller"
#: The handler attribute that counts its limits; `functools.wraps` copies it from one decorator to the next.
DEPTH = "limitkeeper_limits"
EXEMPT = "limitkeeper_exempt"
#: The most characters of a rule's name, and those that it can't have.
MAX_NAME = 64
FORBIDDEN = frozenset('"\\')
#: Fields that list several limits.
LISTED = ("RateLimit-Policy", "RateLimit")


class HandlerLimit:
    """One limit of one handler, as declared. `per_location`: other handlers may have the same name."""

    __slots__ = ("key", "name", "per_location", "rule")

    def __init__(self, name: str, limit: LimitSpec | None, key: Key, options: RuleOptions, per_location: bool = False) -> None:
        self.name = name
        self.key = key
        self.per_location = per_location
        self.rule: dict[str, object] = {**options, "limit": limit}
        Policy.of(limits=[{**self.rule, "name": name, "key": "ip"}])  # errors are raised where the limit is declared

    def name_at(self, location: str | None) -> str:
        """The rule's name for the handler at a location."""
        return located_name(self.name, location) if self.per_location and location is not None else self.name

    def policy(self, name: str, site: Policy | None = None) -> Policy:
        """A policy of one rule, with the identities and the response settings of the site's."""
        identify: dict[str, Identity | dict[str, object]] = {} if site is None else dict(site.identify)
        key: object = self.key
        if callable(key):
            identify[CALLER] = {"call": caller_identity(key)}
            key = f"{CALLER} | ip"
        policy = Policy.of(identify=identify, limits=[{**self.rule, "name": name, "key": key}])
        if site is None:
            return policy
        return replace(policy, name=site.name, headers=site.headers, problem=site.problem, budget_us=site.budget_us)


class HandlerGates:
    """The gates of one application: its policy's, where there is one, and one for each name of a handler's limit."""

    def __init__(self, gate: Gate | None, store: Store | None = None, handlers: Mapping[str, Handler] | None = None) -> None:
        self.gate = gate
        self.store = store if store is not None else MemoryStore() if gate is None else gate.store
        self._owns_store = store is None and gate is None
        self.handlers = handlers
        #: Endpoints that the policy exempts; None: not looked up yet.
        self.exempt: frozenset[str] | None = None
        self._gates: dict[tuple[HandlerLimit, str], Gate] = {}
        self._lock = Lock()

    def gate_for(self, limit: HandlerLimit, name: str) -> Gate:
        """The gate of a limit under a name, made at its first request."""
        gate = self._gates.get((limit, name))
        if gate is None:
            with self._lock:
                gate = self._gates.get((limit, name))
                if gate is None:
                    policy = limit.policy(name, None if self.gate is None else self.gate.policy)
                    gate = self._gates[limit, name] = Gate(policy, store=self.store, handlers=self.handlers)
        return gate

    def close(self) -> None:
        for gate in (*self._gates.values(), *(() if self.gate is None else (self.gate,))):
            gate.close()
        if self._owns_store:
            self.store.close()


def caller_identity(key: Callable[..., object]) -> Callable[[RequestContext], object]:
    """A callable key as an identity: it is given the framework's request; integers and UUIDs become strings."""

    @wraps(key)
    def identity(context: RequestContext) -> object:
        value = key(context.raw)
        return str(value) if isinstance(value, (int, UUID)) else value

    return identity


# Names -----------------------------------------------------------------------------------------------------------


def handler_name(handler: Handler) -> str:
    """`shop.views.checkout`; the second limit of the same handler is `shop.views.checkout.2`."""
    owner = bound_instance(handler)
    if owner is not None:  # a method that a subclass inherits: the subclass, not where the method is defined
        module, own = type(owner).__module__, f"{type(owner).__qualname__}.{handler.__name__}"
    else:
        module, own = handler.__module__, handler.__qualname__
    if "as_view.<locals>" in own:  # a class-based view: all of them have the same inner function
        own = getattr(getattr(handler, "view_class", None), "__qualname__", handler.__name__)
    return rule_name(f"{module}.{own}".replace("<locals>.", ""), getattr(handler, DEPTH, 0) + 1)


def rule_name(name: str, depth: int = 1) -> str:
    """A valid name of a rule: printable ASCII, at most MAX_NAME; others keep the last part that fits, and a hash of the whole."""
    if depth > 1:
        name = f"{name}.{depth}"
    kept = "".join([letter for letter in name if " " <= letter <= "~" and letter not in FORBIDDEN])
    if kept == name and len(name) <= MAX_NAME:
        return name
    return kept[9 - MAX_NAME :].lstrip(". ") + "-" + sha256(name.encode("utf-8", "replace")).hexdigest()[:8]


@lru_cache(4096)
def located_name(name: str, location: str) -> str:
    return rule_name(f"{name}@{location}")


def bound_instance(handler: object) -> object | None:
    """The instance that a handler is a method of, also under decorators and `functools.partial`; None: it is a function."""
    while handler is not None:
        owner: object | None = getattr(getattr(handler, "func", handler), "__self__", None)
        if owner is not None:
            return owner
        handler = getattr(handler, "__wrapped__", None)
    return None


def shares_name(handler: Handler) -> bool:
    """Whether other handlers may have this one's name: it was made within a function, or of a class with arguments."""
    if bound_instance(handler) is not None:
        return False
    if getattr(handler, "view_class", None) is not None:
        return bool(getattr(handler, "view_initkwargs", True))  # Flask does not keep the arguments
    return "<locals>" in getattr(handler, "__qualname__", "")


# Fields ----------------------------------------------------------------------------------------------------------


def tightest(evaluations: Sequence[Evaluation]) -> Evaluation:
    """Of several evaluations of one request the one that refused, or that has the smallest share left."""

    def share_left(evaluation: Evaluation) -> float:
        decision = evaluation.decision
        return -1.0 if not evaluation.allowed else 2.0 if decision is None else decision.remaining / max(1, decision.limit)

    return min(evaluations, key=share_left)


def combined_fields(evaluations: Sequence[Evaluation]) -> list[tuple[str, str]]:
    """The fields of a request with several evaluations: all limits are listed, the tightest gives the other fields."""
    first = tightest(evaluations)
    if len(evaluations) == 1:
        return text_fields(first)
    combined = dict(text_fields(first))
    others = [dict(text_fields(evaluation)) for evaluation in evaluations if evaluation is not first]
    for name in LISTED:
        lines = [fields[name] for fields in (combined, *others) if fields.get(name, "").startswith('"')]
        if lines:
            combined[name] = ", ".join(lines)
    return list(combined.items())
