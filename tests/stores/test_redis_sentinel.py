"""A primary behind sentinels: found, checked, and followed through failovers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest
import redis

from headgate import AsyncLimiter, Limiter, StoreError, StoreUnavailable, TokenBucket
from headgate.stores.redis import RedisStore
from servers.sentinel import Watched
from servers.valkey import free_port
from stand_ins import driven

PASSWORD = "open sesame"
MANY = TokenBucket("1/h", burst=1_000_000)


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    with Watched(password=PASSWORD) as started:
        yield started


def test_the_primary_is_found_in_both_colours(watched: Watched) -> None:
    """The sentinels say who it is, and ROLE confirms it; one that is gone is passed over."""
    with RedisStore(watched.url.replace("@", f"@127.0.0.1:{free_port()},"), prefix="found", timeout="3s") as store:
        assert Limiter(MANY, store=store).hit("k").remaining == 999_999
        assert driven(AsyncLimiter(MANY, store=store).hit("k")).remaining == 999_998
        assert store.route.direct is not None
        assert store.route.direct.port == watched.primary().port


def test_an_unknown_service_is_told_by_name(watched: Watched) -> None:
    """What each sentinel said stands in the error."""
    with (
        RedisStore(watched.url.replace("mymaster", "other")) as store,
        pytest.raises(StoreUnavailable, match="knows no service 'other'"),
    ):
        Limiter(MANY, store=store).hit("k")


def test_a_ready_sentinel_client(watched: Watched) -> None:
    """`Sentinel.master_for` leads to the same primary, now and after a failover."""
    sentinels = redis.Sentinel([("127.0.0.1", sentinel.port) for sentinel in watched.sentinels], password=PASSWORD)
    with sentinels.master_for(watched.service) as client, RedisStore(client, prefix="ready", timeout="3s") as store:
        assert store.address.kind == "sentinel"
        assert Limiter(MANY, store=store).hit("k")
    for sentinel in sentinels.sentinels:
        sentinel.close()


def test_a_primary_that_became_a_replica_is_left(watched: Watched) -> None:
    """A planned failover: the old primary stays up and says READONLY; that very call is brought to the new one."""
    end = time.monotonic() + 15
    with RedisStore(watched.url, prefix="planned", timeout="3s") as store:
        limiter, old = Limiter(MANY, store=store), watched.primary()
        assert limiter.hit("k")
        watched.failover()
        while watched.primary() is old and time.monotonic() < end:
            time.sleep(0.02)
        with old.client(password=PASSWORD) as client:  # the sentinels would do this too, ten seconds later
            client.replicaof("127.0.0.1", watched.primary().port)
        assert limiter.hit("k")
        assert driven(AsyncLimiter(MANY, store=store).hit("k"))
        assert store.route.direct is not None
        assert store.route.direct.port != old.port
    while not watched.in_step() and time.monotonic() < end:
        time.sleep(0.02)


def test_a_failover_during_traffic(watched: Watched) -> None:
    """The primary is killed under four threads and a loop: every call answers or fails within its budget, and then all go on.

    A failover may forget what had not been replicated, so the bound is stated and held: what was admitted is at most the limit
    once more for each failover; here the limit is far away, and what is counted is that the new primary lost at most the last
    moments.
    """
    budget = 0.4
    with RedisStore(watched.url, prefix="failover", timeout=budget) as store:
        limiter, tasks = Limiter(MANY, store=store), AsyncLimiter(MANY, store=store)
        limiter.hit("k")
        over = threading.Event()
        answers: list[tuple[float, float, object]] = []

        def note(begun: float, told: object) -> None:
            answers.append((begun, time.monotonic() - begun, told))

        def work() -> None:
            while not over.is_set():
                begun = time.monotonic()
                try:
                    note(begun, limiter.hit("k").remaining)
                except StoreError as error:
                    note(begun, error)
                time.sleep(0.01)

        async def loop_work() -> None:
            while not over.is_set():
                begun = time.monotonic()
                try:
                    note(begun, (await tasks.hit("k")).remaining)
                except StoreError as error:
                    note(begun, error)
                await asyncio.sleep(0.01)

        threads = [threading.Thread(target=work) for _ in range(4)]
        threads.append(threading.Thread(target=lambda: asyncio.run(loop_work())))
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        old = watched.primary()
        died = time.monotonic()
        old.kill()
        end = died + 15
        while time.monotonic() < end and not any(begun > died and isinstance(told, int) for begun, _, told in answers):
            time.sleep(0.02)
        time.sleep(0.3)
        over.set()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
        assert watched.primary() is not old
        assert max(took for _, took, _ in answers) < budget + 2
        before = [told for begun, _, told in answers if isinstance(told, int) and begun < died]
        after = [told for begun, _, told in answers if isinstance(told, int) and begun > died + 0.1]
        assert before
        assert after
        assert max(after) < max(before) - 20  # the new primary knows what the old one decided
        assert max(after) - min(before) < 50  # but for the last moments, which it may not have heard of
