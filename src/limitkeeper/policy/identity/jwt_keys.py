"""The keys that verify tokens: one, or several while one takes the place of another.

A text holds a shared secret, one or several keys in PEM one after the other, or a JSON Web Key Set ({"keys": [{"kty": …}, …]}).
A key can't be mistaken for something else: algorithms of one family only, a public key never serves as a shared secret, and
`none` is no algorithm. Keys that can be guessed are refused. PyJWT reads them, and is imported when the first one is read.
"""

from __future__ import annotations

import json
import re
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
#: A forged token is tried with every key that could have signed it.
MOST_KEYS = 16
BLOCK = re.compile(r"-----BEGIN [^-\n]+-----.*?-----END [^-\n]+-----", re.S)


class Key(NamedTuple):
    """A key as PyJWT takes it. `name` is its `kid`, where a set gives it one: a token that names another is not tried with it."""

    key: Any
    name: str | None = None


def pyjwt() -> Any:
    try:
        import jwt
    except ModuleNotFoundError:
        raise ConfigurationError("identities from a JWT need PyJWT: pip install 'limitkeeper[policy]'") from None
    return jwt


def is_public(text: str | bytes) -> bool:
    """Whether others know this key, so that as a shared secret it would let anybody sign."""
    data = text.encode("utf-8", "replace") if isinstance(text, str) else text
    return b"-----BEGIN" in data or data.startswith(b"ssh-") or key_set(data) is not None


def key_set(data: str | bytes) -> list[Any] | None:
    """The members of a JSON Web Key Set; None: it is something else."""
    if data.lstrip()[:1] not in ("{", b"{"):
        return None
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    members = found.get("keys") if isinstance(found, dict) else None
    return members if isinstance(members, list) else None


def keys_of(text: str | bytes, algorithms: tuple[str, ...]) -> tuple[Key, ...]:
    """All keys in a text, read once; ConfigurationError for anything that could be mistaken for something else."""
    one_family(algorithms)
    if not isinstance(text, (str, bytes)):
        raise ConfigurationError(f"the key must be text or bytes, not {type(text).__name__}")
    members = key_set(text)
    if members is not None:
        found = tuple([key for member in members for key in of_a_set(member, algorithms)])
        if not found:
            wanted = " or ".join(algorithms)
            raise ConfigurationError(f"none of the {len(members)} keys of this set verifies {wanted}; name the algorithm of one")
    else:
        shown = text if isinstance(text, str) else text.decode("utf-8", "replace")
        blocks: list[Any] = BLOCK.findall(shown)
        found = tuple([Key(prepared(block, algorithms)) for block in (blocks if len(blocks) > 1 else [text])])
    if len(found) > MOST_KEYS:
        raise ConfigurationError(f"these are {len(found)} keys, and a forged token is tried with each; keep {MOST_KEYS} or fewer")
    return found


def one_family(algorithms: tuple[str, ...]) -> None:
    if not algorithms:
        raise ConfigurationError("algorithms: say which a token may be signed with, such as [RS256]")
    for name in algorithms:
        if str(name).lower() == "none":
            raise ConfigurationError(
                "algorithms: 'none' means that anybody can write a token; write how yours are signed: [RS256]"
            )
    families = {FAMILIES.get(str(name)[:2], "") for name in algorithms}
    if len(families) > 1 and "" not in families:
        raise ConfigurationError(
            f"algorithms: {', '.join(algorithms)} need different keys ({' and '.join(sorted(families))}), and a token could "
            "choose which; name those of one kind"
        )


def of_a_set(member: Any, algorithms: tuple[str, ...]) -> list[Key]:
    """The key of a member of a set; nothing where it is for something else: encryption, or another algorithm."""
    if not isinstance(member, dict) or member.get("use", "sig") != "sig" or member.get("kty") == "oct":
        return []
    names = [name for name in algorithms if member.get("alg", name) == name]
    found: Any = None
    for name in names:
        try:
            found = algorithm_of(name).from_jwk(member)
        except ConfigurationError:
            raise
        except Exception:  # of another kind, or unreadable: a set may hold what nobody here knows
            return []
        found = found.public_key() if hasattr(found, "public_key") else found
        strong(name, found)
    told = member.get("kid")
    return [] if found is None else [Key(found, told if isinstance(told, str) else None)]


def prepared(text: str | bytes, algorithms: tuple[str, ...]) -> Any:
    """One key, which every algorithm must take."""
    found = None
    for name in algorithms:
        algorithm = algorithm_of(name)
        if not text:
            raise ConfigurationError(f"the key is empty; {name} needs {FAMILIES[name[:2]]}")
        try:
            found = algorithm.prepare_key(text)
        except Exception as error:  # the library's reasons never hold the key itself
            needs = f"{FAMILIES[name[:2]]}, which {name} needs"
            raise ConfigurationError(f"the key is not {needs} ({type(error).__name__})") from None
        strong(name, found)
    return found


def algorithm_of(name: str) -> Any:
    jwt = pyjwt()
    try:
        return jwt.get_algorithm_by_name(name)
    except NotImplementedError:
        known = sorted(one for one in jwt.PyJWS().get_algorithms() if one != "none")
        raise ConfigurationError(f"algorithms: {name!r} is none that PyJWT knows; write one of {', '.join(known)}") from None


def strong(name: str, key: Any) -> None:
    """Refuses keys that can be guessed (RFC 7518, 3.2 and 3.3)."""
    least = SECRET_BYTES.get(name)
    if least is not None and len(key) < least:
        raise ConfigurationError(
            f"the key has {len(key)} bytes, and {name} needs {least} or more: whoever guesses it writes tokens of anybody"
        )
    if name[:2] in ("RS", "PS") and key.key_size < 2048:
        raise ConfigurationError(f"the key has {key.key_size} bits, and {name} needs 2048 or more; make a longer one")
