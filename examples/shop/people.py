"""The shop's users. It signs a token for every name, for demonstration only; a real shop authenticates its users.

The name selects the plan: "pro-…" and "enterprise-…" are paid plans, every other name is free. Tokens are signed with a key pair
(RS256) that is created at the first start in a folder outside version control. The policy has the public key only.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

KEYS = Path(__file__).resolve().parent / "keys"
PLANS = ("pro", "enterprise")
HOUR = timedelta(hours=1)


def plan_of(name: str) -> str:
    """The plan of a user, selected by the prefix of the name."""
    return next((plan for plan in PLANS if name == plan or name.startswith(f"{plan}-")), "free")


def make_keys(folder: Path = KEYS) -> None:
    """Creates the key pair once. Both files appear atomically, so several processes may start at the same time."""
    if folder.is_dir():
        return
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    text = serialization.Encoding.PEM
    private = key.private_bytes(text, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    public = key.public_key().public_bytes(text, serialization.PublicFormat.SubjectPublicKeyInfo)
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".keys-"))
    (made / "jwt.key").write_bytes(private)
    (made / "jwt.pub").write_bytes(public)
    try:
        os.rename(made, folder)
    except OSError:  # another process was first
        shutil.rmtree(made)


def token_for(name: str, folder: Path = KEYS) -> str:
    """A signed token with the user's name and plan."""
    claims = {"sub": name, "plan": plan_of(name), "iss": "shop", "exp": datetime.now(UTC) + HOUR}
    return jwt.encode(claims, (folder / "jwt.key").read_bytes(), algorithm="RS256")
