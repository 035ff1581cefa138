"""Source tree of a policy: scalars, lists and mappings with their positions. YAML text and Python values give the same tree.

A plain YAML scalar keeps its text (`010`, `off`) and its value (number, true, false, null). Each field takes the one that it
needs, so a key `no` stays a string and an override for `42` is one for "42".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count

#: Nesting depth of lists and mappings; a valid policy needs nine.
MAX_DEPTH = 32
#: Number of nodes in a policy from Python.
MAX_NODES = 100_000


@dataclass(frozen=True, slots=True)
class SourcePosition:
    """Position of a node: `line` and `column` from 1, `length` characters of that line; line 0 for a policy from Python."""

    line: int = 0
    column: int = 0
    length: int = 1
    path: str = ""

    def part(self, start: int, length: int) -> SourcePosition:
        return SourcePosition(self.line, self.column + start, max(1, length), self.path) if self.line else self


class SourceError(Exception):
    """The source is not valid YAML, or is not a tree that a policy may have."""

    def __init__(self, position: SourcePosition, message: str, suggestion: str = "", text: str = "") -> None:
        super().__init__(message)
        self.position, self.message, self.suggestion, self.text = position, message, suggestion, text


class Node:
    """Base of the node types. `noun` names the type in messages."""

    __slots__ = ("position",)
    noun = "nothing"

    def __init__(self, position: SourcePosition) -> None:
        self.position = position


class Scalar(Node):
    """A string or another value. `exact`: `text` appears verbatim in the source line, `offset` characters after the position."""

    __slots__ = ("exact", "offset", "text", "value")
    noun = "a string"

    def __init__(self, position: SourcePosition, value: object, text: str, offset: int = 0, exact: bool = False) -> None:
        super().__init__(position)
        self.value = value
        self.text = text
        self.offset = offset
        self.exact = exact

    def part(self, start: int, length: int) -> SourcePosition:
        """The position of a part of the text; of the whole scalar where it was folded or escaped."""
        return self.position.part(self.offset + start, length) if self.exact else self.position


class ListNode(Node):
    """A list."""

    __slots__ = ("items",)
    noun = "a list"

    def __init__(self, position: SourcePosition) -> None:
        super().__init__(position)
        self.items: list[Node] = []


class MappingNode(Node):
    """Keys and their values in source order, without duplicates. `partial`: a merge key was dropped and reported."""

    __slots__ = ("entries", "partial")
    noun = "a mapping"

    def __init__(self, position: SourcePosition) -> None:
        super().__init__(position)
        self.partial = False
        self.entries: dict[str, tuple[Scalar, Node]] = {}

    def value(self, key: str) -> Node:
        """The value of a key; the mapping itself where the key is absent."""
        entry = self.entries.get(key)
        return self if entry is None else entry[1]

    def key_position(self, key: str) -> SourcePosition:
        """The position of a key; of the mapping where the key is absent."""
        entry = self.entries.get(key)
        return self.position if entry is None else entry[0].position


class Missing(Node):
    """Placeholder of a node that was dropped and already reported."""

    __slots__ = ()


def join_path(path: str, key: str) -> str:
    """The path of a key in a mapping."""
    return f"{path}.{key}" if path else key


def scalar_from(value: object, position: SourcePosition) -> Scalar:
    """A Python value as a scalar."""
    if isinstance(value, bool):
        return Scalar(position, value, "true" if value else "false")
    if value is None:
        return Scalar(position, None, "")
    if isinstance(value, int):
        return Scalar(position, value, str(value) if abs(value) < 10**18 else "a very large number")
    return Scalar(position, value, str(value) if isinstance(value, str) else safe_repr(value))


def safe_repr(value: object) -> str:
    """The repr of a value; its type's name where repr raises."""
    try:
        return repr(value)
    except Exception:
        return f"a {type(value).__name__}"


def from_python(value: object) -> Node:
    """Builds the tree of a policy that is written in Python. Raises SourceError for one that is too deep or too large."""
    numbers = count(1)

    def build(value: object, path: str, depth: int) -> Node:
        position = SourcePosition(path=path)
        if depth > MAX_DEPTH or next(numbers) > MAX_NODES:
            raise SourceError(position, "this policy is too deep or too large; does a list contain itself?")
        if isinstance(value, Mapping):
            mapping = MappingNode(position)
            for key, item in value.items():
                if item is None and isinstance(key, str):
                    continue  # None means "not given"
                scalar = scalar_from(key, position)
                scalar.position = SourcePosition(path=join_path(path, scalar.text))
                mapping.entries[scalar.text] = (scalar, build(item, scalar.position.path, depth + 1))
            return mapping
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            node = ListNode(position)
            node.items = [build(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
            return node
        return scalar_from(value, position)

    return build(value, "", 0)


def to_python(node: Node) -> object:
    """The plain Python value of a tree, as JSON would hold it."""
    if isinstance(node, MappingNode):
        return {key: to_python(item) for key, (_, item) in node.entries.items()}
    if isinstance(node, ListNode):
        return [to_python(item) for item in node.items]
    assert isinstance(node, Scalar)
    return node.value


def find_position(node: Node, text: str) -> SourcePosition:
    """The position of a text inside a scalar, a list or a mapping; of the node where it is not found."""
    if isinstance(node, Scalar):
        start = node.text.find(text)
        return node.part(start, len(text)) if start >= 0 else node.position
    if isinstance(node, ListNode):
        for item in node.items:
            if isinstance(item, Scalar) and text in item.text:
                return find_position(item, text)
            found = node.position if isinstance(item, Scalar) else find_position(item, text)
            if found not in (node.position, item.position):
                return found
    if isinstance(node, MappingNode):
        if text in node.entries:
            return node.key_position(text)
        for _, item in node.entries.values():
            found = find_position(item, text)
            if found != item.position or (isinstance(item, Scalar) and item.text == text):
                return found
    return node.position
