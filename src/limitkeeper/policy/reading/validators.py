"""Shapes: what may stand at a place of a policy. One shape reads it and tells editors about it, so that the two can't part.

`read(node, page)` gives the value, or BAD after noting why; `schema()` is the same as JSON Schema. What a shape refuses by its
form (another kind of thing, a word nobody knows, a number outside its bounds) the schema refuses too; what only a reader of texts
can know (a rate, a network, a name that is nowhere defined) it leaves open.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from ...errors import ConfigurationError, InvalidLimit
from ...rate import duration_us
from .diagnostics import FORM
from .nodes import ListNode, Missing, Node, Scalar, Table
from .parse_context import ParseContext, ParseError, did_you_mean, short

Json = dict[str, Any]
BAD: Any = type("Bad", (), {"__repr__": lambda self: "BAD", "__bool__": lambda self: False})()


class Validator:
    """The base: `what` it is, as a noun, and an `example`."""

    what = "something"
    example = ""

    def read(self, node: Node, page: ParseContext) -> Any:
        raise NotImplementedError

    def schema(self) -> Json:
        raise NotImplementedError

    def refuse(self, node: Node, page: ParseContext) -> Any:
        """Notes that something else stands here."""
        if not isinstance(node, Missing):
            page.wrong(node.place, text_of(node), f"{shown(node)} stands here, not {self.what}", self.remedy(), FORM)
        return BAD

    def remedy(self) -> str:
        return f"write it like {self.example}" if self.example else ""


def text_of(node: Node) -> str:
    return node.text if isinstance(node, Scalar) else ""


def shown(node: Node) -> str:
    """What stands somewhere, in a message."""
    if not isinstance(node, Scalar):
        return node.noun
    if node.value is None:
        return "nothing"
    return repr(short(node.text)) if isinstance(node.value, str) else short(node.text)


class Text(Validator):
    """A text that `parse` reads, raising Wrong. `ready` tells values from Python that need no reading.

    A number or true/false that was written without quotes is taken as its text where `loose`.
    """

    def __init__(
        self,
        what: str,
        parse: Callable[[str], Any] = str,
        example: str = "",
        *,
        ready: Callable[[Any], bool] | None = None,
        taken: Callable[[Any], Any] | None = None,
        loose: bool = False,
        pattern: str = "",
        secret: bool = False,
    ) -> None:
        self.what = what
        self.parse = parse
        self.example = example
        self.ready = ready
        self.taken = taken
        self.loose = loose
        self.pattern = pattern
        self.secret = secret

    def read(self, node: Node, page: ParseContext) -> Any:
        if not isinstance(node, Scalar) or node.value is None:
            return self.refuse(node, page)
        if self.secret:
            page.hide(node)
        try:
            if self.ready is not None and self.ready(node.value):
                return node.value if self.taken is None else self.taken(node.value)
            if not isinstance(node.value, str) and not (self.loose and isinstance(node.value, (int, float))):
                return self.refuse(node, page)
            if self.pattern and not re.search(self.pattern, node.text):
                return self.refuse(node, page)
            return self.parse(node.text)
        except ParseError as wrong:
            page.wrong_text(node, wrong)
            return BAD

    def schema(self) -> Json:
        said: Json = {"type": ["string", "number", "boolean"] if self.loose else "string"}
        return said | ({"pattern": self.pattern} if self.pattern else {})


class Url(Text):
    """A URL; its login and password are never shown."""

    login = re.compile(r"(?<=://)[^/]*(?=@)|(?<=password=)[^&#]*")

    def read(self, node: Node, page: ParseContext) -> Any:
        if isinstance(node, Scalar) and isinstance(node.value, str):
            for found in self.login.finditer(node.text):
                page.hide(node, found.start(), len(found[0]))
                page.secrets.update(part for part in found[0].split(":") if len(part) > 2)
        return super().read(node, page)


class Number(Validator):
    """A whole number within bounds."""

    def __init__(self, what: str, low: int, high: int) -> None:
        self.what = f"{what} (a whole number from {low} to {high})"
        self.low, self.high = low, high

    def read(self, node: Node, page: ParseContext) -> Any:
        value = node.value if isinstance(node, Scalar) else None
        if isinstance(value, bool) or not isinstance(value, int) or not self.low <= value <= self.high:
            return self.refuse(node, page)
        return value

    def schema(self) -> Json:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


class Boolean(Validator):
    """true or false; on, off, yes and no mean the same."""

    what = "true or false"
    words: Mapping[str, bool] = {"on": True, "yes": True, "off": False, "no": False}

    def read(self, node: Node, page: ParseContext) -> Any:
        value = node.value if isinstance(node, Scalar) else None
        if isinstance(value, str):
            value = self.words.get(value.lower(), value)
        return value if isinstance(value, bool) else self.refuse(node, page)

    def schema(self) -> Json:
        return {"enum": [True, False, *(form for word in self.words for form in (word, word.title(), word.upper()))]}


class Choice(Validator):
    """One of a few words."""

    def __init__(self, *words: str) -> None:
        self.words = words
        self.what = "one of " + ", ".join(words)

    def read(self, node: Node, page: ParseContext) -> Any:
        if not isinstance(node, Scalar) or node.value is None:
            return self.refuse(node, page)
        text = "off" if node.value is False and "off" in self.words else node.text
        if text in self.words:
            return text
        page.wrong(
            node.place, node.text, f"{shown(node)} is none of {', '.join(self.words)}", did_you_mean(text, self.words), FORM
        )
        return BAD

    def schema(self) -> Json:
        return {"enum": [*self.words, *([False] if "off" in self.words else [])]}


class DurationText(Validator):
    """A duration in microseconds: text ("200ms"), seconds as a number, a timedelta from Python."""

    what = "a duration"
    example = "200ms, 30s or 24h"

    def __init__(self, low: str = "1us", high: str = "400d") -> None:
        self.low, self.high = low, high
        self.bounds = duration_us(low), duration_us(high)

    def read(self, node: Node, page: ParseContext) -> Any:
        value = node.value if isinstance(node, Scalar) else None
        if isinstance(value, bool) or not isinstance(value, (str, int, float, timedelta)):
            return self.refuse(node, page)
        assert isinstance(node, Scalar)
        try:
            found = duration_us(short(value, 80) if isinstance(value, str) else value)
        except (InvalidLimit, ValueError, OverflowError):
            page.wrong(node.place, node.text, f"{shown(node)} is no duration", self.remedy())
            return BAD
        if not self.bounds[0] <= found <= self.bounds[1]:
            page.wrong(node.place, node.text, f"{shown(node)} is too short or too long", f"write {self.low} to {self.high}")
            return BAD
        return found

    def schema(self) -> Json:
        return {"type": ["string", "number"]}


class ListOf(Validator):
    """A list of one shape; one thing alone is a list of one. Where `sound`, what could not be read is left out of it."""

    def __init__(
        self, item: Validator, what: str = "", least: int = 1, most: int = 1000, *, alone: bool = True, sound: bool = False
    ) -> None:
        self.item = item
        self.what = what or f"a list of {item.what}"
        self.example = item.example
        self.least = least
        self.alone = alone
        self.sound = sound
        self.most = most

    def read(self, node: Node, page: ParseContext) -> Any:
        if not isinstance(node, ListNode):
            if not self.alone or isinstance(node, Missing):
                return self.refuse(node, page)
            value = self.item.read(node, page)
            return BAD if value is BAD else (value,)
        if len(node.items) < self.least:
            page.wrong(node.place, "[]", f"an empty list stands here, not {self.what}", self.remedy(), FORM)
            return BAD
        if len(node.items) > self.most:
            page.wrong(node.place, "", f"this list has {len(node.items)} entries; {self.most} are the most", "", FORM)
            return BAD
        values = [self.item.read(item, page) for item in node.items]
        if self.sound:
            return tuple(value for value in values if value is not BAD)
        return BAD if any(value is BAD for value in values) else tuple(values)

    def schema(self) -> Json:
        several: Json = {"type": "array", "items": self.item.schema(), "minItems": self.least, "maxItems": self.most}
        return {"anyOf": [self.item.schema(), several]} if self.alone else several


class Kinds(Validator):
    """Something that may be written as a text, as a list or as a table."""

    def __init__(
        self, what: str, *, text: Validator | None = None, several: Validator | None = None, table: Validator | None = None
    ) -> None:
        self.what = what
        self.shapes = {Scalar: text, ListNode: several, Table: table}
        self.example = next((shape.example for shape in self.shapes.values() if shape is not None and shape.example), "")

    def read(self, node: Node, page: ParseContext) -> Any:
        shape = self.shapes.get(type(node))
        if shape is None or (isinstance(node, Scalar) and node.value is None):
            return self.refuse(node, page)
        return shape.read(node, page)

    def schema(self) -> Json:
        return {"anyOf": [shape.schema() for shape in self.shapes.values() if shape is not None]}


class Made(Validator):
    """Another shape, of whose value something else is made."""

    def __init__(self, shape: Validator, made: Callable[[Any], Any]) -> None:
        self.shape, self.made = shape, made
        self.what, self.example = shape.what, shape.example

    def read(self, node: Node, page: ParseContext) -> Any:
        value = self.shape.read(node, page)
        return BAD if value is BAD else self.made(value)

    def schema(self) -> Json:
        return self.shape.schema()


class Ready(Validator):
    """A value from Python that is used as it is, or else what a shape says."""

    def __init__(self, ready: Callable[[Any], bool], shape: Validator) -> None:
        self.ready, self.shape = ready, shape
        self.what, self.example = shape.what, shape.example

    def read(self, node: Node, page: ParseContext) -> Any:
        if (
            isinstance(node, Scalar)
            and node.value is not None
            and not isinstance(node.value, (str, int, float))
            and self.ready(node.value)
        ):
            return node.value
        return self.shape.read(node, page)

    def schema(self) -> Json:
        return self.shape.schema()


class Anything(Validator):
    """Whatever JSON has."""

    what = "a value"

    def read(self, node: Node, page: ParseContext) -> Any:
        if isinstance(node, Table):
            read = {word: self.read(item, page) for word, (_, item) in node.entries.items()}
            return BAD if any(value is BAD for value in read.values()) else read
        if isinstance(node, ListNode):
            values = [self.read(item, page) for item in node.items]
            return BAD if any(value is BAD for value in values) else values
        if not isinstance(node, Scalar) or not (node.value is None or isinstance(node.value, (str, int, float))):
            return self.refuse(node, page)
        return node.value

    def schema(self) -> Json:
        return {}


def only_configuration(error: Exception) -> Sequence[str]:
    """The message and the remedy of an error that was raised while something was made."""
    message, _, remedy = str(error).rpartition("; ")
    return (message, remedy) if message else (str(error), "")


MISFITS = (ConfigurationError, InvalidLimit)
