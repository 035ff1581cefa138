"""Limits declared on single handlers: Django and Flask views, Starlette endpoints, FastAPI routes.

    @limit("5/s burst 10")                                  per client address
    @limit("100/h", key="user | ip")                        identities of the site's policy
    @limit("100/h", key=lambda request: request.user.pk)    a callable; None falls back to the client's address

    @limit(limit_of_plan)                                   a callable that is given the request and returns the limit

Each is a policy of one rule with a gate of its own, made at its first request, on a store that all of them share. The rule's name
is the handler's with a hash, and the state in the store goes by it: handlers share a limit only under the same name=. Handlers
made by one function, or of one class with different arguments, differ by their location (Flask's endpoint, Django's URL
pattern, Starlette's route). Rejected: numbering them, since the order in which they are made or called differs between processes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import lru_cache, wraps
from hashlib import sha256
from inspect import isfunction
from threading import Lock
from typing import Any, TypedDict, cast
from uuid import UUID
from weakref import WeakSet, WeakValueDictionary

from ..algorithms.limit import Limit
from ..errors import ConfigurationError
from ..observe.events import Event
from ..policy.callback_errors import callback_name, check_callback
from ..policy.evaluation import Evaluation
from ..policy.gate import Gate, gate_of
from ..policy.identity.client_ip import ClientIp
from ..policy.identity.identify import RequestPart
from ..policy.model import Headers, Identity, Policy
from ..policy.reading.diagnostics import PolicyError, did_you_mean, shorten
from ..policy.reading.load import from_fields
from ..policy.reading.rule_fields import RULE
from ..policy.refusal import Refusal
from ..policy.request_context import RequestContext
from ..policy.store_lifetime import OpenedStore
from ..stores import Store, store_from_url
from ..stores.guarded import GuardedStore
from ..stores.worker_warning import memory_store
from .headers import text_fields

log = logging.getLogger("limitkeeper")

Handler = Callable[..., object]
#: A limit as the policy reads it: a Limit, its text, several of them, or limits by identity.
LimitSpec = Limit | str | Sequence[Limit | str] | Mapping[str, object]
#: A limit, or a callable that is given the framework's request and returns one; "unlimited" and "blocked" are limits too.
LimitSource = LimitSpec | Callable[..., Limit | str | None]
#: A key: identities as in a policy ("user | ip"), or a callable that is given the framework's request.
Key = str | Sequence[str] | Callable[..., object]

#: The fields of `client_ip` in a policy, or the identity that they make.
ClientAddress = ClientIp | Mapping[str, object]


class RuleOptions(TypedDict, total=False):
    """Options of a declared limit: `methods` to which it applies, `per_method` (each method counts separately), `exempt_when` (a
    callable that is given the request), `on_breach` (a listener of its refusals), `identify` (identities for `key`, as in a
    policy), `headers` (as in a policy); and the other fields of a rule, as in a policy file. A callable `message` is given the
    Refusal and the request."""

    methods: Sequence[str]
    per_method: bool
    exempt_when: Callable[..., object]
    on_breach: Callable[[Event], object]
    identify: Mapping[str, object]
    headers: Headers | Mapping[str, object] | str | bool

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
    message: str | Callable[..., str]
    body: object
    problem: bool
    retry_after: object
    priority: int
    alert: object
    safe_concurrency: int


#: Options that are no fields of the rule.
OWN_OPTIONS = ("exempt_when", "headers", "identify", "methods", "on_breach", "per_method")
#: What other libraries call an option, and its name here.
OPTIONS_ELSEWHERE = {
    **dict.fromkeys(("by", "identifier", "key_func", "per"), "key"),
    "error_message": "message",
    **dict.fromkeys(("scope", "group"), "name"),
    "method": "methods",
    "deduct_when": "charge",
    "header_name_mapping": "headers",
}
#: Identities of every declared limit, unless the site's policy has its own of the same name.
REQUEST_PARTS: dict[str, Identity] = {part: RequestPart(part) for part in ("host", "method", "route")}
#: A policy without anything: its settings are those of limits without a policy.
DEFAULTS = Policy()
#: The identity of a callable key.
CALLER = "caller"
#: The identity that is present where `exempt_when` holds.
EXEMPTED = "exempt_when"
#: The most different limits that the callable of one declaration may return.
MAX_CHOICES = 256
#: Methods that `per_method` distinguishes; all others together are one, since clients can send any.
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
PARENTHESES = 'write @limit("5/s burst 10"), with parentheses'
#: The handler attribute that counts its limits; `functools.wraps` copies it from one decorator to the next.
DEPTH = "limitkeeper_limits"
EXEMPT = "limitkeeper_exempt"
#: The most characters of a rule's name, and those that it can't have.
MAX_NAME = 64
FORBIDDEN = frozenset('"\\')
#: Fields that list several limits.
LISTED = ("RateLimit-Policy", "RateLimit")


class HandlerLimit:
    """One limit of one handler, as declared. `per_location`: other handlers may have the same name. `declared_by` is what the
    application called, for messages."""

    __slots__ = (
        "choices",
        "choose",
        "declared_by",
        "dynamic",
        "exempt_when",
        "headers",
        "identify",
        "key",
        "name",
        "on_breach",
        "per_location",
        "per_method",
        "rule",
    )

    def __init__(
        self,
        name: str,
        limit: LimitSource | None,
        key: Key,
        options: RuleOptions,
        per_location: bool = False,
        declared_by: str = "@limit",
    ) -> None:
        self.declared_by = declared_by
        self.name = name
        self.key = key
        self.per_location = per_location
        self._check_options(options)
        self.rule: dict[str, object] = {name: value for name, value in options.items() if name not in OWN_OPTIONS}
        self.identify = dict(options.get("identify", {}))
        self.headers = options.get("headers")
        self.per_method = options.get("per_method", False)
        self.on_breach = options.get("on_breach")
        self.exempt_when = options.get("exempt_when")
        self._add_conditions(options.get("methods"))
        #: The callable that chooses the limit, and the declarations of those that it has returned.
        self.choose: Callable[..., Limit | str | None] | None = None
        self.choices: dict[object, HandlerLimit] = {}
        self.rule["limit"] = limit
        self.dynamic = callable(limit)
        if callable(limit):
            check_choice(limit)
            self.choose = limit
            self.rule["limit"] = "unlimited"
        if callable(key):
            check_callback(key, "request", option="key")
        message = self.rule.get("message")
        if callable(message):
            check_callback(message, "refusal", "request", option="message")
            self.rule["message"] = request_message(message)
        self._check()

    def _check_options(self, options: RuleOptions) -> None:
        known = (*OWN_OPTIONS, *RULE.specs)
        for name in options:
            if name not in known:
                found = OPTIONS_ELSEWHERE.get(name)
                everything = f"expected one of {', '.join(known)}"
                remedy = did_you_mean(name, known, everything) if found is None else f"write {found}="
                raise ConfigurationError(f"{self.declared_by}: unknown option {name!r}; {remedy}")

    def _check(self) -> None:
        """Raises errors where the limit is declared. The identities that a key in text names are a site's, unknown here."""
        self.policy(self.name, key=None if callable(self.key) else "ip")

    def _add_conditions(self, methods: Sequence[str] | None) -> None:
        """Makes `methods` and `exempt_when` fields of the rule."""
        if methods is not None:
            if "match" in self.rule:
                raise ConfigurationError("expected methods= or match=, got both; write match={'methods': […], 'path': …}")
            self.rule["match"] = {"methods": [methods] if isinstance(methods, str) else list(methods)}
        if self.exempt_when is not None:
            check_callback(self.exempt_when, "request", option="exempt_when")
            when = dict(cast(Mapping[str, object], self.rule.get("when") or {}))
            absent = when.get("absent", ())
            others = [absent] if isinstance(absent, str) else list(cast(Sequence[str], absent))
            self.rule["when"] = {**when, "absent": [*others, EXEMPTED]}

    def chosen(self, request: object) -> HandlerLimit:
        """The declaration of the limit that the callable returns for a request. Its exceptions are the application's own."""
        if self.choose is None:
            return self
        limit = self.choose(request)
        limit = "unlimited" if limit is None else limit
        if not isinstance(limit, (str, Limit)):
            raise ConfigurationError(
                f"expected a limit such as '5/s', 'unlimited', 'blocked' or None from {callback_name(self.choose)}, got {limit!r}"
            )
        found = self.choices.get(limit)
        if found is None:
            if len(self.choices) >= MAX_CHOICES:
                text = f"{callback_name(self.choose)} returned more than {MAX_CHOICES} different limits"
                raise ConfigurationError(f"{text}; return one of a few, and use cost= or key= for what differs by client")
            found = self.choices.setdefault(limit, self._with_limit(limit))
        return found

    def _with_limit(self, limit: Limit | str) -> HandlerLimit:
        """This declaration with another limit."""
        other = copy(self)
        other.choose, other.rule = None, {**self.rule, "limit": limit}
        other._check()
        return other

    def name_at(self, location: str | None) -> str:
        """The rule's name for the handler at a location."""
        return located_name(self.name, location) if self.per_location and location is not None else self.name

    def policy(self, name: str, site: Policy | None = None, ip: Identity | None = None, key: Key | None = None) -> Policy:
        """A policy of one rule, with the identities and the response settings of the site's; `ip` is another client address."""
        identify: dict[str, object] = {**REQUEST_PARTS, **({} if site is None else site.identify), **self.identify}
        if ip is not None:
            identify["ip"] = ip
        key = self.key if key is None else key
        if callable(key):
            identify[CALLER] = {"call": caller_identity(key)}
            key = f"{CALLER} | ip"
        if self.exempt_when is not None:
            identify[EXEMPTED] = {"call": exempt_identity(self.exempt_when)}
        instances = None if site is None else site.instances
        policy = self._policy_of(name, key, identify, instances)
        if site is None:
            return policy
        names = ("name", "problem", "budget_us", "waiting_threads", *(("headers",) if self.headers is None else ()))
        return replace(policy, **{name: getattr(site, name) for name in names})

    def _policy_of(
        self, name: str, key: object, identify: Mapping[str, object] | None = None, instances: int | None = None
    ) -> Policy:
        """The policy of this rule; errors name the declaration, since there is no file in which to find `limits[0].limit`."""
        try:
            limits = [{**self.rule, "name": name, "key": key}]
            fields = {"identify": identify, "instances": instances, "headers": self.headers, "limits": limits}
            return from_fields(fields, warn=not (self.dynamic and self.rule["limit"] == "unlimited"))
        except PolicyError as error:
            found = [f"{one.location.removeprefix('limits[0].')}: {one.full_message}" for one in error.errors]
            shown = f"{self.declared_by}({shorten(repr(self.rule['limit']))})"
            raise ConfigurationError(f"{shown}: {'; '.join(found)}") from None


