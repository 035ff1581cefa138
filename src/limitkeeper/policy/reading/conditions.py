"""Words that rules and exemptions share: which requests, by which key, under which condition."""

from __future__ import annotations

from ..model import Key, Match, When
from . import route_parser, value_parsers
from .fields import Fields, Said, Word
from .identities import TEXT
from .parse_context import ParseContext
from .validators import Kinds, ListOf, Made, Text

METHODS = Made(
    ListOf(Text("a method", route_parser.methods, "GET, HEAD"), "methods"), lambda found: frozenset[str]().union(*found)
)


def _match(said: Said, page: ParseContext) -> Match:
    return Match(said.get("methods", frozenset()), said.get("path", ""), said.get("host", ""))


PATH = Text("a path", route_parser.path, "/checkout")
MATCH_TABLE = Fields(
    "match",
    {
        "methods": Word(METHODS, "HTTP methods; without them every one. GET means HEAD too."),
        "path": Word(PATH, "A path: literal segments, {name} or * for one, ** at the end for any rest."),
        "host": Word(
            Text("a host", route_parser.host, "api.example.com"), "The host that was asked for; *.example.com for all below it."
        ),
    },
    _match,
    example="POST /checkout",
)
ONE_MATCH = Kinds(
    "a match",
    text=Text("a match", route_parser.match, "POST /checkout", ready=lambda value: isinstance(value, Match)),
    table=MATCH_TABLE,
)
MATCHES = ListOf(ONE_MATCH, "a match, or a list of them")
PATHS = ListOf(PATH, "a path, or a list of them")

NAMES = ListOf(Text("an identity", value_parsers.identity_name, "user"), "an identity, or a list of them")
VALUES = ListOf(TEXT, "a value, or a list of them")


def _when(said: Said, page: ParseContext) -> When:
    equals = tuple((name, said.get(name)) for name in said if name not in ("present", "absent"))
    return When(said.get("present", ()), said.get("absent", ()), equals)


WHEN = Fields(
    "when",
    {
        "present": Word(NAMES, "Identities that must be there (a default counts)."),
        "absent": Word(NAMES, "Identities that must not be there."),
    },
    _when,
    others=VALUES,
    named=value_parsers.identity_name,
    example="{present: partner}",
)

ALTERNATIVES = Text("an identity", value_parsers.alternatives, "user | ip")


def _lone_key(text: str) -> Key:
    return () if text.strip() == value_parsers.EVERYONE else (value_parsers.alternatives(text),)


KEY = Kinds(
    "a key",
    text=Text("a key", _lone_key, "user | ip"),
    several=ListOf(ALTERNATIVES, "parts of a key", alone=False),
)


def key_names(key: Key) -> tuple[str, ...]:
    """Every identity that a key mentions."""
    return tuple(name for part in key for name in part)
