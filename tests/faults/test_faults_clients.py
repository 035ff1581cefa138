"""What goes wrong with clients: their clock is off, or they are killed in the middle of a call. Each is a process of its own."""

from __future__ import annotations

import time
from contextlib import ExitStack

from laboratory.crew import Worker
from laboratory.modes import MODES
from laboratory.traffic import KEYS, LIMITS, Tally, over
from servers.faketime import Skew


def worked(workers, name, seconds, halfway=lambda: None):
    """A round of traffic by several processes; what all of them saw, and each of them."""
    begun = time.monotonic()
    for worker in workers:
        worker.tell(f"round {name}")
    time.sleep(seconds / 2)
    halfway()
    time.sleep(seconds / 2)
    for worker in workers:
        worker.tell("stop")
    total, each = Tally(), []
    for worker in workers:
        assert worker.process.poll() is not None or worker.wait_for("total", name, 10)
        each.append(worker.tally(name))
        total.add(each[-1])
    total.seconds = time.monotonic() - begun
    return total, each


def test_a_clients_clock_decides_nothing(valkey, needs_faketime):
    """A client five seconds ahead and one five seconds behind are admitted exactly the limit together, and each has turns."""
    with ExitStack() as stack:
        workers = []
        for seconds in (5, -5):
            skew = Skew(seconds)
            stack.callback(skew.close)
            workers.append(Worker(MODES["redis"], {"server": valkey.url}, skew, pause=0.01))
            stack.callback(workers[-1].close)
        total, each = worked(workers, f"clocks off {time.time_ns()}", 3.0)
    assert {total.admitted[f"window {key}"] for key in KEYS} == {LIMITS["window"].capacity}
    assert over(total, LIMITS) == {}
    assert total.strange == []
    assert all(tally.bucket_at.total() > 3 for tally in each), "one of them was kept out by its clock"


def test_a_client_that_is_killed_takes_nothing_from_the_others(valkey):
    """Two of three clients killed -9 in the middle of their calls: nobody is admitted over the limit, the third sees no error."""
    with ExitStack() as stack:
        workers = []
        for _ in range(3):
            workers.append(Worker(MODES["redis"], {"server": valkey.url}, None, pause=0.01))
            stack.callback(workers[-1].close)
        total, each = worked(workers, f"killed {time.time_ns()}", 1.0, lambda: [worker.kill() for worker in workers[:2]])
    assert over(total, LIMITS) == {}
    assert (each[-1].errors.total(), each[-1].strange, each[-1].hung) == (0, [], 0)
    assert each[-1].unwell(time.monotonic() - 1.0) == ""
