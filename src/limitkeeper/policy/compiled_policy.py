"""One version of a policy, prepared: a request that has begun with a version ends with it.

What a path means is worked out once: `plan` remembers, for the last few thousand paths, which rules they are meant by. A plan is
a list of clauses, with the hosts to compare where a rule names some, and the exemptions that may apply.
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
#: How many paths an edition remembers, and how long they may be.
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
    def applies(self, identities: dict, facts: RequestContext, address: Any) -> cython.bint:  # type: ignore[type-arg]
        """Whether everything that the exemption says (besides its match) holds."""
        if self.networks is not None:
            client = address.address(facts)
            if client is None or not self.networks.holds(client):
                return False
        for name, value in self.headers:
            told = facts.header(name)
            if told is None or not compare_digest(told.encode("utf-8", "surrogatepass"), value.encode()):
                return False
        return True if self.when is None else holds(identities, facts, self.when)


@cython.cclass
class MatchedRules:
    """What a path is meant by: clauses, the hosts that each wants (none: any), exemptions, and what its templates captured."""

    __slots__ = ("captured", "clauses", "exempt", "hosts", "named", "narrow", "pardons")

    def __init__(self, clauses: list[CompiledRule], hosts: list[Any], pardons: list[Any], captured: Mapping[str, str]) -> None:
        self.exempt = False
        for pardon, wanted in pardons:
            if pardon.whole and not wanted:
                self.exempt = self.exempt or not pardon.rules
                kept = [i for i, clause in enumerate(clauses) if clause.name not in pardon.rules]
                clauses, hosts = [clauses[i] for i in kept], [hosts[i] for i in kept]
        self.clauses = clauses
        self.hosts: Any = hosts if any(hosts) else None
        self.pardons = [(pardon, wanted) for pardon, wanted in pardons if not pardon.whole or wanted]
        self.captured: Any = captured or None
        self.named = frozenset([host for wanted in hosts for host in wanted])
        self.narrow: dict[tuple[str, ...], MatchedRules] = {}

    def within(self, patterns: tuple[str, ...], everything: bool | int) -> MatchedRules:
        """The plan for hosts that are meant by these patterns (or by all of them), made once: there are as many as the policy
        names, whatever hosts clients make up."""
        kept = [
            clause
            for clause, wanted in zip(self.clauses, self.hosts, strict=True)
            if not wanted or everything or not set(wanted).isdisjoint(patterns)
        ]
        plan = MatchedRules(kept, [() for _ in kept], [], self.captured or {})
        plan.exempt, plan.pardons = self.exempt, self.pardons
        self.narrow[patterns] = plan
        return plan


@cython.cclass
class CompiledPolicy:
    """A policy made ready. `handlers` are the degrade handlers by name, for those the policy does not import itself."""

    # fmt: off
    __slots__ = ("address", "clauses", "handlers", "identities", "known", "matcher", "pardons", "policy", "remembered",
                 "shut_key", "store")
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
        self.clauses = [CompiledRule(policy.name, rule, self.identities) for rule in policy.rules]
        degraded = [rule for rule in policy.rules if imports and is_degraded(rule)]
        self.handlers = {rule.name: handler_of(rule, handlers or {}) for rule in degraded}
        self.shut_key: Any = policy.penalty_box.key if policy.penalty_box is not None else None
        matches = [rule.match for rule in policy.rules] + [exemption.match for exemption in policy.exempt]
        self.matcher = PathMatcher(matches)
        self.pardons: list[Any] = [CompiledExemption(exemption) for exemption in policy.exempt]
        self.known: dict[str, dict[str, MatchedRules]] = {method: {} for method in METHODS}
        self.remembered = 0
        self.store: Any = None  # that the gate has opened for it: what was charged under it goes back there

    def handler(self, rule: Rule) -> Callable[..., Any]:
        return self.handlers[rule.name]

    @cython.ccall
    def plan(self, facts: RequestContext) -> MatchedRules:
        """What a request's path is meant by, and what its templates captured."""
        paths: dict = self.known.get(facts.method)  # type: ignore[type-arg,assignment]
        plan: MatchedRules
        if paths is not None:
            plan = paths.get(facts.path)  # type: ignore[assignment]
            if plan is None:
                plan = self.find(facts.method, facts.path)
                self.remember(paths, facts.path, plan)
        else:
            plan = self.find(facts.method, facts.path)
        if plan.captured is not None:
            facts.captured = plan.captured
        return plan

    def find(self, method: str, path: str) -> MatchedRules:
        """A rule is meant by any reading of a path (most paths have one), an exemption only by all of them."""
        first, *others = [self.matcher.find(method, reading) for reading in readings(path)]
        hits, captured = dict(first[0]), first[1]
        n = len(self.clauses)
        for found, named in others:
            told = dict(found)
            hits = {index: wanted for index, wanted in hits.items() if index < n or told.get(index) == wanted}
            for index, wanted in found:
                if index < n:
                    before = hits.get(index, wanted)
                    hits[index] = (*before, *wanted) if before and wanted else ()
            captured = {**named, **captured}
        ordered = sorted(hits.items())
        clauses = [self.clauses[index] for index, _ in ordered if index < n]
        hosts = [wanted for index, wanted in ordered if index < n]
        pardons = [(self.pardons[index - n], wanted) for index, wanted in ordered if index >= n]
        return MatchedRules(clauses, hosts, pardons, captured)

    def remember(self, paths: dict[str, MatchedRules], path: str, plan: MatchedRules) -> None:
        """Bounded: a flood of made-up paths makes the memory start again, never grow."""
        if len(path) > LONGEST:
            return
        if self.remembered >= PATHS:
            for known in self.known.values():
                known.clear()
            self.remembered = 0
        paths[path] = plan
        self.remembered += 1

    @cython.ccall
    def hosted(self, plan: MatchedRules, facts: RequestContext) -> MatchedRules:
        """The plan for the host of a request, where rules name hosts. A Host that can't be read may well be read by the
        application: it is meant by all of them."""
        host: str = facts.host()
        unreadable = not host and bool(facts.header("host"))
        patterns = UNREADABLE if unreadable else tuple([one for one in patterns_of(host) if one in plan.named])
        found = plan.narrow.get(patterns)
        return plan.within(patterns, unreadable) if found is None else found

    @cython.ccall
    def pardoned(self, plan: MatchedRules, facts: RequestContext) -> object:
        """None: nothing is exempt. True: everything. Otherwise the names of the rules that are not asked."""
        names: set = set()  # type: ignore[type-arg]
        for pardon, wanted in plan.pardons:
            if wanted and not host_is_meant(wanted, facts.host()):
                continue
            if pardon.applies(self.identities, facts, self.address):
                if not pardon.rules:
                    return True
                names |= pardon.rules
        return names or None

    def close(self) -> None:
        """Lets go of what the rules read from elsewhere."""
        for clause in self.clauses:
            if clause.overrides is not None:
                clause.overrides.close()


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
