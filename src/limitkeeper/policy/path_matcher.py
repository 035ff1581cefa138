"""Finds the rules that match a path in a tree of segments: the cost depends on the shape of the rules, not on their number.

    /orders/{order_id}/items     one node for "orders", one for any segment, one for "items"
    /static/**                   everything below "static", and "static" itself

A walk follows a literal child and the one for any segment, side by side, and collects the pattern sets that end there: the
*shape* of a path. All paths of one shape match the same rules, so that plans are made per shape, not per path. Within a pattern
set, patterns are found by host, so that a walk costs the same for one host and for thousands. Rejected: one regular expression
after the other (a thousand rules cost a thousand tries).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..errors import ConfigurationError
from .identity.paths import matches_exactly, normalize_path, segments_of
from .model import Match

#: A rule without methods does not match it: one message of a connection is no request.
MESSAGE = "MESSAGE"


class Pattern(NamedTuple):
    """One match of one rule: what must hold besides the path, and the names of the path's open segments."""

    rule: int
    match: Match
    names: tuple[tuple[int, str], ...]

    def matches(self, method: str) -> bool:
        """A server answers HEAD with its GET handler, so a rule for GET matches HEAD too."""
        methods = self.match.methods
        return method in methods or (method == "HEAD" and "GET" in methods) if methods else method != MESSAGE


#: Patterns by host pattern; "" is any host. Sets are compared by identity.
PatternSet = dict[str, list[Pattern]]
#: The pattern sets that one reading of a path meets.
Shape = tuple[PatternSet, ...]


@dataclass(slots=True)
class Node:
    """A node of the tree: its literal children, the child for any segment, and the patterns that end here or go on."""

    literal: dict[str, Node] = field(default_factory=dict)
    any: Node | None = None
    ends: PatternSet = field(default_factory=dict)
    rests: PatternSet = field(default_factory=dict)
    #: All patterns of this node and of those below, made when it is first needed.
    below: PatternSet | None = None

    def children(self) -> Iterator[Node]:
        yield from self.literal.values()
        if self.any is not None:
            yield self.any


class PathMatcher:
    """The matches of many rules. `hosts` and `methods` are all that they name, `depth` is more than their most segments."""

    def __init__(self, rules: Iterable[Sequence[Match]], exemptions: Iterable[Sequence[Match]] = ()) -> None:
        self.root = Node()
        self.hosts: set[str] = set()
        self.methods: set[str] = set()
        self.depth = 1
        #: The ids of pattern sets that name segments.
        self.capturing: set[int] = set()
        #: The paths of exemptions, by the id of their pattern set: often one for thousands of hosts.
        self.exempting: dict[int, set[str]] = {}
        rules = list(rules)
        for index, matches in enumerate([*rules, *exemptions]):
            for match in matches or (Match(),):
                patterns = self._add(index, match)
                if index >= len(rules) and match.path:
                    self.exempting.setdefault(id(patterns), set()).add(match.path)

    def _add(self, index: int, match: Match) -> PatternSet:
        names: list[tuple[int, str]] = []
        node, walked = self.root, 0
        segments = segments_of(match.path)
        for depth, segment in enumerate(segments):
            if segment == "**":
                if depth != len(segments) - 1:
                    raise ConfigurationError(f"{match.path!r}: '**' is allowed only at the end of a path; '*' is one segment")
                break
            if segment == "*" or segment[:1] == "{":
                if segment[:1] == "{":
                    names.append((walked, segment[1:-1]))
                node.any = node.any or Node()
                node, walked = node.any, walked + 1
            else:  # spelt as requests are: `my%20file` is "my file"
                for part in segments_of(normalize_path("/" + segment)):
                    node, walked = node.literal.setdefault(part, Node()), walked + 1
        pattern = Pattern(index, match, tuple(names))
        patterns = node.rests if not match.path or segments[-1:] == ["**"] else node.ends
        patterns.setdefault(match.host, []).append(pattern)
        if names:
            self.capturing.add(id(patterns))
        self.hosts |= {match.host} - {""}
        self.methods |= match.methods
        self.depth = max(self.depth, walked + 1)
        return patterns

    def inexact(self, shapes: Iterable[Shape], paths: Sequence[str]) -> frozenset[str]:
        """The paths of exemptions among these shapes that spell none of these paths as received."""
        found = {template for shape in shapes for patterns in shape for template in self.exempting.get(id(patterns), ())}
        return frozenset([template for template in found if not any(matches_exactly(template, path) for path in paths)])

    def segments_of(self, path: str) -> list[str]:
        """As the function; the last one holds whatever is deeper than any rule, so that depth costs nothing."""
        return segments_of(path, self.depth)

    def walk(self, segments: list[str]) -> tuple[Shape, list[Node]]:
        """The pattern sets of a path, and the nodes where it ends."""
        sets: list[PatternSet] = []
        nodes = [self.root]
        for segment in segments:
            below = []
            for node in nodes:
                if node.rests:
                    sets.append(node.rests)
                below += [child for child in (node.literal.get(segment), node.any) if child is not None]
            nodes = below
            if not nodes:
                break
        sets += [patterns for node in nodes for patterns in (node.rests, node.ends) if patterns]
        return tuple(sets), nodes


def all_below(node: Node) -> PatternSet:
    """All patterns of a node and of those below it, without the names of segments, since it is not known which they are."""
    if node.below is None:
        found: PatternSet = {}
        for patterns in (node.rests, node.ends, *map(all_below, node.children())):
            for host, listed in patterns.items():
                found.setdefault(host, []).extend([pattern._replace(names=()) for pattern in listed])
        node.below = found
    return node.below


def matching(shape: Shape, method: str, hosts: Iterable[str] | None) -> Iterator[Pattern]:
    """The patterns of a shape for a method and for these host patterns; None: whatever the host."""
    for patterns in shape:
        for host in patterns if hosts is None else ("", *hosts):
            yield from (pattern for pattern in patterns.get(host, ()) if pattern.matches(method))
