"""The names of keys in Redis: no two (limit, key) pairs ever meet in one, and a slot of a Cluster holds what is decided together.

    limitkeeper:Zm9vYmFyYmF6:{user:42}        prefix, digest of (limiter, limit name, rule), the caller's key in braces
    limitkeeper:Zm9vYmFyYmF6                  the limit's registry: who that digest is, its birth, and its rates so far

The digest is 72 bits, so that a long name costs twelve bytes a key; the registry remembers whose it is, and a limit that
meets another's digest is refused by name. The caller's key is bytes as they are (UTF-8, lone surrogates too); one that is
empty or starts with `}`, `=` or `#` gets a `=` in front, one above 128 bytes is `#` and its SHA-256, and then the whole key
lies behind the state. Read backwards each form is told by its first byte, so no two keys share a name.

The braces are Redis Cluster's hash tag: limits that a decision asks about the *same* key (user per second and user per day)
lie in one slot and are decided in one step, and different keys spread over the nodes. The price: a decision over different
keys (user and tenant) spans slots. Whoever wants all of it in one slot, and one node to carry it, says `prefix="{app}"`.

Under a clock of one's own (tests) the colon behind the prefix is a `~`, so that made-up times never meet real ones.
"""

from __future__ import annotations

import hashlib
import re
from base64 import urlsafe_b64encode
from typing import Any

from ...algorithms.claim import NamedLimit
from ...errors import ConfigurationError

#: A key longer than this is hashed.
LONGEST = 128
_DIGEST = 12


def key_bytes(key: str) -> bytes:
    """Any str as bytes, lone surrogates too."""
    try:
        return key.encode()
    except UnicodeEncodeError:
        return key.encode("utf-8", "surrogatepass")


def key_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def digest(*parts: str) -> bytes:
    """72 bits of a sequence of texts, as 12 characters; where one text ends and the next begins counts."""
    joined = b"".join(b"%d:%b" % (len(part), part) for part in map(key_bytes, parts))
    return urlsafe_b64encode(hashlib.sha256(joined).digest()[:9])


class KeyNames:
    """Keys under a prefix. `marked`: the store runs on a clock of its own. What is known of each limit is kept in `places`."""

    def __init__(self, prefix: str = "limitkeeper", marked: bool = False) -> None:
        if not isinstance(prefix, str) or not prefix:
            raise ConfigurationError(f"the prefix of keys must be a text such as 'limitkeeper', not {prefix!r}")
        if not re.fullmatch(r"[^{}]*(\{[^{}]+\}[^{}]*)?", prefix):
            raise ConfigurationError(f"prefix {prefix!r}: braces are a hash tag; write none, or one whole one such as '{{app}}'")
        self.prefix = prefix
        self.marked = marked
        self.start = key_bytes(prefix) + (b"~" if marked else b":")
        self.places: dict[NamedLimit, Any] = {}

    def registry(self, named: NamedLimit) -> bytes:
        """The hash that remembers a limit: its identity, its birth, its rates."""
        return self.start + digest(*named.identity)

    def head(self, named: NamedLimit) -> bytes:
        """What all keys of a limit start with."""
        return self.registry(named) + b":{"

    def key(self, named: NamedLimit, key: str) -> bytes:
        return self.head(named) + tag(key_bytes(key)) + b"}"

    def pattern(self, named: NamedLimit) -> bytes:
        """For SCAN: all keys of a limit and nothing else."""
        return re.sub(rb"([\\*?\[\]^-])", rb"\\\1", self.head(named)) + b"*"

    def parse(self, redis_key: bytes) -> str | None:
        """The caller's key; None when it was hashed and lies in the value. A name that is none of ours is an error."""
        skipped = len(self.start) + _DIGEST
        inner = redis_key[skipped + 2 : -1]
        ours = redis_key.startswith(self.start) and redis_key[skipped : skipped + 2] == b":{" and redis_key.endswith(b"}")
        if not ours or not inner:
            raise ConfigurationError(f"{redis_key!r} is no key of limitkeeper under the prefix {self.prefix!r}")
        if inner[0] == 35:  # '#'
            return None
        return key_text(inner[1:] if inner[0] == 61 else inner)


def tag(data: bytes) -> bytes:
    """The caller's key between its braces, as one byte string per key and one key per byte string."""
    if len(data) > LONGEST:
        return b"#" + urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
    if not data or data[0] in b"}=#":
        return b"=" + data
    return data


def is_hashed(data: bytes) -> bool:
    return len(data) > LONGEST
