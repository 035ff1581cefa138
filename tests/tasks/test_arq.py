"""limit_task for arq: jobs that come too early are put back for their wait, once each.

arq needs redis-py below 6, and the other tests use a newer one: `test_arq_environment.py` runs this file in its own environment.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

arq = pytest.importorskip("arq", reason="arq is not installed here: test_arq_environment.py runs this file where it is")

from limitkeeper import AsyncLimiter, ConfigurationError, Limiter, RateLimited  # noqa: E402
from limitkeeper.tasks.arq import limit_task  # noqa: E402
from servers.valkey import Valkey  # noqa: E402

HERE = Path(__file__).parent


@pytest.fixture
def ctx(valkey: Valkey) -> Any:
    """Makes the context that arq's worker gives a job, with a client of the real server."""
    valkey.client().flushall()

    def make(job_id: str, job_try: int = 1) -> dict[str, Any]:
        return {"job_id": job_id, "job_try": job_try, "redis": arq.ArqRedis(port=valkey.port)}

    return make


async def run(job: Any, ctx: dict[str, Any], *args: Any) -> Any:
    try:
        return await job(ctx, *args)
    finally:
        await ctx["redis"].aclose()


def test_a_job_too_early_is_put_back_once(ctx, store):
    """Of three jobs at once at 10/s, two are put back for 0.1 and 0.2 s, and run when they come back, without a decision."""

    @limit_task(AsyncLimiter("leaky bucket queue 10/s", store), key="mail")
    async def job(ctx: dict[str, Any], number: int) -> int:
        return number

    async def main() -> None:
        assert await run(job, ctx("0"), 0) == 0
        for number in (1, 2):
            with pytest.raises(arq.Retry) as raised:
                await run(job, ctx(str(number)), number)
            assert raised.value.defer_score == number * 100
        for number in (1, 2):
            assert await run(job, ctx(str(number), 2), number) == number
        with pytest.raises(arq.Retry):  # a run that fails and is tried again is a new one
            await run(job, ctx("2", 3), 2)

    asyncio.run(main())


def test_a_start_too_far_away_is_not_reserved(ctx, store):
    """A job whose start is beyond `max_countdown` is put back for at most that long, and is decided again."""
    limiter = AsyncLimiter("leaky bucket queue 1/h", store)

    @limit_task(limiter, key="mail", max_countdown="1min")
    async def job(ctx: dict[str, Any]) -> None:
        pass

    async def main() -> None:
        await run(job, ctx("0"))
        for job_try in (1, 2):
            with pytest.raises(arq.Retry) as raised:
                await run(job, ctx("1", job_try))
            assert raised.value.defer_score == 60_000
        assert (await limiter.peek("mail")).retry_after == 3600

    asyncio.run(main())


def test_a_cost_that_can_never_pass_fails_the_job(ctx, store):
    """A job that costs more than the limit can ever admit raises RateLimited."""

    @limit_task(AsyncLimiter("10/s burst 5", store), cost=lambda number: number)
    async def job(ctx: dict[str, Any], number: int) -> int:
        return number

    assert asyncio.run(run(job, ctx("0"), 5)) == 5
    with pytest.raises(RateLimited, match="can never admit"):
        asyncio.run(run(job, ctx("1"), 6))


def test_only_an_async_limiter_can_limit(store):
    """Another object instead of the limiter raises an error that shows the remedy."""
    with pytest.raises(ConfigurationError, match="expects an AsyncLimiter, got <Limiter"):
        limit_task(Limiter("10/s", store))  # type: ignore[arg-type]


@pytest.fixture
def workers(valkey: Valkey) -> Iterator[None]:
    """Two worker processes that run one job at a time."""
    valkey.client().flushall()
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "ARQ_TEST_SERVER": valkey.url, "PYTHONPATH": path}
    command = [sys.executable, "-m", "arq", "arq_jobs.WorkerSettings"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = [subprocess.Popen(command, env=environment, cwd=HERE, **quiet) for _ in range(2)]
    yield
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
    """Two workers run 60 jobs at 20/s: the n-th starts at least n intervals after the first was sent, all run once after at
    most one return to the queue, and a job without a limit does not wait behind them."""
    server = valkey.client()

    async def send(name: str, *numbers: int) -> None:
        pool = arq.ArqRedis(port=valkey.port)
        for number in numbers:
            await pool.enqueue_job(name, number)
        await pool.aclose()

    def both_work() -> bool:
        asyncio.run(send("unlimited", -1))
        time.sleep(0.05)
        return len({line.split()[2] for line in server.lrange("unlimited", 0, -1)}) == 2

    eventually(both_work)
    seconds, microseconds = server.time()
    sent = seconds * 1_000_000 + microseconds
    asyncio.run(send("limited", *range(60)))
    asyncio.run(send("unlimited", 0))
    eventually(lambda: server.llen("limited") == 60 and any(run[0] == 0 for run in runs_of(server, "unlimited")))
    runs = runs_of(server, "limited")
    assert sorted(number for number, *_ in runs) == list(range(60))
    starts = sorted(at for _, at, *_ in runs)
    assert all(at >= sent + number * 50_000 for number, at in enumerate(starts))
    assert {tries for *_, tries in runs} <= {1, 2}
    assert next(run[1] for run in runs_of(server, "unlimited") if run[0] == 0) < starts[-1]


def runs_of(server: Any, name: str) -> list[tuple[int, ...]]:
    """(number, microseconds, process, try) of every run, as the jobs have recorded them."""
    return [tuple(map(int, line.split())) for line in server.lrange(name, 0, -1)]
