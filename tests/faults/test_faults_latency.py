"""A far store: 40 ms each way to the server, called for every decision, and leased from by two regions near their callers."""

from __future__ import annotations

import threading
import time

import pytest

from fault_lab.traffic import most
from limitkeeper import LeasedStore, Limiter, RedisStore, TokenBucket
from servers.proxy import Proxy

AWAY = 0.04
LIMIT = TokenBucket("1000/s burst 500")


@pytest.fixture
def far(valkey):
    with Proxy(valkey.port) as network:
        network.latency = AWAY
        yield network


def test_a_far_store_costs_one_round_trip_a_decision(far):
    """A server 40 ms away that is called for every decision gets one request at a time: connecting and loading the script come
    first.
    """
    with RedisStore(far.url, timeout=60) as store:
        limiter = Limiter(LIMIT, store=store, name=f"far {time.time_ns()}")
        limiter.hit("first")
        before = far.asked
        for trips in (1, 2, 3):
            begun = time.monotonic()
            assert limiter.hit("somebody")
            assert time.monotonic() - begun >= 2 * AWAY
            assert far.asked - before == trips


def test_two_regions_lease_from_a_far_store(far, valkey, eventually):
    """Once demand is known, few callers of two regions wait for the far store, and it is called far less often than they are;
    both together stay within the one limit."""
    name, calls, ended = f"regions {time.time_ns()}", [], threading.Event()
    stores = [LeasedStore(RedisStore(far.url, timeout=60), life="1s") for _ in range(2)]

    def call(store: LeasedStore) -> None:
        limiter = Limiter(LIMIT, store=store, name=name)
        while not ended.is_set():
            begun = time.monotonic()
            admitted = bool(limiter.hit("everybody"))
            calls.append((begun, time.monotonic() - begun, admitted))
            time.sleep(0.02)

    def asked() -> int:
        with valkey.client() as client:
            return sum(stats["calls"] for name, stats in client.info("commandstats").items() if name.startswith("cmdstat_eval"))

    def made(count: int) -> None:
        eventually(lambda: len(calls) >= count)

    callers = [threading.Thread(target=call, args=(store,)) for store in stores for _ in range(4)]
    begun = time.monotonic()
    for caller in callers:
        caller.start()
    time.sleep(1.7)
    made(800)
    steady, before = time.monotonic(), asked()
    made(len(calls) + 300)
    after = asked()
    ended.set()
    for caller in callers:
        caller.join()
    for store in stores:
        store.close()
    late = [took for moment, took, _ in calls if moment >= steady]
    assert sum(admitted for _, _, admitted in calls) <= most(LIMIT, time.monotonic() - begun)
    assert sum(took > AWAY / 2 for took in late) <= len(late) / 5, sorted(late)[-10:]
    assert (after - before) <= len(late) / 5
