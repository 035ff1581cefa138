"""The checkout of the shop: the content of a refusal, its scope, and that other limits stay unchanged."""

from __future__ import annotations

import pytest


def test_the_eleventh_checkout_gets_a_retry_time(street):
    """Ten at once pass; the eleventh gets the message word for word and a second to wait."""
    ada = street.customer("ada")
    assert [ada.post("/checkout").status for _ in range(10)] == [200] * 10
    refused = ada.post("/checkout")
    assert refused.status == 429
    assert refused.body == b'{"code":"RATE_LIMITED","message":"Too many checkout attempts. Retry after 1s."}'
    assert refused.headers["content-type"] == "application/json"
    assert refused.headers["retry-after"] == "1"
    assert refused.headers["x-ratelimit-limit"] == "10"
    assert refused.headers["x-ratelimit-remaining"] == "0"
    assert refused.headers["cache-control"] == "no-store"


def test_a_checkout_that_passes_shows_what_is_left(street):
    """An answer names every checked limit, and no time to wait; the handler sees the decision too."""
    passed = street.customer("ada").post("/checkout")
    assert (passed.status, passed.body) == (200, b'{"checkout":"done","cents":4900,"more_at_once":9}')
    assert passed.headers["ratelimit-policy"] == '"user";q=40;w=2, "checkout";q=10;w=2'
    assert '"checkout";r=9;t=2' in passed.headers["ratelimit"]
    assert "retry-after" not in passed.headers


def test_the_checkout_never_spends_what_the_catalog_has(street):
    """A user with no checkout left, refused fifty times, has the whole catalog."""
    eve = street.customer("enterprise-eve")
    assert eve.passes("POST", "/checkout", 11) == 10
    eve_was_refused = [eve.post("/checkout").status for _ in range(50)]
    assert eve_was_refused == [429] * 50
    assert eve.passes("GET", "/products", 1001) == 1000


def test_the_catalog_never_spends_what_the_checkout_has(street):
    """A user with nothing left of the catalog has the whole checkout."""
    eve = street.customer("enterprise-eve")
    assert eve.passes("GET", "/products", 1001) == 1000
    assert eve.passes("POST", "/checkout", 11) == 10


def test_a_refused_checkout_spends_nothing_of_any_limit(street):
    """All or nothing: a loop of refused checkouts takes nothing of the user's own bucket, nor of the common capacity."""
    ada = street.customer("ada")
    ada.passes("POST", "/checkout", 10)
    before = ada.post("/checkout").headers["ratelimit"]
    assert [ada.post("/checkout").headers["ratelimit"] for _ in range(20)] == [before] * 20
    assert '"user";r=30' in before


def test_guests_are_counted_by_address(street, clock):
    """Without a token ten at once pass from one address; another address has ten of its own."""
    assert street.customer(None, "203.0.113.7").passes("POST", "/checkout", 12) == 10
    clock.advance(0.1)
    assert street.customer(None, "203.0.113.8").passes("POST", "/checkout", 12) == 10


def test_the_checkout_bears_so_many_at_once_for_all_together(street):
    """At one instant at most 24 of the capacity and 14 of the guarantee pass, whichever the clients; the others get a 503."""
    clients = [street.customer(f"user-{n}", f"203.0.113.{n}", partner=f"partner-{n}") for n in range(8)]
    clients += [street.customer(f"third-{n}", partner="globex") for n in range(3)]
    assert 30 <= sum(one.passes("POST", "/checkout", 10) for one in clients) <= 38
    refused = clients[7].post("/checkout")
    assert refused.status == 503
    assert refused.retry_after == 1
    assert b"The service is at its capacity." in refused.body


def test_a_flood_leaves_the_guarantee_untouched(street):
    """After a flood of the public at one instant, the guaranteed partner has its 14 at once."""
    public = [street.customer(f"user-{n}") for n in range(8)]
    assert sum(one.passes("POST", "/checkout", 10) for one in public) <= 24
    partners = [street.customer(f"third-{n}", partner="globex") for n in range(3)]
    assert sum(one.passes("POST", "/checkout", 10) for one in partners) >= 14


@pytest.mark.parametrize("waits", [1, 2, 7])
def test_a_customer_that_waits_is_served(street, clock, waits):
    """After the retry time of the answer, the checkout is open again: five more for each."""
    ada = street.customer("ada")
    ada.passes("POST", "/checkout", 11)
    clock.advance(waits)
    assert ada.passes("POST", "/checkout", 20) == min(10, 5 * waits)