class HandlerGates:
    """The gates of one application: its policy's, where there is one, and one for each name of a handler's limit."""

    def __init__(
        self,
        gate: Gate | None,
        store: Store | None = None,
        handlers: Mapping[str, Handler] | None = None,
        client_ip: ClientAddress | None = None,
        enabled: bool = True,
        default: LimitSource | Mapping[str, object] | None = None,
    ) -> None:
        self.default = default_limit(default if enabled else None)
        if not enabled:  # a policy without rules admits everything
            gate, client_ip = Gate(Policy(), store=store), None
        self.enabled = enabled
        if client_ip is not None and gate is not None:
            raise ConfigurationError("client_ip belongs to the policy here; write it there, under identify: {ip: {client_ip: …}}")
        self.gate = gate
        self.ip = client_address(client_ip)
        budget_us = DEFAULTS.budget_us if gate is None else gate.policy.budget_us
        own = guard(store, budget_us) if store is not None else memory_store() if gate is None else None
        self.store: Store | OpenedStore = own if own is not None else gate.opened_store  # type: ignore[union-attr]
        self._owns_store = store is None and gate is None
        self.handlers = handlers
        #: Endpoints that the policy exempts; None: not looked up yet.
        self.exempt: frozenset[str] | None = None
        self._gates: dict[tuple[HandlerLimit, str], Gate] = {}
        #: The policy whose identities each of them has.
        self._policies: dict[Gate, Policy | None] = {}
        self._lock = Lock()

    def gate_for(self, limit: HandlerLimit, name: str, request: object = None) -> Gate:
        """The gate of a limit under a name for a request, made at its first one."""
        site = self.gate
        if not self.enabled and site is not None:
            return site
        if limit.per_method:
            method = getattr(request, "method", None)
            name = rule_name(f"{name} {method if method in METHODS else 'other'}", "")
        limit = limit.chosen(request)
        if site is not None and isinstance(self.store, OpenedStore) and self.store is not site.opened_store:
            with self._lock:  # a reload has changed the store
                self.store, self._gates, self._policies = site.opened_store, {}, {}
        policy = None if site is None else site.policy
        gate = self._gates.get((limit, name))
        if gate is None or self._policies.get(gate) is not policy:
            with self._lock:
                gate = self._make_gate(limit, name, policy)
        return gate

    def _make_gate(self, limit: HandlerLimit, name: str, site: Policy | None) -> Gate:
        """The gate of a limit; a reload of the site's policy, whose identities it has, reloads it. Where the new version lacks
        one of its key, the old one stays in force: a handler must not fail by a reload."""
        gate = self._gates.get((limit, name))
        if gate is None:
            gate = self._gates[limit, name] = Gate(limit.policy(name, site, self.ip), store=self.store, handlers=self.handlers)
            if limit.on_breach is not None:
                gate.events.on("refused", limit.on_breach)
        elif self._policies.get(gate) is not site:
            try:
                gate.reload(limit.policy(name, site, self.ip))
            except ConfigurationError as error:
                log.error("%s; the limit %r keeps the identities of the policy before", error, name)
        self._policies[gate] = site
        return gate

    def close(self) -> None:
        for gate in (*self._gates.values(), *(() if self.gate is None else (self.gate,))):
            gate.close()
        if self._owns_store and isinstance(self.store, Store):
            self.store.close()


