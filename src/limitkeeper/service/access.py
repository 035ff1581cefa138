"""Access: the access tokens of the service, what each may do (scopes), and on which limits.

    check      decisions: /v1/check, /v1/reserve, /v1/settle, /v1/refund, /auth; LK.HIT and so on; Envoy
    inspect    what is read: /v1/limits, the dashboard, metrics, explanations
    operate    what changes something: reset, overrides, reload, load

`--token` has every scope. The file that `--tokens` names has more, each a table `[[token]]` with `name`, `token`, `scopes` and,
where it is restricted to some limits, `limits` (names, or patterns such as `api_*`). A restricted token can't have requests
matched by the whole policy, nor use CL.THROTTLE. Each token has a Router and Commands of its own over what it may use, so
services without a token file run as before.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from hmac import compare_digest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..policy.operator_overrides import matches

if TYPE_CHECKING:
    from .settings import Settings

CHECK, INSPECT, OPERATE = SCOPES = ("check", "inspect", "operate")
FIELDS = ("name", "token", "scopes", "limits")
EXAMPLE = 'name = "gateway", token = "…", scopes = ["check"]'


class Token(NamedTuple):
    """`limits`: patterns of limits that it is restricted to, none: all."""

    name: str
    secret: bytes
    scopes: frozenset[str] = frozenset(SCOPES)
    limits: tuple[str, ...] = ()

    def allows(self, limit: str) -> bool:
        return not self.limits or any(matches(pattern, limit) for pattern in self.limits)


#: Who acts where no token is required.
ANYONE = Token("loopback", b"")


class Access:
    """The tokens of the settings. `open`: there are none, and everybody who can connect has access."""

    def __init__(self, settings: Settings) -> None:
        self.tokens = [] if settings.token is None else [Token("token", settings.token.encode())]
        self.tokens += [] if settings.tokens is None else read_tokens(settings.tokens)[0]
        self.open = not self.tokens
        self.scoped = settings.tokens is not None

    def find(self, given: bytes | None) -> Token | None:
        """The token that a client presents; all are compared, each in constant time."""
        found = ANYONE if self.open else None
        for token in self.tokens:
            if given is not None and compare_digest(given, token.secret):
                found = token
        return found


def read_tokens(path: str) -> tuple[list[Token], list[str]]:
    """The tokens of a file, and its mistakes."""
    found: list[Token] = []
    mistakes: list[str] = []
    try:
        tables = tomllib.loads(Path(path).read_text()).get("token")
    except (OSError, ValueError, RecursionError) as error:
        return [], [f"{path}: can't read the tokens: {error}"]
    if not isinstance(tables, list) or not tables:
        return [], [f"{path}: expected tables [[token]] with {EXAMPLE}"]
    for number, table in enumerate(tables, 1):
        wrong = list(_mistakes(table, {one.secret for one in found}, {one.name for one in found}))
        mistakes += [f"{path}: token {number}: {one}" for one in wrong]
        if not wrong:
            limits = tuple(table.get("limits", ()))
            found.append(Token(table["name"], table["token"].encode(), frozenset(table["scopes"]), limits))
    return found, mistakes


def _mistakes(table: Any, secrets: set[bytes], names: set[str]) -> Iterable[str]:
    from .settings import secret

    if not isinstance(table, dict) or not set(table) <= set(FIELDS) or not {"name", "token", "scopes"} <= set(table):
        yield f"expected the fields {', '.join(FIELDS)} (limits is optional); write {EXAMPLE}"
        return
    if not isinstance(table["name"], str) or not table["name"].isprintable() or not 0 < len(table["name"]) <= 64:
        yield "name: expected a string of 1 to 64 characters"
    elif table["name"] in names:
        yield f"name: {table['name']!r} is there twice"
    try:
        if not isinstance(table["token"], str):
            yield f"token: expected a string, got {type(table['token']).__name__}; write it in quotes"
        elif secret(table["token"]).encode() in secrets:
            yield "token: another one has the same"
    except ValueError as error:
        yield f"token: {error}"
    if not _texts(table["scopes"]) or not table["scopes"] or not set(table["scopes"]) <= set(SCOPES):
        yield f"scopes: expected a list of {', '.join(SCOPES)}, got {table['scopes']!r:.80}"
    if "limits" in table and (not _texts(table["limits"]) or not table["limits"]):
        yield "limits: expected a list of names of limits, or patterns such as 'api_*'"


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def bearer(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The token in the header fields of a request: X-Limitkeeper-Token, or Authorization: Bearer."""
    given: bytes | None = None
    for name, value in headers:
        if name == b"x-limitkeeper-token":
            return value
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            given = value[7:].strip()
    return given
