"""Validators that rules and exemptions share: `match`, `path`, `when` and `key`."""

from __future__ import annotations

from ..model import Key, Match, When
from .fields import Fields, FieldSpec, ParsedFields
from .match_parsers import parse_host, parse_match, parse_methods, parse_path
from .parse_context import ParseContext, bounded_text
from .phrase_parsers import EVERYONE, parse_alternatives, parse_identity_name
from .validators import AnyOf, ListOf, Text

STRING = Text("a string", bounded_text, loose=True)
METHODS = ListOf(Text("a method", parse_methods, "GET, HEAD"), "methods").map(lambda found: frozenset[str]().union(*found))
PATH = Text("a path", parse_path, "/checkout")
PATHS = ListOf(PATH, "a path, or a list of them")
MATCH_FIELDS = Fields(
    "match",
    {
        "methods": FieldSpec(METHODS, "HTTP methods; default: all. GET includes HEAD."),
        "path": FieldSpec(PATH, "A path: literal segments, {name} or * for one segment, ** at the end for any rest."),
        "host": FieldSpec(Text("a host", parse_host, "api.example.com"), "The request's host; *.example.com for subdomains."),
    },
    lambda fields, context: Match(fields.get("methods", frozenset()), fields.get("path", ""), fields.get("host", "")),
    example="POST /checkout",
)
MATCH = AnyOf(
    "a match",
    scalar=Text("a match", parse_match, "POST /checkout", accepts=lambda value: isinstance(value, Match)),
    mapping=MATCH_FIELDS,
)
MATCHES = ListOf(MATCH, "a match, or a list of them")
NAMES = ListOf(Text("an identity", parse_identity_name, "user"), "an identity, or a list of them")


def _when(fields: ParsedFields, context: ParseContext) -> When:
    equals = tuple((name, fields.get(name)) for name in fields if name not in ("present", "absent"))
    return When(fields.get("present", ()), fields.get("absent", ()), equals)


WHEN = Fields(
    "when",
    {
        "present": FieldSpec(NAMES, "Identities that must be present (a default counts)."),
        "absent": FieldSpec(NAMES, "Identities that must be absent."),
    },
    _when,
    others=ListOf(STRING, "a value, or a list of them"),
    check_key=parse_identity_name,
    example="{present: partner}",
)


def _single_key(text: str) -> Key:
    return () if text.strip() == EVERYONE else (parse_alternatives(text),)


KEY = AnyOf(
    "a key",
    scalar=Text("a key", _single_key, "user | ip"),
    items=ListOf(Text("an identity", parse_alternatives, "user | ip"), "parts of a key", single=False),
)


def key_names(key: Key) -> tuple[str, ...]:
    """All identities that a key mentions."""
    return tuple(name for part in key for name in part)
