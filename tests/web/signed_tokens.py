"""Tokens that a policy accepts, and tokens that it must not: signed with a secret, or a key pair, of the tests."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

SECRET = "a secret that is long enough for HS256"


def token(secret: str = SECRET, **claims: str) -> dict[str, str]:
    """The header of a request that carries these claims."""
    return {"Authorization": "Bearer " + jwt.encode(claims, secret, algorithm="HS256")}


def unsigned(**claims: str) -> dict[str, str]:
    """The same, with the algorithm "none": without a signature."""
    return {"Authorization": "Bearer " + jwt.encode(claims, "", algorithm="none")}


@functools.cache
def pair() -> tuple[rsa.RSAPrivateKey, Path]:
    """A private key, and the file of its public half."""
    private = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    folder = tempfile.mkdtemp(prefix="limitkeeper-tokens-")
    atexit.register(shutil.rmtree, folder)
    file = Path(folder) / "jwt.pub"
    form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    file.write_bytes(private.public_key().public_bytes(*form))
    return private, file


def signed(**claims: str) -> dict[str, str]:
    """The header of a request with a token of the key pair."""
    return {"Authorization": "Bearer " + jwt.encode(claims, pair()[0], algorithm="RS256")}
