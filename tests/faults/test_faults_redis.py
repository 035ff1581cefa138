"""RedisStore in real traffic while its server and its network are broken: threads and tasks on one store, a fault in the middle.

Nothing hangs: each call answers or fails within its budget. Only headgate's own errors come out. Nobody is admitted more than the
limit says, plus what the fault is worth (a server that comes back empty: one more full limit). Afterwards all is as before.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from headgate import RedisStore
from laboratory.faults import FAULTS, Fault, Laboratory
from laboratory.traffic import KEYS, LIMITS, Tally, Traffic, between, over

BUDGET = 0.15
#: What may come on top of a budget: the turns of an event loop and of threads that share two cores.
SLACK = 0.15
#: Within this time after a fault is over, nobody is told of it any more.
RECOVERY = 0.3


@pytest.fixture(scope="module")
def lab() -> Iterator[Laboratory]:
    with Laboratory() as own:
        yield own


def struck(
    lab: Laboratory, fault: Fault, before: float = 0.15, during: float = 0.35, after: float = 0.6
) -> tuple[Tally, float, float]:
    """Traffic before, while and after a fault: what callers saw, when it struck, and when it was over."""
    with RedisStore(lab.url) as store:
        assert store.answers_within(round(BUDGET * 1e6))
        traffic = Traffic(store, name=fault.name).start()
        try:
            time.sleep(before)
            strikes = time.monotonic()
            fault.strike(lab)
            time.sleep(during)
        finally:
            fault.heal(lab)
        healed = time.monotonic()
        time.sleep(after)
        tally = traffic.stop()
    return tally, strikes, healed


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_in_traffic_is_survived(lab, fault):
    """Whatever is broken: no hang, no strange error, no admission over the bound, and recovery within a third of a second."""
    if fault.fakes_time and not lab.fakes_time:
        pytest.skip("clocks are stepped with libfaketime (pip install libfaketime), and with the wheel's Valkey only")
    tally, strikes, healed = struck(lab, fault)
    assert tally.strange == []
    assert tally.hung == 0
    assert tally.longest <= BUDGET + SLACK + tally.late, f"{tally.longest:.3f} s in a call, threads woke {tally.late:.3f} s late"
    assert over(tally, LIMITS, fault.forgets, fault.jumps) == {}
    assert tally.unwell(healed + RECOVERY + tally.late) == ""
    assert between(tally.bucket_at, healed + RECOVERY) > 0, "nobody was admitted any more after it was over"
    if fault.cuts:
        assert between(tally.errors_at, strikes) > 0, "the fault was not felt"
    else:
        assert between(tally.bucket_at, strikes + 0.1, healed) > 0, "nobody was admitted while it lasted"


def test_without_a_fault_the_limit_is_exact(lab):
    """With nothing broken, threads and tasks together are admitted exactly the window's limit, and nobody sees an error."""
    tally, _, _ = struck(lab, FAULTS[0])
    assert {tally.admitted[f"window {key}"] for key in KEYS} == {LIMITS["window"].capacity}
    assert sum(tally.errors.values()) == 0
