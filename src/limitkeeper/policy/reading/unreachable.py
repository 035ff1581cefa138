"""Finds rules, conditions, tiers and overrides that no request can reach, and captures that are ambiguous."""

from __future__ import annotations

from itertools import islice

from ..identity.addresses import read_address
from ..identity.client_ip import ClientIp
from ..identity.identify import Captured, Network
from ..identity.paths import normalize_path
from ..model import SKIP, Exemption, Identity, Match, Rule, Tiers, When
from ..path_matcher import segments_of
from .assembly import Assembly
from .fields import ParsedFields
from .match_and_key_fields import key_names
from .nodes import MappingNode, Node, SourcePosition, find_position
from .parse_context import did_you_mean
from .rules import RuleDraft

#: More pairs of rules and exemptions, or of templates, are not compared.
MAX_PAIRS = 200_000


def check_reachable(assembly: Assembly) -> None:
    """Reports every rule, condition, tier and override that no request can reach."""
    for draft, rule in assembly.rules:
        check_when(assembly, rule.when, draft.fields.at("when"))
        check_key(assembly, draft, rule)
        check_tiers(assembly, draft, rule)
        check_override(assembly, draft, rule)
    for exemption in assembly.exemptions:
        check_when(assembly, exemption.exemption.when, exemption.fields.at("when"))
    check_exempted(assembly)


# Conditions, keys, tiers -----------------------------------------------------------------------------------------------------


def check_when(assembly: Assembly, when: When, node: Node) -> None:
    context, identities = assembly.context, assembly.identities
    required = {*when.present, *(name for name, _ in when.equals)}
    for name in when.absent:
        default = identities.default(name)
        if name in required:
            message = f"{name!r} can't be both present and absent"
            context.error(position_in(node, "absent", name), message, "remove one of them", name)
        elif default is not None:
            message = f"{name!r} has the default {default!r}, so it is never absent"
            context.error(position_in(node, "absent", name), message, f"write {name}: [{default}], or remove the default", name)
    for name, values in when.equals:
        known = known_values(assembly, name)
        for value in values:
            normalized = normalize_value(identities.by_name.get(name), value)
            if known is not None and value not in known:
                remedy = did_you_mean(value, known)
            elif normalized != value:
                remedy = f"write {normalized!r}"
            else:
                continue
            context.error(position_in(node, name, value), f"{name!r} is never {value!r}", remedy, value)


def position_in(node: Node, key: str, text: str) -> SourcePosition:
    """The position of a text in the value of a key."""
    if isinstance(node, MappingNode) and key in node.entries:
        return find_position(node.value(key), text)
    return node.position


def known_values(assembly: Assembly, name: str) -> tuple[str, ...] | None:
    """All values that an identity can have; None where they are not known."""
    identity = assembly.identities.by_name.get(name)
    if not isinstance(identity, Network):
        return None
    default = () if identity.default is None else (identity.default,)
    return tuple(dict.fromkeys((*(value for value, _ in identity.classes), *default)))


def normalize_value(identity: Identity | None, value: str) -> str:
    """A value as an identity gives it: addresses as they are counted, path segments in lower case."""
    if isinstance(identity, ClientIp):
        address = read_address(value.partition("/")[0])
        return value if address is None else identity.key_of(address)
    if isinstance(identity, Captured):
        return normalize_path("/" + value)[1:] or value
    return value


def check_override(assembly: Assembly, draft: RuleDraft, rule: Rule) -> None:
    """Every overridden key is one that a request can have, and not one of several identities."""
    identities = assembly.identities.by_name
    for entry in draft.override:
        for names, value in zip(rule.key, entry.parts, strict=False):
            if not value:
                continue
            position = find_position(entry.key_node, value)
            normalized = {normalize_value(identities.get(name), value) for name in names}
            if value not in normalized and len(normalized) == 1:
                message = f"no request has the key {value!r}, so this limit is never used"
                assembly.context.error(position, message, f"write {normalized.pop()!r}", value)
            named = [name for name in names if name != "ip" and not isinstance(identities.get(name), ClientIp)]
            is_address = read_address(value.partition("/")[0]) is not None
            if len(named) > 1 and value.partition(":")[0] not in names and not is_address:
                message = f"{value!r} may be the value of {' or of '.join(named)}, and each would have this limit"
                assembly.context.warning(position, message, f"write '{named[0]}:{value}' for one of them", value)


def check_key(assembly: Assembly, draft: RuleDraft, rule: Rule) -> None:
    """At least one part of the key can be present."""
    names = key_names(rule.key)
    if not names or rule.unidentified != SKIP:
        return
    position = draft.fields.at("key").position
    if all(name in rule.when.absent for name in names):
        message = "the rule applies only when its key is absent, so it never applies"
        assembly.context.error(position, message, "write another key, or unidentified: share")
    parts = [assembly.identities.by_name.get(name) for name in names]
    captured = {segment for match in rule.match for segment in segments_of(match.path)}
    absent = [one.name for one in parts if isinstance(one, Captured) and one.default is None]
    missing = [name for name in absent if f"{{{name}}}" not in captured]
    if len(missing) == len(names):
        message = f"no path of this rule captures {{{missing[0]}}}, so its key is never present"
        assembly.context.error(position, message, f"write it into match:, like /orders/{{{missing[0]}}}")


