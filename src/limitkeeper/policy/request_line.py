"""Parses a request that is written in one line: `POST /checkout user=42 ip=10.0.0.1 header:X-Tenant=acme query:n=5`.

After the path come `identity=value` (taken as given, nothing is verified), `header:Name=value`, `query:name=value`,
`cookie:name=value`, `host=name` and `peer=address`. `ip=` also sets the peer, unless `peer=` does.
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

EXAMPLE = "write it like 'POST /checkout user=42 header:X-Tenant=acme'"


@dataclass
class Request:
    """The parts of a request line."""

    method: str = "GET"
    path: str = "/"
    identities: dict[str, str | None] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    query: dict[str, str] = field(default_factory=dict)
    cookies: dict[str, str] = field(default_factory=dict)
    peer: str | None = None

    def context(self) -> WrittenRequest:
        """The request context; without a peer or an address the peer is 127.0.0.1."""
        headers = dict(self.headers)
        if self.cookies:
            headers["cookie"] = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        address = self.identities.get("ip") or ""
        peer = self.peer or (address if read_address(address) else "127.0.0.1")
        return WrittenRequest(self.method, self.path, headers=headers, query=self.query, peer=peer, identities=self.identities)

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


def parse_request(text: str, policy: Policy) -> Request:
    """Parses a request line; ConfigurationError names the part that is wrong."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigurationError(f"{text!r}: {error}; {EXAMPLE}") from None
    request = Request()
    if words and not words[0].startswith("/") and "=" not in words[0]:
        request.method = words.pop(0).upper()
    if not words or not words[0].startswith("/"):
        raise ConfigurationError(f"{text!r} has no path; {EXAMPLE}")
    request.path, _, query = words.pop(0).partition("?")
    request.query.update(reversed(parse_qsl(query, keep_blank_values=True)))
    for word in words:
        _add_word(request, word, policy)
    return request


def _add_word(request: Request, word: str, policy: Policy) -> None:
    name, equals, value = word.partition("=")
    if not equals:
        raise ConfigurationError(f"{word!r} has no value; write {word}=value")
    kind, colon, rest = name.partition(":")
    target = {"header": request.headers, "query": request.query, "cookie": request.cookies}.get(kind) if colon else None
    if target is not None:
        target[rest] = value
    elif name == "peer":
        request.peer = value
    elif name == "host":
        request.headers["host"] = value
    elif name in policy.identify:
        request.identities[name] = value
    else:
        hint = did_you_mean(name, sorted(policy.identify))
        raise ConfigurationError(f"{word!r}: the policy has no identity {name!r}; {hint}")
