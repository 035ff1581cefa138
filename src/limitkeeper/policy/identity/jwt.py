"""Claims of verified JSON Web Tokens as identities, and the keys that verify them.

The claims of a token count only if a known key signed it with one of the named algorithms, issuer and audience are the named
ones (without them, tokens for other services count too), and it is within its validity period. A signature is verified once
(50 µs for RS256) and cached by the token's SHA-256 until it expires; the period is compared each time. Invalid tokens have a
cache of their own, so a flood of them evicts no valid one. Of one request at most two tokens of a header and two of a cookie are
verified: an application takes the first or the last one; and where these are invalid, the header without junk, and two cookies
between commas. A key is a shared secret, one or several PEM keys in sequence, or a JSON Web Key Set ({"keys": [{"kty": …}, …]}),
for a key rotation. PyJWT parses the keys and verifies; it is imported when the first key is read.
"""

from __future__ import annotations

import json
import math
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from types import ModuleType
from typing import Any, NamedTuple

from ...clock import utc_us
from ...errors import ConfigurationError
from ..request_context import RequestContext
from .identify import cookie_pattern, unquote_cookie
from .key_and_cache_bounds import hash_long, remember

#: A longer token is ignored.
MAX_LENGTH = 8_192
#: Of a header that came in several lines the first MAX_LINES within MAX_SCANNED characters are read, and the last one.
MAX_LINES, MAX_SCANNED = 3, 65_536
#: Entries of the caches of valid and invalid tokens.
MAX_VALID, MAX_INVALID = 4_096, 256
_CHECKS = {"verify_exp": False, "verify_nbf": False, "verify_iat": False, "verify_sub": False, "verify_jti": False}
_NO_END = 1 << 62
_BASE64URL = re.compile("[A-Za-z0-9_-]*").fullmatch
FAMILIES = {
    "HS": "a shared secret",
    "RS": "an RSA key",
    "PS": "an RSA key",
    "ES": "an elliptic curve key",
    "Ed": "an Ed25519 key",
}
SECRET_BYTES = {"HS256": 32, "HS384": 48, "HS512": 64}
#: A forged token is tried with every key that may have signed it.
MAX_KEYS = 16
PEM_BLOCK = re.compile(r"-----BEGIN [^-\n]+-----.*?-----END [^-\n]+-----", re.S)

Claims = Mapping[str, object]


class Key(NamedTuple):
    """A key as PyJWT takes it. `name` is its `kid` in a key set: a token with another `kid` is not tried with it."""

    key: Any
    name: str | None = None


class CachedToken(NamedTuple):
    """A token with a valid signature: its claims and its validity period."""

    claims: Claims
    since_us: int
    until_us: int


