"""A policy file's YAML as a tree of nodes with their places. The only file that knows PyYAML.

The tree is built from the parser's events, not by its composer: lines and columns stay exact, nothing is recursive, depth is
bounded while it grows, and no tag can make anything. Anchors, aliases, merge keys and tags are refused: a policy says what it
means at the place where it is read, and no few lines become a million. Rejected: yaml.safe_load, which keeps no places, takes the
last of two equal keys in silence, and reads `no` as false.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from ...errors import ConfigurationError
from .nodes import DEEPEST, ListNode, Missing, Node, Scalar, SourcePosition, Table, under

#: The largest file, in bytes.
LARGEST = 500_000
#: Up to here a mistake is looked for again with the parser that explains it better, and is slower.
EXPLAINED = 100_000
_NUMBER = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)")
_FLOAT = re.compile(r"[-+]?(0|[1-9][0-9]*)\.[0-9]+")
_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None, "~": None, "": None}
_WORDS |= {word.title(): value for word, value in _WORDS.items()} | {word.upper(): value for word, value in _WORDS.items()}


class NotYaml(Exception):
    """The text is no YAML that a policy may be."""

    def __init__(self, place: SourcePosition, text: str, message: str, suggestion: str = "") -> None:
        super().__init__(message)
        self.place = place
        self.text = text
        self.message = message
        self.suggestion = suggestion


def library() -> ModuleType:
    """PyYAML, or what to install."""
    try:
        import yaml
    except ImportError:
        raise ConfigurationError("a policy file needs PyYAML; pip install 'limitkeeper[policy]'") from None
    return yaml


def text_of(data: bytes) -> str:
    """The text of a file's bytes: UTF-8, with or without a byte order mark."""
    if len(data) > LARGEST:
        raise NotYaml(
            SourcePosition(),
            "",
            f"the file has {len(data):,} bytes; a policy has at most {LARGEST:,}",
            "take overrides from a call or a Redis hash",
        )
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise NotYaml(SourcePosition(1, 1), "", "the file is written in UTF-16", "save it as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8", "replace")
        place = SourcePosition(before.count("\n") + 1, len(before) - before.rfind("\n"))
        raise NotYaml(place, repr(data[error.start : error.start + 1])[1:], "the file is not UTF-8", "save it as UTF-8") from None


