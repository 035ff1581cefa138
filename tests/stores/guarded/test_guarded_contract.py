"""A guard changes nothing while its store works: the contract on guarded stores, with and without a deadline of their own."""

from __future__ import annotations

import pytest
from failing import FailingStore, HangingTasks

from effort import scaled
from limitkeeper import Limiter, MemoryStore
from limitkeeper.stores.guarded import GuardedStore
from limitkeeper.stores.guarded.deadline_store import DeadlineStore
from limitkeeper.testing import ManualClock, StoreContract


class TestGuardedMemory(StoreContract):
    """A guard around a store that answers at once, with `rebook`."""

    examples = scaled(10)
    threads = 20

    def make_store(self, clock: ManualClock) -> GuardedStore:
        return GuardedStore(MemoryStore(clock=clock), on_failure="local", share=4, clock=clock, background=False)


class TestGuardedFarStore(StoreContract):
    """A guard around a store that promises no deadline: every call is made by a worker thread."""

    examples = scaled(4)
    threads = 20

    def make_store(self, clock: ManualClock) -> GuardedStore:
        far = FailingStore(MemoryStore(clock=clock), local=False)
        return GuardedStore(far, budget="10s", on_failure="closed", clock=clock, background=False)


class TestGuardedAsyncStore(StoreContract):
    """A guard around a store with async methods of its own: they are called as tasks."""

    examples = scaled(2)
    threads = 20

    def make_store(self, clock: ManualClock) -> GuardedStore:
        far = HangingTasks(MemoryStore(clock=clock))
        far.hangs = False
        return GuardedStore(far, budget="10s", clock=clock)


def test_a_store_that_promises_a_deadline_is_called_directly(store):
    """A local store is called directly; a remote one that promises no deadline is called by workers."""
    assert GuardedStore(store)._store is store
    assert isinstance(GuardedStore(FailingStore(store))._store, DeadlineStore)


@pytest.mark.parametrize("near", [True, False], ids=["local", "remote"])
def test_a_guard_is_as_local_as_its_store(store, near):
    """`local` is that of the store behind."""
    assert GuardedStore(FailingStore(store, local=near)).local is near


def test_rebook_is_offered_when_the_store_behind_offers_it(store):
    """A queue moves up behind a guard exactly where it does without one."""
    assert GuardedStore(store).can_rebook
    assert not GuardedStore(FailingStore(store)).can_rebook


def test_a_guard_keeps_its_deadline_to_a_guard_around_it(store):
    """A guard passes a shorter deadline on; with a longer one, it keeps to its own."""
    guard = GuardedStore(FailingStore(store), budget="20ms")
    assert guard.answers_within(5_000) is True
    assert (guard.budget_us, guard._store.budget_us) == (5_000, 5_000)
    assert guard.answers_within(50_000) is True
    assert guard.budget_us == 5_000


def test_guards_compose(store):
    """A guard in a guard answers as the store itself."""
    limiter = Limiter("5/s burst 10", store=GuardedStore(GuardedStore(store)))
    assert limiter.hit("a", cost=4).remaining == 6
    assert limiter.reserve("a", cost=6).settle(1) is True
    assert limiter.peek("a").remaining == 5
