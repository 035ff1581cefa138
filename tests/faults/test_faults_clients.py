"""Faults of clients: their clock is off, or they are killed in the middle of a call. Each is a process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from fault_lab.modes import MODES
from fault_lab.traffic import KEYS, LIMITS, PATIENCE, Tally, between, over
from fault_lab.workers import Worker
from servers.faketime import Skew

#: A busy machine must not exhaust it: budgets are the point of other tests.
AMPLE = 30.0


@pytest.fixture
def start_workers(valkey):
    """Makes workers of a store with an ample budget; a skew is the offset of a worker's clock."""
    with ExitStack() as stack:

        def gather(skews: list[Skew | None]) -> list[Worker]:
            workers = []
            for skew in skews:
                if skew is not None:
                    stack.callback(skew.close)
                workers.append(Worker(MODES["redis"], {"server": valkey.url, "timeout": AMPLE}, skew, pause=0.01))
                stack.callback(workers[-1].close)
            return workers

        yield gather


def seen_by(workers: list[Worker], name: str) -> list[Tally]:
    return [worker.tally(name) for worker in workers]


def wait_until(workers: list[Worker], name: str, so: Callable[[list[Tally]], bool]) -> bool:
    """Waits until the reports of this round fulfil the condition; False when they never did."""
    end = time.monotonic() + PATIENCE
    while not so(seen_by(workers, name)):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def stopped(workers: list[Worker], name: str, begun: float) -> tuple[Tally, list[Tally]]:
    """Ends a round: the reports of all together, and of each."""
    for worker in workers:
        worker.tell("stop")
    total = Tally()
    for worker in workers:
        assert worker.process.poll() is not None or worker.wait_for("total", name, 2 * PATIENCE)
        total.add(worker.tally(name))
    total.seconds = time.monotonic() - begun
    return total, seen_by(workers, name)


def used_up(each: list[Tally]) -> bool:
    return all(sum(tally.admitted[f"window {key}"] for tally in each) >= LIMITS["window"].capacity for key in KEYS)


def test_a_clients_clock_decides_nothing(start_workers, needs_faketime):
    """A client five seconds ahead and one five seconds behind are admitted exactly the limit together, and each is admitted
    some."""
    name, begun = f"clocks off {time.time_ns()}", time.monotonic()
    workers = start_workers([Skew(5), Skew(-5)])
    for worker in workers:
        worker.tell(f"round {name}")
    turns = wait_until(workers, name, lambda each: all(tally.bucket_at.total() > 3 for tally in each))
    wait_until(workers, name, used_up)
    time.sleep(0.5)
    total, _ = stopped(workers, name, begun)
    assert {total.admitted[f"window {key}"] for key in KEYS} == {LIMITS["window"].capacity}
    assert over(total, LIMITS) == {}
    assert total.strange == []
    assert turns, "a client was never admitted because of its clock"


def test_a_client_that_is_killed_takes_nothing_from_the_others(start_workers):
    """Of three clients two are killed -9 in the middle of their calls: the limit holds, and the third sees no error."""
    name, begun = f"killed {time.time_ns()}", time.monotonic()
    workers = start_workers([None, None, None])
    for worker in workers:
        worker.tell(f"round {name}")
    assert wait_until(workers, name, lambda each: all(tally.calls > 0 for tally in each)), "a client did not begin"
    for worker in workers[:2]:
        worker.kill()
    killed = time.monotonic()
    goes_on = wait_until(workers, name, lambda each: between(each[-1].bucket_at, killed) > 0)
    total, each = stopped(workers, name, begun)
    assert goes_on, "the third was not admitted any more"
    assert over(total, LIMITS) == {}
    assert (each[-1].errors.total(), each[-1].strange, each[-1].hung) == (0, [], 0)
