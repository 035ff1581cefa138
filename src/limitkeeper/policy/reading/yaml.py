"""Parses a policy's YAML into a tree of nodes with positions. The only module that uses PyYAML.

The tree is built from parser events, not by PyYAML's composer: lines and columns stay exact, nothing recurses, depth is bounded
while the tree grows, and no tag constructs anything. Anchors, aliases, merge keys and tags are errors, so a few lines can't
expand to millions of nodes. Rejected: yaml.safe_load, which keeps no positions, silently takes the last of two equal keys, and
reads `no` as false.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from ...errors import ConfigurationError
from .nodes import MAX_DEPTH, ListNode, MappingNode, Missing, Node, Scalar, SourceError, SourcePosition, join_path

MAX_BYTES = 500_000
#: A syntax error in a text up to this size is parsed again by the pure-Python parser, which is slower and explains more.
MAX_EXPLAINED = 100_000
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)")
_FLOAT = re.compile(r"[-+]?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")  # as in JSON
#: The longest text that is taken for a number, and the most characters of an integer that is kept exactly.
MAX_NUMBER, MAX_EXACT = 400, 31
_CONSTANTS: dict[str, bool | None] = {"true": True, "false": False, "null": None, "~": None, "": None}
_CONSTANTS |= {spell(word): value for word, value in _CONSTANTS.items() for spell in (str.title, str.upper)}


Event = Any  # PyYAML has no types of its own


def import_yaml() -> ModuleType:
    """Imports PyYAML; ConfigurationError names what to install."""
    try:
        import yaml
    except ImportError:
        raise ConfigurationError("a policy file needs PyYAML; pip install 'limitkeeper[policy]'") from None
    return yaml


def decode_text(data: bytes) -> str:
    """Decodes a file's bytes: UTF-8, with or without a byte order mark."""
    if len(data) > MAX_BYTES:
        message = f"the file has {len(data):,} bytes; a policy has at most {MAX_BYTES:,}"
        raise SourceError(SourcePosition(), message, "take overrides from a callable or a Redis hash")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise SourceError(SourcePosition(1, 1), "the file is encoded in UTF-16", "save it as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        position = end_position(data[: error.start].decode("utf-8", "replace"))
        invalid = repr(data[error.start : error.start + 1])[1:]
        raise SourceError(position, "the file is not UTF-8", "save it as UTF-8", invalid) from None


def end_position(before: str) -> SourcePosition:
    """The position that follows a text."""
    return SourcePosition(before.count("\n") + 1, len(before) - before.rfind("\n"))


def parse_yaml(text: str) -> tuple[Node, list[SourceError]]:
    """Parses a text into its tree and the errors that did not stop parsing (anchors, aliases, tags, duplicate keys)."""
    yaml = import_yaml()
    if len(text) > MAX_BYTES:
        raise SourceError(SourcePosition(), f"the text has {len(text):,} characters; a policy has at most {MAX_BYTES:,}")
    invalid = yaml.reader.Reader.NON_PRINTABLE.search(text)
    if invalid is not None:
        message = f"the character U+{ord(invalid[0]):04X} is not allowed in YAML"
        remedy = "remove it, or write it as an escape in double quotes"
        raise SourceError(end_position(text[: invalid.start()]), message, remedy, invalid[0])
    lines = text.splitlines()
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    while True:
        try:
            return TreeBuilder(yaml, lines).build(yaml.parse(text, loader))
        except yaml.YAMLError as error:
            if loader is yaml.SafeLoader or len(text) > MAX_EXPLAINED:
                raise explain_error(error, lines) from None
            loader = yaml.SafeLoader


class TreeBuilder:
    """Builds nodes from parser events with a stack of open collections. `errors` are those that did not stop the parser."""

    def __init__(self, yaml: ModuleType, lines: list[str]) -> None:
        self.yaml = yaml
        self.lines = lines
        self.open: list[ListNode | MappingNode] = []
        self.keys: list[Scalar | None] = []  # for each open mapping, the key whose value comes next
        self.root: Node | None = None
        self.errors: list[SourceError] = []
        self.aliases: set[str] = set()

    def build(self, events: Iterator[Event]) -> tuple[Node, list[SourceError]]:
        yaml, documents = self.yaml, 0
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    message = "a second document begins here; a policy is a single document"
                    raise SourceError(position_of(event), message, "remove the '---'", "---")
            elif isinstance(event, yaml.NodeEvent):
                self.check_features(event)
                self.begin(event)
            elif isinstance(event, yaml.CollectionEndEvent):
                self.open.pop()
                self.keys.pop()
        if self.root is None or (isinstance(self.root, Scalar) and self.root.value is None):
            raise SourceError(SourcePosition(), "the file is empty", "a policy has at least limits: with one rule")
        return self.root, self.errors

    def report(self, position: SourcePosition, text: str, message: str, suggestion: str) -> None:
        self.errors.append(SourceError(position, message, suggestion, text))
        if len(self.errors) > 100:
            raise self.errors[0]

    def check_features(self, event: Event) -> None:
        """Reports aliases (each name once), anchors and tags."""
        name, tag = event.anchor, getattr(event, "tag", None)
        if isinstance(event, self.yaml.AliasEvent):
            if name in self.aliases:
                return
            self.aliases.add(name)
            text, kind, remedy = f"*{name}", "an alias", "write out its value; a string that begins with '*' needs quotes"
        elif name is not None:
            text, kind, remedy = f"&{name}", "an anchor", "write out the value at each use"
        elif tag is not None:
            text, kind = tag.replace("tag:yaml.org,2002:", "!!"), "a tag"
            remedy = "remove it; strings, lists and mappings need none"
        else:
            return
        self.report(position_of(event), text, f"{text!r} is {kind}, which a policy can't have", remedy)

    def begin(self, event: Event) -> None:
        position = position_of(event, self.path())
        if isinstance(event, self.yaml.AliasEvent):
            self.add(Missing(position))
        elif isinstance(event, self.yaml.ScalarEvent):
            self.add(self.scalar(event, position))
        else:
            node = MappingNode(position) if isinstance(event, self.yaml.MappingStartEvent) else ListNode(position)
            self.add(node)
            if len(self.open) >= MAX_DEPTH:
                raise SourceError(position, f"lists and mappings are nested more than {MAX_DEPTH} deep here", "a policy is flat")
            self.open.append(node)
            self.keys.append(None)

    def path(self) -> str:
        if not self.open:
            return ""
        top, key = self.open[-1], self.keys[-1]
        if isinstance(top, ListNode):
            return f"{top.position.path}[{len(top.items)}]"
        return top.position.path if key is None else join_path(top.position.path, key.text)

    def add(self, node: Node) -> None:
        """Adds a node to the innermost open collection: as an item, as a value, or as the next key."""
        if not self.open:
            self.root = node
            return
        top, key = self.open[-1], self.keys[-1]
        if isinstance(top, ListNode):
            top.items.append(node)
        elif key is not None:
            if key.text == "<<" and not key.offset:
                top.partial = True
            else:
                top.entries.setdefault(key.text, (key, node))
            self.keys[-1] = None
        elif isinstance(node, Scalar):
            self.keys[-1] = self.checked_key(top, node)
        else:
            remedy = "write 'key: value'; strings with braces need quotes"
            raise SourceError(node.position, f"{node.noun} can't be the key of a mapping", remedy)

    def checked_key(self, mapping: MappingNode, key: Scalar) -> Scalar:
        """The key with its path; reports a merge key and a duplicate."""
        at = key.position
        if key.text == "<<" and not key.offset:
            self.report(at, "<<", "'<<' is a merge key, which a policy can't have", "write out the merged fields")
        if key.text in mapping.entries:
            message = f"duplicate key {key.text!r}; the first one is in line {mapping.key_position(key.text).line}"
            self.report(at, key.text, message, "remove one of them")
        key.position = SourcePosition(at.line, at.column, at.length, join_path(mapping.position.path, key.text))
        return key

    def scalar(self, event: Event, position: SourcePosition) -> Scalar:
        text = event.value
        line = self.lines[position.line - 1] if position.line <= len(self.lines) else ""
        offset = 1 if event.style in ("'", '"') else 0
        exact = line.startswith(text, position.column - 1 + offset)
        return Scalar(position, text if event.style else resolve_plain(text), text, offset, exact)


def resolve_plain(text: str) -> str | int | float | bool | None:
    """The value of a plain scalar: a decimal number, true, false, null, or the text. 010 and 1:30 are strings."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if len(text) <= MAX_NUMBER:
        if _INTEGER.fullmatch(text):
            return int(text) if len(text) <= MAX_EXACT else float(text)
        if _FLOAT.fullmatch(text):
            return float(text)
    return text


def position_of(event: Event, path: str = "") -> SourcePosition:
    start, end = event.start_mark, event.end_mark
    length = end.column - start.column if end.line == start.line else 1
    return SourcePosition(start.line + 1, start.column + 1, max(1, length), path)


_EXPLANATIONS = (
    (r"character '\\t'", "a tab can't indent YAML", "use spaces"),
    (r"scanning an alias", "a string that begins with '*' is an alias", "put it in quotes: '*'"),
    (r"scanning an anchor", "a string that begins with '&' is an anchor", "put it in quotes"),
    (r"character '(.)' that cannot start", "a string can't begin with {0!r} here", "put it in quotes"),
    (r"character that cannot start", "a string can't begin with this character", "put it in quotes"),
    (r"mapping values are", "unexpected ':'", "indent all fields of a mapping alike; a string with ': ' needs quotes"),
    (r"sequence entries are not allowed", "unexpected '-'", "begin a list on its own line"),
    (r"scanning a quoted scalar.*end of stream", "these quotes are never closed", "close them"),
    (r"flow (sequence|mapping)", "this {0} is never closed, or a ',' is missing", "close it, or add the ','"),
    (r"block (mapping|collection)", "this line does not belong to the block above it", "indent it like the lines around it"),
    (r"simple key.*could not find expected ':'", "a ':' is missing after this key", "write 'key: value'"),
)
#: Errors that are shown where the construct begins, not where the parser stopped.
_AT_THE_START = ("quoted scalar", "flow ", "simple key", "alias", "anchor")


def explain_error(error: Exception, lines: list[str]) -> SourceError:
    """A syntax error of PyYAML with its position, in words that name the fix."""
    context, problem = getattr(error, "context", None), getattr(error, "problem", None)
    reason = " ".join(str(part) for part in (context, problem) if part) or str(error)
    stopped = getattr(error, "problem_mark", None)
    if stopped is not None and "found character that cannot" in reason:  # libyaml does not name the character
        line = lines[stopped.line] if stopped.line < len(lines) else ""
        character = line[stopped.column : stopped.column + 1] or " "
        reason = reason.replace("found character that cannot", f"found character {character!r} that cannot")
    mark = (getattr(error, "context_mark", None) if any(word in reason for word in _AT_THE_START) else None) or stopped
    position = SourcePosition(min(mark.line + 1, max(1, len(lines))), mark.column + 1) if mark is not None else SourcePosition()
    for pattern, message, suggestion in _EXPLANATIONS:
        found = re.search(pattern, reason, re.S)
        if found is not None:
            words = ["list" if word == "sequence" else word for word in found.groups()]
            return SourceError(position, message.format(*words), suggestion, reason)
    return SourceError(position, f"invalid YAML: {reason}", "", reason)