@dataclass(frozen=True, slots=True)
class Verifier:
    """Verifies tokens: keys and algorithms, issuer, audience, and tolerated clock difference.

    `key` is PEM text for RS, PS, ES and EdDSA (several keys in sequence, or a JSON Web Key Set, during a key rotation), or the
    shared secret for HS. `header` holds the token, with or without "Bearer"; `cookie` is read where the header has no valid one
    (with `header=None`, only the cookie is).
    """

    key: str | bytes = field(repr=False)
    algorithms: tuple[str, ...]
    header: str | None = "Authorization"
    issuer: str | None = None
    audience: str | None = None
    leeway_us: int = 0
    now_us: Callable[[], int] = field(default=utc_us, repr=False, compare=False)
    cookie: str | None = None
    _keys: tuple[Key, ...] = field(init=False, repr=False, compare=False)
    _name: str = field(init=False, repr=False, compare=False)
    _cookies: tuple[re.Pattern[str], ...] = field(init=False, repr=False, compare=False)
    _valid: dict[bytes, CachedToken] = field(init=False, repr=False, compare=False, default_factory=dict)
    _invalid: dict[bytes, None] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.algorithms, str):
            raise ConfigurationError(f"algorithms: write a list, such as [{self.algorithms}]")
        object.__setattr__(self, "algorithms", tuple(self.algorithms))
        object.__setattr__(self, "_name", (self.header or "").strip().lower())
        # Applications separate cookies by semicolons alone; commas may be those of several Cookie headers.
        patterns = () if self.cookie is None else (cookie_pattern(self.cookie, ";"), cookie_pattern(self.cookie))
        object.__setattr__(self, "_cookies", patterns)
        if not self._name and not patterns:
            raise ConfigurationError("a token needs a header or a cookie; write header: Authorization, or cookie: session")
        object.__setattr__(self, "_keys", read_keys(self.key, self.algorithms))

    def claims(self, request: RequestContext) -> Claims | None:
        """The claims of a request's token; None: no valid token."""
        value = request.header(self._name) if self._name else None
        claims = None
        if value:
            # No token has a comma: these are several header lines, of which an application may take the first or the last.
            several = [*value[:MAX_SCANNED].split(",", MAX_LINES)[:MAX_LINES], value.rpartition(",")[2]]
            lines = several if "," in value else [value]
            claims = self._first_valid([word for line in lines for word in words_after_scheme(line)])
        if value and claims is None:
            claims = self._claims(without_junk(value))
        for pattern in self._cookies if claims is None else ():
            cookies = pattern.findall(request.header("cookie") or "")
            values = [unquote_cookie(cookie.strip()) for cookie in cookies[:1] + cookies[1:][-1:]]
            claims = self._first_valid([word for value in values for word in value.split(None, 2)[:2]])
            if claims is not None:
                break
        return claims

    def _first_valid(self, texts: list[str]) -> Claims | None:
        """The claims of the first or the last of these that looks like a token."""
        tokens = [text for text in texts if text.count(".") == 2 and len(text) <= MAX_LENGTH]
        chosen = dict.fromkeys((tokens[0], tokens[-1])) if tokens else {}
        return next((claims for claims in map(self._claims, chosen) if claims is not None), None)

    def _claims(self, text: str) -> Claims | None:
        if not text or len(text) > MAX_LENGTH:
            return None
        digest = sha256(text.encode("utf-8", "surrogatepass")).digest()
        token = self._valid.get(digest) or self._verify(text, digest)
        if token is None:
            return None
        now_us = self.now_us()
        if now_us >= token.until_us:
            self._valid.pop(digest, None)
            return None
        return token.claims if token.since_us <= now_us else None

    def _verify(self, text: str, digest: bytes) -> CachedToken | None:
        if digest in self._invalid:
            return None
        options = {**_CHECKS, "verify_aud": self.audience is not None}
        named = {"algorithms": list(self.algorithms), "audience": self.audience, "issuer": self.issuer, "options": options}
        key = self._keys[0] if len(self._keys) == 1 else signing_key(self._keys, self.algorithms, text)
        try:
            claims = import_pyjwt().decode(text, key.key, **named)  # type: ignore[union-attr]
            since, until = _to_us(claims.get("nbf"), 0), _to_us(claims.get("exp"), _NO_END)
        except Exception:  # a client's text may raise anything
            return remember(self._invalid, digest, None, MAX_INVALID)
        return remember(self._valid, digest, CachedToken(claims, since - self.leeway_us, until + self.leeway_us), MAX_VALID)


class MissingVerifier(Verifier):
    """A verifier without its key, for commands that run where the application does not: no token is valid."""

    __slots__ = ()

    def __post_init__(self) -> None:
        """There is no key to read; `key` is its name."""

    def claims(self, request: RequestContext) -> Claims | None:
        return None


def words_after_scheme(line: str) -> list[str]:
    """The words of a header line of which an application may take one for the token: the second, whatever word precedes it (many
    do not look whether that is "Bearer"), and the last; or its only word."""
    return [*line.split(None, 2)[:2][-1:], *line.rsplit(None, 1)[-1:]]


def without_junk(value: str) -> str:
    """The token of a header without what many libraries ignore in its signature: all that is not base64, such as spaces and
    commas, and all that follows the padding. A client can add it to a valid token. "": there is none, or no token."""
    words = value.split(None, 1)
    text = words[1] if len(words) > 1 and "." not in words[0] else value
    signed, _, signature = text.strip().rpartition(".")
    if len(signed) > MAX_LENGTH or _BASE64URL(signature) is not None:
        return ""
    data = signature.encode("utf-8", "surrogatepass")
    try:
        found = urlsafe_b64decode(data + b"=" * (-len(data) % 4))
    except ValueError:
        return ""
    return f"{signed}.{urlsafe_b64encode(found).rstrip(b'=').decode()}"


def signing_key(keys: tuple[Key, ...], algorithms: tuple[str, ...], token: str) -> Key | None:
    """The key that signed a token; None: none of them. The token is parsed once, whatever the number of keys; a key whose ID is
    another one than the token's is not tried."""
    try:
        jwt = import_pyjwt()
        header = jwt.get_unverified_header(token)
        if header.get("alg") not in algorithms:
            return None
        algorithm, kid = find_algorithm(header["alg"]), header.get("kid")
        signed, _, signature = token.encode().rpartition(b".")
        signature = urlsafe_b64decode(signature + b"==")
    except Exception:  # a client's text may raise anything
        return None
    tried = [key for key in keys if key.name is None or kid is None or kid == key.name]
    return next((key for key in tried if verifies(algorithm, signed, key.key, signature)), None)


def verifies(algorithm: Any, signed: bytes, key: Any, signature: bytes) -> bool:
    try:
        return bool(algorithm.verify(signed, key, signature))
    except Exception:  # a key of another type or curve
        return False


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


