"""Rules that no request can reach: exempted wholly, or asking for what can't be."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from ..identity.addresses import read_address
from ..identity.client_ip import ClientIp
from ..identity.identify import Captured, Network
from ..identity.paths import tidy
from ..model import SKIP, Exemption, Match, Rule, Tiers, When
from ..path_matcher import segments_of
from .assembly import Assembly
from .conditions import key_names
from .nodes import ListNode, Node, Scalar, SourcePosition, Table
from .parse_context import ParseContext, did_you_mean
from .rules import RuleDraft

#: More pairs of rules and exemptions, or of templates, than this are not compared.
MOST_PAIRS = 200_000


def check_reach(assembly: Assembly) -> None:
    """Notes every rule, condition and tier that nothing can reach."""
    for draft, rule in assembly.rules:
        check_when(assembly, rule.when, draft.said.at("when"))
        check_key(assembly, draft, rule)
        check_tiers(assembly, draft, rule)
        check_override(assembly, draft, rule)
    for exemption in assembly.exemptions:
        check_when(assembly, exemption.exemption.when, exemption.said.at("when"))
    check_exempted(assembly)


def name_place(node: Node, name: str) -> SourcePosition:
    """Where a name stands in a text, a list or a table."""
    if isinstance(node, Scalar):
        start = node.text.find(name)
        return node.within(start, len(name)) if start >= 0 else node.place
    if isinstance(node, ListNode):
        for item in node.items:
            if isinstance(item, Scalar) and name in item.text:
                return name_place(item, name)
            found = node.place if isinstance(item, Scalar) else name_place(item, name)
            if found not in (node.place, item.place):
                return found
    if isinstance(node, Table):
        if name in node.entries:
            return node.entries[name][0].place
        for _, item in node.entries.values():
            found = name_place(item, name)
            if found != item.place or (isinstance(item, Scalar) and item.text == name):
                return found
    return node.place


# Conditions ------------------------------------------------------------------------------------------------------------------


def check_when(assembly: Assembly, when: When, node: Node) -> None:
    page, identities = assembly.page, assembly.identities
    asked = {*when.present, *(name for name, _ in when.equals)}
    for name in when.absent:
        if name in asked:
            told = f"{name!r} must be there and must not be there: nothing can be both"
            page.wrong(absent_place(node, name), name, told, "take one of them out")
        elif identities.default(name) is not None:
            told = f"{name!r} has the default {identities.default(name)!r}, so it is never absent"
            page.wrong(
                absent_place(node, name), name, told, f"write {name}: [{identities.default(name)}], or take the default out"
            )
    for name, values in when.equals:
        known = values_of(assembly, name)
        for value in values:
            spelt = spelling(identities.made.get(name), value)
            if known is not None and value not in known:
                told = f"{name!r} is never {value!r}"
                page.wrong(value_place(node, name, value), value, told, did_you_mean(value, known))
            elif spelt != value:
                page.wrong(value_place(node, name, value), value, f"{name!r} is never {value!r}", f"write {spelt!r}")


def absent_place(node: Node, name: str) -> SourcePosition:
    if isinstance(node, Table) and "absent" in node.entries:
        return name_place(node.entries["absent"][1], name)
    return node.place


def value_place(node: Node, name: str, value: str) -> SourcePosition:
    if isinstance(node, Table) and name in node.entries:
        return name_place(node.entries[name][1], value)
    return node.place


def values_of(assembly: Assembly, name: str) -> tuple[str, ...] | None:
    """All values that an identity can have, where that is known."""
    identity = assembly.identities.made.get(name)
    if not isinstance(identity, Network):
        return None
    classes = [value for value, _ in identity.classes]
    return tuple(dict.fromkeys([*classes, *([identity.default] if identity.default is not None else [])]))


def spelling(identity: object, value: str) -> str:
    """A value as an identity spells it: addresses as they are counted, parts of a path in lower case."""
    if isinstance(identity, ClientIp):
        address = read_address(value.partition("/")[0])
        return value if address is None else identity.counted(address)
    if isinstance(identity, Captured):
        return tidy("/" + value)[1:] or value
    return value


def check_override(assembly: Assembly, draft: RuleDraft, rule: Rule) -> None:
    """A single key has a limit of its own only when somebody can have that key."""
    for parts, node in overridden(draft):
        for names, value in zip(rule.key, parts, strict=False):
            spelt = {spelling(assembly.identities.made.get(name), value or "") for name in names}
            tell_ambiguous(assembly, names, value or "", node)
            if value is not None and value not in spelt and len(spelt) == 1:
                told = f"nobody has the key {value!r}, so nobody has this limit"
                assembly.page.wrong(name_place(node, value), value, told, f"write {spelt.pop()!r}")


def tell_ambiguous(assembly: Assembly, names: tuple[str, ...], value: str, node: Node) -> None:
    """A value without a name is anybody's who is called so: a user may call himself like a partner."""
    called = [name for name in names if name != "ip" and not isinstance(assembly.identities.made.get(name), ClientIp)]
    if len(called) < 2 or not value or value.partition(":")[0] in names or read_address(value.partition("/")[0]) is not None:
        return
    told = f"whoever is called {value!r} as {' or as '.join(called)} has this limit"
    assembly.page.warn(name_place(node, value), value, told, f"write '{called[0]}:{value}' where one of them is meant")


def overridden(draft: RuleDraft) -> Iterator[tuple[tuple[str | None, ...], Node]]:
    """The keys that have limits of their own, in parts, and where they stand."""
    node = draft.said.at("override")
    said = draft.said.get("override", ())
    if isinstance(node, ListNode):
        yield from ((parts, entry.at("key")) for parts, _, entry in said)
    else:
        yield from (((value,), node) for value, _ in said)


