"""Real servers as shards: each with its own clock, spanned by one decision, handed over, leased from, and killed."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from shards import key_on

from limitkeeper import AsyncLimiter, FixedWindow, LeakyBucketQueue, Limiter, SlidingWindowLog, StoreUnavailable, TokenBucket
from limitkeeper.stores import RedisStore, ShardedStore
from servers.faketime import FaketimeValkey
from servers.valkey import Valkey, free_port
from stand_ins import HeldClock

KEYS = [f"user:{i}" for i in range(200)]
RULES = {"bucket": TokenBucket("5/h"), "window": FixedWindow("5/400d"), "log": SlidingWindowLog("5/h")}


@pytest.fixture(scope="module")
def servers():
    running = [Valkey() for _ in range(3)]
    yield running
    for server in running:
        server.close()


@pytest.fixture
def sharded(servers):
    """Three servers, emptied."""
    for server in servers:
        with server.client() as client:
            client.flushall()
    with ShardedStore(
        {name: RedisStore(server.url, timeout="60s") for name, server in zip("abc", servers, strict=True)}, hot=False
    ) as store:
        yield store


def remaining(limiter, key):
    return [part.remaining for part in limiter.peek(key).decisions]


def test_threads_on_several_servers_are_admitted_exactly(sharded):
    """Eight threads on twenty keys over three servers: every key is admitted its limit, to the unit."""
    limiter = Limiter("fixed window 20/400d", store=sharded)
    admitted = []

    def work():
        admitted.append([sum(bool(limiter.hit(key)) for _ in range(5)) for key in KEYS[:20]])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [sum(each) for each in zip(*admitted, strict=True)] == [20] * 20


def test_a_decision_on_two_servers_is_all_or_nothing(sharded):
    """A user on the one server and a tenant on the other are charged together, or neither is."""
    limiter = Limiter({"user": "5/h", "tenant": "2/h"}, store=sharded)
    keys = {"user": key_on(sharded, "a"), "tenant": key_on(sharded, "b")}
    assert [bool(limiter.hit(keys)) for _ in range(4)] == [True, True, False, False]
    assert remaining(limiter, keys) == [3, 0]
    reservation = limiter.reserve({**keys, "tenant": key_on(sharded, "b", 1)}, cost=2)
    reservation.cancel()
    assert remaining(limiter, keys) == [3, 0]


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_starts_on_two_servers_are_common(sharded, colour):
    """With a timeout both servers charge at the later start: the bucket pays then, and not when it could have started."""
    limits = {"user": TokenBucket("2/s", burst=2), "tenant": LeakyBucketQueue("2 per 3s")}
    keys = {"user": key_on(sharded, "a"), "tenant": key_on(sharded, "b")}
    if colour == "sync":
        limiter = Limiter(limits, store=sharded)
        limiter.hit(keys)
        waits = [limiter.reserve(keys).wait for _ in range(2)]
        peeked = limiter.peek(keys)
    else:

        async def main():
            limiter = AsyncLimiter(limits, store=sharded)
            await limiter.hit(keys)
            waits = [(await limiter.reserve(keys)).wait for _ in range(2)]
            return waits, await limiter.peek(keys)

        waits, peeked = asyncio.run(main())
    assert [wait == pytest.approx(start, abs=0.5) for wait, start in zip(waits, (1.5, 3.0), strict=True)] == [True, True]
    user = peeked.decisions[0]
    assert user.reset_after == pytest.approx(3.5, abs=0.6)  # full again half a second after the later start


def test_state_moves_from_server_to_server(sharded, servers):
    """A server joins and another leaves: every key of every rule answers as before, and nothing is left behind."""
    limiter = Limiter(RULES, store=sharded)
    for i, key in enumerate(KEYS):
        for _ in range(i % 6):
            limiter.hit(key)
    before = {key: remaining(limiter, key) for key in KEYS}
    with Valkey() as joining:
        sharded.add("d", RedisStore(joining.url, timeout="60s"))
        assert {key: remaining(limiter, key) for key in KEYS} == before
        assert 20 < sum(sharded.home_of(key) == "d" for key in KEYS) < 80
        gone = sharded.remove("b")
        assert {key: remaining(limiter, key) for key in KEYS} == before
        assert [key for named in limiter.named for key, _ in gone.items(named)] == []
        gone.close()
        sharded.remove("d").close()
    assert {key: remaining(limiter, key) for key in KEYS} == before


def test_callers_go_on_while_a_server_joins(sharded):
    """Tasks that never stop are admitted exactly the limit of each key, while a quarter of the keys moves."""

    async def main(joining):
        limiter = AsyncLimiter("fixed window 1000/400d", store=sharded)
        keys, done = KEYS[:30], asyncio.Event()
        admitted = dict.fromkeys(keys, 0)

        async def ask():
            while not done.is_set():
                for key in keys:
                    decision = await limiter.hit(key)
                    admitted[key] += bool(decision)

        asking = [asyncio.create_task(ask()) for _ in range(4)]
        await sharded.aadd("d", RedisStore(joining.url, timeout="60s"))
        await asyncio.sleep(0.05)
        gone = await sharded.aremove("d")
        done.set()
        await asyncio.gather(*asking)
        await gone.aclose()
        left = {key: (await limiter.peek(key)).remaining for key in keys}
        await sharded.aclose()
        return {admitted[key] + left[key] for key in keys}

    with Valkey() as joining:
        assert asyncio.run(main(joining)) == {1000}


@pytest.mark.parametrize("on_loss", ["fail", "rehash"])
def test_a_killed_server_is_lost(on_loss):
    """A killed server's keys fail, or start anew on another; all other keys continue."""
    with Valkey() as first, Valkey() as second:
        stores = {"first": RedisStore(first.url, timeout="60s"), "second": RedisStore(second.url, timeout="60s")}
        with ShardedStore(stores, on_loss=on_loss, hot=False) as sharded:
            limiter = Limiter("fixed window 5/400d", store=sharded)
            lost, kept = key_on(sharded, "first"), key_on(sharded, "second")
            limiter.hit_many([lost, kept], cost=4)
            first.kill()
            assert limiter.hit(kept).remaining == 0
            if on_loss == "fail":
                with pytest.raises(StoreUnavailable, match="shard 'first'"):
                    limiter.hit(lost)
            else:
                assert limiter.hit(lost).remaining == 4
                assert (sharded.lost, sharded.home_of(lost)) == (["first"], "second")


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_a_viral_key_costs_its_server_little(servers, colour):
    """One key with all the traffic calls its server less than once in ten decisions, and is admitted no more than its limit."""
    for server in servers:
        with server.client() as client:
            client.flushall()
            client.config_resetstat()
    hits = 20_000
    store = ShardedStore(
        {name: RedisStore(server.url, timeout="60s") for name, server in zip("abc", servers, strict=True)}, hot=200
    )

    async def storm():
        async with store:
            limiter = AsyncLimiter("fixed window 3000/400d", store=store)
            return sum([bool(await limiter.hit("viral")) for _ in range(hits)])

    if colour == "async":
        admitted = asyncio.run(storm())
    else:
        with store:
            limiter = Limiter("fixed window 3000/400d", store=store)
            admitted = sum(bool(limiter.hit("viral")) for _ in range(hits))
    asked = sum(scripts(server) for server in servers)
    assert 0.9 * 3000 <= admitted <= 3000
    assert asked <= 0.1 * hits


