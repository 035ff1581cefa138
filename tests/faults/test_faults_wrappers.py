"""Stores over stores while a real server fails: guards that answer meanwhile, and shards of which one is lost."""

from __future__ import annotations

import time

import pytest

from fault_lab.faults import FAULTS, Laboratory
from fault_lab.modes import MODES
from fault_lab.round_result import counted, unrecovered
from fault_lab.scheduling_delay import Watch
from fault_lab.traffic import LIMITS, Traffic, between, over
from limitkeeper import RedisStore, ShardedStore
from servers.valkey import Valkey

CUTS = {fault.name: fault for fault in FAULTS if fault.name in ("server killed, restarted empty", "server stopped (SIGSTOP)")}
GUARDED = [mode for mode in MODES.values() if mode.name.startswith("guarded")]


@pytest.mark.parametrize("fault", CUTS.values(), ids=str)
def test_a_guard_answers_whatever_happens(fault):
    """Open, closed or local: no caller sees an error, every call keeps its budget, every mode its bound, and all recover."""
    with Laboratory() as lab:
        stores = {mode: mode.make(lab.places) for mode in GUARDED}
        traffics = {mode: Traffic(store, name=mode.name, threads=2, tasks=2).start() for mode, store in stores.items()}
        begun = time.monotonic()
        time.sleep(0.2)
        strikes = time.monotonic()
        fault.strike(lab)
        time.sleep(0.5)
        felt = {
            mode.name: traffic.go_on(until=lambda seen: between(seen.alone_at, strikes) > 0) for mode, traffic in traffics.items()
        }
        fault.heal(lab)
        healed = time.monotonic()
        with Watch([lab.server]) as watch:
            recoveries = {mode: traffic.recovery(healed, unrecovered) for mode, traffic in traffics.items()}
        tallies = {mode: traffic.stop() for mode, traffic in traffics.items()}
        seconds = time.monotonic() - begun
        for store in stores.values():
            store.close()
    assert felt == {mode.name: True for mode in GUARDED}
    for mode, tally in tallies.items():
        assert tally.errors.total() == 0, mode.name
        assert counted(mode, fault, tally, seconds, 1).broken == [], mode.name
        assert recoveries[mode] <= watch.allows(5 * mode.recovery), f"{mode.name}, the machine was {watch.late:.3f} s late"
    assert tallies[MODES["guarded, closed"]].alone.total() == 0
    assert tallies[MODES["guarded, open"]].alone.total() > 0
    assert tallies[MODES["guarded, local"]].alone.total() > 0


def test_a_lost_shard_takes_only_its_own_keys_with_it(valkey):
    """Of two shards one is killed: keys at home on the other are decided exactly and without an error; the rest come back."""
    names, mark = [f"user:{number}" for number in range(40)], time.time_ns()
    with Valkey() as mortal, RedisStore(valkey.url, timeout=30.0) as safe, RedisStore(mortal.url, timeout=0.15) as lost:
        store = ShardedStore({"safe": safe, "lost": lost}, hot=False)
        keys = {home: tuple(name for name in names if store.home_of(name) == home)[:3] for home in ("safe", "lost")}
        traffics = {
            home: Traffic(store, name=f"shards {mark}", keys=own, threads=2, tasks=2).start() for home, own in keys.items()
        }
        windows = [f"window {key}" for key in keys["safe"]]
        time.sleep(0.3)
        mortal.kill()
        killed = time.monotonic()
        felt = traffics["lost"].go_on(0.4, until=lambda seen: between(seen.errors_at, killed) > 0)
        untouched = traffics["safe"].go_on(until=lambda seen: between(seen.bucket_at, killed) > 0)
        mortal.start()
        healed = time.monotonic()
        with Watch([mortal]) as watch:
            recovery = traffics["lost"].recovery(healed)
        used_up = traffics["safe"].go_on(0.3, until=lambda seen: all(seen.admitted[window] >= 60 for window in windows))
        tallies = {home: traffic.stop() for home, traffic in traffics.items()}
    assert (felt, untouched, used_up) == (True, True, True)
    assert [tally.strange for tally in tallies.values()] == [[], []]
    assert [tally.hung for tally in tallies.values()] == [0, 0]
    assert tallies["safe"].errors.total() == 0
    assert {tallies["safe"].admitted[window] for window in windows} == {LIMITS["window"].capacity}
    assert over(tallies["safe"], LIMITS) == {}
    assert recovery <= watch.allows(5 * 0.4), f"the machine was {watch.late:.3f} s late"
    assert over(tallies["lost"], LIMITS, forgotten=1) == {}
