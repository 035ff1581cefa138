"""Words that rules and exemptions share: which requests, by which key, under which condition."""

from __future__ import annotations

from ..model import Key, Match, When
from . import routes, words
from .fields import Fields, Said, Word
from .identities import TEXT
from .page import Page
from .shapes import Kinds, Listing, Made, Words

METHODS = Made(Listing(Words("a method", routes.methods, "GET, HEAD"), "methods"), lambda found: frozenset[str]().union(*found))


def _match(said: Said, page: Page) -> Match:
    return Match(said.get("methods", frozenset()), said.get("path", ""), said.get("host", ""))


PATH = Words("a path", routes.path, "/checkout")
MATCH_TABLE = Fields(
    "match",
    {
        "methods": Word(METHODS, "HTTP methods; without them every one. GET means HEAD too."),
        "path": Word(PATH, "A path: literal segments, {name} or * for one, ** at the end for any rest."),
        "host": Word(
            Words("a host", routes.host, "api.example.com"), "The host that was asked for; *.example.com for all below it."
        ),
    },
    _match,
    example="POST /checkout",
)
ONE_MATCH = Kinds(
    "a match",
    text=Words("a match", routes.match, "POST /checkout", ready=lambda value: isinstance(value, Match)),
    table=MATCH_TABLE,
)
MATCHES = Listing(ONE_MATCH, "a match, or a list of them")
PATHS = Listing(PATH, "a path, or a list of them")

NAMES = Listing(Words("an identity", words.identity_name, "user"), "an identity, or a list of them")
VALUES = Listing(TEXT, "a value, or a list of them")


def _when(said: Said, page: Page) -> When:
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
    named=words.identity_name,
    example="{present: partner}",
)

ALTERNATIVES = Words("an identity", words.alternatives, "user | ip")


def _lone_key(text: str) -> Key:
    return () if text.strip() == words.EVERYONE else (words.alternatives(text),)


KEY = Kinds(
    "a key",
    text=Words("a key", _lone_key, "user | ip"),
    several=Listing(ALTERNATIVES, "parts of a key", alone=False),
)


def key_names(key: Key) -> tuple[str, ...]:
    """Every identity that a key mentions."""
    return tuple(name for part in key for name in part)
