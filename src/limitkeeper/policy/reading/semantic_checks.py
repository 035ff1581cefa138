"""What is legal to write and yet wrong or unwise: names that nothing defines, limits that nothing passes, waits in vain."""

from __future__ import annotations

from collections.abc import Iterator

from ...algorithms import LeakyBucket, LeakyBucketQueue, SlidingWindowCounter, TokenBucket
from ...errors import ConfigurationError
from ..identity.identify import Captured
from ..model import SHADOW, WAIT, Limits, PenaltyBoxConfig, Rule, Tiers, When
from .assembly import Assembly
from .conditions import key_names
from .import_string import handlers_of, names_of, sound
from .nodes import Node, SourcePosition, Table
from .parse_context import did_you_mean
from .rules import RuleDraft, TiersDraft
from .unreachable import check_places, check_reach, name_place


def check(assembly: Assembly) -> None:
    """Notes what is wrong with a policy that could be read."""
    check_names(assembly)
    check_identities(assembly)
    check_exempt_limits(assembly)
    check_reach(assembly)
    for draft, rule in assembly.rules:
        check_limits(assembly, draft, rule)
        check_cost(assembly, draft, rule)
        check_wait(assembly, draft, rule)
        check_shadow(assembly, draft, rule)
    check_captured(assembly)
    check_places(assembly)
    check_emptiness(assembly)
    if assembly.page.imports:
        check_imports(assembly)


# Names -----------------------------------------------------------------------------------------------------------------------


def check_names(assembly: Assembly) -> None:
    """Every rule has a name of its own, and so has every limit of it."""
    seen: dict[str, RuleDraft] = {}
    labels: dict[str, str] = {}
    for draft in assembly.drafts:
        if not draft.name:
            continue
        place = draft.said.at("name").place
        before = seen.setdefault(draft.name, draft)
        if before is not draft:
            line = before.said.at("name").place.line
            where = f"in line {line}" if line else f"in {before.said.node.place.path}"
            assembly.page.wrong(
                place, draft.name, f"a rule {where} is called {draft.name!r} too", "give each rule a name of its own"
            )
    for _, rule in assembly.rules:
        for number in range(2, most_limits(rule) + 1):
            labels[f"{rule.name}.{number}"] = f"what the limits of rule {rule.name!r} are called from the second on"
        if rule.once is not None:
            labels[f"{rule.name} once"] = f"what the marks of rule {rule.name!r} are called, which charges once"
    for draft in assembly.drafts:
        if draft.name in labels:
            told = f"{draft.name!r} is {labels[draft.name]}"
            assembly.page.wrong(draft.said.at("name").place, draft.name, told, "give this rule another name")


def most_limits(rule: Rule) -> int:
    return max((len(limits) for limits in limits_of(rule)), default=0)


def check_identities(assembly: Assembly) -> None:
    """Every identity that is named is one."""
    for draft in assembly.drafts:
        known_names(assembly, key_names(draft.key), draft.said.at("key"))
        known_when(assembly, draft.when, draft.said.at("when"))
        if isinstance(draft.limit, TiersDraft) and draft.limit.by is not None:
            known_names(assembly, (draft.limit.by,), draft.limit.said.at("by"))
    for exemption in assembly.exemptions:
        known_when(assembly, exemption.exemption.when, exemption.said.at("when"))
    shut_out = assembly.said.get("penalty_box")
    if isinstance(shut_out, PenaltyBoxConfig):
        node = assembly.said.at("penalty_box")
        at = node.entries["key"][1] if isinstance(node, Table) and "key" in node.entries else node
        known_names(assembly, key_names(shut_out.key), at)
        if not shut_out.key:
            told = "shutting out everybody together would let one client shut out all others"
            assembly.page.wrong(at.place, "", told, "write key: ip, or user | ip")


def known_when(assembly: Assembly, when: When, node: Node) -> None:
    known_names(assembly, (*when.present, *when.absent, *(name for name, _ in when.equals)), node)


def known_names(assembly: Assembly, names: tuple[str, ...], node: Node) -> None:
    known = assembly.identities.names
    seen: set[str] = set()
    for name in names:
        if name not in known:
            told = did_you_mean(name, sorted(known), f"define it: identify: {{{name}: {{header: X-{name.title()}}}}}")
            assembly.page.wrong(name_place(node, name), name, f"no identity is called {name!r}", told)
        elif name in seen and "when" not in node.place.path:
            assembly.page.wrong(name_place(node, name), name, f"{name!r} stands twice in this key", "say it once")
        seen.add(name)


def check_exempt_limits(assembly: Assembly) -> None:
    names = [draft.name for draft in assembly.drafts if draft.name]
    for exemption in assembly.exemptions:
        for name in exemption.exemption.rules:
            if name not in names:
                place = name_place(exemption.said.at("limits"), name)
                assembly.page.wrong(place, name, f"no rule is called {name!r}", did_you_mean(name, names))


# Limits ----------------------------------------------------------------------------------------------------------------------


