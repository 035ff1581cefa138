"""Law 11 for guards: however a store fails and recovers, what is admitted without it is at most the declared share's own bound.
Law 11 for guards: however a store fails and recovers, what is admitted without it is at most the declared share's own bound."""

from __future__ import annotations

from fractions import Fraction
from random import Random

import pytest
from failing import FailingStore
from hypothesis import given
from hypothesis import strategies as st

from effort import effort
from limitkeeper import Limiter, MemoryStore, TokenBucket
from limitkeeper.algorithms import Limit
from limitkeeper.stores.guarded import GuardedStore
from limitkeeper.stores.guarded.share import shared_limit
from limitkeeper.testing import ManualClock
from limitkeeper.testing.admission_bounds import check_bound
from limitkeeper.testing.strategies import LIMITS, limits

BEGIN = 1_700_000_123.456789
NODES = 3


class Fleet:
    """Some nodes with a guard each around one central store, each cut off and connected at will."""

    def __init__(self, limit: Limit, nodes: int = NODES, seed: int = 1) -> None:
        self.clock = ManualClock(BEGIN)
        self.central = MemoryStore(clock=self.clock)
        self.links = [FailingStore(self.central, local=True) for _ in range(nodes)]
        self.guards = [
            GuardedStore(
                link,
                on_failure="local",
                share=nodes,
                failures=1,
                backoff="10ms",
                ramp="1s",
                clock=self.clock,
                rng=Random(seed + number),
                background=False,
            )
            for number, link in enumerate(self.links)
        ]
        self.limit = limit
        self.limiters = [Limiter(limit, store=guard, name="api") for guard in self.guards]
        self.remote: list[tuple[int, int]] = []
        self.here: list[list[tuple[int, int]]] = [[] for _ in range(nodes)]

    def ask(self, node: int, cost: int, patience: float | None) -> bool:
        decision = self.limiters[node].reserve("a", cost, patience).decision
        if decision:
            here = GuardedStore.answered_here(decision)
            (self.here[node] if here else self.remote).append((decision.start_us, cost))
        return bool(decision)

    def cut(self, node: int) -> None:
        self.links[node].failing.add("decide")

    def connect(self, node: int) -> None:
        self.links[node].failing.clear()

    def check(self) -> None:
        """The central limit holds for the store's decisions, and each node's share for the node's own."""
        check_bound(self.limit, [(at // self.limit.tick, cost) for at, cost in self.remote])
        share = shared_limit(self.limit, Fraction(1, len(self.guards)))
        for admitted in self.here:
            check_bound(share, [(at // share.tick, cost) for at, cost in admitted])


steps = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, NODES - 1), st.integers(1, 3), st.sampled_from([0, 0, 0, None, 2.0])),
        st.tuples(st.just("cut"), st.integers(0, NODES - 1)),
        st.tuples(st.just("connect"), st.integers(0, NODES - 1)),
        st.tuples(st.just("probe"), st.integers(0, NODES - 1)),
        st.tuples(st.just("wait"), st.sampled_from([0.0001, 0.05, 0.3, 1.0, 7.0, 61.0])),
    ),
    max_size=60,
)


@pytest.mark.parametrize("algorithm", list(LIMITS), ids=lambda algorithm: algorithm.kind)
def test_outages_admit_at_most_the_share_however_often_they_come(algorithm):
    """In any interval, with any outages, cuts and recoveries inside: central bound for the store, share's bound for each node."""

    @effort(40)
    @given(limits(algorithm), steps, st.integers(0, 99))
    def law(limit, trace, seed):
        fleet = Fleet(limit, seed=seed)
        for what, *more in trace:
            if what == "ask":
                fleet.ask(*more)
            elif what == "wait":
                fleet.clock.advance(*more)
            elif what == "probe":
                fleet.guards[more[0]].probe()
            else:
                getattr(fleet, what)(*more)
        fleet.check()

    law()


def saturated(fleet: Fleet, seconds: float) -> int:
    """Every node calls until it is refused, twenty times a second, for so long."""
    admitted = 0
    for _ in range(round(seconds * 20)):
        for node in range(len(fleet.guards)):
            while fleet.ask(node, 1, 0):
                admitted += 1
            if fleet.guards[node].state == "open":
                fleet.guards[node].probe()
        fleet.clock.advance(0.05)
    return admitted


def test_a_whole_outage_with_both_its_edges():
    """Four nodes on 40/s burst 40, cut off for three of five busy seconds: each admits ten and ten a second, and not one more;
    together that is one burst and one rate, beside the central limit."""
    fleet = Fleet(TokenBucket("40/s"), nodes=4)
    saturated(fleet, 1)
    for node in range(4):
        fleet.cut(node)
    during = saturated(fleet, 3)
    for node in range(4):
        fleet.connect(node)
    saturated(fleet, 1)
    fleet.check()
    assert during == 4 * (10 + int(10 * 2.95))  # the last call was at 2.95 s
    most = 40 + 40 * 4.95 + 4 * (10 + 10 * 4.95)
    assert len(fleet.remote) + sum(len(one) for one in fleet.here) <= most


def test_flapping_gives_no_burst_twice():
    """A store that fails ten times in a second costs one burst of the share, not ten: its state is kept in between."""
    fleet = Fleet(TokenBucket("4/h burst 40"), nodes=4)
    for _ in range(10):
        fleet.cut(0)
        for _ in range(20):
            fleet.ask(0, 1, 0)
        fleet.connect(0)
        fleet.guards[0].probe()
        fleet.clock.advance(1.1)
        fleet.guards[0]._health.may_call()
        assert fleet.guards[0].state == "closed"
    assert len(fleet.here[0]) == 10


def test_a_node_alone_lets_through_its_share_of_many_keys():
    """The share is each key's own, as the limit is."""
    fleet = Fleet(TokenBucket("100/s"), nodes=4)
    fleet.cut(0)
    admitted = sum(bool(fleet.limiters[0].hit(f"user {n % 50}")) for n in range(50 * 30))
    assert admitted == 50 * 25
