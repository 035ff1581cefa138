"""StoreContract: the laws, for any store. Subclass it, say how a store is made, and run pytest.

    class TestMyStore(StoreContract):
        def make_store(self, clock):
            return MyStore(clock=clock)

A law is a statement about every trace, so hypothesis looks for one that breaks it; what it prints can be pasted into a test.
`examples` is how many it tries for each law, `threads` how many callers there are at once. A clock is always a `ManualClock`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ..algorithms import Limit, TokenBucket
from ..stores.contract import Store
from .bounds import check_bound
from .clock import ManualClock
from .contract_state import BEGIN, Named, StateLaws, named, played
from .contract_waiting import WaitingLaws
from .faces import COLOURS, face
from .player import Player, promised_us
from .traces import HUGE, LIMITS, Hit, Peek, Reserve, Step, limits, moments

every_colour = pytest.mark.parametrize("colour", COLOURS)
every_algorithm = pytest.mark.parametrize("algorithm", list(LIMITS), ids=lambda algorithm: algorithm.kind)


class CountingClock(ManualClock):
    """Counts how often it is read."""

    reads = 0

    def now_us(self) -> int:
        self.reads += 1
        return super().now_us()


class StoreContract(StateLaws, WaitingLaws):
    """What every store must hold. Subclass it and give it `make_store`."""

    examples = 25
    threads = 100

    def make_store(self, clock: ManualClock) -> Store:
        """A fresh, empty store that goes by this clock."""
        raise NotImplementedError("a StoreContract needs to know its store: define make_store(self, clock)")

    def holds(self, law: Callable[..., None], *strategies: st.SearchStrategy[Any], examples: int | None = None) -> None:
        """Looks for an example that breaks a law."""
        effort = settings(
            max_examples=examples or self.examples,
            deadline=None,
            phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.target, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        effort(given(*strategies)(law))()

    @contextmanager
    def player(self, colour: str, limits: Any, name: str | None = None) -> Iterator[Player]:
        """A limiter on a fresh store, ready to be played on."""
        clock = ManualClock(BEGIN)
        with self.make_store(clock) as store:
            yield Player(face(colour, limits, store, name), clock)

    # 1. Honest wait ----------------------------------------------------------------------------------------------------

    @every_colour
    def test_a_refused_call_is_accepted_when_it_was_promised_and_not_before(self, colour: str) -> None:
        """Law 1, for a hit and for a reservation with patience, of one limit or of several."""

        def law(drawn: tuple[Named, list[Step]], cost: int, patience_us: int) -> None:
            some, trace = drawn
            with self.player(colour, some) as player:
                player.play(trace)
                call = Hit("a", cost) if not patience_us else Reserve("a", cost, patience_us)
                player.step(call)
                self.is_honest(player, call, some)

        self.holds(
            law, played(several_keys=True, backwards=True, max_size=12), st.integers(1, 12), st.just(0) | st.integers(1, 10**7)
        )

    def is_honest(self, player: Player, call: Step, some: Named) -> None:
        refused = player.last
        if refused:
            return
        promise = promised_us(refused)
        if promise is None:
            assert any(cost_of(call) > limit.capacity for limit in some.values()), f"{call} fits, but is told never: {refused}"
            return
        assert promise > 0, f"{call} is refused, and told to come back now: {refused}"
        before = promise - some[refused.name].tick
        if before > 0:
            player.wait(before)
            assert not player.step(call)["allowed"], f"{call} is accepted a tick before it was promised: {refused}"
        player.wait(min(promise, promise - before))
        assert player.step(call)["allowed"], f"{call} is refused at the promised moment: {refused}, then {player.last}"

    @every_colour
    def test_what_is_larger_than_the_limit_is_never_and_nothing_is_always(self, colour: str) -> None:
        """A cost above the limit can never pass; a cost of nothing always does, and stores nothing."""

        def law(limit: Limit) -> None:
            with self.player(colour, limit) as player:
                for cost in (limit.capacity + 1, HUGE):
                    assert player.hit("a", cost)["retry_after"] == float("inf")
                    assert not player.limiter.reserve("a", cost)
                assert player.hit("a", 0)["allowed"]
                assert player.hit("a", 0)["remaining"] == player.peek("a", 1)["remaining"]
                assert not list(player.limiter.store.items(player.limiter.named[0]))

        self.holds(law, limits())

    # 2. Refused is free ------------------------------------------------------------------------------------------------

    @every_colour
    def test_refused_and_peeked_calls_change_nothing(self, colour: str) -> None:
        """Law 2: the later answers are those of a limiter that never heard the refused calls."""

        def law(drawn: tuple[Named, list[Step]]) -> None:
            some, trace = drawn
            with self.player(colour, some) as quiet, self.player(colour, some) as loud:
                for step in trace:
                    self.ask_in_vain(loud, some)
                    assert loud.step(step) == quiet.step(step), f"{step} is answered differently after refused calls"

        self.holds(law, played(several_keys=True, max_size=12))

    def ask_in_vain(self, player: Player, some: Named) -> None:
        """Peeks, and calls that are refused; the state must be what it was."""
        limiter, last = player.limiter, player.last
        before = [sorted(limiter.store.items(one)) for one in limiter.named]
        largest = max(limit.capacity for limit in some.values())
        player.step(Peek("a", 1))
        for cost in (1, 2, largest + 1):
            if not player.step(Peek("a", cost))["allowed"]:
                assert not player.step(Hit("a", cost))["allowed"], f"a hit of {cost} is told other than a peek"
                assert not limiter.reserve("a", cost, 0), f"a reservation of {cost} without patience is told other than a peek"
        assert [sorted(limiter.store.items(one)) for one in limiter.named] == before
        player.last = last

    # 3 and 4. The bound, and no lost fractions ---------------------------------------------------------------------------

    @every_algorithm
    def test_never_more_than_the_bound_is_admitted(self, algorithm: type[Limit]) -> None:
        """Law 3: in any interval, the cost of what started is within what the rule says is its worst case."""

        def law(limit: Limit, data: Any) -> None:
            calls = data.draw(
                st.lists(st.tuples(moments([limit]), st.integers(1, 3), st.none() | st.just(0)), max_size=30), "calls"
            )
            admitted = []
            with self.player("sync", limit) as player:
                for passing, cost, patience in calls:
                    player.wait(passing)
                    player.reserve("a", cost, patience)
                    if player.last:
                        admitted.append((player.last.start_us // limit.tick, cost))
            check_bound(limit, admitted)

        self.holds(law, limits(algorithm), st.data())

    @pytest.mark.parametrize("rate", ["54/min", "3/s", "7 per 3 hours"])
    def test_no_fraction_of_the_rate_is_lost(self, rate: str) -> None:
        """Law 4: under saturation a bucket admits its burst and the configured rate, exactly."""
        limit = TokenBucket(rate, burst=2)
        with self.player("sync", limit) as player:
            begin_us, admitted = player.clock.now_us(), 0
            while admitted < 500:
                admitted += player.hit("a", 1)["allowed"]
                player.until("retry", 0)
            whole = 2 + (player.clock.now_us() - begin_us) * limit.count // limit.period
        assert admitted == whole

    # 5. Time may jump ----------------------------------------------------------------------------------------------------

    @every_colour
    def test_a_clock_that_goes_back_grants_nothing_and_locks_nobody_out(self, colour: str) -> None:
        """Law 5: after a step back a refused call stays refused, and is accepted after what it was promised."""

        def law(limit: Limit, step_us: int) -> None:
            with self.player(colour, limit) as player:
                while player.hit("a", limit.capacity if limit.capacity > 3 else 1)["allowed"]:
                    pass
                promise = promised_us(player.last) or 0
                player.wait(-step_us)
                assert not player.hit("a", limit.capacity if limit.capacity > 3 else 1)["allowed"]
                assert (promised_us(player.last) or 0) <= promise
                player.wait(promise)
                assert player.hit("a", limit.capacity if limit.capacity > 3 else 1)["allowed"]

        self.holds(law, limits(), st.integers(1, 10**12))

    @every_colour
    def test_a_leap_forward_grants_at_most_one_burst(self, colour: str) -> None:
        """Law 5: however far a clock leaps, a key is as new and not more."""

        def law(limit: Limit) -> None:
            with self.player(colour, limit) as player:
                fresh = player.peek("a", 1)
                player.hit("a", 1)
                player.wait(10**15)
                leapt = player.peek("a", 1)
                assert (leapt["remaining"], leapt["reset_after"]) == (limit.capacity, 0.0)
                assert fresh["remaining"] <= limit.capacity

        self.holds(law, limits())

    # 6. All or nothing -----------------------------------------------------------------------------------------------------

    @every_colour
    def test_several_limits_are_charged_together_or_not_at_all(self, colour: str) -> None:
        """Law 6: when one of several limits refuses, none of them has been charged."""

        def law(chosen: list[Limit], cost: int) -> None:
            some = {**named(chosen), "narrow": TokenBucket("1/d", burst=1)}
            with self.player(colour, some) as player:
                player.hit("a", 1)
                before = [sorted(player.limiter.store.items(one)) for one in player.limiter.named]
                told = player.hit("a", {**dict.fromkeys(some, cost), "narrow": 1})
                assert not told["allowed"]
                assert [sorted(player.limiter.store.items(one)) for one in player.limiter.named] == before

        self.holds(law, st.lists(limits(), min_size=1, max_size=4, unique_by=str), st.integers(1, 3))

    @every_colour
    def test_a_decision_reads_the_clock_once(self, colour: str) -> None:
        """Law 6: five limits, a reservation, an acquisition and many keys are each decided at one moment."""
        clock = CountingClock(BEGIN)
        some = {str(size): TokenBucket("10/s", burst=size) for size in (10, 20, 30, 40, 50)}
        with self.make_store(clock) as store:
            limiter = face(colour, some, store)
            calls = [("hit", "a"), ("peek", "a"), ("reserve", "a", 10), ("acquire", "b"), ("hit_many", ["a", "b", "c", "a"])]
            for verb, *arguments in calls:
                clock.reads = 0
                getattr(limiter, str(verb))(*arguments)
                assert clock.reads == 1, verb

    def test_keys_of_one_call_see_each_other_in_order(self) -> None:
        """`hit_many` decides a key that comes twice twice, at one moment, in order."""
        with self.player("sync", TokenBucket("1/s", burst=2)) as player:
            told = player.limiter.hit_many(["a", "b", "a", "a", "b"], [1, 2, 1, 1, 1])
            assert [bool(one) for one in told] == [True, True, True, False, False]
            assert [one.remaining for one in told] == [1, 0, 0, 0, 0]


def cost_of(call: Any) -> int:
    return int(call.cost)
