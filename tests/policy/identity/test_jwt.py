"""Claims count when their token is verified, and only then."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import sys

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from limitkeeper.errors import ConfigurationError
from limitkeeper.policy.identity.jwt import MAX_INVALID, MAX_LENGTH, MAX_VALID, Jwt, Verifier
from limitkeeper.policy.request_context import WrittenRequest
from limitkeeper.testing import ManualClock

STEADY = settings(deadline=None, suppress_health_check=list(HealthCheck))

SECRET = "a shared secret that is long enough"
NOW = 1_700_000_000


def pair(private):
    public = private.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return private, public.decode()


PRIVATE, PUBLIC = pair(rsa.generate_private_key(65537, 2048))
OTHER, _ = pair(rsa.generate_private_key(65537, 2048))


@pytest.fixture
def moment():
    return ManualClock(NOW)


@pytest.fixture
def verifier(moment):
    return Verifier(PUBLIC, ("RS256",), now_us=moment.now_us)


def bearing(token: str, scheme: str = "Bearer ") -> WrittenRequest:
    return WrittenRequest(headers={"Authorization": scheme + token})


def signed(key=PRIVATE, algorithm="RS256", **claims) -> str:
    return jwt.encode({"sub": "ann", **claims}, key, algorithm=algorithm)


def part(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER   ", "", "JWT ", "a.b.c ", "Bearer x ", " x\t"])
def test_a_signed_token_gives_its_claims(verifier, scheme):
    """With or without the word Bearer before it, or others: many applications take the second word, whatever the first is."""
    assert Jwt("sub", verifier).of(bearing(signed(), scheme)) == "ann"


@pytest.mark.parametrize(
    ("private", "algorithm"),
    [(ec.generate_private_key(ec.SECP256R1()), "ES256"), (ed25519.Ed25519PrivateKey.generate(), "EdDSA"), (PRIVATE, "PS256")],
)
def test_every_family_of_keys_is_verified(private, algorithm):
    """Elliptic curves, Ed25519 and RSA-PSS, each with its public key in PEM."""
    verifier = Verifier(pair(private)[1], (algorithm,))
    assert Jwt("sub", verifier).of(bearing(signed(private, algorithm))) == "ann"
    assert Jwt("sub", verifier).of(bearing(signed())) is None


def test_a_shared_secret_verifies_too():
    """HS256, with a secret as a string or bytes."""
    for key in (SECRET, SECRET.encode()):
        assert Jwt("sub", Verifier(key, ("HS256",))).of(bearing(signed(SECRET, "HS256"))) == "ann"


def forged() -> dict[str, str]:
    head, body, signature = signed().split(".")
    none = part({"alg": "none", "typ": "JWT"}) + "." + body + "."
    confused = part({"alg": "HS256", "typ": "JWT"}) + "." + body
    mac = base64.urlsafe_b64encode(hmac.new(PUBLIC.encode(), confused.encode(), hashlib.sha256).digest()).rstrip(b"=").decode()
    return {
        "another key": signed(OTHER),
        "another algorithm of the same key": signed(algorithm="RS512"),
        "no algorithm": none,
        "no algorithm, a signature": none + signature,
        "None": part({"alg": "None"}) + "." + body + ".",
        "the public key as a secret": confused + "." + mac,
        "a shared secret": signed(SECRET, "HS256"),
        "another body": f"{head}.{part({'sub': 'bob'})}.{signature}",
        "no signature": f"{head}.{body}.",
        "two parts": f"{head}.{body}",
        "a list": jwt.api_jws.encode(b'["ann"]', PRIVATE, algorithm="RS256"),
        "no JSON": jwt.api_jws.encode(b"ann", PRIVATE, algorithm="RS256"),
        "a critical header": jwt.encode({"sub": "ann"}, PRIVATE, algorithm="RS256", headers={"crit": ["x"], "x": 1}),
        "words": "of no meaning",
        "nothing": "",
    }


@pytest.mark.parametrize("forgery", forged())
def test_what_is_not_verified_does_not_count(verifier, forgery):
    """A forged token gives no claim: the identity is absent or has its default."""
    facts = bearing(forged()[forgery])
    assert Jwt("sub", verifier).of(facts) is None
    assert Jwt("sub", verifier, default="free").of(facts) == "free"


@STEADY
@given(st.one_of(st.text(max_size=100), st.lists(st.sampled_from([".", "e30", "eyJhbGciOiJub25lIn0", "=", "\x00"])).map("".join)))
def test_no_text_is_mistaken_for_a_token(text):
    """Any header text raises nothing and gives no claim."""
    assert Jwt("sub", Verifier(SECRET, ("HS256",))).of(bearing(text)) is None


def test_time_is_compared_with_every_request(verifier, moment):
    """A token counts from nbf to exp, although it was verified and cached before; a token without exp counts on."""
    identity, facts = Jwt("sub", verifier), bearing(signed(nbf=NOW + 10, exp=NOW + 20))
    received = []
    for _ in range(5):
        received.append(identity.of(facts))
        moment.advance(5)
    assert received == [None, None, "ann", "ann", None]
    moment.advance(10**9)
    assert identity.of(facts) is None
    assert identity.of(bearing(signed())) == "ann"


def test_leeway_is_given_at_both_ends(moment):
    """A token may be early or late by the leeway, and not by a second more."""
    identity = Jwt("sub", Verifier(PUBLIC, ("RS256",), leeway_us=3_000_000, now_us=moment.now_us))
    assert identity.of(bearing(signed(exp=NOW - 2))) == "ann"
    assert identity.of(bearing(signed(exp=NOW - 3))) is None
    assert identity.of(bearing(signed(nbf=NOW + 3))) == "ann"
    assert identity.of(bearing(signed(nbf=NOW + 4))) is None


@pytest.mark.parametrize("claim", ["exp", "nbf"])
@pytest.mark.parametrize("moment_said", ["soon", "7", True, [NOW], float("inf"), float("-inf"), float("nan"), {}])
def test_an_invalid_time_makes_the_token_invalid(verifier, moment_said, claim):
    """An exp or nbf that is not a number is not treated as absent."""
    body = json.dumps({"sub": "ann", claim: moment_said}).encode()
    assert Jwt("sub", verifier).of(bearing(jwt.api_jws.encode(body, PRIVATE, algorithm="RS256"))) is None


def test_issuer_and_audience_are_checked():
    """With an issuer or an audience, tokens of or for other services do not count."""
    strict = Jwt("sub", Verifier(PUBLIC, ("RS256",), issuer="https://id.example", audience="shop"))
    assert strict.of(bearing(signed(iss="https://id.example", aud="shop"))) == "ann"
    assert strict.of(bearing(signed(iss="https://id.example", aud=["x", "shop"]))) == "ann"
    for claims in (
        {"iss": "https://evil.example", "aud": "shop"},
        {"iss": "https://id.example", "aud": "bank"},
        {"aud": "shop"},
        {},
    ):
        assert strict.of(bearing(signed(**claims))) is None
    assert Jwt("sub", Verifier(PUBLIC, ("RS256",))).of(bearing(signed(aud="bank"))) == "ann"


@pytest.mark.parametrize(
    ("value", "received"),
    [
        ("pro", "pro"),
        (42, "42"),
        (-1, "-1"),
        ("", None),
        (True, None),
        (1.5, None),
        (["pro"], None),
        ({"a": 1}, None),
        (None, None),
    ],
)
def test_claims_are_strings_or_integers(verifier, value, received):
    """A claim of another type counts as absent."""
    body = json.dumps({"plan": value}).encode()
    assert Jwt("plan", verifier).of(bearing(jwt.api_jws.encode(body, PRIVATE, algorithm="RS256"))) == received


def test_a_long_claim_is_hashed(verifier):
    """The length of verified values is bounded too."""
    assert Jwt("sub", verifier).of(bearing(signed(sub="x" * 1_000))).startswith("sha256:")


@pytest.mark.parametrize("junk", ["", "    ", ",,,,", "\t\t\t\t", "!" * 4 * MAX_LENGTH, "é" * 4])
@pytest.mark.parametrize("space", [" ", " " * 2 * MAX_LENGTH], ids=len)
def test_what_applications_ignore_in_a_header_hides_no_token(verifier, junk, space):
    """A client can add it to its token: FastAPI strips spaces, and many libraries skip invalid base64 in a signature."""
    token = signed()
    assert Jwt("sub", verifier).of(bearing(f"{token[:-20]}{junk}{token[-20:]}", f"Bearer{space}")) == "ann"
    assert Jwt("sub", verifier).of(bearing(f"{token[:-20]}{junk}{token[-19:]}", f"Bearer{space}")) is None


def test_what_follows_the_padding_of_a_signature_hides_no_token(verifier):
    """Many libraries do not read it."""
    assert Jwt("sub", verifier).of(bearing(signed() + "==" + "A" * 2 * MAX_LENGTH)) == "ann"


@pytest.mark.parametrize("before", ["", "a=1,token=a.b.c; ", "token=a.b.c; "])
@pytest.mark.parametrize("after", ["", "; b=2,token=a.b.d", ", b=2"])
def test_what_looks_like_a_cookie_hides_no_token(moment, before, after):
    """An application separates cookies by semicolons, and takes the last one of a name; a comma may join two Cookie headers."""
    user = Jwt("sub", Verifier(PUBLIC, ("RS256",), header=None, cookie="token", now_us=moment.now_us))
    assert user.of(WrittenRequest(headers={"Cookie": f"{before}token={signed()}{after}"})) == "ann"


def test_a_long_token_is_ignored(verifier, monkeypatch):
    """A token of more than MAX_LENGTH is ignored, even with a valid signature."""
    token = signed(junk="x" * MAX_LENGTH)
    monkeypatch.setattr(jwt, "decode", None)
    assert Jwt("sub", verifier).of(bearing(token)) is None
    assert Jwt("sub", verifier).of(bearing("x" * 1_000_000)) is None
    assert verifier._invalid == {}


def counted(monkeypatch) -> list[str]:
    looked: list[str] = []
    decode = jwt.decode

    def counting(token, *args, **more):
        looked.append(token)
        return decode(token, *args, **more)

    monkeypatch.setattr(jwt, "decode", counting)
    return looked


def test_a_token_is_verified_once(verifier, monkeypatch):
    """Whatever the number of claims and requests; also an invalid token."""
    looked = counted(monkeypatch)
    good, bad = bearing(signed(plan="pro")), bearing(signed(OTHER))
    for _ in range(3):
        assert [Jwt(claim, verifier).of(good) for claim in ("sub", "plan", "other")] == ["ann", "pro", None]
        assert [Jwt(claim, verifier).of(bad) for claim in ("sub", "plan")] == [None, None]
    assert len(looked) == 2


def test_the_caches_of_tokens_are_bounded(verifier, monkeypatch):
    """A flood of invalid tokens does not grow memory and evicts no valid one."""
    good = bearing(signed())
    identity = Jwt("sub", verifier)
    assert identity.of(good) == "ann"
    looked = counted(monkeypatch)
    for n in range(MAX_INVALID * 3):
        assert identity.of(bearing(f"a.b.{n}")) is None
    assert len(verifier._invalid) <= MAX_INVALID < MAX_VALID
    looked.clear()
    assert identity.of(good) == "ann"
    assert looked == []


def test_another_header_can_hold_the_token():
    """A gateway may send it in another header; then Authorization is ignored."""
    identity = Jwt("sub", Verifier(PUBLIC, ("RS256",), header="X-Id-Token"))
    assert identity.of(WrittenRequest(headers={"X-Id-Token": signed()})) == "ann"
    assert identity.of(bearing(signed())) is None


@pytest.mark.parametrize(
    ("key", "algorithms", "remedy"),
    [
        (PUBLIC, (), "name those that tokens may be signed with"),
        (PUBLIC, "RS256", r"write a list, such as \[RS256\]"),
        (PUBLIC, ("none",), "accepts unsigned tokens"),
        (PUBLIC, ("RS256", "NONE"), "accepts unsigned tokens"),
        (PUBLIC, ("RS265",), "write one of ES256(?!.*none)"),
        (PUBLIC, ("RS256", "XS256"), "unknown algorithm 'XS256'"),
        (PUBLIC, ("RS256", "HS256"), "a token could choose which"),
        (PUBLIC, ("HS256",), "the key is not a shared secret"),
        (PUBLIC, ("ES256",), "the key is not an elliptic curve key"),
        (SECRET, ("RS256",), "the key is not an RSA key"),
        ("", ("RS256",), "the key is empty"),
        ("", ("HS256",), "the key is empty"),
        ("too short", ("HS256",), "the key has 9 bytes, and HS256 needs 32"),
        (SECRET, ("HS512",), "HS512 needs 64"),
    ],
    ids=range(14),
)
def test_an_unsafe_key_is_an_error(key, algorithms, remedy):
    """The constructor raises it, without showing the key."""
    with pytest.raises(ConfigurationError, match=remedy) as refused:
        Verifier(key, algorithms)
    assert not key or key not in str(refused.value)


@pytest.mark.parametrize("algorithm", ["RS256", "PS256"])
def test_a_short_rsa_key_is_invalid(algorithm):
    """1024 bits can be factored."""
    public = pair(rsa.generate_private_key(65537, 1024))[1]
    with pytest.raises(ConfigurationError, match="needs 2048 or more"):
        Verifier(public, (algorithm,))


@pytest.mark.parametrize("claim", ["", None, 7])
def test_a_claim_has_a_name(verifier, claim):
    """An invalid claim name is an error of the constructor."""
    with pytest.raises(ConfigurationError, match=f"claim: expected the name of a claim, such as sub, got {claim!r}"):
        Jwt(claim, verifier)


def test_a_key_is_never_shown(verifier):
    """Not in the repr of a verifier, nor of an identity."""
    assert "BEGIN" not in repr(verifier)
    assert SECRET not in repr(Jwt("sub", Verifier(SECRET, ("HS256",))))


def test_verifiers_are_values():
    """Equal arguments make equal verifiers, whatever they have cached."""
    one, two = Verifier(SECRET, ("HS256",)), Verifier(SECRET, ("HS256",))
    one.claims(bearing(signed(SECRET, "HS256")))
    assert Jwt("sub", one) == Jwt("sub", two)
    assert hash(one) == hash(two)


def test_without_pyjwt_the_extra_is_named(monkeypatch):
    """The error names the package to install."""
    monkeypatch.setitem(sys.modules, "jwt", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'limitkeeper\[policy\]'"):
        Verifier(SECRET, ("HS256",))


def test_the_library_is_imported_when_a_verifier_is_made(python):
    """Policies without tokens never load it."""
    done = python("import sys, limitkeeper.policy.identity.jwt; print('jwt' in sys.modules)")
    assert done.stdout.strip() == "False", done.stderr


# Bounds on the cost of a request


def test_the_cache_holds_digests_and_no_expired_token(verifier, moment):
    """An entry has the size of a digest, whatever the token's, and goes when the token has expired."""
    request = bearing(signed(exp=NOW + 60, junk="x" * 4000))
    assert Jwt("sub", verifier).of(request) == "ann"
    assert [len(digest) for digest in verifier._valid] == [32]
    moment.advance(60)
    assert Jwt("sub", verifier).of(request) is None
    assert verifier._valid == {}
    assert Jwt("sub", verifier).of(bearing(signed(OTHER))) is None
    assert [len(digest) for digest in verifier._invalid] == [32]


