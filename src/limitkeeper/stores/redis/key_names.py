"""The names of keys in Redis: unique for each (limit, key) pair, with everything that is decided together in one cluster slot.

    limitkeeper:Zm9vYmFyYmF6:{user:42}        prefix, digest of (limiter, limit name, rule), the caller's key in braces
    limitkeeper:Zm9vYmFyYmF6                  the limit's registry: whose digest it is, its birth, and its rates so far

The digest has 72 bits: a long name costs twelve bytes per key. The caller's key is stored as its bytes (UTF-8, lone surrogates
too). One that is empty or starts with `}`, `=` or `#` gets a `=` in front; one above 128 bytes becomes `#` and its SHA-256, and
the whole key is stored behind the state. The first byte tells the three forms apart, so no two keys share a name.

The braces are Redis Cluster's hash tag: limits on the *same* key (user per second and user per day) share a slot and are decided
in one step, and different keys spread over the nodes. The price: a decision over different keys (user and tenant) spans slots.
`prefix="{app}"` puts everything on one node. Under a store's own clock (tests) the colon behind the prefix is a `~`.
"""

from __future__ import annotations

import hashlib
import re
from base64 import urlsafe_b64encode
from typing import TYPE_CHECKING

from ...algorithms.claim import NamedLimit
from ...errors import ConfigurationError

if TYPE_CHECKING:
    from .limit_and_state_codec import LimitEntry
    from .script_request import LimitSet

#: A longer key (in bytes) is hashed.
MAX_KEY = 128
#: First bytes that mark the other forms of a key.
RESERVED = b"}=#"
_DIGEST = 12


def key_bytes(key: str) -> bytes:
    """Any str as bytes, lone surrogates too."""
    try:
        return key.encode()
    except UnicodeEncodeError:
        return key.encode("utf-8", "surrogatepass")


def key_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def join_parts(*parts: str) -> bytes:
    """Texts as one byte string in which the end of each is known."""
    return b"".join(b"%d:%b" % (len(part), part) for part in map(key_bytes, parts))


def digest(*parts: str) -> bytes:
    """72 bits of a sequence of texts, as 12 characters."""
    return urlsafe_b64encode(hashlib.sha256(join_parts(*parts)).digest()[:9])


class KeyNames:
    """Keys under a prefix, and the entries of the limits that are used under it. `marked`: the store has a clock of its own."""

    def __init__(self, prefix: str = "limitkeeper", marked: bool = False) -> None:
        if not isinstance(prefix, str) or not prefix:
            raise ConfigurationError(f"prefix: expected a string such as 'limitkeeper', got {prefix!r}")
        if not re.fullmatch(r"[^{}]*(\{[^{}]+\}[^{}]*)?", prefix):
            raise ConfigurationError(f"prefix {prefix!r}: braces are a hash tag; use none, or a whole one such as '{{app}}'")
        self.prefix = prefix
        self.marked = marked
        self.start = key_bytes(prefix) + (b"~" if marked else b":")
        self.entries: dict[NamedLimit, LimitEntry] = {}
        # Registered limits by id(), which is cheaper than hashing; the values keep the objects alive, so ids stay unique.
        self.registered: dict[int, tuple[NamedLimit, LimitEntry]] = {}
        self.limit_sets: dict[tuple[int, ...], LimitSet] = {}
        #: Of logs in decisions over several slots, which have clocks of their own: (start of the decision, key) -> its own start.
        self.starts: dict[tuple[int, bytes], int] = {}

    def registry(self, named: NamedLimit) -> bytes:
        """The hash that describes a limit: its identity, its birth, its rates."""
        return self.start + digest(*named.identity)

    def head(self, named: NamedLimit) -> bytes:
        """The common start of all keys of a limit."""
        return self.registry(named) + b":{"

    def key(self, named: NamedLimit, key: str) -> bytes:
        return self.head(named) + tag(key_bytes(key)) + b"}"

    def pattern(self, named: NamedLimit) -> bytes:
        """The SCAN pattern of all keys of a limit and nothing else."""
        return re.sub(rb"([\\*?\[\]^-])", rb"\\\1", self.head(named)) + b"*"

    def parse(self, redis_key: bytes) -> str | None:
        """The caller's key; None when it is hashed (then the value holds it)."""
        skipped = len(self.start) + _DIGEST
        inner = redis_key[skipped + 2 : -1]
        ours = redis_key.startswith(self.start) and redis_key[skipped : skipped + 2] == b":{" and redis_key.endswith(b"}")
        if not ours or not inner:
            raise ConfigurationError(f"{redis_key!r} is no key of limitkeeper under the prefix {self.prefix!r}")
        if inner[0] == 35:  # '#'
            return None
        return key_text(inner[1:] if inner[0] == 61 else inner)

    def forget(self) -> None:
        """Marks all limits as unregistered: the server has lost its data."""
        for entry in list(self.entries.values()):  # other threads add theirs
            entry.since_us = None
        self.registered.clear()
        self.limit_sets.clear()


def tag(data: bytes) -> bytes:
    """The text between the braces: a different one for every key."""
    if len(data) > MAX_KEY:
        return b"#" + urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
    if not data or data[0] in RESERVED:
        return b"=" + data
    return data
