"""Claims of a JSON Web Token: verified, or they do not count.

A token that is not signed by a key, with one of the algorithms that were named, from the issuer and for the audience that were
named, within its time, is no token: its claims are not there. PyJWT does the cryptography. Whether a signature holds never
changes, so it is found out once per token (RS256 costs some 50 µs) and kept, under the whole token, in a bounded table; the time
is compared each time. Tokens that do not hold are kept apart, so that a flood of them pushes out nobody who is known.

What may be a key is of keys.py. Without `audience` or `issuer`, tokens that the same key signed for somebody else count too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...clock import utc_us
from ...errors import ConfigurationError
from ..request_context import RequestContext
from .jwt_keys import Key, keys_of, pyjwt
from .key_hashing import hash_long, remember

#: A longer header is not looked at.
LONGEST = 8_192
#: Of a header that came in several lines so many are looked at, and the last one, within so many characters.
LINES, FAR = 3, 65_536
#: How many tokens are remembered: those that hold, and those that do not.
MOST_HELD, MOST_REFUSED = 4_096, 256
_CHECKS = {"verify_exp": False, "verify_nbf": False, "verify_iat": False, "verify_sub": False, "verify_jti": False}
_END = 1 << 62


@dataclass(frozen=True, slots=True)
class CachedToken:
    """A token whose signature holds: its claims, and the moments between which they count."""

    claims: Mapping[str, Any]
    since_us: int
    until_us: int


@dataclass(frozen=True, slots=True)
class Verifier:
    """How a token is verified: by which key and algorithms, from which issuer, for whom, how late it may come.

    `key` is PEM text for RS, PS, ES and EdDSA (several keys one after the other, or a JSON Web Key Set, while one takes the place
    of another), or the shared secret for HS. `header` holds the token, "Bearer" before it or not.
    """

    key: str | bytes = field(repr=False)
    algorithms: tuple[str, ...]
    header: str = "Authorization"
    issuer: str | None = None
    audience: str | None = None
    leeway_us: int = 0
    now_us: Callable[[], int] = field(default=utc_us, repr=False, compare=False)
    _keys: tuple[Key, ...] = field(init=False, repr=False, compare=False)
    _name: str = field(init=False, repr=False, compare=False)
    _held: dict[str, CachedToken] = field(init=False, repr=False, compare=False, default_factory=dict)
    _refused: dict[str, None] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.algorithms, str):
            raise ConfigurationError(f"algorithms: write a list, such as [{self.algorithms}]")
        object.__setattr__(self, "algorithms", tuple(self.algorithms))
        object.__setattr__(self, "_name", self.header.strip().lower())
        object.__setattr__(self, "_keys", keys_of(self.key, self.algorithms))

    def claims(self, facts: RequestContext) -> Mapping[str, Any] | None:
        """The claims of a request's token; None: there is no token that counts."""
        value = facts.header(self._name)
        if not value:
            return None
        if "," in value:  # no token has one: several lines, of which an application may take the first, or the last
            told = (self._claims(line.strip()) for line in (*value[:FAR].split(",", LINES)[:LINES], value.rpartition(",")[2]))
            return next((claims for claims in told if claims is not None), None)
        return self._claims(value)

    def _claims(self, value: str) -> Mapping[str, Any] | None:
        if not value or len(value) > LONGEST:
            return None
        if value[:6].lower() == "bearer":  # any space behind it will do, as for those who split the header into words
            words = value.split(None, 2)
            value = words[1] if len(words) > 1 and len(words[0]) == 6 else value
        held = self._held.get(value)
        if held is None:
            held = self._verified(value)
            if held is None:
                return None
        return held.claims if held.since_us <= self.now_us() < held.until_us else None

    def _verified(self, token: str) -> CachedToken | None:
        if token in self._refused:
            return None
        held = self._look(token)
        if held is None:
            return remember(self._refused, token, None, MOST_REFUSED)
        return remember(self._held, token, held, MOST_HELD)

    def _look(self, token: str) -> CachedToken | None:
        found = (self._signed_by(key, token) for key in self._keys if len(self._keys) == 1 or may_have_signed(key, token))
        return next((held for held in found if held is not None), None)

    def _signed_by(self, key: Key, token: str) -> CachedToken | None:
        options = {**_CHECKS, "verify_aud": self.audience is not None}
        try:
            claims = pyjwt().decode(
                token, key.key, algorithms=list(self.algorithms), audience=self.audience, issuer=self.issuer, options=options
            )
            since, until = _moment(claims.get("nbf"), 0), _moment(claims.get("exp"), _END)
        except Exception:  # whatever a stranger's text brings about: it is no token
            return None
        return CachedToken(claims, since - self.leeway_us, until + self.leeway_us)


def may_have_signed(key: Key, token: str) -> bool:
    """Whether a token can be of this key: not when both have a name, and it is not the same."""
    try:
        said = pyjwt().get_unverified_header(token).get("kid")
    except Exception:
        return False
    return key.name is None or said is None or said == key.name


def _moment(value: Any, default: int) -> int:
    """Seconds of a claim as microseconds; ValueError for what is no time."""
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(value)
    return min(int(value * 1_000_000), _END)


@dataclass(frozen=True, slots=True)
class Jwt:
    """A claim of a verified token: text, or a whole number. Anything else (a list, true) names nobody."""

    claim: str
    verifier: Verifier
    default: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.claim, str) or not self.claim:
            raise ConfigurationError(f"claim: {self.claim!r} is no name of a claim; write one, such as sub")

    def of(self, facts: RequestContext) -> str | None:
        claims = self.verifier.claims(facts)
        said = None if claims is None else claims.get(self.claim)
        if isinstance(said, str):
            return hash_long(said) if said else self.default
        if isinstance(said, int) and not isinstance(said, bool):
            return hash_long(str(said))
        return self.default
