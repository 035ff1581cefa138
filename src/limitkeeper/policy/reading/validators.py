"""Validators: what a policy may hold at one place. Each parses a node and gives the JSON Schema of the same values.

`parse(node, context)` returns the value, or INVALID after adding a diagnostic; `schema` is the JSON Schema of the same values. It
rejects exactly what a validator rejects by type, field name or range (`kind` SCHEMA); what only a parser of the text
can know (a rate, a network, an undefined name) it accepts. `Fields` validates a mapping by a table of its fields.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import timedelta
from typing import Any, Generic, TypeGuard, TypeVar

from ...errors import ConfigurationError, InvalidLimit
from ...rate import duration_us
from .diagnostics import (
    INVALID,
    MAX_TEXT,
    SCHEMA,
    SEMANTIC,
    Invalid,
    ParseContext,
    ParseError,
    bounded_text,
    did_you_mean,
    nearest,
    shorten,
    split_remedy,
)
from .nodes import MAX_LOOSE, ListNode, MappingNode, Missing, Node, Scalar, SourcePosition

MAX_FIELDS = 10_000
T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")


class Validator(Generic[T_co]):
    """Base class. `expects` is the noun phrase behind "expected" in messages, `example` a value to write."""

    expects: str
    schema: Mapping[str, object]
    example = ""

    def parse(self, node: Node, context: ParseContext) -> T_co | Invalid:
        raise NotImplementedError

    def map(self, convert: Callable[[T_co], U]) -> Validator[U]:
        """A validator of the same nodes whose value is converted."""

        def parse(node: Node, context: ParseContext) -> U | Invalid:
            value = self.parse(node, context)
            return INVALID if value is INVALID else convert(value)

        mapped: Any = copy(self)
        mapped.parse = parse
        return mapped  # type: ignore[no-any-return]

    def reject(self, node: Node, context: ParseContext, remedy: str | None = None) -> Invalid:
        """Adds "expected …, got …"."""
        if isinstance(node, Missing):
            return INVALID
        message = f"expected {self.expects}, got {describe(node)}"
        return context.error(node.position, message, self.remedy() if remedy is None else remedy, node.text, SCHEMA)

    def remedy(self) -> str:
        return f"write it like {self.example}" if self.example else ""


def describe(node: Node) -> str:
    """A node in a message."""
    if not isinstance(node, Scalar):
        return node.noun
    if node.value is None:
        return "an empty value"
    return repr(shorten(node.text)) if isinstance(node.value, str) else shorten(node.text)


def unchanged(value: Any) -> Any:
    return value


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_a(kind: type) -> Callable[[object], bool]:
    """Recognizes the values of a type, for `accepts`."""
    return lambda value: isinstance(value, kind)


@dataclass(eq=False)
class Text(Validator[T_co]):
    """A string that `parser` reads; it raises ParseError. `loose` also takes unquoted numbers and booleans as their text.

    `accepts` recognizes ready values from Python, which `convert` turns into the result. `secret` redacts the text everywhere.
    `numbers` is the JSON Schema of the numbers that may be written without quotes, `texts` that of the strings, where it rejects
    exactly what `parser` does.
    """

    expects: str
    parser: Callable[[str], T_co]
    example: str = ""
    _: KW_ONLY
    accepts: Callable[[object], bool] = lambda value: False
    convert: Callable[[Any], T_co] = unchanged
    loose: bool = False
    secret: bool = False
    numbers: Mapping[str, object] | None = None
    texts: Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        if self.parser is bounded_text:
            self.texts = {"maxLength": MAX_TEXT}
        others = [{"type": "boolean"}] if self.loose else []
        if self.loose or self.numbers is not None:
            others.insert(0, LOOSE_NUMBER if self.numbers is None else self.numbers)  # type: ignore[arg-type]
        if self.accepts(None):
            others.append({"type": "null"})
        text: Mapping[str, object] = {"type": "string", **(self.texts or {})}
        self.schema = {"anyOf": [text, *others]} if others else text

    def parse(self, node: Node, context: ParseContext) -> T_co | Invalid:
        if not isinstance(node, Scalar):
            return self.reject(node, context)
        value, text = node.value, node.text
        if self.secret and value is not None:
            context.redact(node.position, text)
        try:
            if self.accepts(value):
                return self.convert(value)
            if is_number(value) and self.numbers is not None:
                text = str(int(value)) if math.isfinite(value) and value == int(value) else text
            elif not isinstance(value, str) and not (self.loose and isinstance(value, (int, float)) and abs(value) <= MAX_LOOSE):
                return self.reject(node, context)
            return self.parser(text)
        except ParseError as error:
            by_schema = self.texts is not None or not isinstance(value, str)
            return context.parse_error(node, error, SCHEMA if by_schema else SEMANTIC)


#: A number that is taken as its text.
LOOSE_NUMBER = {"type": "number", "minimum": -MAX_LOOSE, "maximum": MAX_LOOSE}
#: A key of a mapping that may be any text.
ANY_KEY = Text("a key", str)


class Url(Text[str]):
    """A URL whose credentials are redacted. `${NAME}` in it is the environment variable NAME."""

    credentials = re.compile(r"(?<=://)[^/]*(?=@)|(?<=password=)[^&#]*")
    variable = re.compile(r"\$\{(\w+)\}", re.A)

    def parse(self, node: Node, context: ParseContext) -> str | Invalid:
        if not isinstance(node, Scalar) or not isinstance(node.value, str):
            return super().parse(node, context)
        for name in self.variable.findall(node.text):
            if not os.environ.get(name):
                message, remedy = f"the environment variable {name} is not set", f"set {name}, or write its value"
                return context.error(node.position, message, remedy, f"${{{name}}}")
            context.redact(SourcePosition(), os.environ[name].strip())
        text = self.variable.sub(lambda found: os.environ[found[1]].strip(), node.text)
        for found in self.credentials.finditer(text):
            context.redact(node.part(found.start(), len(found[0])) if text == node.text else SourcePosition(), found[0])
            context.secrets.update(part for part in found[0].split(":") if len(part) > 2)
        return super().parse(node if text == node.text else replace(node, value=text, text=text, exact=False), context)


class Integer(Validator[int]):
    """An integer within bounds."""

    def __init__(self, what: str, low: int, high: int) -> None:
        self.expects = f"{what} (an integer from {low} to {high})"
        self.low, self.high = low, high
        self.schema = {"type": "integer", "minimum": low, "maximum": high}

    def parse(self, node: Node, context: ParseContext) -> int | Invalid:
        value = node.value
        if isinstance(value, float) and value.is_integer():  # in JSON, 429.0 is 429
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not self.low <= value <= self.high:
            return self.reject(node, context)
        return value


class Boolean(Validator[bool]):
    """true or false; on, off, yes and no are synonyms."""

    expects = "true or false"
    synonyms: Mapping[str, bool] = {"on": True, "yes": True, "off": False, "no": False}
    schema: Mapping[str, object] = {
        "enum": [True, False, *(form for word in synonyms for form in (word, word.title(), word.upper()))]
    }

    def parse(self, node: Node, context: ParseContext) -> bool | Invalid:
        value = node.value
        if isinstance(value, str):
            value = self.synonyms.get(value.lower())
        return value if isinstance(value, bool) else self.reject(node, context)


class Choice(Validator[str]):
    """One of a few words."""

    def __init__(self, *words: str) -> None:
        self.words = words
        self.expects = "one of " + ", ".join(words)
        self.schema = {"enum": [*words, *([False] if "off" in words else [])]}

    def parse(self, node: Node, context: ParseContext) -> str | Invalid:
        if node.value is None:
            return self.reject(node, context)
        text = "off" if node.value is False and "off" in self.words else node.text
        if text in self.words:
            return text
        similar = nearest(text, self.words)
        return self.reject(node, context, f"did you mean {similar!r}?" if similar is not None else "")


class Duration(Validator[int]):
    """A duration in microseconds: text ("200ms"), seconds as a number, or a timedelta from Python."""

    expects = "a duration"
    example = "200ms, 30s or 24h"

    def __init__(self, low: str, high: str) -> None:
        self.low, self.high = low, high
        self.low_us, self.high_us = duration_us(low), duration_us(high)
        seconds = {"type": "number", "minimum": self.low_us / 1e6, "maximum": self.high_us / 1e6}
        self.schema = {"anyOf": [{"type": "string"}, seconds]}

    def parse(self, node: Node, context: ParseContext) -> int | Invalid:
        value = node.value
        if isinstance(value, bool) or not isinstance(value, (str, int, float, timedelta)):
            return self.reject(node, context)
        message = f"expected a duration from {self.low} to {self.high}, got {describe(node)}"
        if isinstance(value, (int, float)) and not self.low_us / 1e6 <= value <= self.high_us / 1e6:
            return context.error(node.position, message, text=node.text, kind=SCHEMA)
        try:
            found = duration_us(shorten(value, 80) if isinstance(value, str) else value)
        except (InvalidLimit, ValueError, OverflowError):
            return context.error(node.position, f"expected a duration, got {describe(node)}", self.remedy(), node.text)
        return found if self.low_us <= found <= self.high_us else context.error(node.position, message, text=node.text)


@dataclass(eq=False)
class ListOf(Validator[tuple[T_co, ...]]):
    """A list of one kind of item. `single`: an item alone is a list of one. `lenient`: invalid items are left out."""

    item: Validator[T_co]
    expects: str
    minimum: int = 1
    maximum: int = 1000
    _: KW_ONLY
    single: bool = True
    lenient: bool = False

    def __post_init__(self) -> None:
        self.example = self.item.example
        items = {"type": "array", "items": self.item.schema, "minItems": self.minimum, "maxItems": self.maximum}
        self.schema = {"anyOf": [self.item.schema, items]} if self.single else items

    def parse(self, node: Node, context: ParseContext) -> tuple[T_co, ...] | Invalid:
        if not isinstance(node, ListNode):
            if not self.single or isinstance(node, Missing):
                return self.reject(node, context)
            value = self.item.parse(node, context)
            return INVALID if value is INVALID else (value,)
        if len(node.items) < self.minimum:
            return context.error(node.position, f"expected {self.expects}, got an empty list", self.remedy(), "[]", SCHEMA)
        if len(node.items) > self.maximum:
            message = f"this list has {len(node.items)} items; at most {self.maximum} are allowed"
            return context.error(node.position, message, kind=SCHEMA)
        values = [self.item.parse(item, context) for item in node.items]
        valid = tuple(value for value in values if value is not INVALID)
        return valid if self.lenient or len(valid) == len(values) else INVALID


@dataclass(eq=False)
class AnyOf(Validator[T_co]):
    """A value that may be written as a scalar, as a list or as a mapping, or given ready from Python where `accepts` says so."""

    expects: str
    _: KW_ONLY
    scalar: Validator[T_co] | None = None
    items: Validator[T_co] | None = None
    mapping: Validator[T_co] | None = None
    accepts: Callable[[object], bool] = lambda value: False
    convert: Callable[[Any], T_co] = unchanged

    def __post_init__(self) -> None:
        forms = {Scalar: self.scalar, ListNode: self.items, MappingNode: self.mapping}
        self.forms = {kind: form for kind, form in forms.items() if form is not None}
        self.example = next((form.example for form in self.forms.values() if form.example), "")
        schemas = [form.schema for form in self.forms.values()]
        self.schema = {"anyOf": schemas} if len(schemas) > 1 else schemas[0]

    def parse(self, node: Node, context: ParseContext) -> T_co | Invalid:
        value = node.value
        if value is not None and not isinstance(value, (str, int, float)) and self.accepts(value):
            return self.convert(value)
        form = None if isinstance(node, Scalar) and value is None else self.forms.get(type(node))
        return self.reject(node, context) if form is None else form.parse(node, context)


@dataclass(frozen=True)
class Field:
    """One field of a mapping: its validator, its description for editors, and whether it is required (`unless` one of others is
    given)."""

    validator: Validator[object]
    description: str
    required: bool = False
    unless: tuple[str, ...] = ()


class InvalidField(Exception):
    """A value can't be built because one of its fields is absent or invalid, which has been reported."""


