"""A policy as it is written: texts, lists and tables, each with its place. YAML and Python make the same tree.

A plain YAML scalar keeps both its text (`010`, `off`) and what it is as a value (numbers, true, false, nothing); each word of the
policy takes the one that it needs, so that a key `no` stays a text and an override for `42` is one for "42".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: How deep lists and tables may lie in each other; a policy needs nine.
DEEPEST = 32
#: How many texts, lists and tables a policy from Python may have.
MOST = 100_000


@dataclass(frozen=True, slots=True)
class SourcePosition:
    """Where something stands: `line` and `column` from 1, `length` characters of that line; 0 for a policy from Python."""

    line: int = 0
    column: int = 0
    length: int = 1
    path: str = ""

    def part(self, start: int, length: int) -> SourcePosition:
        return SourcePosition(self.line, self.column + start, max(1, length), self.path) if self.line else self


class Node:
    """Something that is written. The base of the three kinds."""

    __slots__ = ("place",)
    noun = "nothing"

    def __init__(self, place: SourcePosition) -> None:
        self.place = place


class Scalar(Node):
    """One text or value. `exact` says that `text` stands in the source line as it is, `offset` behind the place's column."""

    __slots__ = ("exact", "offset", "text", "value")
    noun = "a text"

    def __init__(self, place: SourcePosition, value: Any, text: str, offset: int = 0, exact: bool = False) -> None:
        super().__init__(place)
        self.value = value
        self.text = text
        self.offset = offset
        self.exact = exact

    def within(self, start: int, length: int) -> SourcePosition:
        """The place of a part of the text; of the whole where it was folded or escaped."""
        return self.place.part(self.offset + start, length) if self.exact else self.place


class ListNode(Node):
    """A list."""

    __slots__ = ("items",)
    noun = "a list"

    def __init__(self, place: SourcePosition) -> None:
        super().__init__(place)
        self.items: list[Node] = []


class Table(Node):
    """Words and what stands behind them, in order; no word twice. `partial`: something was left out, and told of."""

    __slots__ = ("entries", "partial")
    noun = "a table"

    def __init__(self, place: SourcePosition) -> None:
        super().__init__(place)
        self.partial = False
        self.entries: dict[str, tuple[Scalar, Node]] = {}


class Missing(Node):
    """Something was here that could not be kept, and was told of; nobody else needs to complain about it."""

    __slots__ = ()


class TooDeep(Exception):
    """Something lies deeper, or is more, than any policy."""

    def __init__(self, place: SourcePosition, message: str) -> None:
        super().__init__(message)
        self.place = place


def under(path: str, word: str) -> str:
    """The path of a word in a table."""
    return f"{path}.{word}" if path else word


def scalar_of(value: Any, place: SourcePosition) -> Scalar:
    """A value from Python as a scalar."""
    if isinstance(value, bool):
        return Scalar(place, value, "true" if value else "false")
    if value is None:
        return Scalar(place, None, "")
    if isinstance(value, int):
        return Scalar(place, value, str(value) if abs(value) < 10**18 else "a very large number")
    if isinstance(value, float):
        return Scalar(place, value, repr(value))
    return Scalar(place, value, str(value) if isinstance(value, str) else shown_value(value))


def shown_value(value: Any) -> str:
    """A Python value in a message; whoever can't say what it is, is called by its type."""
    try:
        return repr(value)
    except Exception:
        return f"a {type(value).__name__}"


class _Builder:
    """Builds a tree from Python values; what shares or contains itself is cut off."""

    def __init__(self) -> None:
        self.count = 0

    def node(self, value: Any, path: str, depth: int) -> Node:
        place = SourcePosition(path=path)
        self.count += 1
        if depth > DEEPEST or self.count > MOST:
            raise TooDeep(place, "this policy is too deep or too large; does a list contain itself?")
        if isinstance(value, Mapping):
            return self.table(value, place, depth)
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            several = ListNode(place)
            several.items = [self.node(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
            return several
        return scalar_of(value, place)

    def table(self, value: Mapping[Any, Any], place: SourcePosition, depth: int) -> Table:
        table = Table(place)
        for word, item in value.items():
            if item is None and isinstance(word, str):
                continue  # None is not said
            key = scalar_of(word, SourcePosition(path=under(place.path, shown_word(word))))
            table.entries[key.text] = (key, self.node(item, key.place.path, depth + 1))
        return table


def shown_word(word: Any) -> str:
    return word if isinstance(word, str) else scalar_of(word, SourcePosition()).text


def from_python(value: Any) -> Node:
    """The tree of a policy that was said in Python."""
    return _Builder().node(value, "", 0)


def plain(node: Node) -> Any:
    """The values of a tree, as JSON has them."""
    if isinstance(node, Table):
        return {word: plain(item) for word, (_, item) in node.entries.items()}
    if isinstance(node, ListNode):
        return [plain(item) for item in node.items]
    assert isinstance(node, Scalar)
    return node.value
