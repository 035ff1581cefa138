"""A policy compiled for evaluation: its rules with their limits and counters, its exemptions, and the rules of each path.

A request is evaluated by one version of a policy, also when another one is loaded meanwhile. `match` caches the plan of each path
(its rules and exemptions), so that a known path costs one dictionary lookup. Plans are shared by all paths of one shape
(path_matcher.py): a path that clients invent adds its text to the cache, and nothing that grows with the number of rules. All of
this cache has one bound in bytes; when it is reached, the cache is emptied, which costs each path in use one walk of the tree.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from hmac import compare_digest
from types import SimpleNamespace
from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.algorithms.claim import Claim, NamedLimit
    from cython.cimports.limitkeeper.policy.request_context import RequestContext
else:
    from ..algorithms.claim import Claim, NamedLimit
    from .request_context import RequestContext

from ..algorithms.fixed_window import FixedWindow
from ..algorithms.token_bucket import TokenBucket
from ..errors import ConfigurationError
from ..observe.snapshot import RESPONSE_BOUNDS_MS, Histogram, RuleSnapshot
from ..rate import Rate
from ..stores.contract import Store
from .burst_conflicts import BUCKETS
from .callback_errors import CallbackErrors
from .identity.addresses import Networks
from .identity.client_ip import ClientIp, without_name
from .identity.host_names_and_patterns import host_of, patterns_of, possible_patterns
from .identity.identify import SEVERAL
from .identity.key_and_cache_bounds import remember
from .identity.paths import MAX_PATH, canonical_value, readings
from .model import BLOCKED, DEGRADE, SHADOW, SHARE, WAIT, Exemption, Identity, Key, Limits, Overrides, Policy, Rule, Tiers, When
from .path_matcher import MESSAGE, Node, PathMatcher, Pattern, Shape, all_below, matching
from .reading.import_string import import_all, import_object
from .request_cost import request_cost

#: Counters of a rule, and how many of its earlier versions are still counted: their requests may not have ended.
# fmt: off
COUNTERS = ("passed", "refused", "waited", "queue_full", "degraded", "shadow_refused", "near", "alerts", "given_back",
            "replayed", "failed_open", "failed_closed", "failed_local", "sum_ms")
# fmt: on
PREDECESSORS = 8
#: The key of a rule without identities, and of unidentified requests under `unidentified: share`.
EVERYONE, UNIDENTIFIED = "*", "-"
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", MESSAGE)
#: Stands for all methods that no rule names: they have the same plans.
OTHER = ""
#: The most bytes of cached paths, hosts and plans, the longest path or host among them; how many sets of limits a rule caches.
CACHE_BYTES, LONGEST, MAX_ENTRIES = 4 << 20, 256, 10_000
#: First of the patterns of a Host header that can't be parsed: it may match every pattern.
UNREADABLE = "?"
#: The most rules that apply to a request because its host, or a path beyond MAX_PATH, may match: the policy's first ones.
MAX_UNSURE = 64
Handler = Callable[..., Any]

_absent = object()
#: Overrides at run time with a burst above the declared capacity.
large_overrides, LARGE = CallbackErrors(), "%s: an override of %s exceeds the safe concurrency %d"


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
        self.static_overrides = {key: self.entries_of(limits) for key, limits in rule.override}
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
        self.waiting = SimpleNamespace(count=0, clients={})  # requests that wait now, for all versions of the rule
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
        return RuleSnapshot(self.name, waiting=self.waiting.count, responses=times, statuses=statuses, **counts)


@cython.cclass
class CompiledExemption:
    """One exemption of a compiled policy. `unconditional`: whatever it matches is exempt."""

    def __init__(self, exemption: Exemption) -> None:
        self.networks = Networks(exemption.networks) if exemption.networks else None
        self.headers = exemption.headers
        self.condition = compile_condition(exemption.when)
        self.rules = frozenset(exemption.rules)
        self.unconditional = self.networks is None and not self.headers and self.condition is None

    @cython.ccall
    def applies(self, identities: dict, context: RequestContext, address: Any) -> cython.bint:  # type: ignore[type-arg]
        """Whether networks, headers and condition all hold; the match is the caller's part."""
        if self.networks is not None:
            client = context.given_address() or address.address(context)
            if client is None or not self.networks.holds(client):
                return False
        for name, secret in self.headers:
            value = context.header(name)
            if value is None or not compare_digest(value.encode("utf-8", "surrogatepass"), secret.encode()):
                return False
        return True if self.condition is None else condition_holds(identities, context, self.condition)


