"""A rule compiled for evaluation: its condition, its key, the limits of each key, its cost, and its counters.

    key        the first present of each part's identities; several parts are joined by "|", each escaped
    limits     those of the key's override (an operator's, the policy's, the application's), of its tier, or the rule's own

An `Entry` is one limit of one rule: what the store is asked about, and its name in header fields.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.algorithms.claim import NamedLimit
    from cython.cimports.limitkeeper.policy.request_context import RequestContext
else:
    from ..algorithms.claim import NamedLimit
    from .request_context import RequestContext

from ..algorithms.fixed_window import FixedWindow
from ..algorithms.token_bucket import TokenBucket
from ..observe.snapshot import RESPONSE_BOUNDS_MS, Histogram, RuleSnapshot
from ..rate import Rate
from .burst_conflicts import BUCKETS
from .callback_errors import CallbackErrors
from .identity.client_ip import ClientIp, without_name
from .identity.key_and_cache_bounds import MAX_KEY_LENGTH, hash_long, remember
from .model import BLOCKED, SHADOW, SHARE, WAIT, Identity, Key, Limits, Overrides, Rule, Tiers, When
from .request_cost import request_cost

#: Counters of a rule, and how many of its earlier versions are still counted: their requests may not have ended.
# fmt: off
COUNTERS = ("passed", "refused", "waited", "queue_full", "degraded", "shadow_refused", "near", "alerts", "given_back",
            "replayed", "failed_open", "failed_closed", "failed_local", "sum_ms")
# fmt: on
PREDECESSORS = 8
#: The key of a rule without identities, and of unidentified requests under `unidentified: share`.
EVERYONE, UNIDENTIFIED = "*", "-"
#: How many sets of limits a rule caches.
MAX_ENTRIES = 10_000

_absent = object()
#: Overrides at run time with a burst above the declared capacity.
large_overrides = CallbackErrors()
LARGE = "%s: an override of %s exceeds the safe concurrency %d"


@cython.ccall
def identity_of(identities: dict, context: RequestContext, name: str) -> object:  # type: ignore[type-arg]
    """The value of an identity for a request, computed once per request; None: absent."""
    value = context.identities.get(name, _absent)
    if value is _absent:
        value = identities[name].of(context)
        context.identities[name] = value
    return value


@cython.ccall
def first_present(identities: dict, context: RequestContext, names: tuple) -> object:  # type: ignore[type-arg]
    """The first of these identities that is present. With several names the value is prefixed by its name, so that a user called
    203.0.113.9 does not share that address's key."""
    for name in names:
        value = identity_of(identities, context, name)
        if value is not None:
            return value if len(names) == 1 else name + ":" + value
    return None


def escape_part(value: object) -> str:
    """A part of a joined key, escaped: different lists of parts make different keys."""
    if value is None:
        return "-"
    text: str = str(value)
    if "%" in text or "|" in text:
        text = text.replace("%", "%25").replace("|", "%7C")
    return "%2D" if text == "-" else text


def join_key(parts: list[object]) -> str:
    """A key of several parts; an absent part is "-"."""
    return "|".join([escape_part(part) for part in parts])


def key_without_names(identities: dict, key: tuple, text: str) -> str:  # type: ignore[type-arg]
    """The text of a key without the names of its identities. From the text alone: a hit that names its key has no request."""
    if len(key) == 1:
        return without_name(identities, key[0], text)
    parts: list = text.split("|")  # type: ignore[type-arg]
    if len(parts) != len(key):
        return text
    values = [None if part == "-" else part.replace("%2D", "-").replace("%7C", "|").replace("%25", "%") for part in parts]
    return join_key([value and without_name(identities, names, value) for names, value in zip(key, values, strict=True)])


@cython.ccall
def key_of(identities: dict, context: RequestContext, key: tuple) -> object:  # type: ignore[type-arg]
    """The key of a request; None when all its parts are absent."""
    if not key:
        return EVERYONE
    if len(key) == 1:
        return first_present(identities, context, key[0])
    parts = [first_present(identities, context, names) for names in key]
    for part in parts:
        if part is not None:
            return join_key(parts)
    return None


