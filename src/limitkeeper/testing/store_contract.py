"""StoreContract: the laws as tests for any store. Subclass it, define `make_store`, and run pytest.

    class TestMyStore(StoreContract):
        def make_store(self, clock):
            return MyStore(clock=clock)

A law is a statement about every trace, so hypothesis searches for one that breaks it; what it prints can be pasted into a test.
`examples` is how many traces are tried for each law, `threads` the number of concurrent callers. The clock is a `ManualClock`.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ..algorithms import FixedWindow, LeakyBucket, LeakyBucketQueue, Limit, SlidingWindowCounter, SlidingWindowLog, TokenBucket
from ..limiter import Limiter, Limits
from ..stores.contract import Store
from ..stores.memory import MemoryStore
from . import ManualClock
from .admission_bounds import check_bound
from .limiter_trace_player import MODES, TracePlayer, make_limiter, retry_us
from .strategies import HUGE, LIMITS, Hit, Peek, Reserve, Step, limits, moments, traces

T = TypeVar("T")
NamedLimits = dict[str, Limit]
LimitsAndTrace = tuple[NamedLimits, list[Step]]
Strategy = st.SearchStrategy[Any]

#: The start of every clock: 2023-11-14, on no round minute.
START = 1_700_000_123.456789
ODD_KEYS = ("", "\0", "a\0", "\ud800", "é", "e\u0301", "k" * 10_000, "k" * 9_999 + "l", "1", "01")
#: A limit of every algorithm that admits exactly fifty at one moment.
FIFTY: dict[str, Limit] = {
    "token bucket": TokenBucket("50/h"),
    "leaky bucket": LeakyBucket("50/h", capacity=50),
    "fixed window": FixedWindow("50/h"),
    "fixed window, first": FixedWindow("50/h", align="first"),
    "sliding window log": SlidingWindowLog("50/h"),
    "sliding window counter": SlidingWindowCounter("50/h"),
}

every_mode = pytest.mark.parametrize("mode", MODES)
every_algorithm = pytest.mark.parametrize("algorithm", list(LIMITS), ids=lambda algorithm: algorithm.kind)
every_reserving_algorithm = pytest.mark.parametrize(
    "algorithm", [kind for kind in LIMITS if LIMITS[kind][0].reserves], ids=lambda kind: kind.kind
)


class CountingClock(ManualClock):
    """Counts how often it is read."""

    reads = 0

    def now_us(self) -> int:
        self.reads += 1
        return super().now_us()


class MemoryStoreWithoutRebook(MemoryStore):
    """A MemoryStore whose waiters never move up: the model of stores without `rebook`."""

    can_rebook = False


def limits_and_traces(
    most: int = 5, several_keys: bool = False, backwards: bool = False, max_size: int = 25
) -> st.SearchStrategy[LimitsAndTrace]:
    """One to `most` limits of any kind, and a trace for a limiter of them."""
    some = st.lists(limits(), min_size=1, max_size=most, unique_by=str)
    return some.flatmap(
        lambda chosen: st.tuples(
            st.just(name_limits(chosen)), traces(chosen, several_keys=several_keys, backwards=backwards, max_size=max_size)
        )
    )


def name_limits(chosen: list[Limit]) -> NamedLimits:
    return {f"limit {number}": limit for number, limit in enumerate(chosen)}


@contextmanager
def eager_threads() -> Iterator[None]:
    """Switches threads as often as the interpreter can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def run_threads(number: int, work: Callable[[int], T]) -> list[T]:
    """The results of `number` threads that start together."""
    barrier = threading.Barrier(number)

    def run(i: int) -> T:
        barrier.wait()
        return work(i)

    with eager_threads(), ThreadPoolExecutor(number) as pool:
        return list(pool.map(run, range(number)))


def fill(player: TracePlayer) -> None:
    """Takes everything that is available now."""
    while player.hit("a", max(1, player.peek("a", 1)["remaining"]))["allowed"]:
        pass


def stored(player: TracePlayer) -> list[list[tuple[str, object]]]:
    """The state of every limit."""
    return [sorted(player.limiter.store.items(named)) for named in player.limiter.named]