@cython.cclass
class MatchedRules:
    """A plan: the rules and exemptions of a request, and what its path captures, as (name, reading, segment). Shared by many
    paths."""

    def __init__(
        self, rules: list[CompiledRule], exemptions: list[CompiledExemption], captures: tuple[tuple[str, int, int], ...]
    ) -> None:
        unconditional = [exemption for exemption in exemptions if exemption.unconditional]
        self.exempt = any(not exemption.rules for exemption in unconditional)
        self.rules = [rule for rule in rules if not any(rule.name in exemption.rules for exemption in unconditional)]
        self.exemptions = [exemption for exemption in exemptions if not exemption.unconditional]
        self.captures = captures
        self.claims: list[Claim] | None = None  # of the last evaluation, used again by the next
        self.names: tuple[str, ...] = ()

    def capture(self, readings: tuple[list[str], ...]) -> dict[str, str]:
        """The captured segments of a path; those that its readings disagree about are SEVERAL, as repeated parameters are."""
        found: dict[tuple[str, int], str] = {(name, number): readings[number][depth] for name, number, depth in self.captures}
        captured: dict[str, str] = {}
        for (name, _), value in found.items():
            same = canonical_value(captured.setdefault(name, value)) == canonical_value(value)
            captured[name] = captured[name] if same else SEVERAL
        return captured


@cython.cclass
class PathShape:
    """What all paths of one shape have in common: the pattern sets of each reading, those that may match a path that was not read
    to its end, the exemptions that are spelt in another way (`inexact`), and the plans by host pattern. `plan` is that of a host
    without patterns, `by_host` whether there are others; `match` is that of all paths, where no pattern `captures` a segment."""

    def __init__(self, method: str, readings: tuple[Shape, ...], unsure: Shape, captures: bool, inexact: set[Pattern]) -> None:
        self.method, self.inexact = method, inexact
        self.readings = readings
        self.unsure = unsure
        self.by_host = any(len(patterns) > 1 or "" not in patterns for shape in (*readings, unsure) for patterns in shape)
        self.plan: MatchedRules = None  # type: ignore[assignment]
        self.plans: dict[tuple[str, ...], MatchedRules] = {}
        self.captures = captures
        self.match = PathMatch(self, ())
        self.first: list[int] | None = None

    def first_rules(self, n: int) -> list[int]:
        """The first rules that match on any host."""
        if self.first is None:
            patterns = [one for shape in (*self.readings, self.unsure) for one in matching(shape, self.method, None)]
            self.first = sorted({pattern.rule for pattern in patterns if pattern.rule < n})[:MAX_UNSURE]
        return self.first


@cython.cclass
class PathMatch:
    """The shape of a path, the segments of its readings where some are captured, and what its last plan captured of them."""

    def __init__(self, shape: PathShape, readings: tuple[list[str], ...]) -> None:
        self.shape = shape
        self.readings = readings
        self.captured: tuple[MatchedRules | None, dict[str, str] | None] = (None, None)


