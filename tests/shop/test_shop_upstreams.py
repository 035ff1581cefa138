"""Behind the shop: capped calls to inventory and pricing, and a bulkhead before the database."""

from __future__ import annotations

import asyncio

import pytest
from shop.app import POLICY
from shop.people import make_keys
from shop.upstreams import WRITES, Upstreams

from limitkeeper import MemoryStore
from limitkeeper.policy import Policy
from limitkeeper.testing import ManualClock


@pytest.fixture
def upstreams() -> Upstreams:
    make_keys()
    return Upstreams(Policy.load(POLICY), MemoryStore(clock=ManualClock(1000.0)))


def test_an_order_reserves_stock_and_is_written(street):
    """An order reserves at the inventory, requests the price and is written to the database."""
    eve = street.customer("enterprise-eve")
    assert eve.post("/orders?product=2").body == b'{"order":1}'
    assert street.app.state.upstreams.saved() == 1


@pytest.mark.parametrize(("service", "most"), [("inventory", 300), ("pricing", 500)])
def test_calls_to_a_service_are_capped_in_every_second(upstreams, service, most):
    """So many calls start at one instant; the next one starts a second later."""
    dependency = upstreams.dependencies[service]
    for _ in range(most):
        with dependency:
            pass
    store = upstreams.dependencies.store
    before = store.now_us()
    with dependency:
        assert store.now_us() - before == 1_000_000


def test_a_full_service_is_a_503(street):
    """When the cap of a dependency is reached, the shop answers 503 and writes nothing."""
    upstreams = street.app.state.upstreams
    limiter = upstreams.dependencies["inventory"]._limiter
    limiter.reserve("inventory", 300)
    limiter.reserve("inventory", 300)
    answer = street.customer("enterprise-eve").post("/orders")
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert upstreams.saved() == 0


def test_at_most_so_many_writes_at_a_time(upstreams):
    """Of 40 orders at once, at most WRITES are in the database at a time, and all are written."""
    running, most = 0, 0
    insert = upstreams._insert

    def counted(product: int, cents: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            return insert(product, cents)
        finally:
            running -= 1

    upstreams._insert = counted

    async def main() -> list[int]:
        return await asyncio.gather(*(upstreams.save(1, 4900) for _ in range(40)))

    assert sorted(asyncio.run(main())) == list(range(1, 41))
    assert 1 <= most <= WRITES
    assert upstreams.saved() == 40
