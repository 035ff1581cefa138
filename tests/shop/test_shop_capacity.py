"""The capacity of the shop's checkout, by its own policy file on a virtual clock: a partner gets its guarantee."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest
from shop.app import POLICY
from shop.degrade import Degradation
from shop.people import make_keys

from limitkeeper import MemoryStore
from limitkeeper.policy import Gate, Policy, WrittenRequest
from limitkeeper.testing import ManualClock

SECONDS, ASKED = 8.0, 150.0
#: The floods: requests per second of other partners, and of the public, from how many addresses each.
FLOODS = {
    "another partner and the public": {"initech": (600.0, 400), "": (800.0, 600)},
    "one partner with an override": {"acme-corp": (1500.0, 800)},
    "all of them": {"acme-corp": (700.0, 400), "initech": (300.0, 400), "": (500.0, 600)},
}


def arrivals(name: str, per_second: float, addresses: int, rng: random.Random) -> Iterator[tuple[float, str, str]]:
    """Poisson arrivals of a client (""; the public) from many addresses: (time, name, address)."""
    at = rng.expovariate(per_second)
    network = 1 + sum(name.encode()) % 200
    while at < SECONDS:
        number = rng.randrange(addresses)
        yield at, name, f"198.{network}.{number // 250}.{number % 250}"
        at += rng.expovariate(per_second)


def served(flood: dict[str, tuple[float, int]]) -> tuple[Counter[str], Counter[str], Gate]:
    """Requested and admitted checkouts, by client."""
    make_keys()
    clock, rng = ManualClock(1000.0), random.Random(7)
    gate = Gate(Policy.load(POLICY), store=MemoryStore(clock=clock), handlers=Degradation().handlers)
    clients = {"globex": (ASKED, 400), **flood}
    asked, passed = Counter[str](), Counter[str]()
    for at, name, address in sorted(one for key, (rate, n) in clients.items() for one in arrivals(key, rate, n, rng)):
        clock.advance(max(0.0, 1000.0 + at - clock.now_us() / 1e6))
        headers = {"x-api-key": name} if name else {}
        asked[name] += 1
        passed[name] += gate.ask(WrittenRequest("POST", "/checkout", headers=headers, peer=address)).allowed
    return asked, passed, gate


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_the_partner_gets_what_it_was_promised(flood):
    """A partner that requests 150/s of its guaranteed 200/s gets at least 0.95 of it under each flood; the rest is served too."""
    asked, passed, gate = served(flood)
    assert passed["globex"] >= 0.95 * asked["globex"]
    assert sum(passed.values()) <= 350 * SECONDS + 40
    assert sum(passed.values()) >= 0.9 * 350 * SECONDS
    assert all(passed[name] > 0 for name in flood)
    refusing = {rule.name: rule.refused for rule in gate.snapshot().rules if rule.refused}
    assert refusing["checkout-capacity"] > 100


def test_the_guarantee_is_lent_while_it_is_not_used():
    """Without the partner, another one with an override is served at nearly the whole capacity."""
    clock = ManualClock(1000.0)
    gate = Gate(Policy.load(POLICY), store=MemoryStore(clock=clock), handlers=Degradation().handlers)
    passed, rng = 0, random.Random(3)
    for at, name, address in arrivals("acme-corp", 1000.0, 800, rng):
        clock.advance(max(0.0, 1000.0 + at - clock.now_us() / 1e6))
        passed += gate.ask(WrittenRequest("POST", "/checkout", headers={"x-api-key": name}, peer=address)).allowed
    assert passed >= 0.95 * 350 * SECONDS
