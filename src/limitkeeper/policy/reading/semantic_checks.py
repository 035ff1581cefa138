"""Checks of a policy that is valid by its schema: undefined names, costs that no limit can hold, combinations that can't work."""

from __future__ import annotations

from collections.abc import Iterator

from ...algorithms import LeakyBucket, LeakyBucketQueue, SlidingWindowCounter, TokenBucket
from ...errors import ConfigurationError
from ..identity.identify import Captured
from ..model import SHADOW, WAIT, Limits, PenaltyBoxConfig, Rule, Tiers, When
from .assembly import Assembly
from .fields import ParsedFields
from .import_string import handlers_of, import_callback, import_strings_of
from .match_and_key_fields import key_names
from .nodes import MappingNode, Node, SourcePosition, find_position
from .parse_context import did_you_mean
from .rules import RuleDraft
from .unreachable import check_captures, check_reachable


def check(assembly: Assembly) -> None:
    """Adds the diagnostics of all checks."""
    check_rule_names(assembly)
    check_identities(assembly)
    check_exempt_rules(assembly)
    check_reachable(assembly)
    for draft, rule in assembly.rules:
        check_limits(assembly, draft, rule)
        check_cost(assembly, draft, rule)
        check_actions(assembly, draft, rule)
    check_captured_identities(assembly)
    check_captures(assembly)
    if not assembly.context.failed and not assembly.rules:
        position = assembly.fields.key("limits")
        assembly.context.warning(position, "this policy limits nothing: it has no rule", "add limits: with at least one rule")
    if assembly.context.imports:
        check_imports(assembly)


# Names -----------------------------------------------------------------------------------------------------------------------


def check_rule_names(assembly: Assembly) -> None:
    """Names of rules are unique, and differ from the names under which other rules keep state in the store."""
    seen: dict[str, RuleDraft] = {}
    for draft in assembly.drafts:
        first = seen.setdefault(draft.name, draft) if draft.name else draft
        if first is not draft:
            position = first.fields.at("name").position
            where = f"in line {position.line}" if position.line else f"at {first.fields.node.position.path}"
            message = f"duplicate rule name {draft.name!r}; the first one is {where}"
            assembly.context.error(draft.fields.at("name").position, message, "rename one of them", draft.name)
    labels: dict[str, str] = {}
    for _, rule in assembly.rules:
        for number in range(2, max((len(limits) for limits in all_limits(rule)), default=0) + 1):
            labels[f"{rule.name}.{number}"] = f"limit {number} of rule {rule.name!r}"
        if rule.once is not None:
            labels[f"{rule.name} once"] = f"the idempotency keys of rule {rule.name!r}"
    for draft in assembly.drafts:
        if draft.name in labels:
            message = f"{draft.name!r} is the name of {labels[draft.name]} in the store"
            assembly.context.error(draft.fields.at("name").position, message, "rename this rule", draft.name)


def check_identities(assembly: Assembly) -> None:
    """All identities that rules, exemptions and the penalty box name are defined."""
    for draft in assembly.drafts:
        check_defined(assembly, key_names(draft.key), draft.fields.at("key"))
        check_when_defined(assembly, draft.when, draft.fields.at("when"))
        if isinstance(draft.limit, ParsedFields) and draft.limit.get("by") is not None:
            check_defined(assembly, (draft.limit.get("by"),), draft.limit.at("by"))
    for exemption in assembly.exemptions:
        check_when_defined(assembly, exemption.exemption.when, exemption.fields.at("when"))
    box = assembly.fields.get("penalty_box")
    if isinstance(box, PenaltyBoxConfig):
        node = value_of(assembly.fields.at("penalty_box"), "key")
        check_defined(assembly, key_names(box.key), node)
        if not box.key:
            message = "with one key for all clients, one client could put all others into the penalty box"
            assembly.context.error(node.position, message, "write key: ip, or user | ip")


def value_of(node: Node, key: str) -> Node:
    """The value of a key; the node itself where it is not a mapping with this key."""
    return node.value(key) if isinstance(node, MappingNode) else node


def check_when_defined(assembly: Assembly, when: When, node: Node) -> None:
    check_defined(assembly, (*when.present, *when.absent, *(name for name, _ in when.equals)), node)


def check_defined(assembly: Assembly, names: tuple[str, ...], node: Node) -> None:
    known = assembly.identities.names
    seen: set[str] = set()
    for name in names:
        if name not in known:
            remedy = did_you_mean(name, sorted(known), f"define it: identify: {{{name}: {{header: X-{name.title()}}}}}")
            assembly.context.error(find_position(node, name), f"unknown identity {name!r}", remedy, name)
        elif name in seen and "when" not in node.position.path:
            message = f"{name!r} is listed twice in this key"
            assembly.context.error(find_position(node, name), message, "remove one of them", name)
        seen.add(name)


def check_exempt_rules(assembly: Assembly) -> None:
    names = [draft.name for draft in assembly.drafts if draft.name]
    for exemption in assembly.exemptions:
        for name in exemption.exemption.rules:
            if name not in names:
                position = find_position(exemption.fields.at("limits"), name)
                assembly.context.error(position, f"unknown rule {name!r}", did_you_mean(name, names), name)


