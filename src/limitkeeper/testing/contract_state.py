"""The laws about what a store keeps: the same answers as everywhere, a state for every key, and a way to hand it over."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st

from ..algorithms import Limit, TokenBucket
from ..stores.memory import MemoryStore
from .clock import ManualClock
from .faces import COLOURS, face
from .player import Player
from .traces import Step, limits, traces

#: 2023-11-14, on no round minute.
BEGIN = 1_700_000_123.456789
ODD_KEYS = ("", "\0", "a\0", "\ud800", "é", "e\u0301", "k" * 10_000, "k" * 9_999 + "l", "1", "01")

every_colour = pytest.mark.parametrize("colour", COLOURS)

Named = dict[str, Limit]


def played(most: int = 5, **kinds: Any) -> st.SearchStrategy[tuple[Named, list[Step]]]:
    """One to `most` limits of any kind, and a trace for a limiter of them."""
    some = st.lists(limits(), min_size=1, max_size=most, unique_by=str)
    return some.flatmap(lambda chosen: st.tuples(st.just(named(chosen)), traces(chosen, **kinds)))


def named(chosen: list[Limit]) -> Named:
    return {f"limit {number}": limit for number, limit in enumerate(chosen)}


class Bare(MemoryStore):
    """A MemoryStore in whose lines nobody moves up: the model of stores that do not offer that."""

    @property
    def can_rebook(self) -> bool:
        return False


class StateLaws:
    """Laws 9 and 10. Mixed into StoreContract, which makes the stores."""

    examples: int
    holds: Any
    player: Any

    @every_colour
    def test_answers_are_those_of_the_memory_store(self, colour: str) -> None:
        """Law 10: on every trace this store says what a MemoryStore says, compared with ==."""

        def law(drawn: tuple[Named, list[Step]]) -> None:
            some, trace = drawn
            clock = ManualClock(BEGIN)
            with self.player(colour, some) as player:
                kind = MemoryStore if player.limiter.store.can_rebook else Bare
                model = Player(face("sync", some, kind(clock=clock)), clock)
                assert player.play(trace) == model.play(trace)

        self.holds(law, played(several_keys=True, backwards=True), examples=2 * self.examples)

    def test_every_key_has_its_own_state(self) -> None:
        """Empty, NUL, lone surrogates, 10 kB: any text is a key, and no two of them meet."""
        with self.player("sync", TokenBucket("1/h", burst=1)) as player:
            for expected in (True, False):
                for key in ODD_KEYS:
                    assert player.hit(key, 1)["allowed"] is expected
            assert sorted(key for key, _ in player.limiter.store.items(player.limiter.named[0])) == sorted(ODD_KEYS)

    @every_colour
    def test_a_reset_key_is_as_new(self, colour: str) -> None:
        """`reset` forgets a key, and no other."""

        def law(limit: Limit) -> None:
            with self.player(colour, limit) as player:
                fresh = player.peek("a", 1)
                player.hit("a", 1)
                used = player.hit("b", 1)
                player.reset("a")
                assert player.peek("a", 1) == fresh
                assert player.peek("b", 1)["reset_after"] == used["reset_after"]

        self.holds(law, limits())

    def test_state_can_be_handed_over(self) -> None:
        """What `items` gives, `load` takes over: the other store goes on as this one would have."""

        def law(limit: Limit, data: Any) -> None:
            trace, later = (data.draw(traces([limit], gives=False, max_size=10), label) for label in ("trace", "later"))
            with self.player("sync", limit) as old, self.player("sync", limit) as new:
                old.play(trace)
                new.wait(old.clock.now_us() - new.clock.now_us())
                store, one = new.limiter.store, new.limiter.named[0]
                store.load(one, list(old.limiter.store.items(old.limiter.named[0])))
                old.last = new.last = None
                assert new.play(later) == old.play(later)

        self.holds(law, limits().filter(lambda limit: limit.ramp == 0), st.data())