def tree_of(text: str) -> tuple[Node, list[NotYaml]]:
    """The tree of a text, and what a policy can't have but can be read around."""
    yaml = library()
    if len(text) > LARGEST:
        raise NotYaml(SourcePosition(), "", f"the text has {len(text):,} characters; a policy has at most {LARGEST:,}")
    refuse_unprintable(yaml, text)
    lines = text.splitlines()
    quick = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return Builder(yaml, lines).tree(yaml.parse(text, quick))
    except yaml.YAMLError as error:
        if quick is yaml.SafeLoader or len(text) > EXPLAINED:
            raise explained(error, lines) from None
    try:
        return Builder(yaml, lines).tree(yaml.parse(text, yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise explained(error, lines) from None


def refuse_unprintable(yaml: ModuleType, text: str) -> None:
    """Control characters and halves of characters are no YAML; an invisible one is worth being named."""
    found = yaml.reader.Reader.NON_PRINTABLE.search(text)
    if found is None:
        return
    before = text[: found.start()]
    place = SourcePosition(before.count("\n") + 1, len(before) - before.rfind("\n"))
    raise NotYaml(
        place,
        found[0],
        f"the character U+{ord(found[0]):04X} can't stand in YAML",
        "take it out, or write it escaped in double quotes",
    )


class Builder:
    """Turns events into nodes, with a stack of what is open. `refused` is what was left out on the way."""

    def __init__(self, yaml: ModuleType, lines: list[str]) -> None:
        self.yaml = yaml
        self.lines = lines
        self.open: list[Node] = []
        self.words: list[Scalar | None] = []
        self.root: Node | None = None
        self.refused: list[NotYaml] = []
        self.marks: set[str] = set()

    def tree(self, events: Iterator[Any]) -> tuple[Node, list[NotYaml]]:
        yaml, documents = self.yaml, 0
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise NotYaml(place_of(event), "---", "a second document begins here; a policy is one", "take the '---' out")
            elif isinstance(event, yaml.NodeEvent):
                self.refuse_marks(event)
                self.begin(event)
            elif isinstance(event, yaml.CollectionEndEvent):
                self.open.pop()
                self.words.pop()
        if self.root is None or (isinstance(self.root, Scalar) and self.root.value is None):
            raise NotYaml(SourcePosition(), "", "the file is empty", "a policy has at least limits: with one rule")
        return self.root, self.refused

    def refuse(self, place: SourcePosition, text: str, message: str, suggestion: str) -> None:
        self.refused.append(NotYaml(place, text, message, suggestion))
        if len(self.refused) > 100:
            raise self.refused[0]

    def refuse_marks(self, event: Any) -> None:
        mark = event.anchor
        if mark is None and getattr(event, "tag", None) is None:
            return
        place = place_of(event)
        if isinstance(event, self.yaml.AliasEvent):
            if mark in self.marks:
                return
            self.marks.add(mark)
            remedy = "write out what it stands for; a text that begins with '*' needs quotes"
            self.refuse(place, f"*{mark}", f"'*{mark}' is an alias, which a policy can't have", remedy)
        elif mark is not None:
            self.refuse(
                place, f"&{mark}", f"'&{mark}' is an anchor, which a policy can't have", "write each thing where it is meant"
            )
        elif event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            remedy = "take it out; texts, lists and tables need none"
            self.refuse(place, tag, f"{tag!r} is a tag, which a policy can't have", remedy)

    def begin(self, event: Any) -> None:
        path = self.path()
        if isinstance(event, self.yaml.AliasEvent):
            self.add(Missing(place_of(event, path)))
            return
        if isinstance(event, self.yaml.ScalarEvent):
            self.add(self.scalar(event, path))
            return
        kind = Table if isinstance(event, self.yaml.MappingStartEvent) else ListNode
        node = kind(place_of(event, path))
        self.add(node)
        if len(self.open) >= DEEPEST:
            raise NotYaml(
                node.place, "", f"more than {DEEPEST} lists and tables lie in each other here", "a policy is flat: see the sample"
            )
        self.open.append(node)
        self.words.append(None)

    def path(self) -> str:
        if not self.open:
            return ""
        top = self.open[-1]
        if isinstance(top, ListNode):
            return f"{top.place.path}[{len(top.items)}]"
        word = self.words[-1]
        return top.place.path if word is None else under(top.place.path, word.text)

    def add(self, node: Node) -> None:
        if not self.open:
            self.root = node
            return
        top = self.open[-1]
        if isinstance(top, ListNode):
            top.items.append(node)
            return
        assert isinstance(top, Table)
        word = self.words[-1]
        if word is not None:
            if word.text == "<<" and not word.offset:
                top.partial = True
            else:
                top.entries.setdefault(word.text, (word, node))
            self.words[-1] = None
            return
        if not isinstance(node, Scalar):
            raise NotYaml(
                node.place, "", f"{node.noun} can't be a word of a table", "write 'word: value'; texts with braces need quotes"
            )
        self.words[-1] = self.fresh(top, node)

    def fresh(self, table: Table, word: Scalar) -> Scalar:
        """A word of a table that was not said before."""
        if word.text == "<<" and not word.offset:
            self.refuse(word.place, "<<", "'<<' is a merge key, which a policy can't have", "write out what it brings")
        before = table.entries.get(word.text)
        if before is not None:
            told = f"{word.text!r} stands here twice: first in line {before[0].place.line}"
            self.refuse(word.place, word.text, told, "say it once")
        place = SourcePosition(word.place.line, word.place.column, word.place.length, under(table.place.path, word.text))
        return Scalar(place, word.value, word.text, word.offset, word.exact)

    def scalar(self, event: Any, path: str) -> Scalar:
        place, text = place_of(event, path), event.value
        quoted = bool(event.style)
        line = self.lines[place.line - 1] if place.line <= len(self.lines) else ""
        offset = 1 if event.style in ("'", '"') else 0
        exact = line.startswith(text, place.column - 1 + offset)
        return Scalar(place, text if quoted else resolved(text), text, offset, exact)


def resolved(text: str) -> Any:
    """What a plain text is: a decimal number, true, false, nothing, or itself. 010 and 1:30 are texts."""
    if text in _WORDS:
        return _WORDS[text]
    if len(text) <= 18:
        if _NUMBER.fullmatch(text):
            return int(text)
        if _FLOAT.fullmatch(text):
            return float(text)
    return text


def place_of(event: Any, path: str = "") -> SourcePosition:
    start, end = event.start_mark, event.end_mark
    length = end.column - start.column if end.line == start.line else 1
    return SourcePosition(start.line + 1, start.column + 1, max(1, length), path)


# Mistakes of the parser, in words --------------------------------------------------------------------------------------

_REMEDIES = (
    (re.compile(r"character '\\t'"), "a tab can't indent YAML", "use spaces"),
    (re.compile(r"scanning an alias"), "a text that begins with '*' is an alias", "put it in quotes: '*'"),
    (re.compile(r"scanning an anchor"), "a text that begins with '&' is an anchor", "put it in quotes"),
    (re.compile(r"character '(.)' that cannot start"), "a text can't begin with {0!r} here", "put it in quotes"),
    (re.compile(r"character that cannot start"), "a text can't begin with this character", "put it in quotes"),
    (
        re.compile(r"mapping values are not allowed"),
        "a ':' can't stand here",
        "indent the lines of a table alike; a text with ': ' needs quotes",
    ),
    (re.compile(r"sequence entries are not allowed"), "a '-' can't stand here", "begin a list on its own line"),
    (re.compile(r"scanning a quoted scalar.*end of stream", re.S), "the quotes are opened here and never closed", "close them"),
    (
        re.compile(r"flow (sequence|mapping)"),
        "the {0} that is opened here is never closed, or a ',' is missing",
        "close it, or write the ','",
    ),
    (
        re.compile(r"block (mapping|collection)"),
        "this line does not belong to what stands above it",
        "indent it like its neighbours",
    ),
    (re.compile(r"simple key.*could not find expected ':'", re.S), "a ':' is missing behind this word", "write 'word: value'"),
)
_AT_THE_OPENING = ("quoted scalar", "flow ", "simple key", "alias", "anchor")


def at(error: Any, lines: list[str]) -> str:
    """The character at which the parser stopped; the quicker one does not say it."""
    mark = getattr(error, "problem_mark", None)
    if mark is None or mark.line >= len(lines):
        return " "
    return lines[mark.line][mark.column : mark.column + 1] or " "


def explained(error: Any, lines: list[str]) -> NotYaml:
    """What the parser found, in words of policies."""
    said = " ".join(str(part) for part in (getattr(error, "context", None), getattr(error, "problem", None)) if part) or str(
        error
    )
    opening = any(word in said for word in _AT_THE_OPENING)
    said = said.replace("found character that cannot", f"found character {at(error, lines)!r} that cannot")
    mark = (getattr(error, "context_mark", None) if opening else None) or getattr(error, "problem_mark", None)
    place = SourcePosition(min(mark.line + 1, max(1, len(lines))), mark.column + 1) if mark is not None else SourcePosition()
    for pattern, message, suggestion in _REMEDIES:
        found = pattern.search(said)
        if found is not None:
            part = {"sequence": "list", "mapping": "table"}
            words = [part.get(word, word) for word in found.groups()]
            return NotYaml(place, said, message.format(*words), suggestion)
    return NotYaml(place, said, f"this is no YAML: {said}")