def for_all(
    *strategies: Strategy | Callable[..., Strategy], times: int = 1
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test of a StoreContract whose last parameters are drawn. `limits` itself stands for limits of the test's `algorithm`."""

    def decorate(law: Callable[..., None]) -> Callable[..., None]:
        @wraps(law)
        def test(self: StoreContract, **parameters: Any) -> None:
            drawn = [one(parameters["algorithm"]) if callable(one) else one for one in strategies]
            self.holds(MethodType(law, self), *drawn, times=times, **parameters)

        signature = inspect.signature(law)
        fixed = list(signature.parameters.values())[: -len(strategies)]
        test.__signature__ = signature.replace(parameters=fixed)  # type: ignore[attr-defined]  # what pytest provides
        return test

    return decorate


class StoreContract:
    """The laws that every store must hold. Subclass it and define `make_store`."""

    examples = 25
    threads = 100

    def make_store(self, clock: ManualClock) -> Store:
        """A fresh, empty store that uses this clock."""
        raise NotImplementedError("a StoreContract needs a store: define make_store(self, clock)")

    def holds(self, law: Callable[..., None], *strategies: Strategy, times: int = 1, **arguments: object) -> None:
        """Searches for values of a law's last parameters that break it; `arguments` are the other parameters."""
        effort = settings(
            max_examples=times * self.examples,
            deadline=None,
            phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.target, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        effort(given(*strategies)(law))(**arguments)

    @contextmanager
    def player(self, mode: str, limits: Limits) -> Iterator[TracePlayer]:
        """A player of a limiter on a fresh store."""
        clock = ManualClock(START)
        with self.make_store(clock) as store:
            yield TracePlayer(make_limiter(mode, limits, store), clock)

    # 1. Honest wait ----------------------------------------------------------------------------------------------------

    @every_mode
    @for_all(
        limits_and_traces(several_keys=True, backwards=True, max_size=12), st.integers(1, 12), st.just(0) | st.integers(1, 10**7)
    )
    def test_a_refused_call_is_accepted_when_it_was_promised_and_not_before(
        self, mode: str, drawn: LimitsAndTrace, cost: int, max_wait_us: int
    ) -> None:
        """Law 1, for a hit and for a reservation with a wait, of one limit or of several."""
        some, trace = drawn
        with self.player(mode, some) as player:
            player.play(trace)
            call = Reserve("a", cost, max_wait_us) if max_wait_us else Hit("a", cost)
            player.step(call)
            self.check_honest(player, call, cost, some)

    def check_honest(self, player: TracePlayer, call: Step, cost: int, some: NamedLimits) -> None:
        refused = player.decision
        if refused:
            return
        retry = retry_us(refused)
        if retry is None:
            assert any(cost > limit.capacity for limit in some.values()), f"{call} fits, but is refused for ever: {refused}"
            return
        assert retry > 0, f"{call} is refused with retry_after 0: {refused}"
        before = retry - some[refused.name].tick
        if before > 0:
            player.wait(before)
            assert not player.step(call)["allowed"], f"{call} is accepted a tick before its retry_after: {refused}"
        player.wait(min(retry, retry - before))
        assert player.step(call)["allowed"], f"{call} is refused at its retry_after: {refused}, then {player.last}"

    @every_mode
    @for_all(limits())
    def test_what_is_larger_than_the_limit_is_never_and_nothing_is_always(self, mode: str, limit: Limit) -> None:
        """A cost above the limit can never pass; a cost of 0 always passes, and stores nothing."""
        with self.player(mode, limit) as player:
            for cost in (limit.capacity + 1, HUGE):
                assert player.hit("a", cost)["retry_after"] == float("inf")
                assert not player.limiter.reserve("a", cost)
            assert player.hit("a", 0)["allowed"]
            assert player.hit("a", 0)["remaining"] == player.peek("a", 1)["remaining"]
            assert stored(player) == [[]]

    # 2. Refused is free ------------------------------------------------------------------------------------------------

    @every_mode
    @for_all(limits_and_traces(several_keys=True, max_size=12))
    def test_refused_and_peeked_calls_change_nothing(self, mode: str, drawn: LimitsAndTrace) -> None:
        """Law 2: later answers are those of a limiter without the refused calls."""
        some, trace = drawn
        with self.player(mode, some) as without, self.player(mode, some) as player:
            for step in trace:
                self.play_refused(player, some)
                assert player.step(step) == without.step(step), f"{step} is answered differently after refused calls"

    def play_refused(self, player: TracePlayer, some: NamedLimits) -> None:
        """Peeks and refused calls; the state must stay as it was. A store may drop state that is as new meanwhile (law 9): then
        the answers, `remaining` and `reset_after` of every limit among them, are the same without it."""
        last, before = player.last, stored(player)
        answers = [player.peek(key, 1) for key in "ab"]
        player.step(Peek("a", 1))
        for cost in (1, 2, max(limit.capacity for limit in some.values()) + 1):
            if not player.step(Peek("a", cost))["allowed"]:
                assert not player.step(Hit("a", cost))["allowed"], f"a hit of {cost} is allowed, its peek was not"
                assert not player.limiter.reserve("a", cost, 0), f"a reservation of {cost} is granted, its peek was not"
        assert all(entry in old for old, new in zip(before, stored(player), strict=True) for entry in new)
        assert [player.peek(key, 1) for key in "ab"] == answers
        player.last = last

    # 3 and 4. The bound, and no lost fractions ---------------------------------------------------------------------------

    @every_algorithm
    @for_all(limits, st.data())
    def test_never_more_than_the_bound_is_admitted(self, algorithm: type[Limit], limit: Limit, data: st.DataObject) -> None:
        """Law 3: in any interval, the cost of what started is within the algorithm's worst case."""
        calls = data.draw(st.lists(st.tuples(moments([limit]), st.integers(1, 3), st.none() | st.just(0)), max_size=30), "calls")
        admitted = []
        with self.player("sync", limit) as player:
            for wait_us, cost, max_wait_us in calls:
                player.wait(wait_us)
                player.reserve("a", cost, max_wait_us)
                if player.decision:
                    admitted.append((player.decision.start_us // limit.tick, cost))
        check_bound(limit, admitted)

    @pytest.mark.parametrize("rate", ["54/min", "3/s", "7 per 3 hours"])
    def test_no_fraction_of_the_rate_is_lost(self, rate: str) -> None:
        """Law 4: under saturation a bucket admits its burst and the configured rate, exactly."""
        limit = TokenBucket(rate, burst=2)
        with self.player("sync", limit) as player:
            begin_us, admitted = player.clock.now_us(), 0
            while admitted < 500:
                admitted += player.hit("a", 1)["allowed"]
                player.until("retry", 0)
            expected = 2 + (player.clock.now_us() - begin_us) * limit.count // limit.period
        assert admitted == expected

    # 5. Time may jump ----------------------------------------------------------------------------------------------------

    @every_mode
    @for_all(limits(), st.integers(1, 10**12))
    def test_a_clock_that_goes_back_grants_nothing_and_locks_nobody_out(self, mode: str, limit: Limit, step_us: int) -> None:
        """Law 5: after a step back a refused call stays refused, and is accepted after its retry_after."""
        cost = limit.capacity if limit.capacity > 3 else 1
        with self.player(mode, limit) as player:
            while player.hit("a", cost)["allowed"]:
                pass
            retry = retry_us(player.decision) or 0
            player.wait(-step_us)
            assert not player.hit("a", cost)["allowed"]
            assert (retry_us(player.decision) or 0) <= retry
            player.wait(retry)
            assert player.hit("a", cost)["allowed"]

    @every_mode
    @for_all(limits())
    def test_a_leap_forward_grants_at_most_one_burst(self, mode: str, limit: Limit) -> None:
        """Law 5: after a leap of the clock, however far, a key is as new and not more."""
        with self.player(mode, limit) as player:
            fresh = player.peek("a", 1)
            player.hit("a", 1)
            player.wait(10**15)
            after = player.peek("a", 1)
            assert (after["remaining"], after["reset_after"]) == (limit.capacity, 0.0)
            assert fresh["remaining"] <= limit.capacity

    # 6. All or nothing -----------------------------------------------------------------------------------------------------

    @every_mode
    @for_all(st.lists(limits(), min_size=1, max_size=4, unique_by=str), st.integers(1, 3))
    def test_several_limits_are_charged_together_or_not_at_all(self, mode: str, chosen: list[Limit], cost: int) -> None:
        """Law 6: when one of several limits refuses, none of them has been charged."""
        some = {**name_limits(chosen), "narrow": TokenBucket("1/d", burst=1)}
        with self.player(mode, some) as player:
            player.hit("a", 1)
            before = stored(player)
            assert not player.hit("a", (*[cost] * len(chosen), 1))["allowed"]
            assert stored(player) == before

    @every_mode
    def test_a_decision_reads_the_clock_once(self, mode: str) -> None:
        """Law 6: five limits, a reservation, an acquisition and many keys are each decided at one moment."""
        clock = CountingClock(START)
        some = {str(size): TokenBucket("10/s", burst=size) for size in (10, 20, 30, 40, 50)}
        with self.make_store(clock) as store:
            limiter = make_limiter(mode, some, store)
            calls = [("hit", "a"), ("peek", "a"), ("reserve", "a", 10), ("acquire", "b"), ("hit_many", ["a", "b", "c", "a"])]
            for method, *arguments in calls:
                clock.reads = 0
                getattr(limiter, str(method))(*arguments)
                assert clock.reads == 1, method

    def test_keys_of_one_call_see_each_other_in_order(self) -> None:
        """`hit_many` decides a repeated key each time, at one moment, in order."""
        with self.player("sync", TokenBucket("1/s", burst=2)) as player:
            decisions = player.limiter.hit_many(["a", "b", "a", "a", "b"], [1, 2, 1, 1, 1])
            assert [bool(one) for one in decisions] == [True, True, True, False, False]
            assert [one.remaining for one in decisions] == [1, 0, 0, 0, 0]

    # 7. Exact under concurrency ------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("kind", list(FIFTY))
    def test_threads_on_one_key_are_admitted_exactly(self, kind: str) -> None:
        """Law 7: however many threads call at once, exactly the limit is admitted."""
        with self.player("sync", FIFTY[kind]) as player:
            allowed = run_threads(self.threads, lambda i: [player.limiter.hit("a").allowed for _ in range(3)])
            assert sum(map(sum, allowed)) == 50

    def test_threads_in_a_queue_get_a_turn_each(self) -> None:
        """Law 7: no two reservations of a queue share a start, and a full queue refuses."""
        with self.player("sync", LeakyBucketQueue("1/s", capacity=50)) as player:
            reservations = run_threads(self.threads, lambda i: player.limiter.reserve("a"))
            starts = sorted(one.decision.wait for one in reservations if one)
            assert starts == [float(second) for second in range(min(50, self.threads))]

    def test_threads_on_several_limits_charge_all_or_none(self) -> None:
        """Laws 6 and 7: of two limits the narrower decides for both, also when all threads call at once."""
        with self.player("sync", {"wide": FixedWindow("60/h"), "narrow": TokenBucket("50/h")}) as player:
            allowed = run_threads(self.threads, lambda i: player.limiter.hit("a").allowed)
            admitted = min(50, self.threads)
            assert sum(allowed) == admitted
            assert [part.remaining for part in player.limiter.peek("a").decisions] == [60 - admitted, 50 - admitted]

    def test_threads_that_give_back_leave_nothing_behind(self) -> None:
        """Law 7: when every charge is cancelled, the key is as new."""
        with self.player("sync", {"bucket": TokenBucket("50/h"), "log": SlidingWindowLog("50/h")}) as player:

            def work(i: int) -> None:
                for _ in range(5):
                    player.limiter.reserve("a", 1, 0).cancel()

            run_threads(self.threads, work)
            assert [part.remaining for part in player.limiter.peek("a").decisions] == [50, 50]

    # 8. First come, first served -------------------------------------------------------------------------------------------

    @every_mode
    @every_reserving_algorithm
    @for_all(limits, st.lists(st.integers(1, 3), max_size=12))
    def test_starts_are_in_order_of_arrival(self, mode: str, algorithm: type[Limit], limit: Limit, costs: list[int]) -> None:
        """Law 8: a later caller never starts earlier."""
        with self.player(mode, limit) as player:
            allowed = (player.reserve("a", min(cost, limit.capacity), None)["allowed"] for cost in costs)
            starts = [player.decision.start_us for granted in allowed if granted]
            assert starts == sorted(starts)

    @every_mode
    @every_reserving_algorithm
    @for_all(limits)
    def test_a_timed_out_caller_never_took_a_place(self, mode: str, algorithm: type[Limit], limit: Limit) -> None:
        """Law 8: a caller whose wait exceeds its timeout is refused at once, and those behind are not affected."""
        with self.player(mode, limit) as player, self.player(mode, limit) as without:
            fill(player)
            fill(without)
            assert not player.acquire("a", 1, 0)["allowed"]
            assert player.clock.now_us() == without.clock.now_us()
            assert player.reserve("a", 1, None) == without.reserve("a", 1, None)

    @every_mode
    @every_reserving_algorithm
    @for_all(limits, st.integers(0, 3), st.integers(1, 3))
    def test_a_cancelled_reservation_was_never_made(
        self, mode: str, algorithm: type[Limit], limit: Limit, taken: int, cost: int
    ) -> None:
        """Law 8: cancelling the last reservation restores the state before it."""
        with self.player(mode, limit) as player:
            for _ in range(taken):
                player.hit("a", 1)
            before = player.peek("a", 1)
            player.reserve("a", cost, None)
            player.cancel(0)
            assert player.peek("a", 1) == before

    @every_mode
    @every_reserving_algorithm
    @pytest.mark.parametrize("begun", [False, True], ids=["still waiting", "begun"])
    @for_all(limits, st.lists(st.integers(1, 2), min_size=2, max_size=7), st.integers(0, 6))
    def test_those_behind_a_cancelled_reservation_move_up(
        self, mode: str, algorithm: type[Limit], begun: bool, limit: Limit, costs: list[int], index: int
    ) -> None:
        """Law 8: within a process, waiters behind a cancelled one get the starts that they would have had without it."""
        if not self.make_store(ManualClock()).can_rebook:
            pytest.skip("this store can't rebook: waiters behind a cancelled one keep their starts")
        with self.player(mode, limit) as player, self.player(mode, limit) as without:
            for cost in costs:
                player.reserve("a", cost, None)
            index %= len(costs)
            cancelled = player.reservations.pop(index)
            if not all(player.reservations) or bool(cancelled.wait) == begun:
                return
            for cost in costs[:index] + costs[index + 1 :]:
                without.reserve("a", cost, None)
            cancelled.cancel()
            assert [one.wait for one in player.reservations] == [one.wait for one in without.reservations]

    @every_mode
    @for_all(limits())
    def test_one_key_never_waits_for_another(self, mode: str, limit: Limit) -> None:
        """Law 8: a queue of one key delays no other key."""
        with self.player(mode, limit) as player:
            fresh = player.peek("b", 1)
            fill(player)
            assert player.peek("b", 1)["allowed"] == fresh["allowed"]
            assert player.acquire("b", 1, None)["wait"] == (0.0 if fresh["allowed"] else fresh["retry_after"])

    # 9 and 10. State, and equal answers ------------------------------------------------------------------------------------

    @every_mode
    @for_all(limits_and_traces(several_keys=True, backwards=True), times=2)
    def test_answers_are_those_of_the_memory_store(self, mode: str, drawn: LimitsAndTrace) -> None:
        """Law 10: on every trace this store answers what a MemoryStore answers, compared with ==."""
        some, trace = drawn
        clock = ManualClock(START)
        with self.player(mode, some) as player:
            kind = MemoryStore if player.limiter.store.can_rebook else MemoryStoreWithoutRebook
            model = TracePlayer(make_limiter("sync", some, kind(clock=clock)), clock)
            assert player.play(trace) == model.play(trace)

    def test_every_key_has_its_own_state(self) -> None:
        """Empty, NUL, lone surrogates, 10 kB: any string is a key, and no two share state."""
        with self.player("sync", TokenBucket("1/h", burst=1)) as player:
            for expected in (True, False):
                for key in ODD_KEYS:
                    assert player.hit(key, 1)["allowed"] is expected
            assert sorted(key for key, _ in stored(player)[0]) == sorted(ODD_KEYS)

    @every_mode
    @for_all(limits())
    def test_a_reset_key_is_as_new(self, mode: str, limit: Limit) -> None:
        """`reset` forgets a key, and no other."""
        with self.player(mode, limit) as player:
            fresh = player.peek("a", 1)
            player.hit("a", 1)
            used = player.hit("b", 1)
            player.reset("a")
            assert player.peek("a", 1) == fresh
            assert player.peek("b", 1)["reset_after"] == used["reset_after"]

    @for_all(limits().filter(lambda limit: limit.ramp == 0), st.data())
    def test_state_can_be_handed_over(self, limit: Limit, data: st.DataObject) -> None:
        """`load` takes over what `items` returns: the other store continues as this one would have."""
        trace, later = (data.draw(traces([limit], gives=False, max_size=10), label) for label in ("trace", "later"))
        with self.player("sync", limit) as old, self.player("sync", limit) as new:
            old.play(trace)
            new.wait(old.clock.now_us() - new.clock.now_us())
            new.limiter.store.load(new.limiter.named[0], list(old.limiter.store.items(old.limiter.named[0])))
            old.last = new.last = None
            assert new.play(later) == old.play(later)

    def test_keys_of_a_rate_are_listed_under_it(self) -> None:
        """`rate_items` lists the keys on which a rate was used, and no key that its name does not have."""
        with self.make_store(ManualClock(START)) as store:
            one, other = (Limiter({"api": TokenBucket("1/h", burst=burst)}, store, "api") for burst in (5, 10))
            one.hit_many(["a", "b"])
            other.hit("c")
            for limiter, keys in ((one, {"a", "b"}), (other, {"c"})):
                (named,) = limiter.named
                assert keys <= {key for key, _ in store.rate_items(named)} <= {key for key, _ in store.items(named)}
