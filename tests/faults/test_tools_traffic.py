"""The callers and their bound: the counts are true, and a store that exceeds the bound is caught."""

from __future__ import annotations

import math
import time

import pytest

from fault_lab.faults import FAULTS, Laboratory
from fault_lab.traffic import KEYS, LIMITS, Tally, Traffic, most, over
from limitkeeper import MemoryStore, StoreUnavailable


def used_up(seen: Tally) -> bool:
    return all(seen.admitted[f"window {key}"] >= LIMITS["window"].capacity for key in KEYS)


def test_a_true_store_keeps_the_bound_exactly():
    """On a store in this process a window admits its limit for every key, to the last one."""
    traffic = Traffic(MemoryStore(), pause=0.001).start()
    traffic.go_on(until=used_up)
    traffic.go_on(0.2)
    tally = traffic.stop()
    assert over(tally, LIMITS) == {}
    assert {tally.admitted[f"window {key}"] for key in KEYS} == {LIMITS["window"].capacity}
    assert (tally.hung, tally.strange, sum(tally.errors.values())) == (0, [], 0)


def test_callers_with_separate_stores_are_over_the_bound():
    """Two separate stores admit twice the limit, and the bound shows the excess."""
    total = Tally()
    for _ in range(2):
        traffic = Traffic(MemoryStore(), pause=0.001).start()
        traffic.go_on(until=used_up)
        total.add(traffic.stop())
    found = over(total, LIMITS)
    assert {found[f"window {key}"] for key in KEYS} == {LIMITS["window"].capacity}


@pytest.mark.parametrize(("forgotten", "jumps", "allowed"), [(0, 0, 60), (1, 0, 120), (2, 1, 240)])
def test_the_bound_counts_what_a_fault_is_worth(forgotten, jumps, allowed):
    """Each loss of state and each jump of the clock adds one full limit to the bound, no more; time adds nothing to a
    window's."""
    assert most(LIMITS["window"], 100.0, forgotten, jumps) == allowed
    assert most(LIMITS["bucket"], 2.0, forgotten, jumps) == 40 * (1 + forgotten + jumps) + 40


def test_errors_are_counted_by_class():
    """limitkeeper's own errors are counted by class; any other is kept as strange, with its traceback."""
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
            with redis.Redis(port=lab.network.port, socket_timeout=30) as client:
                assert client.set("k", "v"), fault.name
                before, received = time.time(), client.time()
                assert before - 0.5 < received[0] + received[1] / 1e6 < time.time() + 0.5, fault.name


def test_traffic_goes_on_until_what_is_awaited_has_been_seen():
    """`go_on` waits as long as needed, returns False when the condition never holds, and stops no earlier than the given time."""
    traffic = Traffic(MemoryStore(), pause=0.001).start()
    begun = time.monotonic()
    assert traffic.go_on(0.05, until=lambda seen: seen.calls > 500)
    assert time.monotonic() - begun >= 0.05
    assert not traffic.go_on(until=lambda seen: seen.errors, patience=0.1)
    assert traffic.stop().calls > 500


def test_a_recovery_is_the_beginning_of_the_first_good_stretch():
    """Calls that failed until two seconds after the fault make it two seconds; calls that fail for ever, for ever."""
    traffic, healed = Traffic(MemoryStore(), threads=1, tasks=0), time.monotonic() - 4
    for tenths in range(40):
        begun = healed + tenths / 10 + 0.001
        for _ in range(5):
            if tenths < 20:
                traffic.tallies[0].failed(StoreUnavailable("away"), begun)
            else:
                traffic.tallies[0].answered("bucket", "ann", True, begun)
    assert 1.8 <= traffic.recovery(healed) <= 2.2
    traffic.tallies[0].answers_at.clear()
    assert traffic.recovery(healed, patience=0.1) == math.inf
