"""Keys are people: what leaves the process shows a keyed hash of them, the first twelve hexadecimal digits of HMAC-SHA256.

The same key has the same hash in the logs, among the offenders and in every process with the same secret (and begins like the
partition key in a RateLimit field), so that lines can be put together, and whoever holds the secret can ask "is this user 42?" by
hashing 42. Without a secret of yours the process draws one (children that are forked inherit it), and nobody can ask. A bare
hash was rejected: addresses and user numbers are few enough to try them all.
"""

from __future__ import annotations

import hmac
import os

from ..errors import ConfigurationError

#: The secret of this process, for whoever gives none.
_OWN = os.urandom(32)


class KeyHash:
    """`Veil("a secret of ours")("user:42")` is what others may see of a key."""

    __slots__ = ("_secret",)

    def __init__(self, secret: str | bytes | None = None) -> None:
        if secret is not None and (not isinstance(secret, (str, bytes)) or not secret):
            raise ConfigurationError(f"a secret is a text or bytes that nobody guesses, not {secret!r}; None draws one")
        self._secret = _OWN if secret is None else secret.encode("utf-8", "surrogatepass") if isinstance(secret, str) else secret

    def __call__(self, key: str) -> str:
        return hmac.digest(self._secret, key.encode("utf-8", "surrogatepass"), "sha256")[:6].hex()