@pytest.mark.parametrize("cookies", [False, True])
def test_a_request_is_verified_a_bounded_number_of_times(cookies, monkeypatch):
    """Of hundreds of large forged tokens two of a header and two of a cookie are parsed, once each, for any number of keys."""
    keys = [pair(ec.generate_private_key(ec.SECP256R1()))[1] for _ in range(16)]
    verifier = Verifier("\n".join(keys), ("ES256",), cookie="token" if cookies else None)
    stranger = ec.generate_private_key(ec.SECP256R1())
    forged = [signed(stranger, "ES256", n=n, junk="x" * 4000) for n in range(200)]
    calls: list[int] = []
    kind = jwt.algorithms.ECAlgorithm
    verify = kind.verify
    monkeypatch.setattr(kind, "verify", lambda self, signed, *rest: (calls.append(len(signed)), verify(self, signed, *rest))[1])
    parsed = counted(monkeypatch)
    headers = {"Authorization": ", ".join(f"Bearer {token}" for token in forged)}
    if cookies:
        headers["Cookie"] = "; ".join(f"token={token}" for token in forged)
    for _ in range(3):
        assert Jwt("sub", verifier).of(WrittenRequest(headers=headers)) is None
    tokens = 2  # the cookie holds the same two
    assert len(calls) == tokens * 16
    assert max(calls) <= MAX_LENGTH
    assert len(parsed) <= tokens


