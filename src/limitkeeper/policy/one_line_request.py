"""Parses a request that is written in one line: `POST /checkout user=42 ip=10.0.0.1 header:X-Tenant=acme query:n=5`.

After the path come `identity=value` (taken as given, nothing is verified), `header:Name=value`, `query:name=value`,
`cookie:name=value`, `host=name` and `peer=address`. `ip=` also sets the peer, unless `peer=` does; the default is 127.0.0.1.
"""

from __future__ import annotations

import shlex
from urllib.parse import parse_qsl

from ..errors import ConfigurationError
from .identity.addresses import read_address
from .identity.client_ip import ClientIp
from .identity.paths import application_path
from .model import Policy
from .reading.diagnostics import did_you_mean
from .request_context import WrittenRequest

EXAMPLE = "write it like 'POST /checkout user=42 header:X-Tenant=acme'"


def parse_request(text: str, policy: Policy) -> WrittenRequest:
    """Parses a request line; ConfigurationError names the part that is wrong."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigurationError(f"{text!r}: {error}; {EXAMPLE}") from None
    method = words.pop(0) if words and not words[0].startswith("/") and "=" not in words[0] else "GET"
    if not words or not words[0].startswith("/"):
        raise ConfigurationError(f"{text!r} has no path; {EXAMPLE}")
    path, _, asked = words.pop(0).partition("?")
    parts: dict[str, dict[str, str]] = {kind: {} for kind in ("header", "query", "cookie", "identity", "connection")}
    parts["query"].update(reversed(parse_qsl(asked, keep_blank_values=True)))
    for word in words:
        _add_word(parts, word, policy)
    if parts["cookie"]:
        parts["header"]["cookie"] = "; ".join(f"{name}={value}" for name, value in parts["cookie"].items())
    ip = parts["identity"].get("ip", "")
    peer = parts["connection"].get("peer") or (ip if read_address(ip) else "127.0.0.1")
    headers, query, identities = parts["header"], parts["query"], parts["identity"]
    request = WrittenRequest(method, application_path(path), headers=headers, query=query, peer=peer, identities=identities)
    for name, value in identities.items():
        identity, address = policy.identify[name], read_address(value)
        if isinstance(identity, ClientIp) and address is not None:  # counted by its network, though networks compare all of it
            request.identities[name] = identity.key_of(address)
    return request


def _add_word(parts: dict[str, dict[str, str]], word: str, policy: Policy) -> None:
    name, equals, value = word.partition("=")
    if not equals:
        raise ConfigurationError(f"{word!r} has no value; write {word}=value")
    kind, colon, rest = name.partition(":")
    if colon and kind in ("header", "query", "cookie"):
        parts[kind][rest] = value
    elif name == "peer":
        parts["connection"][name] = value
    elif name == "host":
        parts["header"][name] = value
    elif name in policy.identify:
        parts["identity"][name] = value
    else:
        hint = did_you_mean(name, sorted(policy.identify))
        raise ConfigurationError(f"{word!r}: the policy has no identity {name!r}; {hint}")
