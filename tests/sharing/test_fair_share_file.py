"""FairShare on a SharedStore: processes of a host decide as one, also when one of them is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import limitkeeper
from effort import effort
from limitkeeper import SharedStore
from limitkeeper.sharing import FairShare
from limitkeeper.sharing.file_fair_share import HEADER
from limitkeeper.testing import ManualClock

TENANTS = ("a", "b", "ü", "d e", "")
STEP = st.tuples(
    st.sampled_from(TENANTS),
    st.sampled_from([0, 1, 1, 2, 3, 10, 30, 100]),
    st.sampled_from([0, 0, 0, 1, 10_000, 13_337, 1_000_000, 5_000_000]),
    st.sampled_from(["hit", "hit", "hit", "peek", "refund"]),
    st.integers(0, 1),
)
WORKER = """
import sys
from limitkeeper import SharedStore
from limitkeeper.sharing import FairShare
share = FairShare("1000/30d", window="30d", guarantees={"b": "100/30d"}, store=SharedStore(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
found = 0
for _ in range(int(sys.argv[2])):
    found += share.hit("a").allowed
print(found, flush=True)
"""


@effort(20)
@given(
    steps=st.lists(STEP, min_size=1, max_size=60),
    guarantees=st.dictionaries(st.sampled_from(TENANTS), st.sampled_from(["3/s", "13/s"])),
    weights=st.dictionaries(st.sampled_from(TENANTS), st.integers(1, 5)),
    window=st.sampled_from(["100ms", "1s", "2s"]),
)
def test_the_file_answers_as_the_source(tmp_path_factory, steps, guarantees, weights, window):
    """On the same trace two users of one file and one FairShare in memory give equal decisions."""
    clock, path = ManualClock(1000.0), tmp_path_factory.mktemp("share") / "limits"
    options = {"guarantees": guarantees, "weights": weights, "window": window}
    here = FairShare("70/s", clock=clock, **options)
    with SharedStore(path, max_keys=10, clock=clock) as first, SharedStore(path, max_keys=10, clock=clock) as second:
        there = [FairShare("70/s", store=store, **options) for store in (first, second)]
        for tenant, cost, pause_us, call, user in steps:
            clock.advance(pause_us / 1e6)
            assert getattr(here, call)(tenant, cost) == getattr(there[user], call)(tenant, cost)


def started(path: Path, hits: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(limitkeeper.__path__[0]).parent)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", WORKER, str(path), str(hits)], env=environment, **pipes)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_processes_share_one_capacity_exactly(tmp_path):
    """Three processes admit together what one would: a tenant alone holds half of the window, and a guarantee is untouched."""
    workers = [started(tmp_path / "limits", 400) for _ in range(3)]
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    assert sum(int(worker.communicate(timeout=120)[0]) for worker in workers) == 500
    with SharedStore(tmp_path / "limits") as store:
        share = FairShare("1000/30d", window="30d", guarantees={"b": "100/30d"}, store=store)
        assert not share.hit("a")
        assert share.hit("b", 100)


@pytest.mark.parametrize("pause", [0.0, 0.002, 0.01, 0.03])
def test_a_killed_process_leaves_a_whole_state(tmp_path, pause):
    """A process that is killed at any moment of its decisions leaves a state with which others continue."""
    worker = started(tmp_path / "limits", 100_000)
    assert worker.stdin is not None
    worker.stdin.write("go\n")
    worker.stdin.flush()
    try:
        worker.wait(pause)
    except subprocess.TimeoutExpired:
        worker.send_signal(signal.SIGKILL)
    worker.communicate(timeout=60)
    with SharedStore(tmp_path / "limits") as store:
        share = FairShare("1000/30d", window="30d", guarantees={"b": "100/30d"}, store=store)
        found = share.peek("a")
        assert 0 <= found.remaining <= 500
        assert share.hit("c").allowed


@pytest.mark.parametrize("header", [(9, 32, 1 << 62, 0), (1 << 63, 1 << 63, 1, 0), (9, 1 << 40, 50, 7), (9, 40, 9, 1)])
def test_a_damaged_header_starts_the_state_afresh(tmp_path, header):
    """Whatever a crash of the machine left in the header, the next decision is made on a new state, which all processes read."""
    with SharedStore(tmp_path / "limits", max_keys=10, clock=ManualClock(1000.0)) as store:
        one, two = (FairShare("10/s", store=store, name="x") for _ in range(2))
        assert one.hit("a", cost=4)
        (path,) = tmp_path.glob("limits.share-*")
        with path.open("r+b") as file:
            file.write(HEADER.pack(*header))
        assert two.hit("a", cost=4)
        assert one.peek("a") == two.peek("a")


def test_the_order_of_guarantees_and_weights_means_nothing(tmp_path):
    """Processes whose settings are equal share one capacity, also where their mappings are in other orders."""
    with SharedStore(tmp_path / "limits", max_keys=10, clock=ManualClock(1000.0)) as store:
        settings = [({"a": "2/s", "b": "3/s"}, {"c": 2, "d": 3}), ({"b": "3/s", "a": "2/s"}, {"d": 3, "c": 2})]
        one, two = (FairShare("10/s", guarantees=rates, weights=weights, store=store) for rates, weights in settings)
        while one.hit("c"):
            pass
        assert not two.hit("c")
        assert two.peek("b") == one.peek("b")


def test_a_clock_that_went_back_locks_nobody_out(tmp_path):
    """Law 5: after the clock of the store went back by ten minutes, time continues from where it was."""
    with SharedStore(tmp_path / "limits", max_keys=10, clock=ManualClock(1000.0)) as store:
        share = FairShare("10/s", store=store)
        assert [share.hit("a").allowed for _ in range(6)] == [True] * 5 + [False]
    clock = ManualClock(400.0)
    with SharedStore(tmp_path / "limits", max_keys=10, clock=clock) as store:
        share = FairShare("10/s", store=store)
        refused = share.hit("a")
        assert not refused
        clock.advance(refused.retry_after)
        assert share.hit("a")