#: The stores of URLs, and gates of policies (by the ids of policy and store), that limits of this process share.
_stores: WeakValueDictionary[str, Store] = WeakValueDictionary()
_gates: WeakValueDictionary[tuple[int, int], Gate] = WeakValueDictionary()


def guard(store: Store, budget_us: int) -> Store:
    """A store for many gates: one guard for all of them, so that one breaker learns of its failures; `on_failure` of the rules
    answers for it."""
    if store.local or isinstance(store, GuardedStore):
        return store
    return GuardedStore(store, budget=budget_us / 1e6, on_failure="closed", name=DEFAULTS.name)


def shared_store(store: Store | str | None) -> Store | None:
    """A store as it was given, or that of a URL: one, with its connections, for all limits of this process that name the URL."""
    if not isinstance(store, str):
        return store
    found = _stores.get(store)
    if found is None:
        found = _stores[store] = guard(store_from_url(store), DEFAULTS.budget_us)
    return found


def shared_gate(policy: Gate | Policy, store: Store | None) -> Gate:
    """The gate of a policy: one for all limits of this process that name its rules."""
    if not isinstance(policy, Policy):
        return gate_of(policy)
    found = _gates.get((id(policy), id(store)))
    if found is None or found.policy is not policy:
        found = _gates[id(policy), id(store)] = Gate(policy, store=store)
    return found


