"""Clients of the shop: users by plan, partners by key, tenants, unidentified ones by address, and exempt ones."""

from __future__ import annotations

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from shop.people import make_keys, plan_of, token_for


@pytest.mark.parametrize(
    ("name", "plan", "burst"), [("ada", "free", 40), ("pro-bob", "pro", 200), ("enterprise-eve", "enterprise", 999)]
)
def test_users_have_what_they_pay_for(street, name, plan, burst):
    """Free users may send 40 at once, those on the pro plan 200, an enterprise any number."""
    assert plan_of(name) == plan
    assert street.customer(name).passes("GET", "/nowhere", 999) == burst


def test_a_token_that_the_shop_did_not_sign_is_ignored(street):
    """A forged enterprise token is counted like no token: by address, on the free plan."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    forged = jwt.encode({"sub": "enterprise-eve", "plan": "enterprise", "iss": "shop"}, key, algorithm="RS256")
    unsigned = jwt.encode({"sub": "enterprise-eve", "plan": "enterprise", "iss": "shop"}, None, algorithm="none")
    assert street.customer(authorization=f"Bearer {forged}").passes("GET", "/nowhere", 50) == 40
    assert street.customer(authorization=f"Bearer {unsigned}").passes("GET", "/nowhere", 50) == 0


def test_the_shop_gives_a_token_for_any_name(street):
    """POST /login answers with a token that the policy accepts."""
    answer = street.customer().post("/login?name=pro-bob")
    assert (answer.status, answer.headers["x-plan"]) == (200, "pro")
    assert street.customer(authorization=f"Bearer {answer.body.decode()}").passes("GET", "/nowhere", 999) == 200


def test_guessable_secrets_are_limited_to_five_a_minute(street, clock):
    """Login, one-time passwords and resets share five a minute per address, until the clock's next minute."""
    guest = street.customer()
    assert guest.passes("POST", "/login?name=x", 3) == 3
    assert guest.passes("POST", "/otp", 1) == 1
    assert guest.passes("POST", "/password-reset", 9) == 1
    refused = guest.post("/otp")
    assert (refused.status, refused.retry_after) == (429, 60)
    assert street.customer(None, "203.0.113.8").passes("POST", "/otp", 9) == 5
    clock.advance(60)
    assert guest.passes("POST", "/otp", 9) == 5


def test_a_partner_has_a_limit_and_acme_a_larger_one(street):
    """A partner's key allows 400 at once, acme-corp's 1000, whichever client uses it."""
    eve, bob = ({"name": name} for name in ("enterprise-eve", "enterprise-bob"))
    assert street.customer(**eve, partner="books").passes("GET", "/nowhere", 300) == 300
    assert street.customer(**bob, partner="books").passes("GET", "/nowhere", 300) == 100
    assert street.customer(**eve, partner="acme-corp").passes("GET", "/nowhere", 2000) == 1000
    assert street.customer(**eve).passes("GET", "/nowhere", 100) == 100


def test_a_tenants_user_has_a_thousand_a_minute(street):
    """A tenant and a user make one key: the same user of another tenant has a state of its own."""
    assert street.customer("enterprise-eve", tenant="red").passes("GET", "/nowhere", 1100) == 1000
    assert street.customer("enterprise-eve", tenant="blue").passes("GET", "/nowhere", 10) == 10
    assert street.customer("enterprise-bob", tenant="red").passes("GET", "/nowhere", 10) == 10


@pytest.mark.parametrize("path", ["/healthz", "/metrics"])
def test_health_checks_and_monitoring_are_never_refused(street, path):
    """An operator of the shop is exempt, and gets no limit fields."""
    guest = street.customer()
    answers = [guest.get(path) for _ in range(100)]
    assert {answer.status for answer in answers} == {200}
    assert not [name for name in answers[-1].headers if "ratelimit" in name]


def test_services_of_the_house_are_never_refused(street):
    """Requests from the internal network are not limited; a client outside can't claim to be inside."""
    assert street.customer(None, "10.1.2.3").passes("POST", "/orders", 99) == 99
    assert street.customer(None, "203.0.113.9", x_forwarded_for="10.1.2.3").passes("POST", "/orders", 99) == 10


def test_behind_a_proxy_clients_are_distinguished(street):
    """A trusted proxy names its clients: each has limits of its own, and rotating through a /64 gives no new ones."""
    for address in ("198.51.100.1", "198.51.100.2", "2001:db8:1:2::1"):
        assert street.customer(None, "10.9.0.1", x_forwarded_for=address).passes("POST", "/orders", 99) == 10
    assert street.customer(None, "10.9.0.1", x_forwarded_for="2001:db8:1:2:ffff::9").passes("POST", "/orders", 99) == 0


def test_a_client_that_does_not_stop_is_put_into_the_penalty_box(street, clock):
    """After a hundred refusals in a minute a user is refused everywhere for a minute; others are not."""
    eve = street.customer("enterprise-eve")
    assert eve.passes("POST", "/payments", 9) == 5
    for _ in range(99):
        assert eve.post("/payments").status == 429
    assert eve.get("/products").status == 200
    eve.post("/payments")
    shut = eve.get("/products")
    assert (shut.status, shut.retry_after) == (429, 60)
    assert street.customer("enterprise-bob").get("/products").status == 200
    clock.advance(60)
    assert eve.get("/products").status == 200


def test_keys_are_made_once_and_whole(tmp_path):
    """Both halves of the pair exist from the first moment, and a second start uses the same."""
    folder = tmp_path / "keys"
    make_keys(folder)
    public = (folder / "jwt.pub").read_bytes()
    make_keys(folder)
    assert (folder / "jwt.pub").read_bytes() == public
    assert jwt.decode(token_for("ada", folder), public, algorithms=["RS256"])["sub"] == "ada"
    assert [path.name for path in tmp_path.iterdir()] == ["keys"]
