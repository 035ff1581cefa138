"""The callers and the bound that they are held to: what they count is true, and a store that cheats is caught."""

from __future__ import annotations

import time

import pytest

from headgate import MemoryStore, StoreUnavailable
from laboratory.faults import FAULTS, Laboratory
from laboratory.traffic import KEYS, LIMITS, Tally, Traffic, most, over


def test_a_true_store_keeps_the_bound_exactly():
    """On a store in this process a window admits its limit for every key, to the last one."""
    traffic = Traffic(MemoryStore(), pause=0.001).start()
    time.sleep(0.4)
    tally = traffic.stop()
    assert over(tally, LIMITS) == {}
    assert {tally.admitted[f"window {key}"] for key in KEYS} == {LIMITS["window"].capacity}
    assert (tally.hung, tally.strange, sum(tally.errors.values())) == (0, [], 0)


def test_callers_who_do_not_share_are_over_the_bound():
    """Two stores that know nothing of each other admit twice the limit, and the bound says by how much."""
    total = Tally()
    for _ in range(2):
        traffic = Traffic(MemoryStore(), pause=0.001).start()
        time.sleep(0.25)
        total.add(traffic.stop())
    found = over(total, LIMITS)
    assert {found[f"window {key}"] for key in KEYS} == {LIMITS["window"].capacity}


@pytest.mark.parametrize(("forgotten", "jumps", "allowed"), [(0, 0, 60), (1, 0, 120), (2, 1, 240)])
def test_the_bound_counts_what_a_fault_is_worth(forgotten, jumps, allowed):
    """Each loss of state and each jump of the clock is worth one full limit, no more; time is worth nothing to a window."""
    assert most(LIMITS["window"], 100.0, forgotten, jumps) == allowed
    assert most(LIMITS["bucket"], 2.0, forgotten, jumps) == 40 * (1 + forgotten + jumps) + 40


def test_errors_are_told_apart():
    """headgate's own errors are counted by class; any other is kept as strange, with where it came from."""
    tally = Tally()
    tally.failed(StoreUnavailable("gone"), time.monotonic())
    assert (tally.errors, tally.strange) == ({"StoreUnavailable": 1}, [])
    tally.failed(ConnectionResetError("raw"), time.monotonic() - 2)
    assert "ConnectionResetError: raw" in tally.strange[0]
    assert tally.longest >= 2


def test_every_fault_heals():
    """After each fault has struck and healed, the server answers through the network as before."""
    import redis

    with Laboratory() as lab:
        for fault in [fault for fault in FAULTS if lab.fakes_time or not fault.fakes_time]:
            fault.strike(lab)
            fault.heal(lab)
            with redis.Redis(port=lab.network.port, socket_timeout=2) as client:
                assert client.set("k", "v"), fault.name
                assert abs(client.time()[0] - time.time()) < 2, fault.name
