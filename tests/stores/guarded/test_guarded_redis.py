"""A guard around a real server: killed, frozen and back again, sync and async."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest

from limitkeeper import AsyncLimiter, FixedWindow, GuardedStore, Limiter, TokenBucket, store_from_url
from limitkeeper.testing import ManualClock, StoreContract
from servers.valkey import Valkey

RedisStore = pytest.importorskip("limitkeeper.stores.redis", reason="RedisStore is not there").RedisStore

#: What scheduling of threads and loops may take on top of a budget; how late the machine is comes on top of that.
NOISE = 0.5
#: A budget that no busy machine uses up, where it is not the point: a server that was killed refuses connections at once.
AMPLE = "60s"


_prefixes = itertools.count()


@pytest.fixture
def server():
    with Valkey() as one:
        yield one


def guarded(server: Valkey, on_failure: str = "local", **more) -> GuardedStore:
    options = {"budget": "50ms", "failures": 2, "backoff": "10ms", "max_backoff": "50ms", "ramp": "20ms", **more}
    return GuardedStore(
        RedisStore(server.url, timeout=AMPLE), on_failure=on_failure, share=4 if on_failure == "local" else None, **options
    )


class TestGuardedRedis(StoreContract):
    """The contract with a guard around a real server."""

    examples = 3
    threads = 20

    @pytest.fixture(autouse=True)
    def _server(self, valkey):
        self.url = valkey.url

    def make_store(self, clock: ManualClock) -> GuardedStore:
        behind = RedisStore(self.url, prefix=f"guarded{next(_prefixes)}:", clock=clock, timeout=AMPLE)
        return GuardedStore(behind, budget=AMPLE, on_failure="local", share=4, clock=clock, background=False)


def test_a_killed_server_is_survived(server, eventually):
    """The server is killed: the share decides; it is started again: the server decides, without intervention."""
    with guarded(server, budget=AMPLE) as guard:
        heard = []
        guard.events.on("*", lambda event: heard.append(event.kind))
        limiter = Limiter(TokenBucket("4/h burst 40"), store=guard)
        assert limiter.hit("a").remaining == 39
        server.kill()
        decisions = [limiter.hit("a") for _ in range(20)]
        assert guard.state == "open"
        assert sum(map(bool, decisions)) == 10
        assert all(guard.answered_here(one) for one in decisions)
        server.start()
        eventually(lambda: guard.state == "closed")
        assert limiter.hit("a").limit == 40
        assert heard[0] == "opened"
        eventually(lambda: heard[-2:] == ["half open", "closed"])  # published just after the transition


def test_a_frozen_server_costs_the_budget_and_then_nothing(server, eventually, watch):
    """The server hangs with its connections open: no decision takes longer than the budget, and soon none takes any time."""
    with guarded(server) as guard:
        limiter = Limiter(FixedWindow("1000/400d"), store=guard)
        limiter.hit("a")
        server.freeze()
        try:
            while guard.state != "open":
                begun = time.perf_counter()
                limiter.hit("a")
                assert time.perf_counter() - begun < watch.allows(0.05 + NOISE)
            begun = time.perf_counter()
            for _ in range(100):
                limiter.hit("a")
            assert time.perf_counter() - begun < watch.allows(1)  # a budget each would be five seconds
        finally:
            server.thaw()
        eventually(lambda: guard.state == "closed" and not guard.answered_here(limiter.hit("a")))


def test_a_frozen_server_costs_a_task_no_more(server, watch):
    """The same in asyncio, where the prober is a task; many tasks at once are all answered within the budget."""

    async def main():
        async with guarded(server) as guard:
            limiter = AsyncLimiter(FixedWindow("1000/400d"), store=guard)
            await limiter.hit("a")
            server.freeze()
            try:
                begun = time.perf_counter()
                decisions = await asyncio.gather(*(limiter.hit(f"user {n}") for n in range(50)))
                assert time.perf_counter() - begun < watch.allows(0.05 + NOISE)
                assert all(guard.answered_here(one) for one in decisions)
                assert guard.stats().opened >= 1
            finally:
                server.thaw()
            async with asyncio.timeout(30):
                while guard.state != "closed" or guard.answered_here(await limiter.hit("a")):
                    await asyncio.sleep(0.005)

    asyncio.run(main())


@pytest.mark.parametrize("on_failure", ["open", "closed"])
def test_a_server_that_was_never_there(on_failure):
    """A service starts and answers while its server is still away."""
    with Valkey(start=False) as server, guarded(server, on_failure, budget=AMPLE) as guard:
        limiter = Limiter("5/s", store=guard)
        assert [bool(limiter.hit("a")) for _ in range(10)] == [on_failure == "open"] * 10


def test_an_outage_admits_at_most_the_share_of_every_node(server, eventually):
    """Four nodes on one server that is killed and comes back empty: beside what it admits, a quarter of the limit each."""
    guards = [guarded(server, budget=AMPLE) for _ in range(4)]
    limiters = [Limiter(FixedWindow("40/400d"), store=guard) for guard in guards]
    admitted = {True: 0, False: 0}
    for _ in range(30):
        for limiter, guard in zip(limiters, guards, strict=True):
            decision = limiter.hit("a")
            admitted[guard.answered_here(decision)] += bool(decision)
    assert admitted == {True: 0, False: 40}
    server.kill()
    for _ in range(30):
        for limiter, guard in zip(limiters, guards, strict=True):
            decision = limiter.hit("a")
            admitted[guard.answered_here(decision)] += bool(decision)
    assert admitted == {True: 40, False: 40}
    server.start()
    for guard in guards:
        eventually(lambda guard=guard: guard.state == "closed")
        guard.close()


def test_configuration_alone_is_enough(server):
    """A URL makes a guarded store on a real server; its prefix and budget are passed on."""
    url = f"{server.url}/0?prefix=fromurl&guard=local&share=1/4&budget=20s&timeout=60s"
    with store_from_url(url) as guard:
        limiter = Limiter(TokenBucket("4/h burst 40"), store=guard)
        assert limiter.hit("a").remaining == 39
        assert guard.inner.timeout_us == 20_000_000
        assert any(b"fromurl" in key for key in server.client().scan_iter())


def test_leaving_the_queue_of_a_dead_server_raises_nothing(server):
    """Tasks behind a cancelled reservation keep their starts when the server that should move them up is gone."""

    async def main():
        async with guarded(server, budget=AMPLE) as guard:
            published = []
            guard.events.on("give back dropped", published.append)
            limiter = AsyncLimiter("1/min burst 1", store=guard)
            begun = time.monotonic()
            await limiter.hit("a")
            first, second = await limiter.reserve("a"), await limiter.reserve("a")
            server.kill()
            assert await first.cancel() is True
            assert 59 - (time.monotonic() - begun) <= second.wait <= 60  # it moved up in this process
            assert [event.key for event in published] == ["a"]

    asyncio.run(main())
