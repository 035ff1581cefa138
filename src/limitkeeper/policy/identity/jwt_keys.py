"""Reads the keys that verify tokens: one, or several during a key rotation.

A text holds a shared secret, one or several PEM keys in sequence, or a JSON Web Key Set ({"keys": [{"kty": …}, …]}). Rejected:
algorithms of several families, a public key as a shared secret, the algorithm `none`, and keys short enough to be guessed.
PyJWT parses the keys, and is imported when the first one is read.
"""

from __future__ import annotations

import json
import re
from types import ModuleType
from typing import Any, NamedTuple

from ...errors import ConfigurationError

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


class Key(NamedTuple):
    """A key as PyJWT takes it. `name` is its `kid` in a key set: a token with another `kid` is not tried with it."""

    key: Any
    name: str | None = None


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
    key = None
    for name in (name for name in algorithms if member.get("alg", name) == name):
        algorithm = find_algorithm(name)
        try:
            key = algorithm.from_jwk(member)
        except Exception:
            return []
        key = key.public_key() if hasattr(key, "public_key") else key
        check_strength(name, key)
    kid = member.get("kid")
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