def import_pyjwt() -> ModuleType:
    try:
        import jwt
    except ModuleNotFoundError:
        raise ConfigurationError("identities from a JWT need PyJWT: pip install 'limitkeeper[policy]'") from None
    return jwt


def is_public(text: str | bytes) -> bool:
    """Whether a key is public, so that anyone could sign if it were used as a shared secret."""
    data = text.encode("utf-8", "replace") if isinstance(text, str) else text
    return b"-----BEGIN" in data or data.startswith(b"ssh-") or parse_key_set(data) is not None


def parse_key_set(data: str | bytes) -> list[object] | None:
    """The members of a JSON Web Key Set; None: not a key set."""
    if data.lstrip()[:1] not in ("{", b"{"):
        return None
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    members = found.get("keys") if isinstance(found, dict) else None
    return members if isinstance(members, list) else None


def read_keys(text: str | bytes, algorithms: tuple[str, ...]) -> tuple[Key, ...]:
    """All keys in a text; ConfigurationError for a key or an algorithm that is unsafe."""
    check_family(algorithms)
    if not isinstance(text, (str, bytes)):
        raise ConfigurationError(f"the key must be a string or bytes, not {type(text).__name__}")
    members = parse_key_set(text)
    if members is not None:
        found = tuple([key for member in members for key in read_member(member, algorithms)])
        if not found:
            names = " or ".join(algorithms)
            raise ConfigurationError(f"none of the {len(members)} keys of this set verifies {names}; name an algorithm of theirs")
    else:
        blocks: list[str] = PEM_BLOCK.findall(text if isinstance(text, str) else text.decode("utf-8", "replace"))
        found = tuple([Key(prepare_key(block, algorithms)) for block in (blocks if len(blocks) > 1 else [text])])
    if len(found) > MAX_KEYS:
        raise ConfigurationError(f"got {len(found)} keys, and a forged token is tried with each; keep {MAX_KEYS} or fewer")
    return found


def check_family(algorithms: tuple[str, ...]) -> None:
    """Rejects `none`, and algorithms that need different kinds of keys."""
    if not algorithms:
        raise ConfigurationError("algorithms: name those that tokens may be signed with, such as [RS256]")
    if any(str(name).lower() == "none" for name in algorithms):
        raise ConfigurationError("algorithms: 'none' accepts unsigned tokens; name the algorithm of your tokens, such as [RS256]")
    families = {FAMILIES.get(str(name)[:2], "") for name in algorithms}
    if len(families) > 1 and "" not in families:
        raise ConfigurationError(
            f"algorithms: {', '.join(algorithms)} need different keys ({' and '.join(sorted(families))}), and a token could "
            "choose which; name those of one family"
        )


def read_member(member: object, algorithms: tuple[str, ...]) -> list[Key]:
    """The key of a member of a set; none for encryption keys, other algorithms, and members that can't be parsed."""
    if not isinstance(member, dict) or member.get("use", "sig") != "sig" or member.get("kty") == "oct":
        return []
    key, kid = None, member.get("kid")
    for name in (name for name in algorithms if member.get("alg", name) == name):
        algorithm = find_algorithm(name)
        try:
            key = algorithm.from_jwk(member)
        except Exception:
            return []
        key = key.public_key() if hasattr(key, "public_key") else key
        check_strength(name, key)
    return [] if key is None else [Key(key, kid if isinstance(kid, str) else None)]


def prepare_key(text: str | bytes, algorithms: tuple[str, ...]) -> Any:
    """Parses one key, which every algorithm must accept."""
    key = None
    for name in algorithms:
        algorithm = find_algorithm(name)
        if not text:
            raise ConfigurationError(f"the key is empty; {name} needs {FAMILIES[name[:2]]}")
        try:
            key = algorithm.prepare_key(text)
        except Exception as error:  # the type alone: a message could hold the key
            needed = f"{FAMILIES[name[:2]]}, which {name} needs"
            raise ConfigurationError(f"the key is not {needed} ({type(error).__name__})") from None
        check_strength(name, key)
    return key


def find_algorithm(name: str) -> Any:
    jwt = import_pyjwt()
    try:
        return jwt.get_algorithm_by_name(name)
    except NotImplementedError:
        known = sorted(one for one in jwt.PyJWS().get_algorithms() if one != "none")
        raise ConfigurationError(f"algorithms: unknown algorithm {name!r}; write one of {', '.join(known)}") from None


def check_strength(name: str, key: Any) -> None:
    """Rejects keys that can be guessed (RFC 7518, 3.2 and 3.3)."""
    least = SECRET_BYTES.get(name)
    if least is not None and len(key) < least:
        raise ConfigurationError(f"the key has {len(key)} bytes, and {name} needs {least} or more: a guessed key signs any token")
    if name[:2] in ("RS", "PS") and key.key_size < 2048:
        raise ConfigurationError(f"the key has {key.key_size} bits, and {name} needs 2048 or more; make a longer one")
