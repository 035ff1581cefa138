"""Key rotation: several PEM keys in sequence, or a JSON Web Key Set."""

from __future__ import annotations

import json

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from limitkeeper.errors import ConfigurationError
from limitkeeper.policy import Policy, PolicyError
from limitkeeper.policy.gate import Gate
from limitkeeper.policy.identity.jwt import MAX_KEYS, Jwt, Verifier
from limitkeeper.policy.request_context import WrittenRequest

OLD, NEW, STRANGER = (rsa.generate_private_key(65537, 2048) for _ in range(3))
CURVE = ec.generate_private_key(ec.SECP256R1())


def pem(private) -> str:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return private.public_key().public_bytes(serialization.Encoding.PEM, form).decode()


def member(private, algorithm="RS256", **more) -> dict:
    return {**json.loads(jwt.get_algorithm_by_name(algorithm).to_jwk(private.public_key())), **more}


def key_set(*members) -> str:
    return json.dumps({"keys": members})


def token(private, algorithm="RS256", **headers) -> str:
    return jwt.encode({"sub": "ann"}, private, algorithm=algorithm, headers=headers)


def subject_of(verifier: Verifier, said: str) -> str | None:
    return Jwt("sub", verifier).of(WrittenRequest(headers={"Authorization": f"Bearer {said}"}))


TEXTS = {
    "pem": pem(OLD) + pem(NEW),
    "pem with words between": f"the old one:\n{pem(OLD)}\n# and the new one\r\n{pem(NEW)}",
    "a set": key_set(member(OLD), member(NEW)),
    "a set with names": key_set(member(OLD, kid="2025"), member(NEW, kid="2026")),
    "a set with more in it": key_set(
        member(STRANGER, use="enc"), member(CURVE, "ES256"), {"kty": "oct", "k": "c2VjcmV0"}, "?", {"kty": "??"},
        member(OLD, alg="RS256", use="sig"), member(NEW), member(STRANGER, alg="PS256"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("form", [str, str.encode], ids=["text", "bytes"])
def test_tokens_of_every_key_count(text, form):
    """A token that any of the keys signed counts, named or not; a foreign token does not, whatever its kid."""
    verifier = Verifier(form(text), ("RS256",))
    for private in (OLD, NEW):
        assert subject_of(verifier, token(private)) == "ann"
    for headers in ({}, {"kid": "2026"}, {"kid": "9999"}):
        assert subject_of(verifier, token(STRANGER, **headers)) is None


def test_a_token_that_names_its_key_is_tried_with_that_one():
    """A token with the kid of one key is not accepted when another signed it."""
    verifier = Verifier(TEXTS["a set with names"], ("RS256",))
    assert subject_of(verifier, token(NEW, kid="2026")) == "ann"
    assert subject_of(verifier, token(NEW, kid="2025")) is None


@pytest.mark.parametrize("forged", ["", "a.b.c", "a.b", "." * 50, token(NEW)[:-4] + "AAAA", token(CURVE, "ES256")])
def test_forged_tokens_are_invalid(forged):
    """Broken, altered and foreign tokens are rejected by all keys."""
    assert subject_of(Verifier(TEXTS["pem"], ("RS256",)), forged) is None


@pytest.mark.parametrize(
    ("text", "algorithms", "received"),
    [
        (key_set(), ("RS256",), "none of the 0 keys of this set verifies RS256"),
        (key_set(member(CURVE, "ES256"), member(OLD, use="enc")), ("RS256",), "none of the 2 keys of this set verifies RS256"),
        (key_set(member(OLD)), ("HS256",), "none of the 1 keys of this set verifies HS256"),
        (key_set({"kty": "oct", "k": "c2VjcmV0" * 8}), ("HS256",), "none of the 1 keys of this set verifies HS256"),
        (pem(OLD) + pem(CURVE), ("RS256",), "the key is not an RSA key, which RS256 needs"),
        (pem(OLD) * (MAX_KEYS + 1), ("RS256",), f"got {MAX_KEYS + 1} keys"),
        (key_set(*[member(OLD)] * (MAX_KEYS + 1)), ("RS256",), f"keep {MAX_KEYS} or fewer"),
        (key_set(member(rsa.generate_private_key(65537, 1024))), ("RS256",), "1024 bits, and RS256 needs 2048"),
    ],
)
def test_unsafe_keys_are_errors(text, algorithms, received):
    """Of several keys too: none that fits, one of another kind, weak ones, too many, or public ones as a shared secret."""
    with pytest.raises(ConfigurationError, match=received):
        Verifier(text, algorithms)


@pytest.mark.parametrize("key", [None, 5, ["x"]])
def test_a_key_is_text_or_bytes(key):
    """Another type is an error that does not show the value."""
    with pytest.raises(ConfigurationError, match=f"the key must be a string or bytes, not {type(key).__name__}"):
        Verifier(key, ("HS256",))


def test_a_private_member_of_a_set_verifies_like_its_public_half():
    """A private key in a set is used as its public key."""
    private = json.loads(jwt.get_algorithm_by_name("RS256").to_jwk(OLD))
    assert subject_of(Verifier(key_set(private), ("RS256",)), token(OLD)) == "ann"


POLICY = """
identify:
  user: {jwt: {claim: sub, key_file: keys, algorithms: [RS256]}}
limits:
  - {name: user, key: user, limit: fixed window 5/min}
"""


def test_a_key_rotation_locks_no_client_out(tmp_path):
    """Old, then both, then new: at every step tokens of the keys in the file are valid."""
    known = []
    for text in (pem(OLD), pem(OLD) + pem(NEW), key_set(member(NEW))):
        (tmp_path / "keys").write_text(text)
        (tmp_path / "limitkeeper.yaml").write_text(POLICY)
        with Gate(Policy.load(tmp_path / "limitkeeper.yaml")) as gate:
            asked = [gate.ask(WrittenRequest(headers={"Authorization": token(private)})) for private in (OLD, NEW)]
            known.append([evaluation.keys for evaluation in asked])
    assert known == [[["ann"], []], [["ann"], ["ann"]], [[], ["ann"]]]


def test_a_set_is_no_shared_secret(tmp_path):
    """A key set is public: as the secret of HS256 it would let any client sign, which is an error."""
    (tmp_path / "keys").write_text(key_set(member(OLD)))
    (tmp_path / "limitkeeper.yaml").write_text(POLICY.replace("RS256", "HS256"))
    with pytest.raises(PolicyError, match="this key is public: anyone could sign with it"):
        Policy.load(tmp_path / "limitkeeper.yaml")
