"""A policy compiled for evaluation: its rules with their limits and counters, its exemptions, and the rules of each path.

A request is evaluated by one version of a policy, also when another one is loaded meanwhile. `match` caches which rules and
exemptions the last few thousand paths have, so that a known path costs one dictionary lookup.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hmac import compare_digest
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
from ..errors import ConfigurationError
from ..observe.snapshot import RESPONSE_BOUNDS_MS, Histogram, RuleSnapshot
from ..rate import Rate
from ..stores.contract import Store
from .identity.addresses import Networks, read_address
from .identity.callback_errors import CallbackErrors, callback_name
from .identity.client_ip import ClientIp
from .identity.hosts import patterns_of
from .identity.paths import readings
from .model import DEGRADE, SHADOW, SHARE, WAIT, Exemption, Identity, Key, Limits, Overrides, Policy, Rule, Tiers, When
from .path_matcher import PathMatcher, host_matches_any
from .reading.import_string import import_all, import_object

#: Counters of a rule, and how many of its earlier versions are still counted: their requests may not have ended.
# fmt: off
COUNTERS = ("passed", "refused", "waited", "queue_full", "degraded", "shadow_refused", "near", "alerts", "given_back",
            "replayed", "failed_open", "failed_closed", "failed_local", "sum_ms")
# fmt: on
PREDECESSORS = 8
#: The key of a rule without identities, and of unidentified requests under `unidentified: share`.
EVERYONE, UNIDENTIFIED = "*", "-"
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "MESSAGE")
#: How many paths are cached, and the longest of them; how many sets of limits a rule caches.
PATHS, LONGEST, MAX_ENTRIES = 4096, 256, 10_000
#: In the place of host patterns: a Host header that can't be parsed.
UNREADABLE = ("",)
#: (present, absent, equals) identities of a condition.
Condition = tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[str, frozenset[str]], ...]]
Handler = Callable[..., Any]

_absent = object()
#: Errors of cost callbacks.
callback_errors = CallbackErrors()


# Identities and keys -----------------------------------------------------------------------------------------------------


@cython.ccall
def identity_of(identities: dict, context: RequestContext, name: str) -> object:  # type: ignore[type-arg]
    """The value of an identity for a request, computed once per request; None: absent."""
    value = context.identities.get(name, _absent)
    if value is _absent:
        value = identities[name].of(context)
        context.identities[name] = value
    return value


@cython.ccall
def first_present(identities: dict, context: RequestContext, names: tuple, plain: cython.bint) -> object:  # type: ignore[type-arg]
    """The first of these identities that is present. With several names the value is prefixed by its name, so that a user called
    like an address does not share that address's key. `plain` omits the prefix where the value can't be taken for an address."""
    for name in names:
        value = identity_of(identities, context, name)
        if value is not None:
            if len(names) == 1 or (plain and not resembles_address(name, identities[name], value)):  # type: ignore[arg-type]
                return value
            return name + ":" + value
    return None


def resembles_address(name: str, identity: Identity, value: str) -> bool:
    """Whether a value that is not an address reads like one: a user may be called 203.0.113.9."""
    return name != "ip" and not isinstance(identity, ClientIp) and read_address(value.partition("/")[0]) is not None


def escape_part(value: object) -> str:
    """A part of a joined key, escaped: different lists of parts make different keys."""
    if value is None:
        return "-"
    text = str(value)
    return "%2D" if text == "-" else text.replace("%", "%25").replace("|", "%7C")


def join_key(parts: list[object]) -> str:
    """A key of several parts; an absent part is "-"."""
    return "|".join([escape_part(part) for part in parts])


@cython.ccall
def key_of(identities: dict, context: RequestContext, key: tuple, plain: cython.bint = False) -> object:  # type: ignore[type-arg]
    """The key of a request; None when all its parts are absent."""
    if not key:
        return EVERYONE
    if len(key) == 1:
        return first_present(identities, context, key[0], plain)
    parts = [first_present(identities, context, names, plain) for names in key]
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


def compile_condition(when: When) -> Condition | None:
    if not (when.present or when.absent or when.equals):
        return None
    return (when.present, when.absent, tuple((name, frozenset(values)) for name, values in when.equals))


# Costs --------------------------------------------------------------------------------------------------------------------


def request_cost(rule: Rule, context: RequestContext) -> int:
    """A cost that depends on the request, at most `most`; what is no whole number costs the default. A client can't declare its
    own request free: 0 is a cost only where the default is 0, and for a callback of the application."""
    cost = rule.cost
    if cost.call is not None:
        return callback_cost(rule, cost.call, context)
    if context.differs(cost.source, cost.name):  # several values, of which the application may use any
        return cost.most
    text = context.header(cost.name) if cost.source == "header" else context.query(cost.name)
    if text is None or not text.isascii() or not text.isdigit():
        return cost.units
    units = int(text) if len(text) <= 18 else cost.most
    return max(min(1, cost.units), min(units, cost.most))


def callback_cost(rule: Rule, call: Callable[[Any], int], context: RequestContext) -> int:
    """The cost that a callback of the application returns; the default when it raises, or returns no whole number."""
    default = rule.cost.units
    try:
        units = call(context)
    except Exception as error:
        callback_errors.report("%s raised %s: the request costs %d", callback_name(call), type(error).__name__, default)
        return default
    if isinstance(units, bool) or not isinstance(units, int):
        callback_errors.report(
            "%s returned a %s, not an integer: it costs %d", callback_name(call), type(units).__name__, default
        )
        return default
    return max(0, min(units, rule.cost.most))


# Rules --------------------------------------------------------------------------------------------------------------------


@cython.cclass
class Entry:
    """One limit of one rule: `named` is the store's limit, `label` the name in header fields, `rule` the policy's rule.

    `field_template` is a cache of the web package: the encoded part of the header fields that never changes.
    """

    __slots__ = ("compiled_rule", "field_template", "label", "named", "rule")

    def __init__(self, rule: Rule, named: NamedLimit, label: str, compiled_rule: CompiledRule = None) -> None:  # type: ignore[assignment]
        self.rule = rule
        self.named = named
        self.label = label
        self.compiled_rule = compiled_rule
        self.field_template: Any = None

    def __repr__(self) -> str:
        return f"<Entry {self.label}: {self.named.limit}>"


class WaitingCount:
    """How many requests wait for a rule now, in all its versions."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


