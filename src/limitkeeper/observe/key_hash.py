"""Keyed hash of client keys for logs, metrics and offender lists: the first 12 hexadecimal digits of HMAC-SHA256.

Keys may identify people, so exported values show the hash. The same key has the same hash in the logs, among the offenders and
in every process with the same secret (and starts like the partition key in a RateLimit field), so lines can be correlated, and
the holder of the secret can find user 42 by hashing "42". Without a given secret the process draws one; forked children inherit
it.

Rejected: an unkeyed hash, because addresses and user numbers are few enough to try them all.
"""

from __future__ import annotations

import hmac
import os

from ..errors import ConfigurationError

#: The secret of this process, used where none is given.
_PROCESS_SECRET = os.urandom(32)


class KeyHash:
    """`KeyHash("our secret")("user:42")` is the exported form of a key."""

    __slots__ = ("_secret",)

    def __init__(self, secret: str | bytes | None = None) -> None:
        if secret is not None and (not isinstance(secret, (str, bytes)) or not secret):
            raise ConfigurationError(f"secret must be a non-empty string or bytes, got {secret!r}; None draws one")
        given = _PROCESS_SECRET if secret is None else secret
        self._secret = given.encode("utf-8", "surrogatepass") if isinstance(given, str) else given

    def __call__(self, key: str) -> str:
        return hmac.digest(self._secret, key.encode("utf-8", "surrogatepass"), "sha256")[:6].hex()
