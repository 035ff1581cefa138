"""The laws about many callers at once: exact under concurrency, first come first served, nobody in anybody else's way."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import strategies as st

from ..algorithms import FixedWindow, LeakyBucket, LeakyBucketQueue, Limit, SlidingWindowCounter, SlidingWindowLog, TokenBucket
from .clock import ManualClock
from .faces import COLOURS
from .player import Player
from .traces import LIMITS, limits

#: A limit of every rule that lets exactly fifty through at one moment.
FIFTY: dict[str, Limit] = {
    "token bucket": TokenBucket("50/h"),
    "leaky bucket": LeakyBucket("50/h", capacity=50),
    "fixed window": FixedWindow("50/h"),
    "fixed window, first": FixedWindow("50/h", align="first"),
    "sliding window log": SlidingWindowLog("50/h"),
    "sliding window counter": SlidingWindowCounter("50/h"),
}
every_colour = pytest.mark.parametrize("colour", COLOURS)
every_line = pytest.mark.parametrize(
    "algorithm", [kind for kind in LIMITS if LIMITS[kind][0].reserves], ids=lambda kind: kind.kind
)


@contextmanager
def eager_threads() -> Iterator[None]:
    """Threads are switched as often as the interpreter can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def at_once(number: int, work: Callable[[int], Any]) -> list[Any]:
    """What each of `number` threads answered; they start together."""
    answers: list[Any] = [None] * number
    gate = threading.Barrier(number)

    def run(i: int) -> None:
        gate.wait()
        answers[i] = work(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(number)]
    with eager_threads():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return answers


class WaitingLaws:
    """Laws 7 and 8. Mixed into StoreContract, which makes the stores."""

    threads: int
    holds: Any
    player: Any
    make_store: Any

    # 7. Exact under concurrency ------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("kind", list(FIFTY))
    def test_threads_on_one_key_are_admitted_exactly(self, kind: str) -> None:
        """Law 7: however many threads ask at once, what passes is the limit, to the unit."""
        with self.player("sync", FIFTY[kind]) as player:
            told = at_once(self.threads, lambda i: [player.limiter.hit("a").allowed for _ in range(3)])
            assert sum(map(sum, told)) == 50

    def test_threads_in_a_queue_get_a_turn_each(self) -> None:
        """Law 7: no two reservations of a queue share a start, and a full queue takes nobody."""
        with self.player("sync", LeakyBucketQueue("1/s", capacity=50)) as player:
            told = at_once(self.threads, lambda i: player.limiter.reserve("a"))
            starts = sorted(one.decision.wait for one in told if one)
            assert starts == [float(second) for second in range(min(50, self.threads))]

    def test_threads_on_several_limits_charge_all_or_none(self) -> None:
        """Laws 6 and 7: of two limits the narrower decides for both, also when everybody asks at once."""
        with self.player("sync", {"wide": FixedWindow("60/h"), "narrow": TokenBucket("50/h")}) as player:
            told = at_once(self.threads, lambda i: player.limiter.hit("a").allowed)
            admitted = min(50, self.threads)
            assert sum(told) == admitted
            assert [part.remaining for part in player.limiter.peek("a").decisions] == [60 - admitted, 50 - admitted]

    def test_threads_that_give_back_leave_nothing_behind(self) -> None:
        """Law 7: when all that was taken is cancelled, the key is as new."""
        with self.player("sync", {"bucket": TokenBucket("50/h"), "log": SlidingWindowLog("50/h")}) as player:

            def work(i: int) -> None:
                for _ in range(5):
                    player.limiter.reserve("a", 1, 0).cancel()

            at_once(self.threads, work)
            assert [part.remaining for part in player.limiter.peek("a").decisions] == [50, 50]

    # 8. First come, first served -------------------------------------------------------------------------------------------

    @every_colour
    @every_line
    def test_starts_are_in_order_of_arrival(self, colour: str, algorithm: type[Limit]) -> None:
        """Law 8: who comes later never starts earlier."""

        def law(limit: Limit, costs: list[int]) -> None:
            with self.player(colour, limit) as player:
                starts = [
                    player.last.start_us for cost in costs if player.reserve("a", min(cost, limit.capacity), None)["allowed"]
                ]
                assert starts == sorted(starts)

        self.holds(law, limits(algorithm), st.lists(st.integers(1, 3), max_size=12))

    @every_colour
    @every_line
    def test_a_timed_out_caller_never_took_a_place(self, colour: str, algorithm: type[Limit]) -> None:
        """Law 8: whoever would wait longer than it can is refused at once, and those behind don't notice."""

        def law(limit: Limit) -> None:
            with self.player(colour, limit) as player, self.player(colour, limit) as quiet:
                for one in (player, quiet):
                    fill(one, limit)
                impatient = player.acquire("a", 1, 0)
                assert not impatient["allowed"]
                assert player.clock.now_us() == quiet.clock.now_us()
                assert player.reserve("a", 1, None) == quiet.reserve("a", 1, None)

        self.holds(law, limits(algorithm))

    @every_colour
    @every_line
    def test_a_cancelled_reservation_was_never_made(self, colour: str, algorithm: type[Limit]) -> None:
        """Law 8: what is cancelled with nobody behind it leaves everything as it was."""

        def law(limit: Limit, taken: int, cost: int) -> None:
            with self.player(colour, limit) as player:
                for _ in range(taken):
                    player.hit("a", 1)
                before = player.peek("a", 1)
                player.reserve("a", cost, None)
                player.cancel(0)
                assert player.peek("a", 1) == before

        self.holds(law, limits(algorithm), st.integers(0, 3), st.integers(1, 3))

    @every_colour
    @every_line
    @pytest.mark.parametrize("begun", [False, True], ids=["still waiting", "begun"])
    def test_those_behind_a_cancelled_reservation_move_up(self, colour: str, algorithm: type[Limit], begun: bool) -> None:
        """Law 8: within a process, whoever waited behind gets the starts it would have had without the one who left."""
        if not self.make_store(ManualClock()).can_rebook:
            pytest.skip("this store does not offer `rebook`: those behind keep the starts they were given")

        def law(limit: Limit, costs: list[int], leaver: int) -> None:
            with self.player(colour, limit) as player, self.player(colour, limit) as without:
                for cost in costs:
                    player.reserve("a", cost, None)
                left = player.reservations.pop(leaver % len(costs))
                if not all(player.reservations) or bool(left.wait) == begun:
                    return
                for cost in costs[: leaver % len(costs)] + costs[leaver % len(costs) + 1 :]:
                    without.reserve("a", cost, None)
                left.cancel()
                assert [one.wait for one in player.reservations] == [one.wait for one in without.reservations]

        self.holds(law, limits(algorithm), st.lists(st.integers(1, 2), min_size=2, max_size=7), st.integers(0, 6))

    @every_colour
    def test_one_key_never_waits_for_another(self, colour: str) -> None:
        """Law 8: a line at one key is no line at any other."""

        def law(limit: Limit) -> None:
            with self.player(colour, limit) as player:
                fresh = player.peek("b", 1)
                fill(player, limit)
                assert player.peek("b", 1)["allowed"] == fresh["allowed"]
                assert player.acquire("b", 1, None)["wait"] == (0.0 if fresh["allowed"] else fresh["retry_after"])

        self.holds(law, limits())


def fill(player: Player, limit: Limit) -> None:
    """Takes all that there is now."""
    while player.hit("a", max(1, player.peek("a", 1)["remaining"]))["allowed"]:
        pass