@cython.ccall
def bounded(key: str) -> str:
    """A key as the store has it, of at most MAX_KEY_LENGTH characters, and as the service makes it of the same text. Overrides
    are looked up before: a pattern or a function reads the parts of the key itself."""
    return key if len(key) <= MAX_KEY_LENGTH else hash_long(key)


@cython.ccall
def condition_holds(identities: dict, context: RequestContext, condition: tuple) -> cython.bint:  # type: ignore[type-arg]
    """Whether a compiled condition holds for a request."""
    for name in condition[0]:
        if identity_of(identities, context, name) is None:
            return False
    for name in condition[1]:
        if identity_of(identities, context, name) is not None:
            return False
    for name, values in condition[2]:
        if identity_of(identities, context, name) not in values:
            return False
    return True


def compile_condition(when: When) -> tuple | None:  # type: ignore[type-arg]
    """(present, absent, equals) identities of a condition; None: there is none."""
    return (when.present, when.absent, when.equals) if when.present or when.absent or when.equals else None


@cython.cclass
class Entry:
    """One limit of one rule: `named` is the store's limit, `label` the name in header fields, `rule` the policy's rule. `replays`
    is the same limit once more, for the repetitions of idempotency keys; where it admits fewer than those of one key, as many.

    `field_template` is a cache of the web package: the encoded part of the header fields that never changes.
    """

    def __init__(self, rule: Rule, named: NamedLimit, label: str, compiled_rule: CompiledRule = None) -> None:  # type: ignore[assignment]
        self.rule = rule
        self.named = named
        self.label = label
        self.compiled_rule = compiled_rule
        self.replays: NamedLimit | None = None
        if rule.once is not None:
            limit, replays = named.limit, rule.once.replays
            if limit.capacity < replays * rule.cost.units:
                limit = FixedWindow(Rate(replays, limit.rate.period), align="first")
            self.replays = NamedLimit(named.limiter, f"{label} replays", limit)
        self.field_template: Any = None

    def __repr__(self) -> str:
        return f"<Entry {self.label}: {self.named.limit}>"


