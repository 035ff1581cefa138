"""limit_task for Celery: tasks that come too early are published again with their wait as countdown, once each."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

celery = pytest.importorskip("celery", reason="Celery is not installed: pip install celery")

from celery.exceptions import Retry  # noqa: E402

from limitkeeper import AsyncLimiter, ConfigurationError, Limiter, MemoryStore, RateLimited  # noqa: E402
from limitkeeper.tasks.celery import HEADER, limit_task  # noqa: E402
from limitkeeper.testing import ManualClock  # noqa: E402
from servers.valkey import Valkey  # noqa: E402

HERE = Path(__file__).parent


class Message:
    """A message on the way to a worker: the values from which Celery makes a task's request."""

    def __init__(self, id: str, args: tuple[Any, ...] = (), headers: dict[str, Any] | None = None, retries: int = 0) -> None:
        self.id, self.args, self.headers, self.retries = id, args, headers, retries


class Queue:
    """A Celery application on kombu's broker in memory; `run` processes a message as a worker does."""

    def __init__(self) -> None:
        self.app = celery.Celery("unit", broker="memory://", backend="cache+memory://", set_as_current=False)
        self.app.conf.timezone = "UTC"

    def run(self, task: Any, message: Message) -> Any:
        task.push_request(
            id=message.id,
            args=message.args,
            kwargs={},
            headers=message.headers,
            retries=message.retries,
            called_directly=False,
            is_eager=False,
            delivery_info={},
        )
        celery._state._task_stack.push(task)
        try:
            return task.run(*message.args)
        finally:
            celery._state._task_stack.pop()
            task.pop_request()

    def published(self) -> list[tuple[Message, float]]:
        """The messages in the queue, each with its countdown in seconds."""
        found = []
        with self.app.connection_for_read() as connection, connection.SimpleQueue("celery") as queue:
            while queue.qsize():
                one = queue.get_nowait()
                one.ack()
                known = one.headers
                eta = datetime.fromisoformat(known["eta"])
                custom = {HEADER: known.get(HEADER)}
                found.append((Message(known["id"], tuple(one.payload[0]), custom, known["retries"]), eta.timestamp()))
        return found


@pytest.fixture
def queue() -> Queue:
    made = Queue()
    made.published()  # kombu's broker in memory is one for the whole process
    return made


def test_a_task_in_time_runs(queue, store):
    """A task whose start is now runs at once, and nothing is published."""
    task = queue.app.task(limit_task(Limiter("10/s burst 1", store))(abs_of))
    assert queue.run(task, Message("a", (-3,))) == 3
    assert queue.published() == []


def abs_of(number: int) -> int:
    return abs(number)


def test_a_task_too_early_is_published_again_once_with_its_wait(queue, store, clock):
    """Of five tasks at once at 10/s, four go back for 0.1 … 0.4 s, in order, and run when they come back, without another
    decision."""
    task = queue.app.task(limit_task(Limiter("leaky bucket queue 10/s", store))(abs_of))
    before = time.time()
    assert queue.run(task, Message("0", (0,))) == 0
    for number in range(1, 5):
        with pytest.raises(Retry) as raised:
            queue.run(task, Message(str(number), (-number,)))
        assert raised.value.when == number / 10
    found = queue.published()
    assert [message.id for message, _ in found] == ["1", "2", "3", "4"]
    assert [message.retries for message, _ in found] == [0, 0, 0, 0]
    assert all(eta >= before + number / 10 - 0.001 for number, (_, eta) in enumerate(found, 1))
    clock.advance(0.1)  # the clock is behind the later ones: they run on what they have reserved
    assert [queue.run(task, message) for message, _ in found] == [1, 2, 3, 4]
    assert queue.published() == []


def test_a_retry_of_the_task_is_decided_again(queue, store):
    """The reserved start is for one run: a message with one more retry is a new run, and goes back."""
    task = queue.app.task(limit_task(Limiter("leaky bucket queue 10/s", store))(abs_of))
    queue.run(task, Message("0", (0,)))
    with pytest.raises(Retry):
        queue.run(task, Message("1", (1,)))
    ((message, _),) = queue.published()
    assert queue.run(task, message) == 1
    message.retries += 1
    with pytest.raises(Retry):
        queue.run(task, message)