def check_key(assembly: Assembly, draft: RuleDraft, rule: Rule) -> None:
    """A key none of whose parts can be there names nobody."""
    names = key_names(rule.key)
    if not names or rule.unidentified != SKIP:
        return
    node = draft.said.at("key")
    if all(name in rule.when.absent for name in names):
        told = "this rule is for requests without the very identity that is its key: it is never meant"
        assembly.page.wrong(node.place, "", told, "write another key, or unidentified: share")
    captured = [assembly.identities.made.get(name) for name in names]
    missing = [one.name for one in captured if isinstance(one, Captured) and one.default is None and not captures(rule, one.name)]
    if len(missing) == len(names):
        told = f"no path of this rule captures {{{missing[0]}}}, so nobody has its key"
        assembly.page.wrong(node.place, "", told, f"write it into match:, like /orders/{{{missing[0]}}}")


def captures(rule: Rule, name: str) -> bool:
    return any(f"{{{name}}}" in segments_of(match.path) for match in rule.match)


def check_tiers(assembly: Assembly, draft: RuleDraft, rule: Rule) -> None:
    if not isinstance(rule.limit, Tiers):
        return
    known = values_of(assembly, rule.limit.by)
    node = draft.said.at("limit")
    for value, _ in rule.limit.limits:
        if known is not None and value not in known:
            told = f"{rule.limit.by!r} is never {value!r}: nobody has this limit"
            assembly.page.wrong(name_place(node, value), value, told, did_you_mean(value, known))


# Exemptions ------------------------------------------------------------------------------------------------------------------


def check_exempted(assembly: Assembly) -> None:
    """A rule all of whose requests are exempt limits nobody."""
    page: ParseContext = assembly.page
    wholly = [(one.said, one.exemption) for one in assembly.exemptions if unconditional(one.exemption)]
    if len(wholly) * len(assembly.rules) > MOST_PAIRS:
        return
    for draft, rule in assembly.rules:
        for said, exemption in wholly:
            if exempts(exemption, rule):
                line = said.node.place.line
                where = f"the exemption in line {line}" if line else said.node.place.path
                told = f"rule {rule.name!r} is never reached: {where} exempts all of its requests"
                page.wrong(draft.said.word("name"), rule.name, told, "make the exemption narrower, or leave the rule out")
                break


def unconditional(exemption: Exemption) -> bool:
    return bool(exemption.match) and not exemption.networks and not exemption.headers and exemption.when == When()


def exempts(exemption: Exemption, rule: Rule) -> bool:
    if exemption.rules and rule.name not in exemption.rules:
        return False
    return all(any(covers(wide, narrow) for wide in exemption.match) for narrow in rule.match or (Match(),))


def covers(wide: Match, narrow: Match) -> bool:
    """Whether every request of one match is one of the other."""
    if wide.host and wide.host != narrow.host:
        return False
    if wide.methods and (not narrow.methods or not narrow.methods <= wide.methods):
        return False
    if not wide.methods and "MESSAGE" in narrow.methods:
        return False
    return (
        not wide.path
        or (bool(narrow.path) and path_covers(segments_of(wide.path), segments_of(narrow.path)))
        or wide.path == "/**"
    )


def path_covers(wide: list[str], narrow: list[str]) -> bool:
    for number, segment in enumerate(wide):
        if segment == "**":
            return True
        if number >= len(narrow) or narrow[number] == "**":
            return False
        if segment == "*" or segment.startswith("{"):
            continue
        if narrow[number].casefold() != segment.casefold():
            return False
    return len(wide) == len(narrow)


# One name, one value -------------------------------------------------------------------------------------------------


def check_places(assembly: Assembly) -> None:
    """A name that an identity reads stands at one place of any path: of two, a client could change one to be counted anew."""
    wanted = {one.name for one in assembly.identities.made.values() if isinstance(one, Captured)}
    said = [(draft.said, rule.match) for draft, rule in assembly.rules]
    said += [(draft.said, draft.exemption.match) for draft in assembly.exemptions]
    found: dict[str, list[tuple[int, list[str], Any]]] = {}
    for where, matches in said:
        for match in matches:
            segments = segments_of(match.path)
            for depth, segment in enumerate(segments):
                if segment[:1] == "{" and segment[1:-1] in wanted:
                    found.setdefault(segment, []).append((depth, segments, where))
    for name, places in found.items():
        if len({depth for depth, _, _ in places}) > 1:
            tell_places(assembly, name, places)


def tell_places(assembly: Assembly, name: str, places: list[tuple[int, list[str], Any]]) -> None:
    pairs = ((one, other) for number, other in enumerate(places) for one in places[:number] if one[0] != other[0])
    for (_, before, _), (_, segments, where) in islice(pairs, MOST_PAIRS):
        if overlap(before, segments):
            told = f"{name} stands at another place in /{'/'.join(before)}, and one path may be both"
            assembly.page.wrong(where.at("match").place, "", told, "give one of them another name")
            return


def overlap(one: list[str], other: list[str]) -> bool:
    """Whether some path is meant by both templates."""
    for mine, yours in zip(one, other, strict=False):
        if "**" in (mine, yours):
            return True
        if mine[:1] not in ("*", "{") and yours[:1] not in ("*", "{") and mine.casefold() != yours.casefold():
            return False
    longer = one if len(one) > len(other) else other
    return len(one) == len(other) or longer[min(len(one), len(other))] == "**"