@cython.cclass
class CompiledRule:
    """One rule of a compiled policy, `config` its definition. A reload hands the counters on to the rule of the same name."""

    # fmt: off
    __slots__ = ("alert", "alerts", "condition", "config", "constant_cost", "default_entries", "degraded", "entries_by_limits",
                 "failed_closed", "failed_local", "failed_open", "given_back", "has_alternatives", "idempotent", "identities",
                 "key", "limiter", "name", "near", "needs_settlement", "overrides", "passed", "past_counts", "predecessors",
                 "queue_full", "refused", "replayed", "response_times", "shadow", "shadow_refused", "share_unidentified",
                 "single_identity", "static_overrides", "statuses", "sum_ms", "tier_entries", "tier_identity", "waited",
                 "waiting", "waits")
    # fmt: on

    def __init__(self, limiter: str, rule: Rule, identities: dict[str, Identity]) -> None:
        self.limiter = limiter
        self.config = rule
        self.name = rule.name
        self.identities = identities
        self.condition = compile_condition(rule.when)
        self.key: Key = rule.key
        self.single_identity = rule.key[0][0] if len(rule.key) == 1 and len(rule.key[0]) == 1 else None
        self.has_alternatives = any(len(names) > 1 for names in rule.key)
        self.share_unidentified = rule.unidentified == SHARE
        self.entries_by_limits: dict[Limits, tuple[Entry, ...]] = {}
        self.tier_identity: str | None = None
        self.tier_entries: dict[str, tuple[Entry, ...]] = {}
        if isinstance(rule.limit, Tiers):
            self.tier_identity = rule.limit.by
            self.tier_entries = {value: self.entries_of(limits) for value, limits in rule.limit.limits}
        self.default_entries = self.entries_of(rule.limit.otherwise if isinstance(rule.limit, Tiers) else rule.limit)
        self.static_overrides = {key: self.entries_of(limits) for key, limits in rule.override}
        self.overrides: Overrides | None = rule.overrides
        cost = rule.cost
        self.constant_cost = cost.units if cost.source in ("constant", "response") else -1
        self.idempotent: NamedLimit | None = None  # counts the repetitions of an idempotency key
        if rule.once is not None:
            limit = FixedWindow(Rate(rule.once.replays + 1, rule.once.keep_us), align="first")
            self.idempotent = NamedLimit(limiter, f"{rule.name} once", limit)
        self.needs_settlement = cost.source == "response" or bool(rule.charge.statuses) or rule.charge.call is not None
        self.shadow = rule.on_refusal.action == SHADOW
        self.waits = rule.on_refusal.action == WAIT
        self.alert = -1.0 if rule.alert is None else rule.alert
        self.passed = self.refused = self.waited = self.queue_full = self.degraded = self.shadow_refused = self.near = 0
        self.alerts = self.given_back = self.replayed = self.failed_open = self.failed_closed = self.failed_local = 0
        self.waiting = WaitingCount()
        self.predecessors: list[CompiledRule] = []
        self.past_counts: dict[str, Any] = {}
        self.response_times = [0] * (len(RESPONSE_BOUNDS_MS) + 1)
        self.statuses = [0] * 6
        self.sum_ms = 0.0

    def entries_of(self, limits: Limits) -> tuple[Entry, ...]:
        """The entries of these limits. They are cached, because a NamedLimit remembers its handle in the store."""
        found = self.entries_by_limits.get(limits)
        if found is None:
            if len(self.entries_by_limits) >= MAX_ENTRIES:  # overrides with a limit of its own for every key
                self.entries_by_limits.clear()
            labels = [self.name if i == 0 else f"{self.name}.{i + 1}" for i in range(len(limits))]
            found = tuple(
                Entry(self.config, NamedLimit(self.limiter, label, limit), label, self)
                for label, limit in zip(labels, limits, strict=True)
            )
            self.entries_by_limits[limits] = found
        return found

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
        if value is None and self.share_unidentified:
            return UNIDENTIFIED
        return value

    @cython.ccall
    def entries_for(self, context: RequestContext, key: str) -> tuple:  # type: ignore[type-arg]
        """The limits of a key: its override, those of its tier, or the rule's own; none: unlimited."""
        if self.static_overrides or self.overrides is not None:
            found = self.static_overrides.get(key)
            if found is None and self.has_alternatives:  # an override may name the identity ("user:42") or its value alone
                key = key_of(self.identities, context, self.key, True) or key  # type: ignore[assignment]
                found = self.static_overrides.get(key)
            if found is not None:
                return found
            limits = None if self.overrides is None else self.overrides.get(key)
            if limits is not None:
                return self.entries_of(tuple(limits))
        if self.tier_identity is None:
            return self.default_entries
        tier = identity_of(self.identities, context, self.tier_identity)
        return self.tier_entries.get(tier, self.default_entries)  # type: ignore[call-overload, no-any-return]

    @cython.ccall
    def cost_for(self, context: RequestContext) -> cython.longlong:
        if self.constant_cost >= 0:
            return self.constant_cost
        return request_cost(self.config, context)

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

    __slots__ = ("condition", "headers", "networks", "rules", "unconditional")

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
            client = address.address(context)
            if client is None or not self.networks.holds(client):
                return False
        for name, secret in self.headers:
            value = context.header(name)
            if value is None or not compare_digest(value.encode("utf-8", "surrogatepass"), secret.encode()):
                return False
        return True if self.condition is None else condition_holds(identities, context, self.condition)


