"""Fault schedules: the real stores keep their stated bounds, runs repeat exactly, and broken stores are found."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import astuple

import pytest
from source_mutation import mutated

from limitkeeper.simulate import faults
from limitkeeper.simulate.fault_run import MODES, run_schedule, schedule_of
from limitkeeper.simulate.fault_schedule import Fault, Schedule, shrink
from limitkeeper.simulate.history_check import broken_promises
from limitkeeper.stores.guarded import fallback
from limitkeeper.stores.leased.lease_refill import Refill
from limitkeeper.stores.sharded.membership import Membership
from limitkeeper.stores.sharded.shard_map import NodeMap
from limitkeeper.stores.two_phase_decision import TwoPhaseDecision

#: Schedules of each mode: two in `make test`, 16 (208 in all) in `make test-all`; `make soak` runs 10 000 by the command.
FEW, MANY = 2, 16


def check(mode: str, first: int, count: int) -> None:
    found = [faults.describe(*one) for one in faults.failures(faults.seeds([mode], first, count))]
    assert not found, "\n".join(["a stated bound does not hold; replay it with", *found])


@pytest.mark.parametrize("mode", MODES)
def test_a_few_schedules_keep_the_stated_bound(mode):
    """No interval of any history admits more than the mode's bound, and no tokens are created or lost."""
    check(mode, 0, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_many_schedules_keep_the_stated_bound(mode):
    """The same for the schedules of `make test-all`."""
    check(mode, FEW, MANY - FEW)


MUTATIONS = {
    "a lease that does not expire": (
        *("strict", Refill, "_grant"),
        *("wait_us + lease.terms.life_us", "wait_us + 50_000_000"),
    ),
    "a hand-over that copies but does not close": ("sharded", Membership, "_close_gate", "self._point(gates)", "pass"),
    "a hand-over that does not copy": ("sharded", Membership, "_hand_over", "copy.copy_name(tuple(rates), report)", "pass"),
    "a node that decides on slots that are closed": ("fenced", NodeMap, "_check_slot", "slot in self.closed", "False"),
    "a guard that uses the whole limit alone": (
        *("guarded-local", fallback.LocalShare, "limit_of"),
        *("shared_limit(named.limit, self.share)", "named.limit"),
    ),
    "a closed guard that allows": ("guarded-closed", fallback.FailClosed, "decide_one", "cost == 0, size", "True, size"),
    "a refused decision that gives nothing back": ("sharded-fixed", TwoPhaseDecision, "_withdraw", "undo=True", "undo=False"),
    "a return that is made again when its reply is lost": (
        *("leased", Refill, "give_back", "for group, _, _ in calls for part in group)"),
        "for group, _, _ in [*calls, (group, 0, 0)] for part in group)",
    ),
}


#: A seed to begin with, to find each mutation soon.
BEGIN = {"a closed guard that allows": 0, "a lease that does not expire": 40, "a node that decides on slots that are closed": 3}
BEGIN |= {"a hand-over that copies but does not close": 6, "a hand-over that does not copy": 6}
BEGIN |= {
    "a guard that uses the whole limit alone": 10,
    "a refused decision that gives nothing back": 20,
    "a return that is made again when its reply is lost": 60,
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_store_is_found(name):
    """The checker can fail: each mutation of a store breaks a promise in one of a few schedules of its mode."""
    mode, *mutation = MUTATIONS[name]
    with mutated(*mutation):
        runs = map(faults.check_schedule, faults.seeds([mode], BEGIN.get(name, 8), 40))
        assert any(broken for _, broken in runs)


@pytest.mark.parametrize("mode", ["guarded-leased", "fenced"])
def test_a_seed_repeats_exactly(mode):
    """A run is fixed by its mode and seed, in other processes with another hash seed too."""
    code = f"""if True:
        import logging; logging.disable(logging.CRITICAL)
        from dataclasses import astuple
        from limitkeeper.simulate.fault_run import run_schedule, schedule_of
        history = run_schedule(schedule_of({mode!r}, 5))
        print([astuple(one) for one in history.admitted], history.left, history.failed_calls)"""
    runs = []
    for hash_seed in ("1", "2"):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": hash_seed,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        runs.append(found.stdout)
    history = run_schedule(schedule_of(mode, 5))
    here = f"{[astuple(one) for one in history.admitted]} {history.left} {history.failed_calls}\n"
    assert runs == [here, here]


def test_a_failing_schedule_is_shrunken_and_replays_with_one_command(capsys):
    """A failure is printed with the faults that it needs and the command that repeats it."""
    with mutated(fallback.FailClosed, "decide_one", "cost == 0, size", "True, size"):
        assert faults.main(["--mode", "guarded-closed", "--first", "2", "--count", "1"]) == faults.ERRORS
        command, *lines = capsys.readouterr().out.splitlines()
        assert command.startswith("python -m limitkeeper.simulate.faults --mode guarded-closed --seed 2")
        assert any("broken: " in line for line in lines)
        assert faults.main(command.split()[3:]) == faults.ERRORS
        again = capsys.readouterr().out
    assert all(line in again for line in lines)
    assert faults.main(command.split()[3:]) == faults.OK


def test_shrinking_leaves_only_the_faults_that_are_needed():
    """Of ten faults of which two together fail, these two are left."""
    schedule = Schedule("leased", 0, (), (), tuple(Fault(float(i), "cut") for i in range(10)), tuple(range(10)))
    small = shrink(schedule, lambda one: {2, 7} <= set(one.kept))
    assert small.kept == (2, 7)
    assert small.command.endswith("--only 2,7")


def test_a_run_that_fails_without_faults_shrinks_to_none():
    """Faults that are not needed are all removed."""
    schedule = Schedule("leased", 0, (), (), (Fault(1.0, "cut"), Fault(2.0, "slow")), (0, 1))
    assert shrink(schedule, lambda one: True).command.endswith("--only none")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--seed", "1"], "needs one --mode"), (["--mode", "central", "--seed", "1", "--only", "99"], "expected numbers from 0")],
)
def test_bad_arguments_are_explained(arguments, words, capsys):
    """The error of an incomplete command names what is missing."""
    with pytest.raises(SystemExit):
        faults.main(arguments)
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_the_modes_meet_faults():
    """Among the first schedules of each mode, calls fail, are admitted and are refused."""
    for mode in MODES:
        histories = [run_schedule(schedule_of(mode, seed)) for seed in range(FEW, FEW + 3)]
        assert sum(history.failed_calls + len(history.node_steps) for history in histories) > 0
        assert 0 < sum(len(history.admitted) for history in histories) < sum(history.calls for history in histories) * 1.2
        assert not any(broken_promises(history) for history in histories)
