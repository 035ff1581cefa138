"""Tokens that a policy believes, and tokens that it must not: signed with a secret of the tests."""

from __future__ import annotations

import jwt

SECRET = "a secret that is long enough for HS256"


def token(secret: str = SECRET, **claims: str) -> dict[str, str]:
    """The header of a request that carries these claims."""
    return {"Authorization": "Bearer " + jwt.encode(claims, secret, algorithm="HS256")}


def unsigned(**claims: str) -> dict[str, str]:
    """The same, with the algorithm "none": nobody vouches for it."""
    return {"Authorization": "Bearer " + jwt.encode(claims, "", algorithm="none")}
