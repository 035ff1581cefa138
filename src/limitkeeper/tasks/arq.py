"""limit_task for arq: a limit on a coroutine that arq's workers run, for all workers together.

    @limit_task(AsyncLimiter("leaky bucket queue 10/s", store="redis://…"), key="mail")
    async def send_mail(ctx, address): ...

A job that comes too early raises `arq.Retry(defer=its wait)`, which puts it back and counts as one of its `max_tries`. Its start
is reserved, and noted under the job's id in arq's Redis until the job comes back.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, TypeVar

from ..decorators import CostArgument, KeyArgument
from ..errors import ConfigurationError
from ..limiter import AsyncLimiter
from ..rate import Duration
from .requeue import TaskLimit

try:
    from arq import Retry
except ImportError as error:
    raise ImportError("limitkeeper.tasks.arq needs arq: pip install 'limitkeeper[arq]'") from error

P = ParamSpec("P")
R = TypeVar("R")
Job = Callable[Concatenate[dict[str, Any], P], Awaitable[R]]
#: The prefix of the keys that note reserved starts, and how long after its start a job may still come back, in milliseconds.
PREFIX, LATEST_MS = "limitkeeper:arq:", 3_600_000


def limit_task(
    limiter: AsyncLimiter, *, key: KeyArgument | None = None, cost: CostArgument = 1, max_countdown: Duration = "10min"
) -> Callable[[Job[P, R]], Job[P, R]]:
    """Limits a job. `key` and `cost` are values or functions of the job's arguments (without `ctx`); the default key is the
    function's name."""
    if not isinstance(limiter, AsyncLimiter):
        raise ConfigurationError(f"limit_task() expects an AsyncLimiter, got {limiter!r}; create AsyncLimiter('10/s', store=…)")
    options = TaskLimit(key, cost, max_countdown)

    def decorate(function: Job[P, R]) -> Job[P, R]:
        @functools.wraps(function)
        async def call(ctx: dict[str, Any], /, *args: P.args, **kwargs: P.kwargs) -> R:
            note = f"{PREFIX}{ctx['job_id']}"
            if ctx["job_try"] == 1 or not await ctx["redis"].delete(note):
                arguments = options.arguments(function.__qualname__, args, kwargs)
                requeue = options.requeue(await limiter.reserve(*arguments, options.max_wait))
                if requeue is not None:
                    if requeue.reserved:
                        await ctx["redis"].set(note, 1, px=requeue.milliseconds + LATEST_MS)
                    raise Retry(defer=timedelta(milliseconds=requeue.milliseconds))
            return await function(ctx, *args, **kwargs)

        return call

    return decorate