def scripts(server):
    """How many scripts a server has run."""
    with server.client() as client:
        stats = client.info("commandstats")
        return sum(stats.get(f"cmdstat_{verb}", {}).get("calls", 0) for verb in ("evalsha", "eval", "fcall"))


class SleepsAtOnce(HeldClock):
    """A clock whose sleeps are recorded and end at once."""

    def sleep(self, seconds: float, wake: Any = None) -> None:
        self.sleeps.append(seconds)
        self.advance(seconds)


@pytest.mark.usefixtures("needs_faketime")
@pytest.mark.parametrize("ahead", [60.0, -60.0])
def test_a_wait_is_as_long_as_its_shard_has_said_whatever_the_clock_of_another_shows(ahead):
    """Law 3: a call on the second shard waits its half second, though the clock of the first is a minute ahead or behind."""
    clock = SleepsAtOnce()
    with FaketimeValkey() as first, Valkey() as second:
        first.set_clock(ahead)
        shards = {
            name: RedisStore(server.url, timeout="60s", budget_clock=clock) for name, server in (("a", first), ("b", second))
        }
        with ShardedStore(shards, hot=False) as store:
            limiter = Limiter("2/s burst 1", store=store)
            limiter.hit(key_on(store, "a"))
            limiter.hit(key_on(store, "b"))
            waited = limiter.acquire(key_on(store, "b"), timeout=30).wait
    assert waited == pytest.approx(0.5, abs=0.4)
    assert sum(clock.sleeps) == pytest.approx(waited, abs=1e-5)


def test_waits_on_a_shard_need_no_other_one():
    """The first shard has never answered: on the second, calls wait, and what leaves the queue is given back."""
    with Valkey() as server:
        shards = {"a": RedisStore(f"redis://127.0.0.1:{free_port()}"), "b": RedisStore(server.url, timeout="60s")}
        with ShardedStore(shards, hot=False) as store:
            limiter = Limiter("20/s burst 1", store=store)
            key = key_on(store, "b")
            limiter.hit(key)
            assert limiter.acquire(key, timeout=30)
            hour = Limiter("1/h burst 1", store=store)
            hour.hit(key)
            first, second = hour.reserve(key), hour.reserve(key)
            assert first.cancel()
            assert second.wait == pytest.approx(3600, abs=60)
            assert second.settle(0)
            hour.refund(key)
            assert hour.peek(key).allowed
            assert store.now_us()
