"""Claims of verified JSON Web Tokens as identities.

The claims of a token count only if a known key signed it with one of the named algorithms, issuer and audience are the named
ones, and it is within its validity period. PyJWT does the cryptography. Whether a signature is valid never changes, so each token
is verified once (RS256 costs about 50 µs) and cached, by the whole token, in a bounded cache; the period is compared each time.
Invalid tokens have a cache of their own, so a flood of them evicts no valid one.

Keys are in jwt_keys.py. Without `audience` or `issuer`, tokens that the same key signed for other services count too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ...clock import utc_us
from ...errors import ConfigurationError
from ..request_context import RequestContext
from .bounded_keys import hash_long, remember
from .jwt_keys import Key, import_pyjwt, read_keys

#: A longer header is ignored.
MAX_LENGTH = 8_192
#: Of a header that came in several lines the first MAX_LINES within MAX_SCANNED characters are tried, and the last one.
MAX_LINES, MAX_SCANNED = 3, 65_536
#: Entries of the caches of valid and invalid tokens.
MAX_VALID, MAX_INVALID = 4_096, 256
_CHECKS = {"verify_exp": False, "verify_nbf": False, "verify_iat": False, "verify_sub": False, "verify_jti": False}
_NO_END = 1 << 62

Claims = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class CachedToken:
    """A token with a valid signature: its claims and its validity period."""

    claims: Claims
    since_us: int
    until_us: int


@dataclass(frozen=True, slots=True)
class Verifier:
    """Verifies tokens: keys and algorithms, issuer, audience, and tolerated clock difference.

    `key` is PEM text for RS, PS, ES and EdDSA (several keys in sequence, or a JSON Web Key Set, during a key rotation), or the
    shared secret for HS. `header` holds the token, with or without "Bearer".
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
    _valid: dict[str, CachedToken] = field(init=False, repr=False, compare=False, default_factory=dict)
    _invalid: dict[str, None] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.algorithms, str):
            raise ConfigurationError(f"algorithms: write a list, such as [{self.algorithms}]")
        object.__setattr__(self, "algorithms", tuple(self.algorithms))
        object.__setattr__(self, "_name", self.header.strip().lower())
        object.__setattr__(self, "_keys", read_keys(self.key, self.algorithms))

    def claims(self, request: RequestContext) -> Claims | None:
        """The claims of a request's token; None: no valid token."""
        value = request.header(self._name)
        if not value:
            return None
        if "," not in value:
            return self._claims(value)
        # No token has a comma: these are several header lines, of which an application may take the first or the last.
        lines = (*value[:MAX_SCANNED].split(",", MAX_LINES)[:MAX_LINES], value.rpartition(",")[2])
        return next((claims for claims in (self._claims(line.strip()) for line in lines) if claims is not None), None)

    def _claims(self, value: str) -> Claims | None:
        if not value or len(value) > MAX_LENGTH:
            return None
        if value[:6].lower() == "bearer":  # any whitespace may follow, as for applications that split the header
            words = value.split(None, 2)
            value = words[1] if len(words) > 1 and len(words[0]) == 6 else value
        token = self._valid.get(value)
        if token is None:
            token = self._verify(value)
            if token is None:
                return None
        return token.claims if token.since_us <= self.now_us() < token.until_us else None

    def _verify(self, text: str) -> CachedToken | None:
        if text in self._invalid:
            return None
        candidates = (key for key in self._keys if len(self._keys) == 1 or may_have_signed(key, text))
        token = next((found for key in candidates if (found := self._verify_with(key, text)) is not None), None)
        if token is None:
            return remember(self._invalid, text, None, MAX_INVALID)
        return remember(self._valid, text, token, MAX_VALID)

    def _verify_with(self, key: Key, text: str) -> CachedToken | None:
        options = {**_CHECKS, "verify_aud": self.audience is not None}
        try:
            claims = import_pyjwt().decode(
                text, key.key, algorithms=list(self.algorithms), audience=self.audience, issuer=self.issuer, options=options
            )
            since, until = _to_us(claims.get("nbf"), 0), _to_us(claims.get("exp"), _NO_END)
        except Exception:  # a client's text may raise anything
            return None
        return CachedToken(claims, since - self.leeway_us, until + self.leeway_us)


def may_have_signed(key: Key, token: str) -> bool:
    """Whether this key may have signed a token: not when both have a key ID and these differ."""
    try:
        kid = import_pyjwt().get_unverified_header(token).get("kid")
    except Exception:
        return False
    return key.name is None or kid is None or kid == key.name


def _to_us(value: object, default: int) -> int:
    """Seconds of a claim as microseconds; ValueError for other values."""
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(value)
    return min(int(value * 1_000_000), _NO_END)


@dataclass(frozen=True, slots=True)
class Jwt:
    """A claim of a verified token: a string or an integer. A claim of another type (a list, true) counts as absent."""

    claim: str
    verifier: Verifier
    default: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.claim, str) or not self.claim:
            raise ConfigurationError(f"claim: expected the name of a claim, such as sub, got {self.claim!r}")

    def of(self, request: RequestContext) -> str | None:
        claims = self.verifier.claims(request)
        value = None if claims is None else claims.get(self.claim)
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        return hash_long(value) if isinstance(value, str) and value else self.default