def test_a_start_too_far_away_is_not_reserved(queue, store):
    """A task whose start is beyond `max_countdown` goes back for at most that long, and is decided again."""
    limiter = Limiter("leaky bucket queue 1/h", store)
    task = queue.app.task(limit_task(limiter, key="k", max_countdown="1min")(abs_of))
    queue.run(task, Message("0", (0,)))
    with pytest.raises(Retry) as raised:
        queue.run(task, Message("1", (1,)))
    assert raised.value.when == 60
    ((message, _),) = queue.published()
    assert message.headers == {HEADER: None}
    with pytest.raises(Retry):
        queue.run(task, message)
    assert limiter.peek("k").retry_after == 3600


def test_key_and_cost_are_those_of_the_arguments(queue, store):
    """`key` and `cost` can be functions of the task's arguments; the default key is the task's name."""
    limiter = Limiter("10/s burst 5", store)
    task = queue.app.task(limit_task(limiter, key=lambda number: f"of {number}", cost=lambda number: number)(abs_of))
    queue.run(task, Message("0", (3,)))
    assert limiter.peek("of 3").remaining == 2
    plain = queue.app.task(name="plain")(limit_task(limiter)(abs_of))
    queue.run(plain, Message("0", (3,)))
    assert limiter.peek("plain").remaining == 4


def test_a_cost_that_can_never_pass_fails_the_task(queue, store):
    """A task that costs more than the limit can ever admit raises RateLimited instead of being republished for ever."""
    task = queue.app.task(limit_task(Limiter("10/s burst 5", store), cost=6)(abs_of))
    with pytest.raises(RateLimited, match="can never admit"):
        queue.run(task, Message("0", (1,)))
    assert queue.published() == []


def test_a_direct_call_that_may_not_run_raises(queue, store):
    """Outside of a worker there is no queue to go back to: a call that may not run now raises RateLimited."""
    task = queue.app.task(limit_task(Limiter("10/s burst 1", store))(abs_of))
    assert task(-1) == 1
    with pytest.raises(RateLimited):
        task(-1)
    with pytest.raises(RateLimited):
        task.apply((-1,), throw=True)


def test_only_a_limiter_can_limit(store):
    """Another object instead of the limiter raises an error that shows the remedy."""
    with pytest.raises(ConfigurationError, match="expects a Limiter, got '10/s'; create it with"):
        limit_task("10/s")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="expects a Limiter"):
        limit_task(AsyncLimiter("10/s", MemoryStore(clock=ManualClock())))  # type: ignore[arg-type]


# Two real workers and a real broker


@pytest.fixture
def workers(valkey: Valkey, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two worker processes that take one task at a time, and the application of the tests."""
    valkey.client().flushall()
    monkeypatch.setenv("CELERY_TEST_BROKER", valkey.url)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "celery", "-A", "celery_tasks", "worker", "-P", "solo", "-l", "error"]
    command += ["--without-gossip", "--without-mingle"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = [subprocess.Popen([*command, "-n", f"w{number}"], env=environment, cwd=HERE, **quiet) for number in range(2)]
    monkeypatch.delitem(sys.modules, "celery_tasks", raising=False)
    import celery_tasks

    try:
        yield celery_tasks
    finally:
        for process in started:
            process.terminate()
        for process in started:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.mark.slow
def test_all_workers_together_keep_the_limit(workers, valkey, eventually):
    """Two workers run 60 tasks at 20/s: the n-th starts at least n intervals after the first was sent, all run once, and a task
    without a limit does not wait behind them."""
    server = valkey.client()

    def both_work() -> bool:
        workers.unlimited.delay(-1)
        time.sleep(0.05)
        return len({line.split()[2] for line in server.lrange("unlimited", 0, -1)}) == 2

    eventually(both_work)
    seconds, microseconds = server.time()
    sent = seconds * 1_000_000 + microseconds
    for number in range(60):
        workers.limited.delay(number)
    workers.unlimited.delay(0)
    eventually(lambda: server.llen("limited") == 60 and any(run[0] == 0 for run in runs_of(server, "unlimited")))
    runs = runs_of(server, "limited")
    assert sorted(number for number, _, _ in runs) == list(range(60))
    starts = sorted(at for _, at, _ in runs)
    early = [sent + number * 50_000 - at for number, at in enumerate(starts)]
    assert max(early) <= 10_000  # Celery's timer is not exact to the millisecond
    assert next(run[1] for run in runs_of(server, "unlimited") if run[0] == 0) < starts[-1]


def runs_of(server: Any, name: str) -> list[tuple[int, ...]]:
    """(number, microseconds, process) of every run, as the tasks have recorded them."""
    return [tuple(map(int, line.split())) for line in server.lrange(name, 0, -1)]