def test_the_first_and_the_last_of_several_tokens_count(verifier):
    """Every token that an application may take is verified, whatever surrounds it; others are not."""
    forged = [signed(OTHER, n=n) for n in range(9)]
    first, last, middle = [signed(), *forged], [*forged, signed()], [*forged[:1], signed(), *forged[1:]]
    found = [Jwt("sub", verifier).of(WrittenRequest(headers={"Authorization": ", ".join(one)})) for one in (first, last, middle)]
    assert found == ["ann", "ann", None]


# Tokens in cookies


@pytest.mark.parametrize(
    "cookies",
    [
        "token={}",
        'a=b; token="{}"',
        "a=b token={} c=d",
        'token="Bearer {}"',
        "token={} ;x",
        "token={}; token=x",
        "token=a.b.c; token={}",
    ],
)
def test_a_cookie_can_hold_the_token(moment, cookies):
    """Written as applications read it; of several the first and the last count."""
    identity = Jwt("sub", Verifier(PUBLIC, ("RS256",), None, cookie="token", now_us=moment.now_us))
    assert identity.of(WrittenRequest(headers={"Cookie": cookies.format(signed())})) == "ann"
    assert identity.of(WrittenRequest(headers={"Cookie": cookies.format(signed(OTHER))})) is None
    assert identity.of(WrittenRequest(headers={"Cookie": "x=1"})) is None
    assert identity.of(bearing(signed())) is None  # the header is not read


