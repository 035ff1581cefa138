"""Law 7: threads, and finalisers that run in the middle of a decision, leave the totals exact. (More in `StoreContract`.)"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from limitkeeper import Decision, Limiter, MemoryStore
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
