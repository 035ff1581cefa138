"""First come, first served through a RedisStore in asyncio, also when the server has lost its scripts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from limitkeeper import AsyncLimiter, Decision, StoreUnavailable, TokenBucket
from limitkeeper.algorithms.claim import Claim
from limitkeeper.stores.redis import RedisStore
from limitkeeper.stores.redis.script_request import DecideOptions, encode_decide
from servers.proxy import Proxy
from servers.valkey import Valkey


@pytest.mark.parametrize("flushes", [1, 5])
def test_after_a_script_flush_no_caller_is_overtaken(valkey: Valkey, flushes: int) -> None:
    """400 tasks call one after the other while scripts are flushed: their starts are in the order of their calls."""

    async def main() -> list[int]:
        async with RedisStore(valkey.url, prefix=f"flush {flushes}", timeout="60s") as store:
            limiter = AsyncLimiter(TokenBucket("1/min burst 1"), store=store)
            await limiter.hit("k")
            tasks: list[asyncio.Task[int]] = []

            async def start() -> int:
                return (await limiter.reserve("k")).decision.start_us

            with valkey.client() as client:
                for number in range(400):
                    tasks.append(asyncio.create_task(start()))
                    if number % 9 == 0:
                        await asyncio.sleep(0.0005 * (number % 4))
                    if number % (400 // flushes) == 50:
                        client.script_flush()
            return list(await asyncio.gather(*tasks))

    starts = asyncio.run(main())
    assert starts == sorted(starts)
    assert len(set(starts)) == 400


def test_after_a_script_flush_no_batch_waits_for_the_round_trips_of_others(valkey: Valkey) -> None:
    """Hundreds of batches, in flight and made meanwhile, are repeated in a few round trips: none exceeds its budget."""

    async def main() -> None:
        with Proxy(valkey.port) as network:
            async with RedisStore(network.url, prefix="round trips", timeout="10s") as store:
                limiter = AsyncLimiter(TokenBucket("1/min burst 1000"), store=store)
                await limiter.hit("k")
                network.latency, tasks = 0.05, list[asyncio.Task[Decision]]()
                for number in range(400):
                    tasks.append(asyncio.create_task(limiter.hit("k")))
                    await asyncio.sleep(0.001)
                    if number == 50:
                        with valkey.client() as client:
                            client.script_flush()
                assert [decision.remaining for decision in await asyncio.gather(*tasks)] == list(range(998, 598, -1))

    asyncio.run(main())


def test_who_waited_for_a_registration_goes_before_those_that_came_meanwhile(valkey: Valkey) -> None:
    """However short it was: the clock of uvloop moves once a millisecond."""

    async def main() -> list[int]:
        async with RedisStore(valkey.url, prefix="meanwhile", timeout="60s") as store:
            limiter = AsyncLimiter(TokenBucket("1/min burst 10"), store=store)
            await limiter.hit("k")
            batcher, (named,) = store.batchers.current(), limiter.named
            first, later = (encode_decide(store.names, [Claim(named, "k", 1)], DecideOptions()) for _ in range(2))

            def registration() -> Iterator[None]:
                yield from ()

            async def wait() -> None:
                await batcher.submit(first, await batcher.run_once("limit", registration))

            waiting = asyncio.create_task(wait())
            while not batcher._resuming:
                await asyncio.sleep(0)
            await asyncio.gather(batcher.submit(later), waiting)
            return [request.answer.remaining for request in (first, later)]

    assert asyncio.run(main()) == [8, 7]


def test_an_earlier_batch_that_fails_later_is_repeated_first(valkey: Valkey) -> None:
    """A batch that is repeated while a later one waits for its turn (of another server) is answered too."""

    async def main() -> list[int]:
        async with RedisStore(valkey.url, prefix="earlier", timeout="60s") as store:
            limiter = AsyncLimiter(TokenBucket("1/min burst 10"), store=store)
            await limiter.hit("k")
            batcher, (named,) = store.batchers.current(), limiter.named
            requests = [encode_decide(store.names, [Claim(named, "k", 1)], DecideOptions()) for _ in range(2)]
            for request in requests:
                request.future = batcher.loop.create_future()
            batcher._unanswered = 1
            batcher._all_answered.clear()
            for number in (1, 0):
                batcher._repeat((number, [requests[number]], batcher.deadline()))
                await asyncio.sleep(0)
            batcher._unanswered = 0
            batcher._all_answered.set()
            async with asyncio.timeout(30):
                await asyncio.gather(*[request.future for request in requests])
            return [request.answer.remaining for request in requests]

    assert asyncio.run(main()) == [8, 7]


def test_a_batch_that_ends_with_an_error_leaves_no_caller_waiting(valkey: Valkey) -> None:
    """When a batch ends with an error that is not of the store, the callers behind it and later ones are answered."""

    async def main() -> None:
        async with RedisStore(valkey.url, prefix="error", timeout="60s") as store:
            limiter = AsyncLimiter(TokenBucket("1/min burst 1000"), store=store)
            await limiter.hit("k")
            with valkey.client() as client:
                client.script_flush()
            execute = store.route.execute

            def fails(*requests: object) -> object:
                store.route.execute = execute  # type: ignore[method-assign]
                raise RuntimeError("an error of this library")

            store.route.execute = fails  # type: ignore[method-assign,assignment]
            async with asyncio.timeout(30):
                found = await asyncio.gather(*[limiter.hit("k") for _ in range(100)], return_exceptions=True)
                assert {type(one) for one in found} <= {Decision, StoreUnavailable}
                assert StoreUnavailable in map(type, found)
                assert await limiter.hit("k")

    asyncio.run(main())


def test_a_batch_that_cannot_be_made_delays_no_later_one(valkey: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its callers get a store error, and a batch that is repeated later waits for no reply to it."""

    def fail(*arguments: Any) -> Any:
        raise OSError("no descriptor is left")

    async def main() -> None:
        async with RedisStore(valkey.url, prefix="unmade", timeout="60s") as store:
            limiter = AsyncLimiter(TokenBucket("1/min burst 10"), store=store)
            await limiter.hit("k")
            asyncio.get_running_loop().set_exception_handler(lambda *_: None)
            with monkeypatch.context() as patched:
                patched.setattr(store.route, "pack_batch", fail)
                with pytest.raises(StoreUnavailable, match="no descriptor"):
                    await limiter.hit("k")
            with valkey.client() as client:
                client.script_flush()
            async with asyncio.timeout(30):
                assert (await limiter.hit("k")).remaining == 8

    asyncio.run(main())


def test_a_first_call_that_is_cancelled_on_the_way_gives_back_without_asking_for_the_time(valkey: Valkey) -> None:
    """The reply that shows the charge shows the server's time too; a call that asks for it would block the event loop."""

    async def main() -> None:
        async with RedisStore(valkey.url, prefix="first", timeout="60s") as store:
            limiter = AsyncLimiter(TokenBucket("1/h burst 1"), store=store)
            await store.arun_plan(store._register(limiter.named, None))
            valkey.freeze()
            try:
                task = asyncio.create_task(limiter.acquire("k"))
                for _ in range(10):
                    await asyncio.sleep(0)
                task.cancel()
            finally:
                valkey.thaw()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not store.pool._servers
            assert (await limiter.peek("k")).remaining == 1

    asyncio.run(main())
