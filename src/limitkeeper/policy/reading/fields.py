"""Validator of mappings: which fields a mapping may hold, the validator of each, and the value that is built from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigurationError, InvalidLimit
from .diagnostics import SCHEMA
from .nodes import MappingNode, Node, Scalar, SourcePosition
from .parse_context import ParseContext, ParseError, did_you_mean, shorten
from .validators import INVALID, Invalid, Json, T_co, Validator, split_remedy

MAX_FIELDS = 10_000


@dataclass(frozen=True)
class FieldSpec:
    """One field of a mapping: its validator, its description for editors, and whether it is required."""

    validator: Validator[object]
    description: str = ""
    required: bool = False


class ParsedFields:
    """The valid values of a mapping's fields, and the position of every field. `name in fields`: it is written, valid or not."""

    def __init__(self, node: MappingNode, values: dict[str, Any]) -> None:
        self.node = node
        self.values = values

    def __contains__(self, name: str) -> bool:
        return name in self.node.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.values)

    def get(self, name: str, default: object = None) -> Any:
        return self.values.get(name, default)

    def at(self, name: str) -> Node:
        """The node of a field's value; the mapping where the field is absent."""
        return self.node.value(name)

    def key(self, name: str) -> SourcePosition:
        """The position of a field's name."""
        return self.node.key_position(name)

    def valid(self, *names: str) -> bool:
        """Whether each of these fields is absent or valid."""
        return all(name in self.values for name in names if name in self.node.entries)


class Fields(Validator[T_co]):
    """A mapping of known fields. `build(fields, context)` makes the value.

    others      validator of the values of any other key; `check_key` raises ParseError for a key that is not allowed
    one_of      exactly one of these fields must be there
    renamed     former names of fields, for the error message
    """

    def __init__(
        self,
        name: str,
        specs: Mapping[str, FieldSpec],
        build: Callable[[ParsedFields, ParseContext], T_co | Invalid],
        *,
        others: Validator[object] | None = None,
        check_key: Callable[[str], object] = str,
        one_of: tuple[str, ...] = (),
        renamed: Mapping[str, str] | None = None,
        minimum: int = 0,
        example: str = "",
    ) -> None:
        self.name = name
        self.expects = f"{'an' if name[0] in 'aeiou' else 'a'} {name} mapping"
        self.specs = specs
        self.build = build
        self.others = others
        self.check_key = check_key
        self.one_of = one_of
        self.renamed = renamed or {}
        self.minimum = minimum
        self.example = example

    def parse(self, node: Node, context: ParseContext) -> T_co | Invalid:
        if not isinstance(node, MappingNode):
            return self.reject(node, context)
        if len(node.entries) > MAX_FIELDS:
            message = f"this mapping has {len(node.entries)} fields; at most {MAX_FIELDS} are allowed"
            context.error(node.position, message, kind=SCHEMA)
            return INVALID
        if len(node.entries) < self.minimum:
            context.error(node.position, f"expected {self.expects}, got an empty mapping", self.remedy(), "{}", SCHEMA)
            return INVALID
        fields = ParsedFields(node, {})
        for text, (key, item) in node.entries.items():
            value = self._value(text, key, item, context)
            if value is not INVALID:
                fields.values[text] = value
        self._check_presence(fields, context)
        try:
            return self.build(fields, context)
        except (ConfigurationError, InvalidLimit) as error:
            context.error(node.position, *split_remedy(error))
            return INVALID

    def _value(self, text: str, key: Scalar, item: Node, context: ParseContext) -> object:
        spec = self.specs.get(text)
        if spec is not None:
            return spec.validator.parse(item, context)
        if self.others is None:
            former = self.renamed.get(text)
            remedy = did_you_mean(text, self.specs) if former is None else f"write {former!r} instead"
            context.error(key.position, f"unknown field {shorten(text)!r} in {self.name}", remedy, text, SCHEMA)
            return INVALID
        value = self.others.parse(item, context)
        try:
            self.check_key(text)
        except ParseError as error:
            context.parse_error(key, error)
            return INVALID
        return value

    def _check_presence(self, fields: ParsedFields, context: ParseContext) -> None:
        """Reports required fields that are missing and fields that exclude each other."""
        if fields.node.partial:
            return
        start = first_position(fields.node)
        for name, spec in self.specs.items():
            if spec.required and name not in fields:
                remedy = f"write {name}: {spec.validator.example or '…'}"
                context.error(start, f"missing field {name!r} in {self.name}", remedy, kind=SCHEMA)
        present = [name for name in self.one_of if name in fields]
        if not self.one_of or len(present) == 1:
            return
        remedy = f"write one of {', '.join(self.one_of)}"
        if present:
            message = f"{self.name} can't have both {present[0]!r} and {present[1]!r}"
            context.error(fields.key(present[1]), message, remedy, present[1], SCHEMA)
        else:
            context.error(start, f"missing field in {self.name}", remedy, kind=SCHEMA)

    def schema(self) -> Json:
        schema: Json = {
            "type": "object",
            "properties": {
                name: spec.validator.schema() | ({"description": spec.description} if spec.description else {})
                for name, spec in self.specs.items()
            },
            "additionalProperties": False if self.others is None else self.others.schema(),
            "minProperties": self.minimum,
            "maxProperties": MAX_FIELDS,
        }
        required = [name for name, spec in self.specs.items() if spec.required]
        if required:
            schema["required"] = required
        if self.one_of:
            schema["oneOf"] = [{"required": [name]} for name in self.one_of]
        return schema


def first_position(node: MappingNode) -> SourcePosition:
    """Where a mapping begins: at its first key, if it has one."""
    for key, _ in node.entries.values():
        return key.position if key.position.line else node.position
    return node.position


def pairs_of(
    name: str, item: Validator[object], check_key: Callable[[str], object], example: str
) -> Fields[tuple[tuple[str, Any], ...]]:
    """A mapping of arbitrary keys to one kind of value, as (key, value) pairs; INVALID where any of them is."""

    def build(fields: ParsedFields, context: ParseContext) -> tuple[tuple[str, Any], ...] | Invalid:
        return tuple(fields.values.items()) if fields.valid(*fields.node.entries) else INVALID

    return Fields(name, {}, build, others=item, check_key=check_key, minimum=1, example=example)