def client_address(given: ClientAddress | None) -> Identity | None:
    """The identity `ip` of limits without a policy: `{"trusted_proxies": ["10.0.0.0/8"]}`, as under `client_ip` in one."""
    if given is None or isinstance(given, ClientIp):
        return given
    return Policy.of(identify={"ip": {"client_ip": given}}).identify["ip"]


def caller_identity(key: Callable[..., object]) -> Callable[[RequestContext], object]:
    """A callable key as an identity: it is given the framework's request; integers and UUIDs become strings."""

    @wraps(key)
    def identity(context: RequestContext) -> object:
        value = key(context.raw)
        return str(value) if isinstance(value, (int, UUID)) else value

    return identity


def request_message(message: Callable[..., object]) -> Callable[[Refusal, RequestContext | None], object]:
    """A callable message: it is given the refusal and the framework's request."""

    @wraps(message)
    def of_request(refusal: Refusal, context: RequestContext | None) -> object:
        return message(refusal, None if context is None else context.raw)

    return of_request


def check_choice(limit: Callable[..., object]) -> None:
    """ConfigurationError for a callable that can't choose a limit: mostly a handler, under a decorator without parentheses."""
    try:
        check_callback(limit, "request", option="limit")
    except ConfigurationError as error:
        raise ConfigurationError(f"{error}; if it is a handler, {PARENTHESES}") from None


def default_limit(given: LimitSource | Mapping[str, object] | None) -> HandlerLimit | None:
    """The limit of handlers that have none of their own: a limit, or the arguments of `limit`, as {"limit": "50/h", "key": …}.
    Each handler counts separately, unless there is a name."""
    if given is None:
        return None
    options: dict[str, Any] = dict(given) if isinstance(given, Mapping) and "limit" in given else {"limit": given}
    limit, key, name = options.pop("limit"), options.pop("key", "ip"), options.pop("name", None)
    return HandlerLimit(name or DEFAULT_NAME, limit, key, cast(RuleOptions, options), name is None, "default")


#: Functions to which a limit was added, which they themselves do not have.
_without_limit: WeakSet[Handler] = WeakSet()


def count_limit(limited: object, handler: Handler) -> None:
    """Records that `limited` is a handler with one more limit."""
    setattr(limited, DEPTH, getattr(handler, DEPTH, 0) + 1)
    with suppress(TypeError):  # an object that can't be hashed, or referenced weakly
        _without_limit.update((handler, *wrapped_by(handler)))


def wrapped_by(handler: object) -> Iterator[Handler]:
    """The functions under the decorators of a handler."""
    while (handler := getattr(handler, "__wrapped__", None)) is not None:
        yield cast(Handler, handler)


