"""A policy compiled for evaluation: its rules and exemptions, and which of them match a request's path and host.

A request is evaluated by one version of a policy, also when another one is loaded meanwhile. `match` caches the plan of each path
(its rules and exemptions), so that a known path costs one dictionary lookup. Plans are shared by all paths of one shape
(path_matcher.py): a path that clients invent adds its text to the cache, and nothing that grows with the number of rules. All of
this cache has one bound in bytes; when it is reached, the cache is emptied, which costs each path in use one walk of the tree.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from hmac import compare_digest
from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.algorithms.claim import Claim
    from cython.cimports.limitkeeper.policy.compiled_rule import CompiledRule, condition_holds
    from cython.cimports.limitkeeper.policy.request_context import RequestContext
else:
    from ..algorithms.claim import Claim
    from .compiled_rule import CompiledRule, condition_holds
    from .request_context import RequestContext

from ..errors import ConfigurationError
from ..stores.contract import Store
from .compiled_rule import compile_condition
from .identity.addresses import Networks
from .identity.client_ip import ClientIp
from .identity.host_names_and_patterns import host_of, patterns_of, possible_patterns
from .identity.identify import SEVERAL
from .identity.paths import MAX_PATH, canonical_value, readings
from .model import DEGRADE, Exemption, Identity, Policy, Rule
from .path_matcher import MESSAGE, Node, PathMatcher, Shape, all_below, matching
from .reading.import_string import import_all, import_object

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", MESSAGE)
#: Stands for all methods that no rule names: they have the same plans.
OTHER = ""
#: The most bytes of cached paths, hosts and plans, and the longest path or host among them.
CACHE_BYTES, LONGEST = 4 << 20, 256
#: First of the patterns of a Host header that can't be parsed: it may match every pattern.
UNREADABLE = "?"
#: The most rules that apply to a request because its host, or a path beyond MAX_PATH, may match: the policy's first ones.
MAX_UNSURE = 64
Handler = Callable[..., Any]


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
    to its end, the paths of exemptions that are spelt otherwise (`inexact`), and the plans by host pattern. `plan` is that of a
    host without patterns, `by_host` whether there are others; `match` is that of all paths, where no pattern `captures` a
    segment."""

    def __init__(self, method: str, readings: tuple[Shape, ...], unsure: Shape, captures: bool, inexact: frozenset[str]) -> None:
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

    def shape_of(self, method: str, sets: list[Shape], unsure: list[Node], inexact: frozenset[str]) -> PathShape:
        key = (method, tuple([tuple(map(id, one)) for one in sets]), tuple(map(id, unsure)), inexact)
        shape = self.shapes.get(key)
        if shape is None:
            captures = any(id(patterns) in self.matcher.capturing for one in sets for patterns in one)
            shape = PathShape(method, tuple(sets), tuple([all_below(node) for node in unsure]), captures, inexact)
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
            exact = [one for one in found if one.match.path not in shape.inexact and not (unreadable and one.match.host)]
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
