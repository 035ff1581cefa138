"""The contract on LeasedStore: with lease=1 it equals its parent, to the last field; larger leases keep all laws but a few.

By nature a batch in hand is charged at the parent before it is spent. So `remaining` counts the batch in hand, answers differ
from those of a store without leases, and the clock is read here as well as at the parent. Each such law is stated in a weaker
form below.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from leased_fleet import Tally

from effort import scaled
from limitkeeper import FixedWindow, LeasedStore, Limit, MemoryStore, TokenBucket
from limitkeeper.stores import Claim
from limitkeeper.testing import ManualClock, StoreContract
from limitkeeper.testing.admission_bounds import BOUNDS, between
from limitkeeper.testing.store_contract import (
    every_algorithm,
    every_mode,
    every_reserving_algorithm,
    limits_and_traces,
    run_threads,
)
from limitkeeper.testing.strategies import limits, moments, traces


class TestLeaseOfOne(StoreContract):
    """LeasedStore(store, lease=1) over a local store: every law, compared with ==."""

    examples = scaled(15)

    def make_store(self, clock: ManualClock) -> LeasedStore:
        return LeasedStore(MemoryStore(clock=clock), lease=1)


class TestLeaseOfOneFarAway(StoreContract):
    """LeasedStore(store, lease=1) over a remote store: every law, sync and async."""

    examples = scaled(8)

    def make_store(self, clock: ManualClock) -> LeasedStore:
        return LeasedStore(Tally(MemoryStore(clock=clock), local=False), lease=1)


class TestAdaptiveLeases(StoreContract):
    """Leases that follow demand."""

    examples = scaled(8)

    def make_store(self, clock: ManualClock) -> LeasedStore:
        return LeasedStore(MemoryStore(clock=clock))

    def test_threads_on_several_limits_charge_all_or_none(self) -> None:
        """Weaker: exactly as many pass, and the tokens in hand and at the parent together are what is left."""
        with self.player("sync", {"wide": FixedWindow("60/h"), "narrow": TokenBucket("50/h")}) as player:
            received = run_threads(self.threads, lambda i: player.limiter.hit("a").allowed)
            admitted = min(50, self.threads)
            assert sum(received) == admitted
            player.limiter.store.return_all()
            assert [part.remaining for part in player.limiter.peek("a").decisions] == [60 - admitted, 50 - admitted]

    def test_state_can_be_handed_over(self) -> None:
        """Weaker: the states of `items` never grant more than this store would have after giving everything back."""

        def law(limit: Limit, data: Any) -> None:
            trace = data.draw(traces([limit], gives=False, max_size=10), "trace")
            with self.player("sync", limit) as old, self.player("sync", limit) as new:
                old.play(trace)
                old.limiter.store.return_all()
                new.wait(old.clock.now_us() - new.clock.now_us())
                new.limiter.store.load(new.limiter.named[0], list(old.limiter.store.items(old.limiter.named[0])))
                assert new.peek("a", 1)["remaining"] <= old.peek("a", 1)["remaining"]

        self.holds(law, limits().filter(lambda limit: limit.ramp == 0), st.data())

    @every_mode
    def test_a_decision_reads_the_clock_once(self, mode: str) -> None:
        """Weaker: this store reads it for its leases and the parent for its decision; five limits are still one moment of it."""
        with self.player(mode, {str(size): TokenBucket("10/s", burst=size) for size in (10, 20, 30)}) as player:
            received = player.limiter.hit("a")
            assert len({part.start_us for part in received.decisions}) == 1

    @every_mode
    def test_answers_are_those_of_the_memory_store(self, mode: str) -> None:
        """Weaker: a lone node that gave everything back refuses and allows exactly as the parent."""

        def law(drawn: Any) -> None:
            some, trace = drawn
            with self.player(mode, some) as player:
                player.play(trace)
                store = player.limiter.store
                store.return_all()
                for one in player.limiter.named:
                    parent = store.parent.decide([Claim(one, "a")], 0, commit=False)
                    here = store.decide([Claim(one, "a")], 0, commit=False)
                    assert here.allowed <= parent.allowed or here.remaining == 0

        self.holds(law, limits_and_traces(1, several_keys=True))

    @every_algorithm
    def test_never_more_than_the_bound_is_admitted(self, algorithm: type[Limit]) -> None:
        """Weaker: never more than the rule's worst case and what a node may hold; without leases never more than that."""

        def law(limit: Limit, data: Any) -> None:
            calls = data.draw(st.lists(st.tuples(moments([limit]), st.integers(1, 3)), max_size=30), "calls")
            admitted = []
            with self.player("sync", limit) as player:
                most = player.limiter.store.over_admission(limit, 1)
                for passing, cost in calls:
                    player.wait(passing)
                    if player.hit("a", cost)["allowed"]:
                        admitted.append((player.last.start_us // limit.tick, cost))
            within(limit, admitted, most)

        self.holds(law, limits(algorithm), st.data())


class TestLeasesOfFifty(TestAdaptiveLeases):
    """Fixed leases of fifty."""

    def make_store(self, clock: ManualClock) -> LeasedStore:
        return LeasedStore(MemoryStore(clock=clock), lease=50)

    @every_mode
    @every_reserving_algorithm
    def test_a_cancelled_reservation_was_never_made(self, mode: str, algorithm: type[Limit]) -> None:
        """Weaker: afterwards as much passes as before, though the tokens in hand went back to the parent meanwhile."""

        def law(limit: Limit, taken: int, cost: int) -> None:
            with self.player(mode, limit) as player:
                for _ in range(taken):
                    player.hit("a", 1)
                before = player.peek("a", 1)
                player.reserve("a", cost, None)
                player.cancel(0)
                assert player.peek("a", 1)["allowed"] == before["allowed"]

        self.holds(law, limits(algorithm), st.integers(0, 3), st.integers(1, 3))


def within(limit: Any, admitted: list[tuple[int, int]], more: float) -> None:
    """The rule's own bound, or that and `more`: tried with the `more` largest charges at the end of each interval left out."""
    try:
        BOUNDS[type(limit)](limit, admitted, ())
    except AssertionError:
        window = limit.period // limit.tick
        times = 1 if limit.logs else 2
        most = limit.capacity + limit.count if limit.gain else times * limit.count
        for last, _ in admitted:
            assert between(admitted, last - window + 1, last) <= most + more
