"""Validators: what a policy may hold at one place. Each parses a node and gives the JSON Schema of the same values.

`parse(node, context)` returns the value, or INVALID after adding a diagnostic; `schema()` is the JSON Schema of the same values.
The schema rejects exactly what a validator rejects by type, field name or range (`kind` SCHEMA); what only a parser of the text
can know (a rate, a network, an undefined name) it accepts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from enum import Enum
from typing import Any, Final, Generic, TypeVar

from ...errors import InvalidLimit
from ...rate import duration_us
from .diagnostics import SCHEMA
from .nodes import ListNode, MappingNode, Missing, Node, Scalar
from .parse_context import ParseContext, ParseError, nearest, shorten

Json = dict[str, object]
T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")


class Invalid(Enum):
    """The type of INVALID, which a validator returns after it has added a diagnostic."""

    INVALID = "invalid"


INVALID: Final = Invalid.INVALID


class Validator(Generic[T_co]):
    """Base class. `expects` is the noun phrase behind "expected" in messages, `example` a value to write."""

    expects = "a value"
    example = ""

    def parse(self, node: Node, context: ParseContext) -> T_co | Invalid:
        raise NotImplementedError

    def schema(self) -> Json:
        raise NotImplementedError

    def map(self, convert: Callable[[T_co], U]) -> Validator[U]:
        """A validator of the same nodes whose value is converted."""
        return Mapped(self, convert)

    def reject(self, node: Node, context: ParseContext, suggestion: str | None = None) -> Invalid:
        """Adds "expected …, got …"."""
        if not isinstance(node, Missing):
            text = node.text if isinstance(node, Scalar) else ""
            remedy = self.remedy() if suggestion is None else suggestion
            context.error(node.position, f"expected {self.expects}, got {describe(node)}", remedy, text, SCHEMA)
        return INVALID

    def remedy(self) -> str:
        return f"write it like {self.example}" if self.example else ""


class Mapped(Validator[U], Generic[T_co, U]):
    """Another validator whose value is converted."""

    def __init__(self, inner: Validator[T_co], convert: Callable[[T_co], U]) -> None:
        self.inner, self.convert = inner, convert
        self.expects, self.example = inner.expects, inner.example

    def parse(self, node: Node, context: ParseContext) -> U | Invalid:
        value = self.inner.parse(node, context)
        return INVALID if value is INVALID else self.convert(value)

    def schema(self) -> Json:
        return self.inner.schema()


def describe(node: Node) -> str:
    """A node in a message."""
    if not isinstance(node, Scalar):
        return node.noun
    if node.value is None:
        return "an empty value"
    return repr(shorten(node.text)) if isinstance(node.value, str) else shorten(node.text)


class Text(Validator[T_co]):
    """A string that `parser` reads; it raises ParseError. `loose` also takes unquoted numbers and booleans as their text.

    `accepts` recognizes ready values from Python, which `convert` turns into the result. `secret` redacts the text everywhere.
    """

    def __init__(
        self,
        expects: str,
        parser: Callable[[str], T_co],
        example: str = "",
        *,
        accepts: Callable[[object], bool] | None = None,
        convert: Callable[[Any], T_co] | None = None,
        loose: bool = False,
        secret: bool = False,
    ) -> None:
        self.expects = expects
        self.parser = parser
        self.example = example
        self.accepts = accepts
        self.convert: Callable[[Any], T_co] = convert or (lambda value: value)
        self.loose = loose
        self.secret = secret

    def parse(self, node: Node, context: ParseContext) -> T_co | Invalid:
        if not isinstance(node, Scalar) or node.value is None:
            return self.reject(node, context)
        if self.secret:
            context.redact(node)
        try:
            if self.accepts is not None and self.accepts(node.value):
                return self.convert(node.value)
            if not isinstance(node.value, str) and not (self.loose and isinstance(node.value, (int, float))):
                return self.reject(node, context)
            return self.parser(node.text)
        except ParseError as error:
            context.parse_error(node, error)
            return INVALID

    def schema(self) -> Json:
        return {"type": ["string", "number", "boolean"] if self.loose else "string"}


class Url(Text[str]):
    """A URL whose credentials are redacted."""

    credentials = re.compile(r"(?<=://)[^/]*(?=@)|(?<=password=)[^&#]*")

    def parse(self, node: Node, context: ParseContext) -> str | Invalid:
        if isinstance(node, Scalar) and isinstance(node.value, str):
            for found in self.credentials.finditer(node.text):
                context.redact(node, found.start(), len(found[0]))
                context.secrets.update(part for part in found[0].split(":") if len(part) > 2)
        return super().parse(node, context)


class Integer(Validator[int]):
    """An integer within bounds."""

    def __init__(self, what: str, low: int, high: int) -> None:
        self.expects = f"{what} (an integer from {low} to {high})"
        self.low, self.high = low, high

    def parse(self, node: Node, context: ParseContext) -> int | Invalid:
        value = node.value if isinstance(node, Scalar) else None
        if isinstance(value, bool) or not isinstance(value, int) or not self.low <= value <= self.high:
            return self.reject(node, context)
        return value

    def schema(self) -> Json:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


class Boolean(Validator[bool]):
    """true or false; on, off, yes and no are synonyms."""

    expects = "true or false"
    synonyms: Mapping[str, bool] = {"on": True, "yes": True, "off": False, "no": False}

    def parse(self, node: Node, context: ParseContext) -> bool | Invalid:
        value = node.value if isinstance(node, Scalar) else None
        if isinstance(value, str):
            value = self.synonyms.get(value.lower(), value)
        return value if isinstance(value, bool) else self.reject(node, context)

    def schema(self) -> Json:
        return {"enum": [True, False, *(form for word in self.synonyms for form in (word, word.title(), word.upper()))]}


class Choice(Validator[str]):
    """One of a few words."""

    def __init__(self, *words: str) -> None:
        self.words = words
        self.expects = "one of " + ", ".join(words)

    def parse(self, node: Node, context: ParseContext) -> str | Invalid:
        if not isinstance(node, Scalar) or node.value is None:
            return self.reject(node, context)
        text = "off" if node.value is False and "off" in self.words else node.text
        if text in self.words:
            return text
        similar = nearest(text, self.words)
        return self.reject(node, context, f"did you mean {similar!r}?" if similar is not None else "")

    def schema(self) -> Json:
        return {"enum": [*self.words, *([False] if "off" in self.words else [])]}


class DurationText(Validator[int]):
    """A duration in microseconds: text ("200ms"), seconds as a number, or a timedelta from Python."""

    expects = "a duration"
    example = "200ms, 30s or 24h"

    def __init__(self, low: str, high: str) -> None:
        self.low, self.high = low, high

    def parse(self, node: Node, context: ParseContext) -> int | Invalid:
        value = node.value if isinstance(node, Scalar) else None
        if isinstance(value, bool) or not isinstance(value, (str, int, float, timedelta)):
            return self.reject(node, context)
        assert isinstance(node, Scalar)
        try:
            found = duration_us(shorten(value, 80) if isinstance(value, str) else value)
        except (InvalidLimit, ValueError, OverflowError):
            context.error(node.position, f"expected a duration, got {describe(node)}", self.remedy(), node.text)
            return INVALID
        if not duration_us(self.low) <= found <= duration_us(self.high):
            message = f"expected a duration from {self.low} to {self.high}, got {describe(node)}"
            context.error(node.position, message, text=node.text)
            return INVALID
        return found

    def schema(self) -> Json:
        return {"type": ["string", "number"]}


class ListOf(Validator[tuple[T_co, ...]]):
    """A list of one kind of item. `single`: an item alone is a list of one. `lenient`: invalid items are left out."""

    def __init__(
        self,
        item: Validator[T_co],
        expects: str,
        minimum: int = 1,
        maximum: int = 1000,
        *,
        single: bool = True,
        lenient: bool = False,
    ) -> None:
        self.item = item
        self.expects = expects
        self.example = item.example
        self.minimum, self.maximum = minimum, maximum
        self.single = single
        self.lenient = lenient

    def parse(self, node: Node, context: ParseContext) -> tuple[T_co, ...] | Invalid:
        if not isinstance(node, ListNode):
            if not self.single or isinstance(node, Missing):
                return self.reject(node, context)
            value = self.item.parse(node, context)
            return INVALID if value is INVALID else (value,)
        if len(node.items) < self.minimum:
            message = f"expected {self.expects}, got an empty list"
            context.error(node.position, message, self.remedy(), "[]", SCHEMA)
            return INVALID
        if len(node.items) > self.maximum:
            message = f"this list has {len(node.items)} items; at most {self.maximum} are allowed"
            context.error(node.position, message, kind=SCHEMA)
            return INVALID
        values = [self.item.parse(item, context) for item in node.items]
        valid = tuple(value for value in values if value is not INVALID)
        return valid if self.lenient or len(valid) == len(values) else INVALID

    def schema(self) -> Json:
        items: Json = {"type": "array", "items": self.item.schema(), "minItems": self.minimum, "maxItems": self.maximum}
        return {"anyOf": [self.item.schema(), items]} if self.single else items


class AnyOf(Validator[T_co]):
    """A value that may be written as a scalar, as a list or as a mapping, or given ready from Python where `accepts` says so."""

    def __init__(
        self,
        expects: str,
        *,
        scalar: Validator[T_co] | None = None,
        items: Validator[T_co] | None = None,
        mapping: Validator[T_co] | None = None,
        accepts: Callable[[object], bool] | None = None,
        convert: Callable[[Any], T_co] | None = None,
    ) -> None:
        self.expects = expects
        self.convert: Callable[[Any], T_co] = convert or (lambda value: value)
        self.forms = {Scalar: scalar, ListNode: items, MappingNode: mapping}
        self.accepts = accepts
        self.example = next((form.example for form in self.forms.values() if form is not None and form.example), "")

    def parse(self, node: Node, context: ParseContext) -> T_co | Invalid:
        form = self.forms.get(type(node))
        if isinstance(node, Scalar):
            if node.value is None:
                return self.reject(node, context)
            if self.accepts is not None and not isinstance(node.value, (str, int, float)) and self.accepts(node.value):
                return self.convert(node.value)
        return self.reject(node, context) if form is None else form.parse(node, context)

    def schema(self) -> Json:
        forms = [form.schema() for form in self.forms.values() if form is not None]
        return {"anyOf": forms} if len(forms) > 1 else forms[0]


def split_remedy(error: Exception | str) -> tuple[str, str]:
    """Splits "message; remedy"."""
    message, _, remedy = str(error).rpartition("; ")
    return (message, remedy) if message else (remedy, "")
