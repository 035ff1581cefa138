"""FairShare: finalisers that use it during a decision, and signal handlers that raise in the middle of one, leave it intact."""

from __future__ import annotations

import gc
import threading

import pytest

from interrupts import interrupted_at
from limitkeeper import SharedStore, compiled
from limitkeeper.sharing import FairShare
from limitkeeper.testing import ManualClock


def assert_whole(share: FairShare) -> None:
    """The sums are those of the tenants with a backlog, and no lock is held."""
    _, virtual, backlog, weight, finish, _ = share._backend.queue.dump()
    assert len(finish) == weight
    assert sum(at - virtual for at in finish.values()) == pytest.approx(backlog)


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_finalisers_that_refund_during_a_decision_do_no_harm(kind, tmp_path):
    """Objects whose finaliser refunds a unit, collected at any allocation, neither block a decision nor change its state."""
    clock = ManualClock(1000)
    store = None if kind == "memory" else SharedStore(tmp_path / "shared", max_keys=10, clock=clock)
    share = FairShare("1000/h", window="1h", clock=clock, store=store, name="shared")
    refunds = 0

    class Work:
        def __init__(self, tenant):
            self.me, self.tenant = self, tenant

        def __del__(self):
            nonlocal refunds
            refunds += 1
            share.refund(self.tenant)

    def work():
        for i in range(200):
            tenant = f"t{i % 70}"
            share.hit(tenant, 3)
            gc.collect()  # it also empties the lists of free tuples, whose use is no allocation
            Work(tenant)
            gc.set_threshold(2 + i % 30)
            (share.hit if i % 2 else share.peek)(tenant, 300)  # looks ahead past all tenants with a backlog
            gc.set_threshold(*threshold)
            clock.advance(0.1)

    threshold = gc.get_threshold()
    thread = threading.Thread(target=work, daemon=True)
    try:
        thread.start()
        thread.join(300)
        assert not thread.is_alive(), "a decision waits for itself"
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert refunds == 200
    assert_whole(share)


@pytest.mark.skipif(compiled, reason="compiled code has no such moment while it decides")
@pytest.mark.parametrize("method", ["hit", "peek", "refund"])
def test_an_interrupt_at_any_moment_leaves_a_whole_state(method):
    """The next call finds no lock held, no finaliser is kept from running, and the sums are those of the tenants."""
    clock = ManualClock(1000)
    share = FairShare("100/s", clock=clock)
    number, costs = 1, {"next": 3}
    while interrupted_at(number, lambda: getattr(share, method)("a", costs["next"])):
        assert gc.isenabled(), number
        assert not share._backend._lock._is_owned(), number
        share.hit("b", number % 3)
        assert_whole(share)
        clock.advance(0.04)
        costs["next"] = 50 if number % 2 else 3  # refused, or admitted
        number += 1
    assert number > 10
    assert share.peek("c").allowed