def check_tiers(assembly: Assembly, draft: RuleDraft, rule: Rule) -> None:
    if not isinstance(rule.limit, Tiers):
        return
    known = known_values(assembly, rule.limit.by)
    for value, _ in rule.limit.limits:
        if known is not None and value not in known:
            message = f"{rule.limit.by!r} is never {value!r}, so this limit is never used"
            position = find_position(draft.fields.at("limit"), value)
            assembly.context.error(position, message, did_you_mean(value, known), value)


# Exemptions ------------------------------------------------------------------------------------------------------------------


def check_exempted(assembly: Assembly) -> None:
    """No rule has all of its requests exempt."""
    unconditional = [one for one in assembly.exemptions if is_unconditional(one.exemption)]
    if len(unconditional) * len(assembly.rules) > MAX_PAIRS:
        return
    for draft, rule in assembly.rules:
        exempting = next((one for one in unconditional if exempts(one.exemption, rule)), None)
        if exempting is not None:
            position = exempting.fields.node.position
            where = f"the exemption in line {position.line}" if position.line else position.path
            message = f"rule {rule.name!r} is unreachable: {where} exempts all of its requests"
            assembly.context.error(draft.fields.key("name"), message, "narrow the exemption, or remove the rule", rule.name)


def is_unconditional(exemption: Exemption) -> bool:
    return bool(exemption.match) and not exemption.networks and not exemption.headers and exemption.when == When()


def exempts(exemption: Exemption, rule: Rule) -> bool:
    if exemption.rules and rule.name not in exemption.rules:
        return False
    return all(any(covers(wide, narrow) for wide in exemption.match) for narrow in rule.match or (Match(),))


def covers(wide: Match, narrow: Match) -> bool:
    """Whether `wide` matches every request that `narrow` matches."""
    if wide.host and wide.host != narrow.host:
        return False
    if wide.methods and (not narrow.methods or not narrow.methods <= wide.methods):
        return False
    if not wide.methods and "MESSAGE" in narrow.methods:
        return False
    if not wide.path or wide.path == "/**":
        return True
    return bool(narrow.path) and path_covers(segments_of(wide.path), segments_of(narrow.path))


def path_covers(wide: list[str], narrow: list[str]) -> bool:
    for number, segment in enumerate(wide):
        if segment == "**":
            return True
        if number >= len(narrow) or narrow[number] == "**":
            return False
        if segment != "*" and not segment.startswith("{") and narrow[number].casefold() != segment.casefold():
            return False
    return len(wide) == len(narrow)


# Captures --------------------------------------------------------------------------------------------------------------------

#: A template that captures a name: depth of the capture, segments, fields of the rule or exemption.
Capture = tuple[int, list[str], ParsedFields]


def check_captures(assembly: Assembly) -> None:
    """Templates that match the same path capture a name at the same segment; otherwise a client could vary one for a new key."""
    names = {one.name for one in assembly.identities.by_name.values() if isinstance(one, Captured)}
    matches = [(draft.fields, rule.match) for draft, rule in assembly.rules]
    matches += [(draft.fields, draft.exemption.match) for draft in assembly.exemptions]
    found: dict[str, list[Capture]] = {}
    for fields, some in matches:
        for match in some:
            segments = segments_of(match.path)
            for depth, segment in enumerate(segments):
                if segment[:1] == "{" and segment[1:-1] in names:
                    found.setdefault(segment, []).append((depth, segments, fields))
    for name, uses in found.items():
        if len({depth for depth, _, _ in uses}) > 1:
            report_ambiguous(assembly, name, uses)


def report_ambiguous(assembly: Assembly, name: str, uses: list[Capture]) -> None:
    pairs = ((first, second) for number, second in enumerate(uses) for first in uses[:number] if first[0] != second[0])
    for (_, earlier, _), (_, segments, fields) in islice(pairs, MAX_PAIRS):
        if overlap(earlier, segments):
            message = f"{name} is captured at another segment in /{'/'.join(earlier)}, and a path may match both"
            assembly.context.error(fields.at("match").position, message, "rename one of them")
            return


def overlap(first: list[str], second: list[str]) -> bool:
    """Whether some path matches both templates."""
    for a, b in zip(first, second, strict=False):
        if "**" in (a, b):
            return True
        if a[:1] not in ("*", "{") and b[:1] not in ("*", "{") and a.casefold() != b.casefold():
            return False
    longer = first if len(first) > len(second) else second
    return len(first) == len(second) or longer[min(len(first), len(second))] == "**"
