"""RedisStore in real traffic while its server and its network are broken: threads and tasks on one store, a fault in the middle.

Nothing hangs: each call answers or fails within its budget. Only limitkeeper's own errors come out. At most the limit is
admitted, plus the bound of the fault (a server that comes back empty: one more full limit). Afterwards all is as before. Traffic
goes on until the fault had an effect and until that is over; a watch measures how late the machine is meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from fault_lab.faults import FAULTS, Fault, Laboratory
from fault_lab.scheduling_delay import Watch
from fault_lab.traffic import KEYS, LIMITS, Tally, Traffic, between, over
from limitkeeper import RedisStore

BUDGET = 0.15
#: What may come on top of a budget: the turns of an event loop and of threads that share two cores.
SLACK = 0.15
#: Within this time after a fault is over, no caller gets an error of it any more.
RECOVERY = 0.3
#: A budget that no busy machine uses up, where it is not the point.
AMPLE = 30.0


@pytest.fixture(scope="module")
def lab() -> Iterator[Laboratory]:
    with Laboratory() as own:
        yield own


@dataclass
class Struck:
    """The results of a fault: the tally, whether traffic was as expected while it lasted, and how long until all was well."""

    tally: Tally
    felt: bool
    recovery: float
    watch: Watch
    admitted_again: bool


def struck(lab: Laboratory, fault: Fault, before: float = 0.15, during: float = 0.35) -> Struck:
    """Traffic before, during and after a fault: during it, calls fail if it cuts, and are admitted if it does not."""

    def meant(seen: Tally) -> bool:
        return between(seen.errors_at if fault.cuts else seen.bucket_at, strikes) > 0

    with RedisStore(lab.url) as store:
        assert store.answers_within(round(BUDGET * 1e6))
        traffic = Traffic(store, name=fault.name).start()
        traffic.go_on(before, until=lambda seen: seen.bucket_at)
        try:
            strikes = time.monotonic()
            fault.strike(lab)
            felt = traffic.go_on(during, until=meant)
        finally:
            fault.heal(lab)
        healed = time.monotonic()
        with Watch([lab.server]) as watch:
            recovery = traffic.recovery(healed)
            again = traffic.go_on(until=lambda seen: between(seen.bucket_at, healed + recovery) > 0)
        return Struck(traffic.stop(), felt, recovery, watch, again)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_in_traffic_is_survived(lab, fault):
    """Whatever the fault: no hang, no strange error, no admission over the bound, and recovery within a third of a second."""
    if fault.fakes_time and not lab.fakes_time:
        pytest.skip("clocks are stepped with libfaketime (pip install libfaketime), and with the wheel's Valkey only")
    seen = struck(lab, fault)
    tally = seen.tally
    assert tally.strange == []
    assert tally.hung == 0
    assert tally.slow <= BUDGET + SLACK, f"{tally.longest:.3f} s in a call, threads woke {tally.late:.3f} s late"
    assert over(tally, LIMITS, fault.forgets, fault.jumps) == {}
    assert seen.felt, "the fault was not felt" if fault.cuts else "no call was admitted during the fault"
    assert seen.recovery <= seen.watch.allows(5 * RECOVERY), f"the machine was {seen.watch.late:.3f} s late"
    assert seen.admitted_again, "no call was admitted after the fault"


def test_without_a_fault_the_limit_is_exact(lab):
    """Without a fault, threads and tasks together are admitted exactly the window's limit, and no call raises an error."""
    windows = [f"window {key}" for key in KEYS]
    with RedisStore(lab.url, timeout=AMPLE) as store:
        traffic = Traffic(store, name="nothing at all").start()
        traffic.go_on(until=lambda seen: all(seen.admitted[window] >= LIMITS["window"].capacity for window in windows))
        traffic.go_on(0.3)
        tally = traffic.stop()
    assert {tally.admitted[window] for window in windows} == {LIMITS["window"].capacity}
    assert (sum(tally.errors.values()), tally.hung) == (0, 0)
