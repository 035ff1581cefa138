"""A request written in one line: `POST /checkout user=42 ip=10.0.0.1 header:X-Tenant=acme query:n=5 peer=10.0.0.9`.

Words behind the path are `identity=value` (said outright, nothing is verified), `header:Name=value`, `query:name=value`,
`cookie:name=value`, `host=name` and `peer=address`. An `ip=` is the peer too, unless one is named.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from urllib.parse import parse_qsl

from ..errors import ConfigurationError
from .identity.addresses import read_address
from .model import Policy
from .reading.parse_context import did_you_mean
from .request_context import WrittenRequest

WRITE = "write it like 'POST /checkout user=42 header:X-Tenant=acme'"
PARTS = ("header", "query", "cookie")


@dataclass
class Request:
    """What was written."""

    method: str = "GET"
    path: str = "/"
    identities: dict[str, str | None] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    query: dict[str, str] = field(default_factory=dict)
    cookies: dict[str, str] = field(default_factory=dict)
    peer: str | None = None

    def facts(self) -> WrittenRequest:
        """The facts of this request; without a peer or an address it comes from this machine."""
        headers = dict(self.headers)
        if self.cookies:
            headers["cookie"] = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        address = self.identities.get("ip") or ""
        peer = self.peer or (address if read_address(address) else "127.0.0.1")
        return WrittenRequest(self.method, self.path, headers=headers, query=self.query, peer=peer, identities=self.identities)

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


def read_request(text: str, policy: Policy) -> Request:
    """A request from its line; ConfigurationError names the word that makes no sense."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigurationError(f"{text!r}: {error}; {WRITE}") from None
    found = Request()
    if words and not words[0].startswith("/") and "=" not in words[0]:
        found.method = words.pop(0).upper()
    if not words or not words[0].startswith("/"):
        raise ConfigurationError(f"{text!r} has no path; {WRITE}")
    path, _, query = words.pop(0).partition("?")
    found.path = path
    found.query.update(reversed(parse_qsl(query, keep_blank_values=True)))
    for word in words:
        _add(found, word, policy)
    return found


def _add(request: Request, word: str, policy: Policy) -> None:
    name, equals, value = word.partition("=")
    if not equals:
        raise ConfigurationError(f"{word!r} says nothing; write {word}=value")
    part, colon, rest = name.partition(":")
    if colon and part in PARTS:
        named = {"header": request.headers, "query": request.query, "cookie": request.cookies}[part]
        named[rest] = value
    elif name == "peer":
        request.peer = value
    elif name == "host":
        request.headers["host"] = value
    elif name in policy.identify:
        request.identities[name] = value
    else:
        hint = did_you_mean(name, sorted(policy.identify))
        raise ConfigurationError(f"{word!r}: the policy has no identity {name!r}; {hint}")
