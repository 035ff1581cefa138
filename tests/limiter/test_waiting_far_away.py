"""Waiters of a store that is far away, in virtual time."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from limitkeeper import AsyncLimiter, Decision, MemoryStore, TokenBucket
from limitkeeper.simulate.virtual_time import SimulatedClock, VirtualTimeLoop, run_virtual
from limitkeeper.stores.sans_io import finish
from stand_ins import WrappedStore


class FarStore(WrappedStore):
    """A remote store: a call takes a round trip, and is executed in the middle of it."""

    can_rebook = True

    def __init__(self, round_trip: float) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        super().__init__(MemoryStore(clock=SimulatedClock(loop)))
        self.round_trip, self.now, self.arrival = round_trip, loop.time, 0.0

    async def _far(self, verb: str, *args: Any, **options: Any) -> Any:
        self.arrival = max(self.arrival + 1e-6, self.now() + self.round_trip / 2)  # in the order in which they were sent
        await asyncio.sleep(self.arrival - self.now())
        answer = getattr(self.inner, verb)(*args, **options)
        await asyncio.sleep(self.round_trip / 2)
        return answer

    async def adecide(self, claims: Any, max_wait_us: int | None = 0, **options: Any) -> Decision:
        asked = asyncio.ensure_future(self._far("decide", claims, max_wait_us, **options))
        try:
            decision: Decision = await asyncio.shield(asked)
        except asyncio.CancelledError:
            await finish(asked)  # who is cancelled learns the outcome, and gives it back
            raise
        return decision

    async def agive_back(self, claims: Any, charged_at: int = -1, source: str = "store") -> bool:
        return bool(await self._far("give_back", claims, charged_at))

    async def arebook(self, bookings: Any) -> list[Any]:
        return list(await self._far("rebook", bookings))


@pytest.mark.asyncio_only(reason="on an event loop of its own")
@pytest.mark.parametrize("round_trip", [0.001, 0.04, 0.1])
def test_a_quarter_that_leaves_costs_no_throughput_however_far_the_store_is(round_trip: float) -> None:
    """120 tasks call again and again, a quarter of them cancelled while they wait: 95 % of the rate is used."""

    async def main() -> int:
        rng, now = random.Random(7), asyncio.get_running_loop().time
        limiter = AsyncLimiter(TokenBucket("200/s burst 1"), store=FarStore(round_trip))
        starts: list[int] = []

        async def one() -> None:
            while now() < 6:
                asked = asyncio.create_task(limiter.acquire("k"))
                if rng.random() < 0.25:
                    await asyncio.wait({asked}, timeout=rng.random() / 5)
                    asked.cancel()
                if not isinstance(answer := (await asyncio.gather(asked, return_exceptions=True))[0], BaseException):
                    starts.append(round(now() * 1000))
                    assert answer

        await asyncio.gather(*[one() for _ in range(120)])
        assert limiter.waiting() == 0
        return sum(1000 <= start < 6000 for start in starts)

    assert run_virtual(main()) >= 0.95 * 1000
