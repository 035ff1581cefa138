"""Event loops whose tasks begin at once (`asyncio.eager_task_factory`, Python 3.12 and later)."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from limitkeeper import AsyncLimiter, GuardedStore, RedisStore, StoreUnavailable
from servers.valkey import Valkey

pytestmark = [
    pytest.mark.asyncio_only(reason="uvloop does not accept this task factory in every version of Python"),
    pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks came with Python 3.12"),
]


def run(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    def eager_loop() -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        loop.set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined, unused-ignore]
        return loop

    with asyncio.Runner(loop_factory=eager_loop) as runner:
        return runner.run(asyncio.wait_for(work(), 30))


def test_all_waiters_that_leave_one_after_the_other_give_back(valkey: Valkey) -> None:
    """Five waiters leave in successive iterations of the loop, some while the call of the first is in progress."""

    async def remaining() -> int:
        async with RedisStore(valkey.url) as store:
            limiter = AsyncLimiter("sliding window log 10/h", store)
            await limiter.hit("a", 6)
            await asyncio.sleep(0)
            waiters = [asyncio.create_task(limiter.acquire("a", 5)) for _ in range(5)]
            while limiter.waiting() < len(waiters):
                await asyncio.sleep(0.001)
            for waiter in waiters:
                waiter.cancel()
                await asyncio.sleep(0)
            await asyncio.wait(waiters)
            assert all(waiter.cancelled() for waiter in waiters)
            return (await limiter.peek("a")).remaining

    assert run(remaining) == 4


def test_a_socket_that_refuses_at_once_is_reported_at_once(tmp_path: Path) -> None:
    """Connecting to a UNIX socket that does not exist fails before the connection is known to those that write to it."""

    async def main() -> None:
        async with RedisStore(f"unix://{tmp_path}/none.sock", timeout="10s") as store:
            limiter = AsyncLimiter("10/s", store)
            for _ in range(3):
                with pytest.raises(StoreUnavailable, match="can't be reached"):
                    await asyncio.wait_for(limiter.hit("a"), 5)

    run(main)


def test_a_guard_is_closed_again_when_its_server_answers() -> None:
    """The background probe runs as a task of the loop."""

    async def main() -> None:
        with Valkey() as server:
            async with GuardedStore(RedisStore(server.url), failures=1, backoff="10ms", max_backoff="20ms", ramp="10ms") as store:
                limiter = AsyncLimiter("1000/s", store)
                assert (await limiter.hit("a")).source == "store"
                server.kill()
                assert (await limiter.hit("a")).source == "open"
                server.start()
                while store.state != "closed":
                    await limiter.hit("a")
                    await asyncio.sleep(0.01)

    run(main)