# Limits ----------------------------------------------------------------------------------------------------------------------


def all_limits(rule: Rule) -> Iterator[Limits]:
    """Every set of limits that a key of a rule may have."""
    if isinstance(rule.limit, Tiers):
        yield from (limits for _, limits in rule.limit.limits)
        yield rule.limit.otherwise
    else:
        yield rule.limit
    yield from (limits for _, limits in rule.override)


def positioned_limits(draft: RuleDraft, rule: Rule) -> Iterator[tuple[Limits, SourcePosition]]:
    """The same, each with its position."""
    node = draft.fields.at("limit")
    if not isinstance(rule.limit, Tiers):
        yield rule.limit, node.position
    else:
        for value, limits in rule.limit.limits:
            yield limits, value_of(node, value).position
        if isinstance(node, MappingNode) and "default" in node.entries:
            yield rule.limit.otherwise, node.value("default").position
    yield from ((entry.limits, entry.limit_node.position) for entry in draft.override)


def check_limits(assembly: Assembly, draft: RuleDraft, rule: Rule) -> None:
    context = assembly.context
    safe = draft.fields.get("safe_concurrency", assembly.fields.get("safe_concurrency"))
    for limits, position in positioned_limits(draft, rule):
        for limit in limits:
            if safe is not None and isinstance(limit, (TokenBucket, LeakyBucket)) and limit.capacity > safe:
                message = f"a burst of {limit.capacity} exceeds safe_concurrency {safe}"
                context.warning(position, message, f"write burst {safe}, or raise safe_concurrency", str(limit))
    if not any(all_limits(rule)) and rule.overrides is None:
        position = draft.fields.at("limit").position
        context.warning(position, f"rule {rule.name!r} limits nothing", "remove it, or give it a limit", "unlimited")


def check_cost(assembly: Assembly, draft: RuleDraft, rule: Rule) -> None:
    """No cost exceeds the capacity of a limit, and no charge needs a refund that the limit can't give."""
    fields, context, cost = draft.fields, assembly.context, rule.cost
    node = fields.at("cost")
    for limits, _ in positioned_limits(draft, rule):
        for limit in limits:
            if cost.source in ("constant", "response") and cost.units > limit.capacity:
                message = f"a cost of {cost.units} never fits {limit}, whose capacity is {limit.capacity}"
                position = value_of(node, "estimate").position
                context.error(position, message, "raise the limit, or lower the cost", str(cost.units))
                return
            if isinstance(node, MappingNode) and "max" in node.entries and cost.most > limit.capacity:
                message = f"a cost of {cost.most} would never fit {limit}, whose capacity is {limit.capacity}"
                context.warning(node.value("max").position, message, f"write max: {limit.capacity}", str(cost.most))
                return
    refunds = rule.charge.statuses or rule.charge.call is not None or cost.source == "response"
    if refunds and any(isinstance(limit, LeakyBucketQueue) for limits in all_limits(rule) for limit in limits):
        name = "charge" if "charge" in fields else "cost"
        message = "a leaky bucket queue can't refund what a response is not charged for: its turn is over"
        context.error(fields.key(name), message, "use a token bucket", name)


def check_actions(assembly: Assembly, draft: RuleDraft, rule: Rule) -> None:
    """Warns of a wait without FIFO order, and of `once` in a shadow rule."""
    fields, action = draft.fields, rule.on_refusal.action
    if action == WAIT and any(isinstance(limit, SlidingWindowCounter) for limits in all_limits(rule) for limit in limits):
        message = "a sliding window counter can't reserve: a waiting request asks again, and may be overtaken"
        remedy = "use a token bucket or a leaky bucket queue to wait in order"
        assembly.context.warning(fields.at("on_refusal").position, message, remedy)
    if action == SHADOW and rule.once is not None:
        message = "a shadow rule counts repetitions too, so it reports more refusals than it would give when enforced"
        assembly.context.warning(fields.key("once"), message, "remove once while the rule is in shadow", "once")


# Paths and imports -----------------------------------------------------------------------------------------------------------


def check_captured_identities(assembly: Assembly) -> None:
    """Every identity from the path is captured by some template."""
    templates = [match.path for rule in assembly.policy.rules for match in rule.match]
    for name, identity in assembly.identities.by_name.items():
        if isinstance(identity, Captured) and not any(f"{{{identity.name}}}" in path for path in templates):
            message = f"the path of no rule captures {{{identity.name}}}, so {name!r} is never present"
            remedy = f"write it into a match:, like /orders/{{{identity.name}}}"
            assembly.context.warning(assembly.identities.position(name), message, remedy, name)


def check_imports(assembly: Assembly) -> None:
    """All import strings of the policy can be imported."""
    handlers = list(handlers_of(assembly.policy))
    for named in import_strings_of(assembly.policy):
        try:
            named.load() if named in handlers else import_callback(named)
        except ConfigurationError as error:
            message, _, remedy = str(error).partition("; ")
            assembly.context.error(find_position(assembly.fields.node, named.name), message, remedy, named.name)
