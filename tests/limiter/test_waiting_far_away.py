"""Waiters of a store that is far away, or whose replies get lost, in virtual time."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import effort
from limitkeeper import AsyncLimiter, Decision, FixedWindow, Limiter, MemoryStore, SlidingWindowLog, StoreTimeout, TokenBucket
from limitkeeper.simulate.virtual_time import SimulatedClock, VirtualTimeLoop, run_virtual
from limitkeeper.stores.sans_io import finish
from limitkeeper.testing import ManualClock
from stand_ins import NOON, WrappedStore


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


@pytest.mark.asyncio_only(reason="on an event loop of its own")
@pytest.mark.parametrize("enters", [True, False], ids=["after its start", "before its start"])
@pytest.mark.parametrize("used", [0, 1])
def test_a_call_that_moves_up_meanwhile_gives_back_its_own_entry(enters: bool, used: int) -> None:
    """The first of three leaves. Before the reply the second is settled; the third has taken its start and keeps its entry."""

    async def main() -> None:
        store, now = FarStore(0.6), asyncio.get_running_loop().time
        limiter, near = AsyncLimiter(SlidingWindowLog("3/s"), store=store), store.inner
        asking = [asyncio.ensure_future(limiter.reserve("k", cost)) for cost in (1, 2, 1)]  # decided at 0.3
        for _ in range(3):
            assert near.decide(limiter.claims("k"))
            await asyncio.sleep(0.1)
        first, second, third = await asyncio.gather(*asking)
        assert [round(now() + one._left_us() / 1e6, 3) for one in (first, second, third)] == [1.0, 1.2, 2.0]
        await asyncio.sleep(0.65 - now())
        leaving = asyncio.ensure_future(first.cancel())  # executed at 0.95, answered at 1.25
        if enters:
            await second.__aenter__()
            assert round(now(), 3) == 1.2
        else:
            await asyncio.sleep(0.5)
        assert await second.settle(used)
        assert await leaving
        await asyncio.sleep(1)
        begun_us = near.now_us() - round(now() * 1e6)
        [(_, ([*entries], *_))] = near.items(limiter.named[0])
        late = [((moment - begun_us) / 1e6, cost) for moment, cost in entries if moment > begun_us + 500_000]
        assert late == [(1.1, 1)] * used + [(1.2, 1)]
        assert not used or second.decision.start_us == begun_us + 1_100_000

    run_virtual(main())


class LosingStore(WrappedStore):
    """A remote store that executes every call, and loses its replies to those that give back while `loses`."""

    can_rebook, loses = True, False

    def rebook(self, bookings: Any) -> list[Any]:
        return list(self._reply(self.inner.rebook(bookings)))

    def give_back(self, claims: Any, charged_at: int = -1, source: str = "store") -> bool:
        return bool(self._reply(self.inner.give_back(claims, charged_at)))

    def _reply(self, answer: Any) -> Any:
        if self.loses:
            raise StoreTimeout("the reply is lost")
        return answer


class InterruptedStore(WrappedStore):
    """A remote store whose first call that moves waiters up is not executed: it fails after `meanwhile`."""

    can_rebook, meanwhile = True, staticmethod(lambda: None)

    def rebook(self, bookings: Any) -> list[Any]:
        if "rebook" not in self.calls:
            self._noted("rebook")
            self.meanwhile()
            raise StoreTimeout("rebook: nobody answers")
        return list(self.inner.rebook(bookings))


@pytest.mark.parametrize("used", [0, 1])
def test_a_call_that_a_failed_call_would_have_moved_up_gives_back_all_the_same(used: int) -> None:
    """The first of three leaves by a call that fails. Another thread settles the second meanwhile: that gives back its charge."""
    clock = ManualClock(NOON)
    store = InterruptedStore(MemoryStore(clock=clock))
    limiter = Limiter(FixedWindow("10/s"), store=store)
    assert limiter.hit("k", 10)
    first, second, third = [limiter.reserve("k", cost) for cost in (1, 2, 3)]
    store.meanwhile = lambda: second.settle(used)  # type: ignore[assignment]
    assert first.cancel()
    clock.advance(third.wait)
    assert limiter.peek("k").remaining == 10 - 1 - used - 3


STEPS = st.one_of(
    st.tuples(st.just("reserve"), st.integers(1, 3), st.just(False)),
    st.tuples(st.just("cancel"), st.integers(0, 20), st.booleans()),
    st.tuples(st.just("advance"), st.integers(1, 6), st.just(False)),
)


@effort(150)
@given(st.lists(STEPS, min_size=8, max_size=40))
def test_where_a_reply_is_lost_at_most_what_left_is_admitted_once_more(steps: list[tuple[str, int, bool]]) -> None:
    """Waiters of different costs leave, and some replies are lost: a bucket larger by the cost of those admits the rest."""
    clock = ManualClock(NOON)
    store = LosingStore(MemoryStore(clock=clock))
    limiter = Limiter(TokenBucket("10/s burst 3"), store=store)
    reserved, lost = [(limiter.reserve("k", 3), 3)], 0
    for step, number, loses in steps:
        waiting = [one for one in reserved if one[0].decision.start_us > clock.now_us()]
        if step == "reserve":
            reserved.append((limiter.reserve("k", number), number))
        elif step == "advance":
            clock.advance(number / 20)
        elif waiting:
            store.loses, (reservation, cost) = loses, waiting[number % len(waiting)]
            assert reservation.cancel()
            reserved.remove((reservation, cost))
            lost += loses * cost
    clock = ManualClock(NOON)
    model = Limiter(TokenBucket(f"10/s burst {3 + lost}"), store=MemoryStore(clock=clock))
    for start_us, cost in sorted((reservation.decision.start_us, cost) for reservation, cost in reserved):
        clock._now_us = max(clock._now_us, start_us)
        assert model.hit("k", cost)
