"""Source tree of a policy: scalars, lists and mappings with their positions. YAML text and Python values give the same tree.

A plain YAML scalar keeps its text (`010`, `off`) and its value (number, true, false, null). Each field takes the one that it
needs, so a key `no` stays a string and an override for `42` is one for "42".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import ClassVar

#: Nesting depth of lists and mappings; a valid policy needs nine.
MAX_DEPTH = 32
#: The largest number that is taken as its text.
MAX_LOOSE = 10**30
#: Number of nodes in a policy from Python.
MAX_NODES = 100_000


@dataclass(frozen=True, slots=True)
class SourcePosition:
    """Position of a node: `line` and `column` from 1, `length` characters of that line; line 0 for a policy from Python."""

    line: int = 0
    column: int = 0
    length: int = 1
    path: str = ""


@dataclass(eq=False)
class SourceError(Exception):
    """The source is not valid YAML, or is not a tree that a policy may have."""

    position: SourcePosition
    message: str
    suggestion: str = ""
    text: str = ""


@dataclass(slots=True, eq=False)
class Node:
    """Base of the node types. `value` and `text` are those of a scalar; `noun` names the type in messages."""

    position: SourcePosition
    value: object = None
    text: str = ""
    noun: ClassVar[str] = "nothing"

    def child(self, key: str) -> Node:
        """The value of a key; the node itself where it is not a mapping with this key."""
        return self


@dataclass(slots=True, eq=False)
class Scalar(Node):
    """A string or another value. `exact`: `text` appears verbatim in the source line, `offset` characters after the position."""

    offset: int = 0
    exact: bool = False
    noun = "a string"

    def part(self, start: int, length: int) -> SourcePosition:
        """The position of a part of the text; of the whole scalar where it was folded or escaped."""
        at = self.position
        exact = self.exact and at.line
        return replace(at, column=at.column + self.offset + start, length=max(1, length)) if exact else at


@dataclass(slots=True, eq=False)
class ListNode(Node):
    """A list."""

    items: list[Node] = field(default_factory=list)
    noun = "a list"


@dataclass(slots=True, eq=False)
class MappingNode(Node):
    """Keys and their values in source order, without duplicates. `partial`: a merge key was dropped and reported."""

    entries: dict[str, tuple[Scalar, Node]] = field(default_factory=dict)
    partial: bool = False
    noun = "a mapping"

    def child(self, key: str) -> Node:
        return self.entries[key][1] if key in self.entries else self

    def key_position(self, key: str) -> SourcePosition:
        """The position of a key; of the mapping where the key is absent."""
        return self.entries[key][0].position if key in self.entries else self.position


class Missing(Node):
    """Placeholder of a node that was dropped and already reported."""


def join_path(path: str, key: str) -> str:
    """The path of a key in a mapping."""
    return f"{path}.{key}" if path else key


def scalar_from(value: object, position: SourcePosition) -> Scalar:
    """A Python value as a scalar, with the text that YAML would have."""
    try:
        text = str(value) if isinstance(value, (str, int)) else repr(value)
    except Exception:  # an int of thousands of digits, or any __repr__
        text = f"a {type(value).__name__}"
    if value is None or isinstance(value, bool):
        text = {None: "", True: "true", False: "false"}[value]
    elif isinstance(value, int) and abs(value) > MAX_LOOSE:
        text = "a very large number"
    return Scalar(position, value, text)


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
            return ListNode(position, items=[build(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)])
        return scalar_from(value, position)

    return build(value, "", 0)


def find_position(node: Node, text: str) -> SourcePosition:
    """The position of a text inside a scalar, a list or a mapping; of the node where it is not found."""
    if isinstance(node, Scalar):
        start = node.text.find(text)
        return node.part(start, len(text)) if start >= 0 else node.position
    children: list[Node] = node.items if isinstance(node, ListNode) else []
    if isinstance(node, MappingNode):
        if text in node.entries:
            return node.key_position(text)
        children = [item for _, item in node.entries.values()]
    for item in children:
        found = find_position(item, text)
        holds = item.text == text or (isinstance(node, ListNode) and text in item.text)
        if found != item.position or (holds and isinstance(item, Scalar)):
            return found
    return node.position
