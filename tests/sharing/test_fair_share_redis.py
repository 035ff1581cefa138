"""FairShare in Redis: the script answers as the Python source, and all processes share one capacity."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import effort
from limitkeeper.sharing import FairShare
from limitkeeper.stores.redis import RedisStore
from limitkeeper.testing import ManualClock
from servers.valkey import Valkey

TENANTS = ("a", "b", "ü", "d e")
STEP = st.tuples(
    st.sampled_from(TENANTS),
    st.sampled_from([0, 1, 1, 2, 3, 10, 30, 100]),
    st.sampled_from([0, 0, 0, 1, 10_000, 13_337, 100_000, 1_000_000, 5_000_000]),
    st.sampled_from(["hit", "hit", "hit", "peek", "refund"]),
)


@effort(40)
@given(
    steps=st.lists(STEP, min_size=1, max_size=60),
    guarantees=st.dictionaries(st.sampled_from(TENANTS), st.sampled_from(["3/s", "17/s"])),
    weights=st.dictionaries(st.sampled_from(TENANTS), st.integers(1, 5)),
    window=st.sampled_from(["100ms", "1s", "2s"]),
)
def test_the_script_answers_as_the_source(valkey: Valkey, steps, guarantees, weights, window):
    """On the same trace of hits, peeks and refunds both give equal decisions."""
    with valkey.client() as client:
        client.flushall()
    clock = ManualClock(1000.0)
    options = {"guarantees": guarantees, "weights": weights, "window": window}
    here = FairShare("70/s", clock=clock, **options)
    with RedisStore(valkey.url, timeout="60s", clock=clock) as store:
        there = FairShare("70/s", store=store, **options)
        for tenant, cost, pause_us, call in steps:
            clock.advance(pause_us / 1e6)
            assert getattr(here, call)(tenant, cost) == getattr(there, call)(tenant, cost)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_two_clients_share_one_capacity(valkey: Valkey, kind):
    """Two stores on one server admit together what one FairShare admits, on the server's time."""
    with valkey.client() as client:
        client.flushall()
    shares = [FairShare("10/h", store=RedisStore(valkey.url, timeout="60s"), name="one", window="1h") for _ in range(2)]

    async def hits() -> int:
        return sum([(await share.ahit("a")).allowed for _ in range(10) for share in shares])

    found = asyncio.run(hits()) if kind == "async" else sum(share.hit("a").allowed for _ in range(10) for share in shares)
    assert found == 5
    for share in shares:
        share._backend.close()


def test_a_lost_script_is_loaded_again(valkey: Valkey):
    """After SCRIPT FLUSH the next decision loads the script; the state stays."""
    share = FairShare("10/h", store=f"{valkey.url}?prefix=flushed", window="1h")
    assert share.hit("a", 5).allowed
    with valkey.client() as client:
        client.script_flush()
    assert not share.hit("a").allowed
    share.close()


def test_a_server_that_lost_a_part_of_the_state_goes_on(valkey: Valkey):
    """When the server has evicted the finish times, backlogs count as drained; nothing hangs."""
    with RedisStore(valkey.url, prefix="evicted", timeout="60s") as store, valkey.client() as client:
        share = FairShare("1000/s", store=store, window="1s")
        assert share.hit("a", 300).allowed
        assert share.hit("b", 100).allowed
        client.delete(share._backend._keys[1])
        assert share.hit("a", 300).allowed
        assert share.hit("c", 1).allowed
        assert share.hit("b", 5000).retry_after == float("inf")


def test_an_idle_capacity_expires(valkey: Valkey):
    """Both keys have a time to live after every hit, also when the sorted set was empty and is created again."""
    clock = ManualClock(1000.0)
    with RedisStore(valkey.url, prefix="idle", clock=clock) as store, valkey.client() as client:
        share = FairShare("1000/s", store=store)
        for _ in range(3):
            assert share.hit("a", 100).allowed
            assert all(client.pttl(key) > 0 for key in share._backend._keys)
            clock.advance(1)


def test_a_clock_that_goes_back_blocks_no_tenant(valkey: Valkey):
    """After a step of an hour back (another primary, NTP) a refused tenant is admitted at `retry_after`, as before."""
    with valkey.client() as client:
        client.flushall()
    clocks = ManualClock(10_000.0), ManualClock(6_400.0)
    before, after = [FairShare("10/s", store=RedisStore(valkey.url, timeout="60s", clock=clock), name="one") for clock in clocks]
    assert sum(before.hit("a").allowed for _ in range(20)) == 5
    refused = after.hit("a")
    assert not refused
    clocks[1].advance(refused.retry_after)
    assert after.hit("a").allowed
    for share in (before, after):
        share._backend.close()


def test_a_share_may_have_any_name(valkey: Valkey):
    """A name that no UTF-8 encodes is a name, as for limiters."""
    with RedisStore(valkey.url, timeout="60s") as store:
        assert FairShare("10/s", store=store, name="\ud800").hit("a").allowed


def test_a_cost_of_nothing_is_never_refused(valkey: Valkey):
    """As in memory: a tenant that holds more than its share is refused one unit, and a cost of 0 is allowed."""
    with RedisStore(valkey.url, timeout="60s", clock=ManualClock(1000.0)) as store:
        share = FairShare("100/s", store=store, name="nothing")
        for tenant in TENANTS:
            while share.hit(tenant):
                pass
        assert not share.hit(TENANTS[0])
        assert share.hit(TENANTS[0], 0).allowed
