"""Names of the fields in responses: their spelling, their families, and other names that policies give them."""

from __future__ import annotations

from ..policy.model import Headers

#: The conventional spelling of the field names.
NAMES = (
    *("RateLimit", "RateLimit-Policy", "RateLimit-Limit", "RateLimit-Remaining", "RateLimit-Reset"),
    *("X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset"),
    *("Retry-After", "Cache-Control", "Access-Control-Expose-Headers", "Vary"),
)
SPELLING = {name.lower().encode(): name for name in NAMES}
#: What a policy may call these fields, by the words of its `headers: {names: …}`.
WORDS = {"limit": b"x-ratelimit-limit", "remaining": b"x-ratelimit-remaining", "reset": b"x-ratelimit-reset"}
WORDS |= {"retry_after": b"retry-after"}
#: The names that policies of this process have given to fields; empty in most processes, and then no response looks for them.
CUSTOM_NAMES: dict[Headers, dict[bytes, bytes]] = {}

#: Families of fields, as bits. A response that has a field of a family keeps it, and gets none of that family from us.
EXPOSE, VARY = 16, 32
FAMILIES = {b"retry-after": 4, b"cache-control": 8, b"access-control-expose-headers": EXPOSE, b"vary": VARY}
FAMILIES |= {name: 1 if name.startswith(b"r") else 2 for name in SPELLING if name not in FAMILIES}
FAMILY: dict[str | bytes, int] = {key: family for name, family in FAMILIES.items() for key in (name, name.decode())}


def custom_names(headers: Headers) -> dict[bytes, bytes]:
    """Our names of fields and those that a policy gives them, which are from now on merged as ours are."""
    found: dict[bytes, bytes] = {}
    for word, name in headers.names:
        own = found[WORDS[word]] = name.lower().encode()
        SPELLING[own] = name
        FAMILY[own] = FAMILY[own.decode()] = FAMILY.get(own, 0) or FAMILIES[WORDS[word]]
    CUSTOM_NAMES[headers] = found
    return found


def rename(found: list[tuple[bytes, bytes]], headers: Headers) -> list[tuple[bytes, bytes]]:
    names = CUSTOM_NAMES.get(headers)
    return found if names is None else [(names.get(name, name), value) for name, value in found]
