"""Keys are people: what leaves the process shows a keyed hash of them, twelve hexadecimal digits of BLAKE2s.

The same key has the same hash in the logs, among the offenders and in every process with the same secret, so that lines can be
put together, and whoever holds the secret can ask "is this user 42?" by hashing 42. Without a secret of yours the process draws
one (children that are forked inherit it), and nobody can ask. A bare hash was rejected: addresses and user numbers are few
enough to try them all.
"""

from __future__ import annotations

import os
from hashlib import blake2s

from ..errors import ConfigurationError

#: The secret of this process, for whoever gives none.
_OWN = os.urandom(32)


class Veil:
    """`Veil("a secret of ours")("user:42")` is what others may see of a key."""

    __slots__ = ("_secret",)

    def __init__(self, secret: str | bytes | None = None) -> None:
        if secret is not None and (not isinstance(secret, (str, bytes)) or not secret):
            raise ConfigurationError(f"a secret is a text or bytes that nobody guesses, not {secret!r}; None draws one")
        given = _OWN if secret is None else secret.encode("utf-8", "surrogatepass") if isinstance(secret, str) else secret
        self._secret = given if len(given) <= 32 else blake2s(given).digest()

    def __call__(self, key: str) -> str:
        return blake2s(key.encode("utf-8", "surrogatepass"), key=self._secret, digest_size=6).hexdigest()
