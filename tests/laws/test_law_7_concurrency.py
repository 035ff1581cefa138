"""Law 7: threads, and finalisers that run in the middle of a decision, leave the totals exact. (More in `StoreContract`.)"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from limitkeeper import Decision, Limiter, MemoryStore, SharedStore
from limitkeeper.testing import ManualClock
from limitkeeper.testing.store_contract import FIFTY, eager_threads, run_threads

every_kind = pytest.mark.parametrize("kind", list(FIFTY))


@contextmanager
def eager_collector() -> Iterator[None]:
    """The garbage collector runs at almost every allocation."""
    threshold = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        yield
    finally:
        gc.set_threshold(*threshold)


class Litter:
    """Garbage in a reference cycle, whose finaliser calls a limiter."""

    def __init__(self, ask: Any, decided: list[Decision]) -> None:
        self.me = self
        self.ask = ask
        self.decided = decided

    def __del__(self) -> None:
        self.decided.append(self.ask())


def ask(limiter: Limiter, number: int) -> list[Decision]:
    """One of the verbs in the middle of which a finaliser may run, and what it decided about "a"."""
    if number % 5 == 0:
        return limiter.hit_many(["a", "b", "a"])[::2]
    if number % 5 == 1:
        return [limiter.reserve("a", 1, 0).decision]
    if number % 5 == 2:
        limiter.hit(f"fresh key {number}")
    elif number % 5 == 3:
        limiter.peek("a")
    return [limiter.hit("a")]


@every_kind
@pytest.mark.parametrize("several", [False, True], ids=["one limit", "two limits"])
def test_finalisers_that_hit_do_no_harm(kind: str, several: bool) -> None:
    """Charges by a finaliser during a decision are counted once, and so is the interrupted decision."""
    limits = {"limit": FIFTY[kind], **({"other": FIFTY["token bucket"]} if several else {})}
    limiter = Limiter(limits, store=MemoryStore(clock=ManualClock(1_700_000_123.456789)))
    decided: list[Decision] = []
    with eager_collector():
        for number in range(120):
            Litter(lambda: limiter.hit("a"), decided)
            decided += ask(limiter, number)
    gc.collect()
    assert sum(decision.allowed for decision in decided) == 50
    assert limiter.peek("a").remaining == 0


@contextmanager
def collections_at_will() -> Iterator[None]:
    """A collection looks only at what is created from now on; the thresholds are restored afterwards."""
    threshold = gc.get_threshold()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.set_threshold(*threshold)
        gc.unfreeze()


CALLS = {
    "hit": lambda limiter: 5 * bool(limiter.hit("a", 5)),
    "hit many": lambda limiter: 2 * sum(map(bool, limiter.hit_many(["a", "a"], 2))),
    "reserve": lambda limiter: 2 * bool(limiter.reserve("a", 2, 0)),
    "cancel": lambda limiter: 0 if limiter.reserve("a", 2, 0).cancel() else 2,
    "settle": lambda limiter: 1 if limiter.reserve("a", 2, 0).settle(1) else 2,
    "refund": lambda limiter: limiter.refund("a") or -1,
}


@pytest.mark.parametrize("kind", ["memory", "shared"])
@pytest.mark.parametrize("several", [False, True], ids=["one limit", "two limits"])
@pytest.mark.parametrize("call", list(CALLS))
def test_a_finaliser_that_hits_at_any_allocation_changes_no_other_rate(
    kind: str, several: bool, call: str, tmp_path: Any
) -> None:
    """Whenever a finaliser takes something in the middle of a call, each rate of each key has counted it, and the call too."""
    clock = ManualClock(1_700_000_123.456789)
    store = MemoryStore(clock=clock) if kind == "memory" else SharedStore(tmp_path / "limits", 64, 16, "50ms", clock)
    more = {"other": "1/2d burst 90000"} if several else {}
    limiters = [Limiter({"limit": f"{n}/d burst {n}0000", **more}, store, "name") for n in (1, 2, 3)]
    counted = {key: sum(bool(limiter.hit(key)) for limiter in limiters) for key in "ab"}
    with store, collections_at_will():
        for allocations in range(32):
            for other in "ab":
                decided: list[Decision] = []
                gc.collect()  # empties the free lists too: every allocation counts
                Litter(lambda: limiters[2].hit(other, 10), decided)  # noqa: B023
                gc.set_threshold(gc.get_count()[0] + allocations, 1000, 1000)
                taken = CALLS[call](limiters[0])
                gc.collect()
                assert [decision.allowed for decision in decided] == [True]
                counted["a"] += taken
                counted[other] += 10
                found = {key: {d.limit - d.remaining for one in limiters for d in one.peek(key).decisions} for key in "ab"}
                assert found == {key: {count} for key, count in counted.items()}, (allocations, other)


@every_kind
def test_threads_and_finalisers_together_are_exact(kind: str, eventually: Any) -> None:
    """A hundred threads that create garbage and hit: exactly the limit is admitted."""
    limiter = Limiter(FIFTY[kind], store=MemoryStore(clock=ManualClock(1_700_000_123.456789)))
    decided: list[Decision] = []

    def work(i: int) -> None:
        Litter(lambda: limiter.hit("a"), decided)
        decided.append(limiter.hit("a"))

    with eager_collector():
        run_threads(100, work)
    eventually(lambda: (gc.collect(), len(decided))[1] == 200)  # a collection that runs in another thread is not waited for
    assert sum(decision.allowed for decision in decided) == 50


@every_kind
def test_a_returned_decision_never_changes(kind: str) -> None:
    """Kept or released in any order, by any thread: a Decision keeps its values."""
    limiter = Limiter(FIFTY[kind], store=MemoryStore(clock=ManualClock(1_700_000_123.456789)))

    def work(i: int) -> bool:
        kept = []
        for n in range(40):
            decision = limiter.hit(f"key {n % 3}")
            if n % 2:
                kept.append((decision, decision.to_dict()))
        return all(decision.to_dict() == said for decision, said in kept)

    assert all(run_threads(20, work))


def test_many_keys_at_once_keep_their_own_counts() -> None:
    """Threads that make new keys while the table grows and is swept: every key has its own fifty."""
    limiter = Limiter(FIFTY["token bucket"], store=MemoryStore(clock=ManualClock(1_700_000_123.456789)))
    keys = [f"key {n}" for n in range(300)]
    with eager_threads():
        decided = run_threads(20, lambda i: [[limiter.hit(key).allowed for key in keys] for _ in range(3)])
    totals = [sum(rounds[turn][n] for rounds in decided for turn in range(3)) for n in range(len(keys))]
    assert totals == [50] * len(keys)