def test_a_header_is_read_before_a_cookie():
    """Where both are named, the cookie counts only without a valid token in the header."""
    identity = Jwt("sub", Verifier(PUBLIC, ("RS256",), cookie="token"))
    cookie = f"token={signed(sub='bob')}"
    for header, said in ((signed(), "ann"), (signed(OTHER), "bob"), ("", "bob")):
        assert identity.of(WrittenRequest(headers={"Authorization": f"Bearer {header}", "Cookie": cookie})) == said


def test_a_policy_names_the_cookie():
    """`cookie` alone replaces the header; with `header` both are read."""
    from limitkeeper.policy import Policy

    def verifier_of(**more):
        user = {"jwt": {"claim": "sub", "key": SECRET, "algorithms": ["HS256"], **more}}
        return Policy.of(identify={"user": user}).identify["user"].verifier

    assert (verifier_of().header, verifier_of().cookie) == ("Authorization", None)
    assert (verifier_of(cookie="session").header, verifier_of(cookie="session").cookie) == (None, "session")
    assert (verifier_of(cookie="s", header="X-Token").header, verifier_of(cookie="s", header="X-Token").cookie) == (
        "X-Token",
        "s",
    )
    with pytest.raises(ConfigurationError, match="header or a cookie"):
        Verifier(SECRET, ("HS256",), None)