# Policies -----------------------------------------------------------------------------------------------------------------


@cython.cclass
class MatchedRules:
    """What a path matches: rules, the host patterns of each (none: any host), exemptions with theirs, and captured segments."""

    __slots__ = ("by_host", "captured", "claims", "exempt", "exemptions", "host_patterns", "hosts", "names", "rules")

    def __init__(
        self,
        rules: list[CompiledRule],
        hosts: list[tuple[str, ...]],
        exemptions: list[tuple[CompiledExemption, tuple[str, ...]]],
        captured: Mapping[str, str],
    ) -> None:
        self.exempt = False
        for exemption, patterns in exemptions:
            if exemption.unconditional and not patterns:
                self.exempt = self.exempt or not exemption.rules
                kept = [i for i, rule in enumerate(rules) if rule.name not in exemption.rules]
                rules, hosts = [rules[i] for i in kept], [hosts[i] for i in kept]
        self.rules = rules
        self.hosts = hosts if any(hosts) else None
        self.exemptions = [(exemption, patterns) for exemption, patterns in exemptions if not exemption.unconditional or patterns]
        self.captured = captured or None
        self.host_patterns = frozenset([host for patterns in hosts for host in patterns])
        self.by_host: dict[tuple[str, ...], MatchedRules] = {}
        self.claims: list[Claim] | None = None  # of the last evaluation, used again by the next
        self.names: tuple[str, ...] = ()

    def narrow(self, patterns: tuple[str, ...], every: bool | int) -> MatchedRules:
        """The rules for hosts that match these patterns (`every`: any host pattern), cached by patterns: their number is bounded
        by the policy, whatever hosts clients send."""
        assert self.hosts is not None
        kept = [
            rule
            for rule, wanted in zip(self.rules, self.hosts, strict=True)
            if not wanted or every or not set(wanted).isdisjoint(patterns)
        ]
        matched = MatchedRules(kept, [() for _ in kept], [], self.captured or {})
        matched.exempt, matched.exemptions = self.exempt, self.exemptions
        self.by_host[patterns] = matched
        return matched


