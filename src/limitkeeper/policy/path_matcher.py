"""Finds the rules that match a path in a tree of segments: the cost depends on the shape of the rules, not on their number.

    /orders/{order_id}/items     one node for "orders", one for any segment, one for "items"
    /static/**                   everything below "static", and "static" itself

A walk follows a literal child and the one for any segment, side by side, and collects what ends there. Methods and hosts are
compared only for what was collected. Rejected: one regular expression after the other (a thousand rules cost a thousand tries).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..errors import ConfigurationError
from .identity.hosts import host_matches
from .identity.paths import normalize_path
from .model import Match
from .request_context import RequestContext

#: A rule without methods does not match it: one message of a connection is no request.
MESSAGE = "MESSAGE"
#: (rule's index, hosts to compare; none: any host)
Hit = tuple[int, tuple[str, ...]]


class Pattern:
    """One match of one rule: what must hold besides the path, and the names of the path's open segments."""

    __slots__ = ("host", "index", "methods", "names")

    def __init__(self, index: int, match: Match, names: tuple[tuple[int, str], ...]) -> None:
        self.index = index
        self.methods = with_head(match.methods)
        self.host = match.host
        self.names = names

    def matches(self, method: str) -> bool:
        return method in self.methods if self.methods else method != MESSAGE


def with_head(methods: frozenset[str]) -> frozenset[str]:
    """A server answers HEAD with its GET handler, so a rule for GET matches HEAD too."""
    return methods | {"HEAD"} if "GET" in methods else methods


class Node:
    """A node of the tree: its literal children, the child for any segment, and the patterns that end here or go on."""

    __slots__ = ("any", "ends", "literal", "rests")

    def __init__(self) -> None:
        self.literal: dict[str, Node] = {}
        self.any: Node | None = None
        self.ends: list[Pattern] = []
        self.rests: list[Pattern] = []


class PathMatcher:
    """The matches of many rules. `find` gives the rules by index, in order, and what their templates captured."""

    def __init__(self, rules: Iterable[Sequence[Match]]) -> None:
        self.root = Node()
        for index, matches in enumerate(rules):
            for match in matches or (Match(),):
                self._add(index, match)

    def _add(self, index: int, match: Match) -> None:
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
        (node.rests if not match.path or segments[-1:] == ["**"] else node.ends).append(pattern)

    def find(self, method: str, path: str) -> tuple[tuple[Hit, ...], dict[str, str]]:
        """The rules that match a method and a normalised path, for any host."""
        segments = segments_of(path)
        found: dict[int, tuple[str, ...]] = {}
        captured: dict[str, str] = {}
        for pattern in self._walk(segments):
            if not pattern.matches(method):
                continue
            hosts = found.get(pattern.index, (pattern.host,))
            found[pattern.index] = () if not pattern.host or not hosts else (*hosts, pattern.host)
            for depth, name in pattern.names:
                captured[name] = segments[depth]
        return tuple((index, tuple(dict.fromkeys(found[index]))) for index in sorted(found)), captured

    def _walk(self, segments: list[str]) -> list[Pattern]:
        patterns: list[Pattern] = []
        nodes = [self.root]
        for segment in segments:
            below = []
            for node in nodes:
                patterns += node.rests
                literal = node.literal.get(segment)
                if literal is not None:
                    below.append(literal)
                if node.any is not None:
                    below.append(node.any)
            nodes = below
            if not nodes:
                return patterns
        for node in nodes:
            patterns += node.rests
            patterns += node.ends
        return patterns


def segments_of(path: str) -> list[str]:
    """The segments of a path or a template: "/" has none."""
    stripped = path.strip("/")
    return stripped.split("/") if stripped else []


def host_matches_any(hosts: tuple[str, ...], host: str) -> bool:
    """Whether one of these host patterns matches this host."""
    return any(host_matches(pattern, host) for pattern in hosts)


def limits_host(hosts: tuple[str, ...], context: RequestContext) -> bool:
    """Whether a rule for these hosts applies. The application may be able to parse a Host header that this package can't (two of
    them, a port of letters): every rule applies to it, as to any reading of a path, and no exemption."""
    host = context.host()
    return host_matches_any(hosts, host) if host else bool(context.header("host"))
