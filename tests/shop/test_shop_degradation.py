"""What the shop serves above a limit instead of a refusal: the last response, a response later, or a smaller one."""

from __future__ import annotations

import json


def test_recommendations_above_the_limit_are_the_last_ones(street, clock):
    """The sixth request of a minute gets the fifth response with its age, and nothing is computed; a minute later it is anew."""
    ada = street.customer("ada")
    computed = [json.loads(ada.get("/recommendations").body)["computed"] for _ in range(5)]
    sixth = ada.get("/recommendations")
    assert (sixth.status, json.loads(sixth.body)["computed"]) == (200, computed[-1])
    assert sixth.headers["cache-status"].startswith("limitkeeper; hit; ttl=")
    clock.advance(60)
    assert json.loads(ada.get("/recommendations").body)["computed"] == computed[-1] + 1


def test_no_user_gets_the_recommendations_of_another(street):
    """A user without a response of their own is refused above the limit, though others at the address have one."""
    ada, bob = street.customer("ada"), street.customer("bob")
    ada.passes("GET", "/recommendations", 6)
    bob.passes("GET", "/recommendations?for=bob", 5)
    assert bob.get("/recommendations").status == 429


def test_an_invoice_above_the_limit_is_made_later(street, eventually):
    """The sixth invoice of a minute is accepted with a ticket; at its address is then the response of the view."""
    ada = street.customer("ada")
    assert [ada.post("/invoices").status for _ in range(5)] == [201] * 5
    accepted = ada.post("/invoices")
    assert (accepted.status, json.loads(accepted.body)["status"]) == (202, "queued")
    eve = street.customer("enterprise-eve")  # the holder of the ticket may fetch it, and her plan has no limit on requests
    eventually(lambda: eve.get(accepted.headers["location"]).status == 201)
    assert json.loads(eve.get(accepted.headers["location"]).body) == {"invoice": 6}
    assert eve.get("/deferred/unknown").status == 404


def test_reviews_above_the_limit_are_fewer(street):
    """The sixth response of a minute has the names only."""
    ada = street.customer("ada")
    answers = [ada.get("/reviews") for _ in range(6)]
    assert [answer.status for answer in answers] == [200] * 6
    assert len({answer.body for answer in answers[:5]}) == 1
    assert set(json.loads(answers[5].body).values()) == {"…"}