@cython.cclass
class CompiledPolicy:
    """A policy ready for evaluation. `handlers` are degrade handlers by name; `imports` imports the callables that it names, so
    that a missing one is an error now and not at the first request. `store` is the gate's store for this version."""

    # fmt: off
    __slots__ = ("_cached", "_matcher", "cached_paths", "client_ip", "exemptions", "handlers", "identities", "policy", "rules",
                 "store")
    # fmt: on

    def __init__(self, policy: Policy, handlers: Mapping[str, Handler] | None = None, imports: bool | int = True) -> None:
        if imports:
            import_all(policy)
        self.policy = policy
        self.identities: dict[str, Identity] = {"ip": ClientIp(), **policy.identify}
        ip = self.identities["ip"]
        self.client_ip = ip if hasattr(ip, "address") else ClientIp()
        self.rules = [CompiledRule(policy.name, rule, self.identities) for rule in policy.rules]
        degraded = [rule for rule in policy.rules if imports and rule.on_refusal.action == DEGRADE]
        self.handlers = {rule.name: handler_of(rule, handlers or {}) for rule in degraded}
        self._matcher = PathMatcher([rule.match for rule in policy.rules] + [exemption.match for exemption in policy.exempt])
        self.exemptions = [CompiledExemption(exemption) for exemption in policy.exempt]
        self.cached_paths: dict[str, dict[str, MatchedRules]] = {method: {} for method in METHODS}
        self._cached = 0
        self.store: Store = None  # type: ignore[assignment]

    def handler(self, rule: Rule) -> Handler:
        """The degrade handler of a rule."""
        return self.handlers[rule.name]

    @cython.ccall
    def match(self, context: RequestContext) -> MatchedRules:
        """The rules and exemptions of a request's path; captured segments are left in the context."""
        paths: dict = self.cached_paths.get(context.method)  # type: ignore[type-arg,assignment]
        matched: MatchedRules
        if paths is not None:
            matched = paths.get(context.path)  # type: ignore[assignment]
            if matched is None:
                matched = self.find(context.method, context.path)
                self._cache(paths, context.path, matched)
        else:
            matched = self.find(context.method, context.path)
        if matched.captured is not None:
            context.captured = matched.captured
        return matched

    def find(self, method: str, path: str) -> MatchedRules:
        """As `match`, uncached. A rule matches any reading of a path (most paths have one), an exemption only all of them."""
        first, *others = [self._matcher.find(method, reading) for reading in readings(path)]
        hits, captured = dict(first[0]), first[1]
        n = len(self.rules)
        for found, named in others:
            also = dict(found)
            hits = {index: patterns for index, patterns in hits.items() if index < n or also.get(index) == patterns}
            for index, patterns in found:
                if index < n:
                    before = hits.get(index, patterns)
                    hits[index] = (*before, *patterns) if before and patterns else ()
            captured = {**named, **captured}
        ordered = sorted(hits.items())
        rules = [self.rules[index] for index, _ in ordered if index < n]
        hosts = [patterns for index, patterns in ordered if index < n]
        exemptions = [(self.exemptions[index - n], patterns) for index, patterns in ordered if index >= n]
        return MatchedRules(rules, hosts, exemptions, captured)

    def _cache(self, paths: dict[str, MatchedRules], path: str, matched: MatchedRules) -> None:
        """Bounded: a full cache is cleared."""
        if len(path) > LONGEST:
            return
        if self._cached >= PATHS:
            for cached in self.cached_paths.values():
                cached.clear()
            self._cached = 0
        paths[path] = matched
        self._cached += 1

    @cython.ccall
    def match_host(self, matched: MatchedRules, context: RequestContext) -> MatchedRules:
        """The rules for the host of a request, where rules name hosts. The application may be able to parse a Host header that
        this package can't: such a request matches every host pattern."""
        host: str = context.host()
        unreadable = not host and bool(context.header("host"))
        patterns = UNREADABLE if unreadable else tuple([one for one in patterns_of(host) if one in matched.host_patterns])
        found = matched.by_host.get(patterns)
        return matched.narrow(patterns, unreadable) if found is None else found

    @cython.ccall
    def exempted_rules(self, matched: MatchedRules, context: RequestContext) -> object:
        """None: no rule is exempted. True: all of them. Otherwise the names of the exempted rules."""
        names: set = set()  # type: ignore[type-arg]
        for exemption, patterns in matched.exemptions:
            if patterns and not host_matches_any(patterns, context.host()):
                continue
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
