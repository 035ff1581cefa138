"""Jobs for the tests, run by real arq workers: `arq arq_jobs.WorkerSettings`. The server is in the environment."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from arq.connections import RedisSettings

from limitkeeper import AsyncLimiter
from limitkeeper.tasks.arq import limit_task

URL = os.environ["ARQ_TEST_SERVER"]
limiter = AsyncLimiter("leaky bucket queue 20/s", store=URL, name="jobs")


async def note(ctx: dict[str, Any], name: str, number: int) -> None:
    """Records a run with the time of the server, which is also the limiter's."""
    seconds, microseconds = await ctx["redis"].time()
    await ctx["redis"].rpush(name, f"{number} {seconds * 1_000_000 + microseconds} {os.getpid()} {ctx['job_try']}")


@limit_task(limiter, key="mail")
async def limited(ctx: dict[str, Any], number: int) -> int:
    await note(ctx, "limited", number)
    return number


async def unlimited(ctx: dict[str, Any], number: int) -> int:
    await note(ctx, "unlimited", number)
    return number


class WorkerSettings:
    functions: ClassVar = [limited, unlimited]
    redis_settings = RedisSettings.from_dsn(URL)
    max_jobs = 1
    poll_delay = 0.05
