"""A stale state is decided once: a request whose reply was stale, and that was then decided, is not sent again.

A server's clock may go back a little between two calls. The fast path then finds a state from the future, which it leaves to the
slow path; by the time of that call, the clock may have passed that moment, and the fast path works after all.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections.abc import Callable
from typing import Any

import pytest

from limitkeeper import AsyncLimiter, Limiter, RedisStore, StoreUnavailable, TokenBucket, compiled
from servers.valkey import Valkey

HUNDRED = TokenBucket("1/h", burst=100)
AHEAD_US = 60_000_000
_fresh = itertools.count()


class Future:
    """The state of a store's only key: moved a minute ahead, as if written by a clock that went back since."""

    def __init__(self, server: Valkey, store: RedisStore) -> None:
        with server.client() as client:
            (self.key,) = client.scan_iter(match=f"*{store.names.prefix}*once*")
            self.present: Any = client.get(self.key)
            fingerprint, last = struct.unpack("<dd", self.present[:16])
            client.set(self.key, struct.pack("<dd", fingerprint, last + AHEAD_US) + self.present[16:])
        self.server = server

    def over(self) -> None:
        """The clock has passed that moment."""
        with self.server.client() as client:
            client.set(self.key, self.present)


def long_way(store: RedisStore, before: Callable[[], Any]) -> list[int]:
    """Calls a function just before the slow path is first used; returns how many requests used it."""
    taken: list[int] = []
    execute = store.route.execute

    def later(requests: Any, *most: int) -> Any:
        store.route.execute = execute  # type: ignore[method-assign]
        taken.append(len(requests))
        before()
        return execute(requests, *most)

    store.route.execute = later  # type: ignore[method-assign]
    return taken


def test_a_hit_that_came_back_stale_is_charged_once(valkey: Valkey) -> None:
    """In threads: 99 are left after the first hit, and 98 after the second, by either path."""
    with RedisStore(valkey.url, prefix=f"stale-{next(_fresh)}", timeout="60s") as store:
        limiter = Limiter(HUNDRED, store=store)
        assert limiter.hit("once").remaining == 99
        taken = long_way(store, Future(valkey, store).over)
        assert limiter.hit("once").remaining == 98
        assert taken == [1]
        assert limiter.peek("once").remaining == 98


@pytest.mark.parametrize("together", [1, 5])
def test_a_task_whose_hit_came_back_stale_is_charged_once(valkey: Valkey, together: int) -> None:
    """In asyncio, alone and in a batch: every call is charged once."""

    async def main() -> None:
        async with RedisStore(valkey.url, prefix=f"stale-{next(_fresh)}", timeout="60s") as store:
            limiter = AsyncLimiter(HUNDRED, store=store)
            assert (await limiter.hit("once")).remaining == 99
            taken = long_way(store, Future(valkey, store).over)
            result = await asyncio.gather(*[limiter.hit("once") for _ in range(together)])
            assert [one.remaining for one in result] == list(range(98, 98 - together, -1))
            assert taken == [together]
            assert (await limiter.peek("once")).remaining == 99 - together

    asyncio.run(main())


def test_a_state_from_the_future_is_decided_on_once_too(valkey: Valkey) -> None:
    """While the clock is still behind, the slow path decides: again one charge each."""
    with RedisStore(valkey.url, prefix=f"stale-{next(_fresh)}", timeout="60s") as store:
        limiter = Limiter(HUNDRED, store=store)
        assert limiter.hit("once").remaining == 99
        Future(valkey, store)
        assert limiter.hit("once").remaining == 98
        assert limiter.hit("once").remaining == 97


def test_a_reservation_of_skipped_limits_gives_back_nothing(valkey: Valkey) -> None:
    """Where every limit is skipped, leaving a reservation by an exception raises that exception, sync and async."""
    skipped = {"a": None, "b": None}
    with RedisStore(valkey.url, prefix=f"skipped-{next(_fresh)}", timeout="60s") as store:
        limiter = Limiter({"a": "3/s", "b": "4/s"}, store=store)
        with pytest.raises(ValueError, match="mine"), limiter.reserve(skipped):
            raise ValueError("mine")

    async def main() -> None:
        async with RedisStore(valkey.url, prefix=f"skipped-{next(_fresh)}", timeout="60s") as store:
            reservation = await AsyncLimiter({"a": "3/s", "b": "4/s"}, store=store).reserve(skipped)
            assert await reservation.cancel()

    asyncio.run(main())


def beyond_64_bits(reply: bytes) -> bytes:
    return reply[:8] + b"\xff\xff\xff\xff\xff\xff\xff\x7f" * (len(reply) // 8 - 1) + reply[len(reply) // 8 * 8 :]


bounded = pytest.mark.skipif(not compiled, reason="integers of plain Python are never too large")


@pytest.mark.parametrize(
    "garbled",
    [pytest.param(lambda reply: reply[:-1], id="cut off"), pytest.param(beyond_64_bits, id="too large", marks=bounded)],
)
def test_a_reply_that_makes_no_sense_is_an_error_and_the_call_is_not_sent_again(valkey: Valkey, garbled: Any) -> None:
    """A script that was executed is charged once, whatever its reply looks like; sync and async callers get a StoreError."""
    with RedisStore(valkey.url, prefix=f"garbled {next(_fresh)}", timeout="60s") as store:
        limiter = Limiter({"a": HUNDRED, "b": HUNDRED}, store=store)
        assert limiter.hit("k")
        call = store.pool.call
        store.pool.call = lambda *args: garbled(call(*args))  # type: ignore[method-assign]
        with pytest.raises(StoreUnavailable, match="unexpected reply"):
            limiter.hit("k")
        store.pool.call = call  # type: ignore[method-assign]
        assert limiter.peek("k").remaining == 98

        async def main() -> None:
            tasks, pack_batch = AsyncLimiter(limiter.limits, store=store, name=limiter.name), store.route.pack_batch
            await tasks.hit("another")

            def garbling(*args: Any) -> Any:
                data, count, decode = pack_batch(*args)
                return data, count, lambda replies: decode([garbled(replies[0])])

            store.route.pack_batch = garbling  # type: ignore[method-assign]
            async with asyncio.timeout(30):
                with pytest.raises(StoreUnavailable, match="unexpected reply"):
                    await tasks.hit("k")
                store.route.pack_batch = pack_batch  # type: ignore[method-assign]
                assert (await tasks.peek("k")).remaining == 97
            await store.aclose()

        asyncio.run(main())


def test_a_connection_on_which_more_than_the_reply_has_arrived_is_closed(valkey: Valkey) -> None:
    """Bytes that a server sends in addition are not taken for the reply of the next call."""
    with RedisStore(valkey.url, prefix=f"more {next(_fresh)}", timeout="60s") as store:
        limiter = Limiter(HUNDRED, store=store)
        assert limiter.hit("k")
        (connection,) = store.pool.idle(store.route.direct, store.route.login)  # type: ignore[arg-type]
        receive = connection._recv
        connection._recv = lambda size: 2 * receive(size)
        assert [limiter.hit("k").remaining for _ in range(3)] == [98, 97, 96]