def check_order(handlers: Iterable[object]) -> None:
    """ConfigurationError for a handler of an application that was registered before its limit was added, and so never has it.
    One whose name still refers to it was not decorated: another application may have it with a limit."""
    functions = [one for one in handlers if isfunction(one)]
    within = {inner for one in functions for inner in wrapped_by(one)}
    for one in functions:
        if one in _without_limit and one not in within and one.__globals__.get(one.__name__) is not one:
            got = f"expected {one.__name__!r} to be registered with its limit, got it without: the limit is above the route"
            raise ConfigurationError(f"{got}; write @limit(…) below @app.get(…) or @app.route(…)")


def has_own_limit(handler: object, method: str | None = None) -> bool:
    """Whether a handler, or a method of a class-based one, has a limit of its own, which replaces the default. `method` is that
    of the request: of a view class of Flask or Django only what answers it counts."""
    methods = vars(handler).values() if isinstance(handler, type) else ()
    view = getattr(handler, "view_class", None)
    answers = None if method is None else getattr(view, method.lower(), getattr(view, "get", None) if method == "HEAD" else None)
    return any(getattr(one, DEPTH, 0) > 0 for one in (handler, answers, *methods))


def exempt_identity(exempt_when: Callable[..., object]) -> Callable[[RequestContext], object]:
    """`exempt_when` as an identity, which is present where the limit does not apply. Where it raises, the limit applies."""

    @wraps(exempt_when)
    def identity(context: RequestContext) -> object:
        return "yes" if exempt_when(context.raw) else None

    return identity


def handler_name(handler: Handler) -> str:
    """`checkout-5f1d09ac` for `shop.views.checkout`; the second limit of the same handler is `checkout.2-…`."""
    owner = bound_instance(handler)
    if owner is not None:  # a method that a subclass inherits: the subclass, not where the method is defined
        module, own = type(owner).__module__, f"{type(owner).__qualname__}.{handler.__name__}"
    else:
        named = handler if hasattr(handler, "__qualname__") else getattr(handler, "func", type(handler))
        module, own = named.__module__, named.__qualname__
    if "as_view.<locals>" in own:  # a class-based view: all of them have the same inner function
        own = getattr(getattr(handler, "view_class", None), "__qualname__", handler.__name__)
    return rule_name(own, module, getattr(handler, DEPTH, 0) + 1)


def rule_name(own: str, module: str, depth: int = 1) -> str:
    """The name of a handler's rule. Clients see it, so it has the handler's own name (printable ASCII, at most MAX_NAME) and a
    hash of the whole, which tells apart handlers of one name, but no module."""
    shown = own.rpartition("<locals>.")[2] + (f".{depth}" if depth > 1 else "")
    shown = "".join([letter for letter in shown if " " <= letter <= "~" and letter not in FORBIDDEN])
    digest = sha256(f"{module}.{own}.{depth}".encode("utf-8", "replace")).hexdigest()
    return f"{shown[: MAX_NAME - 9].strip()}-{digest[:8]}"


#: The name of the default limit; with the location of each handler another hash.
DEFAULT_NAME = rule_name("default", "")


@lru_cache(4096)
def located_name(name: str, location: str) -> str:
    """The name of a rule for the handler at a location."""
    return rule_name(name.rpartition("-")[0], f"{name}@{location}")


def bound_instance(handler: object) -> object | None:
    """The instance that a handler is a method of, also under decorators and `functools.partial`; None: it is a function."""
    while handler is not None:
        owner: object | None = getattr(getattr(handler, "func", handler), "__self__", None)
        if owner is not None:
            return owner
        handler = getattr(handler, "__wrapped__", None)
    return None


def shares_name(handler: Handler) -> bool:
    """Whether other handlers may have this one's name: it was made within a function, or of a class with arguments, or is an
    object or a partial, which have none of their own."""
    if bound_instance(handler) is not None:
        return False
    if getattr(handler, "view_class", None) is not None:
        return bool(getattr(handler, "view_initkwargs", True))  # Flask does not keep the arguments
    return "<locals>" in getattr(handler, "__qualname__", "<locals>")


def tightest(evaluations: Sequence[Evaluation]) -> Evaluation:
    """Of several evaluations of one request the one that refused (rather than one whose handler ran the application, where
    another limit refused), or that has the smallest share left."""

    def share_left(evaluation: Evaluation) -> float:
        if not evaluation.allowed:
            return -2.0 if evaluation.degrade is None else -1.0
        decision = evaluation.decision
        return 2.0 if decision is None else decision.remaining / max(1, decision.limit)

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
