"""limit_task for Celery: a limit on a task for all workers together (Celery's own `rate_limit` counts in each worker).

    @app.task
    @limit_task(Limiter("leaky bucket queue 10/s", store="redis://…"), key="mail")
    def send_mail(address): ...

A task that comes too early is published again with `countdown` = its wait, with the same id and the same number of retries, and
its state is RETRY until then. Its start is reserved, and noted in a header with the number of retries: a retry of the task's own
is a new run, and is decided again. Keep `max_countdown` below the broker's visibility timeout (Redis: one hour), or the broker
delivers the message twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from ..decorators import CostArgument, KeyArgument
from ..errors import ConfigurationError, RateLimited
from ..limiter import Limiter
from ..rate import Duration
from .requeue import Requeue, TaskLimit

try:
    from celery import current_task
    from celery.exceptions import Retry
except ImportError as error:
    raise ImportError("limitkeeper.tasks.celery needs Celery: pip install 'limitkeeper[celery]'") from error

P = ParamSpec("P")
R = TypeVar("R")
#: The header of a message whose start is reserved; its value is the number of retries of that run.
HEADER = "limitkeeper_start"


def limit_task(
    limiter: Limiter, *, key: KeyArgument | None = None, cost: CostArgument = 1, max_countdown: Duration = "10min"
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Limits a task; put it below `@app.task`. `key` and `cost` are values or functions of the task's arguments; the default key
    is the task's name. Outside of a worker (a direct call, eager mode) a call that may not run now raises `RateLimited`."""
    if not isinstance(limiter, Limiter):
        raise ConfigurationError(f"limit_task() expects a Limiter, got {limiter!r}; create it with Limiter('10/s', store=…)")
    options = TaskLimit(key, cost, max_countdown)

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name = f"{function.__module__}.{function.__qualname__}"

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            task = current_task._get_current_object() if current_task else None
            if task is None or task.request.called_directly or task.request.is_eager:
                decision = limiter.hit(*options.arguments(name, args, kwargs))
                if not decision:
                    raise RateLimited(decision)
            elif (task.request.headers or {}).get(HEADER) != task.request.retries:
                requeue = options.requeue(limiter.reserve(*options.arguments(task.name, args, kwargs), options.max_wait))
                if requeue is not None:
                    raise _published_again(task, requeue)
            return function(*args, **kwargs)

        return call

    return decorate


def _published_again(task: Any, requeue: Requeue) -> Retry:
    """Publishes the present message once more; the worker marks the task as RETRY when the result is raised."""
    request, seconds = task.request, requeue.milliseconds / 1000
    headers = {**(request.headers or {}), HEADER: request.retries if requeue.reserved else None}
    again = task.signature_from_request(request, countdown=seconds, retries=request.retries, headers=headers)
    again.apply_async()
    return Retry(f"limited for {seconds:g} s", when=seconds, sig=again)