def limits_of(rule: Rule) -> Iterator[Limits]:
    """Every set of limits that a key of a rule may have."""
    if isinstance(rule.limit, Tiers):
        yield from (limits for _, limits in rule.limit.limits)
        yield rule.limit.otherwise
    else:
        yield rule.limit
    yield from (limits for _, limits in rule.override)


def limits_at(draft: RuleDraft, rule: Rule) -> Iterator[tuple[Limits, SourcePosition]]:
    """The same, with the place of each."""
    node = draft.said.at("limit")
    if not isinstance(rule.limit, Tiers):
        yield rule.limit, node.place
    elif isinstance(node, Table):
        for value, limits in rule.limit.limits:
            yield limits, node.entries[value][1].place
        if "default" in node.entries:
            yield rule.limit.otherwise, node.entries["default"][1].place
    node = draft.said.at("override")
    for key, limits in rule.override:
        yield limits, node.entries[key][1].place if isinstance(node, Table) and key in node.entries else node.place


def check_limits(assembly: Assembly, draft: RuleDraft, rule: Rule) -> None:
    page = assembly.page
    safe = draft.said.get("safe_concurrency", assembly.said.get("safe_concurrency"))
    for limits, place in limits_at(draft, rule):
        for limit in limits:
            if safe is not None and isinstance(limit, (TokenBucket, LeakyBucket)) and limit.capacity > safe:
                told = f"{limit.capacity} at once is more than the {safe} that are safe"
                page.warn(place, str(limit), told, f"write burst {safe}, or raise safe_concurrency")
    if not any(limits_of(rule)) and rule.overrides is None:
        page.warn(
            draft.said.at("limit").place, "unlimited", f"rule {rule.name!r} limits nobody", "leave it out, or give it a limit"
        )


def check_cost(assembly: Assembly, draft: RuleDraft, rule: Rule) -> None:
    """A cost above what a limit can ever hold never passes."""
    said, page, cost = draft.said, assembly.page, rule.cost
    node = said.at("cost")
    for limits, _ in limits_at(draft, rule):
        for limit in limits:
            if cost.source in ("constant", "response") and cost.units > limit.capacity:
                told = f"a cost of {cost.units} never passes {limit}, which holds {limit.capacity} at most"
                page.wrong(cost_place(node, "estimate"), str(cost.units), told, "raise the limit, or lower the cost")
                return
            if isinstance(node, Table) and "max" in node.entries and cost.most > limit.capacity:
                told = f"a request may cost {cost.most}, and {limit} holds {limit.capacity} at most: such a request never passes"
                page.warn(cost_place(node, "max"), str(cost.most), told, f"write max: {limit.capacity}")
                return
    given_back = rule.charge.statuses or rule.charge.call is not None or cost.source == "response"
    if given_back and any(isinstance(limit, LeakyBucketQueue) for limits in limits_of(rule) for limit in limits):
        word = "charge" if "charge" in said else "cost"
        told = "a queue can't give back what the outcome does not count: its turn is over"
        page.wrong(said.word(word), word, told, "use a token bucket")


def cost_place(node: Node, word: str) -> SourcePosition:
    return node.entries[word][1].place if isinstance(node, Table) and word in node.entries else node.place


def check_wait(assembly: Assembly, draft: RuleDraft, rule: Rule) -> None:
    if rule.on_refusal.action != WAIT:
        return
    if any(isinstance(limit, SlidingWindowCounter) for limits in limits_of(rule) for limit in limits):
        told = "a sliding window counter can't promise a turn: who waits asks again, and may be overtaken"
        assembly.page.warn(
            draft.said.at("on_refusal").place, "", told, "use a token bucket or a leaky bucket queue to wait in order"
        )


def check_shadow(assembly: Assembly, draft: RuleDraft, rule: Rule) -> None:
    if rule.on_refusal.action == SHADOW and rule.once is not None:
        told = "a rule in shadow counts repetitions too: it would refuse more than it will in earnest"
        assembly.page.warn(draft.said.word("once"), "once", told, "leave once out while you try the rule out")


# The whole -------------------------------------------------------------------------------------------------------------------


def check_captured(assembly: Assembly) -> None:
    """An identity from the path is captured by some template."""
    templates = [match.path for rule in assembly.policy.rules for match in rule.match]
    for name, identity in assembly.identities.made.items():
        if isinstance(identity, Captured) and not any(f"{{{identity.name}}}" in path for path in templates):
            told = f"no rule's path captures {{{identity.name}}}, so {name!r} is never there"
            assembly.page.warn(
                assembly.identities.at(name), name, told, f"write it into a match:, like /orders/{{{identity.name}}}"
            )


def check_emptiness(assembly: Assembly) -> None:
    said = assembly.said
    if assembly.page.failed or assembly.rules:
        return
    assembly.page.warn(said.word("limits"), "", "this policy limits nobody: it has no rule", "add limits: with at least one")


def check_imports(assembly: Assembly) -> None:
    """What the policy calls can be imported."""
    handlers = list(handlers_of(assembly.policy))
    for named in names_of(assembly.policy):
        try:
            named.found() if named in handlers else sound(named)
        except ConfigurationError as error:
            message, _, remedy = str(error).partition("; ")
            assembly.page.wrong(name_place(assembly.said.node, named.name), named.name, message, remedy)