@cython.cclass
class CompiledPolicy:
    """A policy ready for evaluation. `handlers` are degrade handlers by name; `imports` imports the callables that it names, so
    that a missing one is an error now and not at the first request. `store` is the gate's; `remote`: it may wait.
    `limits_messages`: a rule applies to messages; otherwise streams are not touched. `waits`, `concurrent`: a rule does."""

    def __init__(self, policy: Policy, handlers: Mapping[str, Handler] | None = None, imports: bool | int = True) -> None:
        if imports:
            import_all(policy)
        self.policy = policy
        self.identities: dict[str, Identity] = {"ip": ClientIp(), **policy.identify}
        ip = self.identities["ip"]
        self.client_ip = ip if hasattr(ip, "address") else ClientIp()
        self.rules = [CompiledRule(policy.name, rule, self.identities) for rule in policy.rules]
        self.rules_by_name = {rule.name: rule for rule in self.rules}
        degraded = [rule for rule in policy.rules if imports and rule.on_refusal.action == DEGRADE]
        self.handlers = {rule.name: handler_of(rule, handlers or {}) for rule in degraded}
        self.matcher = PathMatcher([rule.match for rule in policy.rules], [exemption.match for exemption in policy.exempt])
        self.exemptions = [CompiledExemption(exemption) for exemption in policy.exempt]
        self.limits_messages = any(MESSAGE in match.methods for rule in policy.rules for match in rule.match)
        self.waits = any(rule.waits for rule in self.rules)
        self.concurrent = any(rule.concurrent is not None for rule in policy.rules)
        named = {*self.matcher.methods, *(("HEAD",) if "GET" in self.matcher.methods else ()), MESSAGE, OTHER}
        self.cached_paths: dict[str, dict[str | tuple[str, str], PathMatch]] = {method: {} for method in named}
        self.cached_paths |= {method: self.cached_paths[OTHER] for method in METHODS if method not in named}
        self.cached_hosts: dict[str, tuple[str, ...]] = {}
        self.shapes: dict[object, PathShape] = {}
        self.cached_bytes, self.remote = 0, False
        self.store: Store = None  # type: ignore[assignment]
        self.version: Any = None  # keeps the store open while a request of this version runs

    @cython.ccall
    def match(self, context: RequestContext) -> MatchedRules:
        """The rules and exemptions of a request's path and host; captured segments are left in the context. Those that the
        framework has captured and converted itself stay."""
        paths: dict = self.cached_paths.get(context.method)  # type: ignore[type-arg,assignment]
        found: PathMatch = None if paths is None or context.routed is not None else paths.get(context.path)  # type: ignore[assignment]
        if found is None:
            found = self.find(context)
        shape: PathShape = found.shape
        matched: MatchedRules = self.match_host(shape, context) if shape.by_host else shape.plan
        if matched.captures:
            captured: tuple = found.captured  # type: ignore[type-arg]
            if captured[0] is not matched:  # in one object, so that threads see the two together
                captured = found.captured = (matched, matched.capture(found.readings))
            given = context.captured
            context.captured = captured[1] if not given or given is captured[1] else {**captured[1], **given}
        return matched

    def find(self, context: RequestContext) -> PathMatch:
        """Walks the tree, and caches the result. A rule matches any reading of a path (most paths have one), an exemption only
        all of them. A path beyond MAX_PATH is not read to its end: rules for all that it may be match, and no exemption."""
        method = context.method if context.method in self.cached_paths else OTHER
        paths, path, routed = self.cached_paths[method], context.path, context.routed
        key: str | tuple[str, str] = path if routed is None else (path, routed)  # a joined text might be another path
        known = paths.get(key)
        if known is not None:
            return known
        texts = dict.fromkeys([*readings(path), *(() if routed is None else readings(routed))])
        segments = tuple([self.matcher.segments_of(text) for text in texts])
        walks = [self.matcher.walk(one) for one in segments]
        unsure: list[Node] = []
        if len(path) > MAX_PATH:  # dots in the rest may lead anywhere
            unsure = [self.matcher.root] if "." in path or "%" in path else [node for _, nodes in walks for node in nodes]
        sets = [one for one, _ in walks]
        inexact = self.matcher.inexact(sets, (path,) if routed is None else (path, routed))
        shape = self.shape_of(OTHER if paths is self.cached_paths[OTHER] else method, sets, unsure, inexact)
        found = PathMatch(shape, segments) if shape.captures else shape.match
        if len(path) + len(routed or "") <= LONGEST:
            size = sum([sys.getsizeof(text) for text in (path, routed or "")], 192)
            if shape.captures:  # its segments, and the dictionary of those that are captured
                size += sum([64 * len(one) + 2 * sys.getsizeof("".join(one)) for one in segments], 600)
                size += 128 * len(shape.plan.captures)
            self.cache(paths, key, found, size)
        return found

    def shape_of(self, method: str, sets: list[Shape], unsure: list[Node], inexact: frozenset[Pattern]) -> PathShape:
        key = (method, tuple([tuple(map(id, one)) for one in sets]), tuple(map(id, unsure)), inexact)
        shape = self.shapes.get(key)
        if shape is None:
            captures = any(id(patterns) in self.matcher.capturing for one in sets for patterns in one)
            shape = PathShape(method, tuple(sets), tuple([all_below(node) for node in unsure]), captures, set(inexact))
            shape.plan = self.plan_of(shape, ())
            self.cache(self.shapes, key, shape, 1024 + 64 * sum(map(len, sets)))
        return shape

    def plan_of(self, shape: PathShape, hosts: tuple[str, ...]) -> MatchedRules:
        """The plan of a shape for these host patterns."""
        n, unreadable = len(self.rules), UNREADABLE in hosts
        indexes: set[int] = set()
        exempt = None if shape.unsure else set(range(n, n + len(self.exemptions)))
        captures: dict = {}  # type: ignore[type-arg]
        for number, sets in enumerate(shape.readings):
            found = list(matching(sets, shape.method, hosts))
            indexes |= {pattern.rule for pattern in found if pattern.rule < n}
            exact = [one for one in found if one not in shape.inexact and not (unreadable and one.match.host)]
            exempt = exempt and exempt & {pattern.rule for pattern in exact}
            captures |= {(name, number, depth): None for pattern in found for depth, name in pattern.names}
        unsure = {pattern.rule for pattern in matching(shape.unsure, shape.method, hosts) if pattern.rule < n}
        unsure.update(shape.first_rules(n) if unreadable else ())
        ordered = sorted(indexes | set(sorted(unsure - indexes)[: max(0, MAX_UNSURE - len(indexes))]))
        plan = MatchedRules(
            [self.rules[index] for index in ordered],
            [self.exemptions[index - n] for index in sorted(exempt or ())],
            tuple(captures),
        )
        self.cache(shape.plans, hosts, plan, 1024 + 512 * len(ordered))
        return plan

    @cython.ccall
    def match_host(self, shape: PathShape, context: RequestContext) -> MatchedRules:
        """The plan for the host of a request, where rules name hosts."""
        header = context.header("host")
        if not header:
            return shape.plan
        hosts = self.cached_hosts.get(header)
        if hosts is None:
            hosts = self.patterns_of_header(header)
        plan = shape.plans.get(hosts)
        return self.plan_of(shape, hosts) if plan is None else plan

    def patterns_of_header(self, header: str) -> tuple[str, ...]:
        """The policy's patterns that a Host header matches. The application may be able to parse one that this package can't: it
        matches every pattern, those of the names in it first."""
        host = host_of(header)
        patterns = patterns_of(host) if host else possible_patterns(header)
        found = tuple(dict.fromkeys([one for one in patterns if one in self.matcher.hosts]))
        found = found if host else (UNREADABLE, *found)
        if len(header) <= LONGEST:
            self.cache(self.cached_hosts, header, found, sys.getsizeof(header) + 256 + 8 * len(found))
        return found

    def cache(self, cache: dict, key: object, value: object, size: int) -> None:  # type: ignore[type-arg]
        """Adds an entry of about so many bytes. The cache is emptied where it would exceed CACHE_BYTES."""
        self.cached_bytes += size
        if self.cached_bytes > CACHE_BYTES:
            self.cached_bytes = size
            for one in (self.cached_hosts, self.shapes, *self.cached_paths.values()):
                one.clear()  # type: ignore[attr-defined]
        cache[key] = value

    @cython.ccall
    def exempted_rules(self, matched: MatchedRules, context: RequestContext) -> object:
        """None: no rule is exempted. True: all of them. Otherwise the names of the exempted rules."""
        names: set = set()  # type: ignore[type-arg]
        exemption: CompiledExemption
        for exemption in matched.exemptions:
            if exemption.applies(self.identities, context, self.client_ip):
                if not exemption.rules:
                    return True
                names |= exemption.rules
        return names or None

    def close(self) -> None:
        """Stops reading overrides."""
        for rule in self.rules:
            if rule.overrides is not None:
                rule.overrides.close()


def handler_of(rule: Rule, handlers: Mapping[str, Handler]) -> Handler:
    """A degrade handler: a callable, a name in `handlers`, or "package.module:attribute"."""
    handler = rule.on_refusal.handler
    if callable(handler):
        return handler  # type: ignore[no-any-return]
    if handler in handlers:
        return handlers[handler]
    if ":" not in str(handler):
        raise ConfigurationError(
            f"rule {rule.name!r}: unknown handler {handler!r}; pass handlers={{{handler!r}: …}}, or write module:name"
        )
    return import_object(str(handler))  # type: ignore[no-any-return]
