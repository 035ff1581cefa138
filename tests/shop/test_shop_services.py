"""The limits of each service of the shop: the table of the e-commerce platform, row by row, at noon of a stopped clock."""

from __future__ import annotations

import pytest

# Each service: the request, and how often one user may send it in a minute.
TABLE = [
    pytest.param("GET", "/products", 1000, id="catalog"),
    pytest.param("GET", "/products/4", 1000, id="one product"),
    pytest.param("POST", "/orders", 10, id="orders"),
    pytest.param("POST", "/payments", 5, id="payment"),
    pytest.param("GET", "/search?q=lamp", 100, id="search"),
]


@pytest.mark.parametrize(("method", "path", "count"), TABLE)
def test_a_service_bears_so_much_and_no_more(street, method, path, count):
    """A user's last request of the minute passes, the next one is refused with a quota in its body."""
    eve = street.customer("enterprise-eve")
    assert eve.passes(method, path, count) == count
    refused = street.ask(method, path, eve.address, eve.headers)
    assert refused.status == 429
    assert refused.headers["x-ratelimit-limit"] == str(count)
    assert refused.headers["x-ratelimit-remaining"] == "0"
    assert b'"code":"RATE_LIMITED"' in refused.body


@pytest.mark.parametrize(("method", "path", "count"), TABLE)
def test_a_services_retry_after_is_true(street, clock, method, path, count):
    """A client that waits for the retry time is served; one a second earlier is not."""
    eve = street.customer("enterprise-eve")
    eve.passes(method, path, count)
    wait = street.ask(method, path, eve.address, eve.headers).retry_after
    clock.advance(wait - 1)
    assert eve.passes(method, path, 1) == 0
    clock.advance(1)
    assert eve.passes(method, path, 1) == 1


@pytest.mark.parametrize(("method", "path", "count"), TABLE)
def test_users_do_not_spend_what_others_have(street, method, path, count):
    """One user's spending takes nothing from another user, not even at the same address."""
    street.customer("enterprise-eve").passes(method, path, count + 1)
    assert street.customer("enterprise-bob").passes(method, path, 1) == 1
    assert street.customer().passes(method, path, 1) == 1


def test_payments_are_held_in_every_minute(street, clock):
    """Five payments in any sixty seconds: the sixth waits for the first to be a minute old, whenever that is."""
    eve = street.customer("enterprise-eve")
    clock.advance(50)
    assert eve.passes("POST", "/payments", 9) == 5
    clock.advance(20)
    refused = eve.post("/payments")
    assert (refused.status, refused.retry_after) == (429, 40)
    clock.advance(40)
    assert eve.passes("POST", "/payments", 9) == 5


def test_a_free_user_reads_the_catalog_at_a_steady_pace(street, clock):
    """Twenty a second are a free user's own limit; the thousandth of the minute passes, the next is refused by the catalog's."""
    ada = street.customer("ada")
    passed = 0
    for _ in range(50):
        passed += ada.passes("GET", "/products", 20)
        clock.advance(1)
    refused = ada.get("/products")
    assert (passed, refused.status, refused.headers["x-ratelimit-limit"]) == (1000, 429, "1000")


def test_a_head_and_a_trailing_slash_are_requests_too(street):
    """Spelling a path in another way, or a HEAD request, evades no limit."""
    eve = street.customer("enterprise-eve")
    assert eve.passes("POST", "/payments", 3) == 3
    assert eve.passes("POST", "//Payments/", 2) == 2
    assert eve.passes("POST", "/payments", 1) == 0
    eve.passes("GET", "/search", 100)
    assert eve.passes("HEAD", "/search", 1) == 0