@cython.cclass
class CompiledRule:
    """One rule of a compiled policy, `config` its definition. A reload hands the counters on to the rule of the same name."""

    def __init__(self, limiter: str, rule: Rule, identities: dict[str, Identity]) -> None:
        self.limiter, self.config, self.name = limiter, rule, rule.name
        self.identities, self.condition = identities, compile_condition(rule.when)
        self.key: Key = rule.key
        self.single_identity = rule.key[0][0] if len(rule.key) == 1 and len(rule.key[0]) == 1 else None
        self.has_alternatives = any(len(names) > 1 for names in rule.key)
        has_address = any(name == "ip" or isinstance(identities.get(name), ClientIp) for names in rule.key for name in names)
        self.share_unidentified = rule.unidentified == SHARE or (rule.unidentified is None and has_address)
        self.entries_by_limits: dict[Limits, tuple[Entry, ...]] = {}
        self.blocked: tuple[Entry, ...] | None = None  # what `entries_for` returns for a blocked key
        self.default_entries: tuple[Entry, ...] = ()
        self.total_concurrency = 0  # 0 while the limits of the policy itself are compiled, which were checked when it was read
        self.tier_identity: str | None = None
        self.tier_entries: dict[str, tuple[Entry, ...]] = {}
        if isinstance(rule.limit, Tiers):
            self.tier_identity = rule.limit.by
            self.tier_entries = {value: self.entries_of(limits) for value, limits in rule.limit.limits}
        self.default_entries = self.entries_of(rule.limit.otherwise if isinstance(rule.limit, Tiers) else rule.limit)
        self.capacity: Any = None  # its RuleCapacity in the gate's store, where the rule has a capacity in the place of limits
        self.capacity_entry: Entry = None  # type: ignore[assignment]
        if rule.capacity is not None:
            self.capacity_entry = Entry(rule, NamedLimit(limiter, rule.name, TokenBucket(rule.capacity.rate)), rule.name, self)
        self.static_overrides = {form: self.entries_of(limits) for key, limits in rule.override for form in (key, bounded(key))}
        self.overrides: Overrides | None = rule.overrides
        self.operator_overrides: Any = None  # the RuleOverrides of operators, which take precedence; None: there are none
        self.register: Callable[[CompiledRule, tuple[Entry, ...]], bool] | None = None  # the gate's, for overrides
        cost = rule.cost
        self.constant_cost = cost.units if cost.source in ("constant", "response") else -1
        self.idempotent: NamedLimit | None = None  # counts the repetitions of an idempotency key
        if rule.once is not None:
            limit = FixedWindow(Rate(rule.once.replays + 1, rule.once.keep_us), align="first")
            self.idempotent = NamedLimit(limiter, f"{rule.name} once", limit)
        self.needs_settlement = bool(cost.source == "response" or rule.charge.statuses or rule.charge.call or rule.concurrent)
        self.shadow, self.waits = rule.on_refusal.action == SHADOW, rule.on_refusal.action == WAIT
        self.spread_us = rule.retry_after.spread_us
        self.alert = -1.0 if rule.alert is None else rule.alert
        self.passed = self.refused = self.waited = self.queue_full = self.degraded = self.shadow_refused = self.near = 0
        self.alerts = self.given_back = self.replayed = self.failed_open = self.failed_closed = self.failed_local = 0
        self.waiting = SimpleNamespace(requests=set(), clients={})  # those that wait now, for all versions of the rule
        self.predecessors: list[CompiledRule] = []
        self.past_counts: dict[str, Any] = {}
        self.response_times = [0] * (len(RESPONSE_BOUNDS_MS) + 1)
        self.statuses, self.sum_ms = [0] * 6, 0.0
        self.total_concurrency = rule.total_concurrency or 0

    def entries_of(self, limits: Limits) -> tuple[Entry, ...]:
        """The entries of these limits. They are cached, because a NamedLimit remembers its handle in the store."""
        found = self._blocked_entries() if limits == BLOCKED else self.entries_by_limits.get(limits)
        if found is None:
            labels = [self.name, *(f"{self.name}.{i}" for i in range(2, len(limits) + 2))]
            named = [NamedLimit(self.limiter, label, limit) for label, limit in zip(labels, limits, strict=False)]
            if self.config.concurrent is not None:  # one state, whatever limits precede it
                named += [NamedLimit(self.limiter, f"{self.name} concurrent", self.config.concurrent)]
            found = tuple([Entry(self.config, one, label, self) for label, one in zip(labels, named, strict=False)])
            remember(self.entries_by_limits, limits, found, MAX_ENTRIES)
            for limit in limits if self.total_concurrency else ():
                if isinstance(limit, BUCKETS) and limit.capacity > self.total_concurrency:
                    large_overrides.report(LARGE, self.name, limit, self.total_concurrency)
        return found

    def override_entries(self, limits: Limits) -> tuple[Entry, ...] | None:
        """The entries of limits that came at run time; None: the store has no room for them, and the rule's own limit holds."""
        found = self.entries_by_limits.get(limits)
        if found is None:
            found = self.entries_of(limits)
            if limits != BLOCKED and self.register is not None and not self.register(self, found):
                found = self.entries_by_limits[limits] = ()
        return None if limits and not found else found

    @cython.cfunc
    def varies(self) -> cython.bint:
        """Whether keys may have other limits than `default_entries`."""
        overridden: cython.bint = self.overrides is not None or self.operator_overrides is not None
        return overridden or self.tier_identity is not None or bool(self.static_overrides) or self.blocked is not None

    def names_of(self, key: str) -> tuple[str, ...]:
        """A key as overrides may write it: with the name of its identity ("user:42"), or its value alone ("42")."""
        return (key, key_without_names(self.identities, self.key, key)) if self.has_alternatives else (key,)

    def operator_limits(self, key: str) -> Limits | None:
        """The limits that an operator has set for a key."""
        return None if self.operator_overrides is None else self.operator_overrides.get(key, self.names_of(key)[-1])

    def application_limits(self, key: str) -> Limits | None:
        """The limits that the application has set for a key."""
        found = [] if self.overrides is None else map(self.overrides.get, self.names_of(key))
        return next((limits for limits in found if limits is not None), None)

    def _blocked_entries(self) -> tuple[Entry, ...]:
        """One entry, which no store is asked about: it shows the rule's own limit."""
        if self.blocked is None:
            limits = [entry.named.limit for entry in self.default_entries] or BLOCKED
            self.blocked = (Entry(self.config, NamedLimit(self.limiter, self.name, limits[0]), self.name, self),)
        return self.blocked

    @cython.ccall
    def applies(self, context: RequestContext) -> cython.bint:
        """Whether the rule's condition holds."""
        return True if self.condition is None else condition_holds(self.identities, context, self.condition)

    @cython.ccall
    def key_for(self, context: RequestContext) -> object:
        """The key of a request; None: the rule does not apply."""
        if self.single_identity is not None:
            value = identity_of(self.identities, context, self.single_identity)
        else:
            value = key_of(self.identities, context, self.key)
        return UNIDENTIFIED if value is None and self.share_unidentified else value

    @cython.ccall
    def entries_for(self, context: RequestContext, key: str) -> tuple:  # type: ignore[type-arg]
        """The limits of a key: its override, those of its tier, or the rule's own; none: unlimited."""
        if self.operator_overrides is not None:
            limits = self.operator_limits(key)
            found = None if limits is None else self.override_entries(limits)
            if found is not None:
                return found
        if self.static_overrides or self.overrides is not None:
            for name in self.names_of(key):
                found = self.static_overrides.get(name)
                if found is not None:
                    return found
            limits = self.application_limits(key)
            found = None if limits is None else self.override_entries(tuple(limits))
            if found is not None:
                return found
        if self.tier_identity is None:
            return self.default_entries
        tier = identity_of(self.identities, context, self.tier_identity)
        return self.tier_entries.get(tier, self.default_entries)  # type: ignore[call-overload, no-any-return]

    @cython.ccall
    def cost_for(self, context: RequestContext) -> cython.longlong:
        return self.constant_cost if self.constant_cost >= 0 else request_cost(self.config.cost, context)

    @cython.ccall
    def count_response(self, bucket: cython.Py_ssize_t, family: cython.Py_ssize_t, took_ms: cython.double) -> cython.void:
        """Counts the response to a request that the rule has passed; `bucket` is that of its time."""
        self.response_times[bucket] += 1
        self.statuses[family] += 1
        self.sum_ms += took_ms

    def inherit(self, before: CompiledRule) -> None:
        """Continues the counters of the version before. Requests that began with an earlier version are counted there, so
        `counts` adds up the last few versions."""
        self.waiting, self.response_times, self.statuses = before.waiting, before.response_times, before.statuses
        versions = [*before.predecessors, before]
        self.past_counts = dict(before.past_counts)
        for version in versions[:-PREDECESSORS]:
            for name in COUNTERS:
                self.past_counts[name] = self.past_counts.get(name, 0) + getattr(version, name)
        self.predecessors = versions[-PREDECESSORS:]
        before.predecessors = []

    def include(self, other: CompiledRule) -> None:
        """Counts what another form of this rule evaluates."""
        other.waiting, other.response_times, other.statuses = self.waiting, self.response_times, self.statuses
        self.predecessors = [*self.predecessors, other]

    def snapshot(self) -> RuleSnapshot:
        """The counters of all versions of the rule."""
        versions = [*self.predecessors, self]
        counts = {name: self.past_counts.get(name, 0) + sum(getattr(one, name) for one in versions) for name in COUNTERS}
        times = Histogram(RESPONSE_BOUNDS_MS, tuple(self.response_times), counts.pop("sum_ms"))
        statuses = {f"{i}xx": n for i, n in enumerate(self.statuses) if n}
        return RuleSnapshot(self.name, waiting=len(self.waiting.requests), responses=times, statuses=statuses, **counts)