@dataclass(eq=False)
class ParsedFields:
    """The valid values of a mapping's fields, and the position of every field. `name in fields`: it is written, valid or not."""

    node: MappingNode
    values: dict[str, Any] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        return name in self.node.entries

    def __getitem__(self, name: str) -> Any:
        """The value of a field; InvalidField where it is absent or invalid."""
        if name not in self.values:
            raise InvalidField(name)
        return self.values[name]

    def get(self, name: str, default: object = None) -> Any:
        return self.values.get(name, default)

    def at(self, name: str) -> Node:
        """The node of a field's value; the mapping where the field is absent."""
        return self.node.child(name)

    def key(self, name: str) -> SourcePosition:
        """The position of a field's name."""
        return self.node.key_position(name)

    def valid(self, *names: str) -> bool:
        """Whether each of these fields (none: of all) is absent or valid."""
        return all(name in self.values for name in names or self.node.entries if name in self.node.entries)


def as_fields(fields: ParsedFields, context: ParseContext) -> Any:
    return fields


def as_pairs(fields: ParsedFields, context: ParseContext) -> Any:
    """The (key, value) pairs of a mapping of arbitrary keys; INVALID where any of them is."""
    return tuple((key, fields[key]) for key in fields.node.entries)


@dataclass(eq=False)
class Fields(Validator[T_co]):
    """A mapping of known fields. `build(fields, context)` makes the value.

    others      validator of the values of any other key; `key` is that of the key itself
    one_of      exactly one of these fields must be there
    rules       more of the JSON Schema, which `build` checks too
    renamed     other names of fields, and what to write instead, for the error message
    unknown     the remedy for a field that resembles none
    """

    name: str
    specs: Mapping[str, Field]
    build: Callable[[ParsedFields, ParseContext], T_co | Invalid] = as_fields
    _: KW_ONLY
    others: Validator[object] | None = None
    key: Text[object] = ANY_KEY
    rules: Mapping[str, object] = field(default_factory=dict)
    one_of: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    unknown: str = ""
    minimum: int = 0
    example: str = ""

    def __post_init__(self) -> None:
        self.expects = f"{'an' if self.name[0] in 'aeiou' else 'a'} {self.name} mapping"
        required = [name for name, one in self.specs.items() if one.required and not one.unless]
        options = [(name, *one.unless) for name, one in self.specs.items() if one.unless]
        either = [{"anyOf": [{"required": [name]} for name in names]} for names in options]
        self.schema = {
            **self.rules,
            "type": "object",
            "properties": {name: {**one.validator.schema, "description": one.description} for name, one in self.specs.items()},
            "additionalProperties": False if self.others is None else self.others.schema,
            "minProperties": self.minimum,
            "maxProperties": MAX_FIELDS,
            **({"propertyNames": {"anyOf": [{"enum": list(self.specs)}, self.key.texts]}} if self.key.texts is not None else {}),
            **({"required": required} if required else {}),
            **({"allOf": either} if either else {}),
            **({"oneOf": [{"required": [name]} for name in self.one_of]} if self.one_of else {}),
        }

    def parse(self, node: Node, context: ParseContext) -> T_co | Invalid:
        if not isinstance(node, MappingNode):
            return self.reject(node, context)
        if len(node.entries) > MAX_FIELDS:
            message = f"this mapping has {len(node.entries)} fields; at most {MAX_FIELDS} are allowed"
            return context.error(node.position, message, kind=SCHEMA)
        if len(node.entries) < self.minimum:
            return context.error(node.position, f"expected {self.expects}, got an empty mapping", self.remedy(), "{}", SCHEMA)
        fields = ParsedFields(node)
        for text, (key, item) in node.entries.items():
            value = self._value(text, key, item, context)
            if value is not INVALID:
                fields.values[text] = value
        self._check_presence(fields, context)
        try:
            return self.build(fields, context)
        except InvalidField:
            return INVALID
        except (ConfigurationError, InvalidLimit) as error:
            return context.error(node.position, *split_remedy(error))

    def or_else(self, expects: str, **forms: Any) -> AnyOf[Any]:
        """This mapping, or another form of the same value: see AnyOf."""
        return AnyOf(expects, mapping=self, **forms)

    def _value(self, text: str, key: Scalar, item: Node, context: ParseContext) -> object:
        if text in self.specs:
            return self.specs[text].validator.parse(item, context)
        if self.others is None:
            remedy = f"write {self.renamed[text]}" if text in self.renamed else did_you_mean(text, self.specs, self.unknown)
            return context.error(key.position, f"unknown field {shorten(text)!r} in {self.name}", remedy, text, SCHEMA)
        value = self.others.parse(item, context)
        try:
            self.key.parser(text)
        except ParseError as error:
            return context.parse_error(key, error, SEMANTIC if self.key.texts is None else SCHEMA)
        return value

    def _check_presence(self, fields: ParsedFields, context: ParseContext) -> None:
        """Reports required fields that are missing and fields that exclude each other."""
        if fields.node.partial:
            return
        first = next((key.position for key, _ in fields.node.entries.values()), fields.node.position)
        start = first if first.line else fields.node.position
        for name, spec in self.specs.items():
            if spec.required and name not in fields and not any(other in fields for other in spec.unless):
                remedy = f"write {name}: {spec.validator.example or '…'}"
                context.error(start, f"missing field {name!r} in {self.name}", remedy, kind=SCHEMA)
        present = [name for name in self.one_of if name in fields]
        remedy = f"write one of {', '.join(self.one_of)}"
        if len(present) > 1:
            message = f"{self.name} can't have both {present[0]!r} and {present[1]!r}"
            context.error(fields.key(present[1]), message, remedy, present[1], SCHEMA)
        elif self.one_of and not present and all(name in self.specs for name in fields.node.entries):
            context.error(start, f"missing field in {self.name}", remedy, kind=SCHEMA)
