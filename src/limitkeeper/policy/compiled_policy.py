"""One version of a policy, prepared: a request that has begun with a version ends with it.

What a path means is worked out once: `matched` remembers, for the last few thousand paths, which rules they are meant by. A matched is
a list of rules, with the hosts to compare where a rule names some, and the exemptions that may apply.
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
    from cython.cimports.limitkeeper.policy.compiled_rule import CompiledRule, holds
    from cython.cimports.limitkeeper.policy.request_context import RequestContext
else:
    from .compiled_rule import CompiledRule, holds
    from .request_context import RequestContext

from ..errors import ConfigurationError
from .compiled_rule import condition
from .identity.addresses import Networks
from .identity.client_ip import ClientIp
from .identity.hosts import patterns_of
from .identity.paths import readings
from .model import DEGRADE, Exemption, Policy, Rule
from .path_matcher import PathMatcher, host_is_meant
from .reading.import_string import import_all, import_object

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "MESSAGE")
#: How many paths a compiled policy remembers, and how long they may be.
PATHS, LONGEST = 4096, 256
#: In the place of patterns: a Host that can't be read.
UNREADABLE = ("",)


@cython.cclass
class CompiledExemption:
    """An exemption at work."""

    __slots__ = ("headers", "networks", "rules", "when", "whole")

    def __init__(self, exemption: Exemption) -> None:
        self.networks: Any = Networks(exemption.networks) if exemption.networks else None
        self.headers = exemption.headers
        self.when: Any = condition(exemption.when)
        self.rules = frozenset(exemption.rules)
        self.whole = self.networks is None and not self.headers and self.when is None

    @cython.ccall
    def applies(self, identities: dict, context: RequestContext, address: Any) -> cython.bint:  # type: ignore[type-arg]
        """Whether everything that the exemption says (besides its match) holds."""
        if self.networks is not None:
            client = address.address(context)
            if client is None or not self.networks.holds(client):
                return False
        for name, value in self.headers:
            told = context.header(name)
            if told is None or not compare_digest(told.encode("utf-8", "surrogatepass"), value.encode()):
                return False
        return True if self.when is None else holds(identities, context, self.when)


@cython.cclass
class MatchedRules:
    """What a path is meant by: rules, the hosts that each wants (none: any), exemptions, and what its templates captured."""

    __slots__ = ("captured", "exempt", "exemptions", "hosts", "named", "narrow", "rules")

    def __init__(self, rules: list[CompiledRule], hosts: list[Any], exemptions: list[Any], captured: Mapping[str, str]) -> None:
        self.exempt = False
        for exemption, wanted in exemptions:
            if exemption.whole and not wanted:
                self.exempt = self.exempt or not exemption.rules
                kept = [i for i, compiled_rule in enumerate(rules) if compiled_rule.name not in exemption.rules]
                rules, hosts = [rules[i] for i in kept], [hosts[i] for i in kept]
        self.rules = rules
        self.hosts: Any = hosts if any(hosts) else None
        self.exemptions = [(exemption, wanted) for exemption, wanted in exemptions if not exemption.whole or wanted]
        self.captured: Any = captured or None
        self.named = frozenset([host for wanted in hosts for host in wanted])
        self.narrow: dict[tuple[str, ...], MatchedRules] = {}

    def within(self, patterns: tuple[str, ...], everything: bool | int) -> MatchedRules:
        """The matched for hosts that are meant by these patterns (or by all of them), made once: there are as many as the policy
        names, whatever hosts clients make up."""
        kept = [
            compiled_rule
            for compiled_rule, wanted in zip(self.rules, self.hosts, strict=True)
            if not wanted or everything or not set(wanted).isdisjoint(patterns)
        ]
        matched = MatchedRules(kept, [() for _ in kept], [], self.captured or {})
        matched.exempt, matched.exemptions = self.exempt, self.exemptions
        self.narrow[patterns] = matched
        return matched


@cython.cclass
class CompiledPolicy:
    """A policy made ready. `handlers` are the degrade handlers by name, for those the policy does not import itself."""

    # fmt: off
    __slots__ = (
        "address",
        "exemptions",
        "handlers",
        "identities",
        "known",
        "matcher",
        "policy",
        "remembered",
        "rules",
        "shut_key",
        "store",
    )
    # fmt: on

    def __init__(
        self, policy: Policy, handlers: Mapping[str, Callable[..., Any]] | None = None, imports: bool | int = True
    ) -> None:
        if imports:  # what the policy names is there from the first request on, or the gate is not made
            import_all(policy)
        self.policy = policy
        self.identities: dict[str, Any] = {"ip": ClientIp(), **policy.identify}
        ip = self.identities["ip"]
        self.address: Any = ip if hasattr(ip, "address") else ClientIp()
        self.rules = [CompiledRule(policy.name, rule, self.identities) for rule in policy.rules]
        degraded = [rule for rule in policy.rules if imports and is_degraded(rule)]
        self.handlers = {rule.name: handler_of(rule, handlers or {}) for rule in degraded}
        self.shut_key: Any = policy.penalty_box.key if policy.penalty_box is not None else None
        matches = [rule.match for rule in policy.rules] + [exemption.match for exemption in policy.exempt]
        self.matcher = PathMatcher(matches)
        self.exemptions: list[Any] = [CompiledExemption(exemption) for exemption in policy.exempt]
        self.known: dict[str, dict[str, MatchedRules]] = {method: {} for method in METHODS}
        self.remembered = 0
        self.store: Any = None  # that the gate has opened for it: what was charged under it goes back there

    def handler(self, rule: Rule) -> Callable[..., Any]:
        return self.handlers[rule.name]

    @cython.ccall
    def match(self, context: RequestContext) -> MatchedRules:
        """What a request's path is meant by, and what its templates captured."""
        paths: dict = self.known.get(context.method)  # type: ignore[type-arg,assignment]
        matched: MatchedRules
        if paths is not None:
            matched = paths.get(context.path)  # type: ignore[assignment]
            if matched is None:
                matched = self.find(context.method, context.path)
                self.remember(paths, context.path, matched)
        else:
            matched = self.find(context.method, context.path)
        if matched.captured is not None:
            context.captured = matched.captured
        return matched

    def find(self, method: str, path: str) -> MatchedRules:
        """A rule is meant by any reading of a path (most paths have one), an exemption only by all of them."""
        first, *others = [self.matcher.find(method, reading) for reading in readings(path)]
        hits, captured = dict(first[0]), first[1]
        n = len(self.rules)
        for found, named in others:
            told = dict(found)
            hits = {index: wanted for index, wanted in hits.items() if index < n or told.get(index) == wanted}
            for index, wanted in found:
                if index < n:
                    before = hits.get(index, wanted)
                    hits[index] = (*before, *wanted) if before and wanted else ()
            captured = {**named, **captured}
        ordered = sorted(hits.items())
        rules = [self.rules[index] for index, _ in ordered if index < n]
        hosts = [wanted for index, wanted in ordered if index < n]
        exemptions = [(self.exemptions[index - n], wanted) for index, wanted in ordered if index >= n]
        return MatchedRules(rules, hosts, exemptions, captured)

    def remember(self, paths: dict[str, MatchedRules], path: str, matched: MatchedRules) -> None:
        """Bounded: a flood of made-up paths makes the memory start again, never grow."""
        if len(path) > LONGEST:
            return
        if self.remembered >= PATHS:
            for known in self.known.values():
                known.clear()
            self.remembered = 0
        paths[path] = matched
        self.remembered += 1

    @cython.ccall
    def match_host(self, matched: MatchedRules, context: RequestContext) -> MatchedRules:
        """The matched for the host of a request, where rules name hosts. A Host that can't be read may well be read by the
        application: it is meant by all of them."""
        host: str = context.host()
        unreadable = not host and bool(context.header("host"))
        patterns = UNREADABLE if unreadable else tuple([one for one in patterns_of(host) if one in matched.named])
        found = matched.narrow.get(patterns)
        return matched.within(patterns, unreadable) if found is None else found

    @cython.ccall
    def exempted_rules(self, matched: MatchedRules, context: RequestContext) -> object:
        """None: nothing is exempt. True: everything. Otherwise the names of the rules that are not asked."""
        names: set = set()  # type: ignore[type-arg]
        for exemption, wanted in matched.exemptions:
            if wanted and not host_is_meant(wanted, context.host()):
                continue
            if exemption.applies(self.identities, context, self.address):
                if not exemption.rules:
                    return True
                names |= exemption.rules
        return names or None

    def close(self) -> None:
        """Lets go of what the rules read from elsewhere."""
        for compiled_rule in self.rules:
            if compiled_rule.overrides is not None:
                compiled_rule.overrides.close()


def is_degraded(rule: Rule) -> bool:
    return rule.on_refusal.action == DEGRADE


def handler_of(rule: Rule, handlers: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """A degrade handler: a callable, a name in `handlers`, or "package.module:attribute"."""
    handler = rule.on_refusal.handler
    if callable(handler):
        return handler  # type: ignore[no-any-return]
    if handler in handlers:
        return handlers[handler]
    if ":" not in str(handler):
        raise ConfigurationError(
            f"rule {rule.name!r}: no handler is called {handler!r}; give handlers={{{handler!r}: …}}, or write module:name"
        )
    return import_object(str(handler))  # type: ignore[no-any-return]
