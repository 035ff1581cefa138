"""A Celery application for the tests, run by real workers: `celery -A celery_tasks worker`. The broker is in the environment."""

from __future__ import annotations

import os

import redis
from celery import Celery

from limitkeeper import Limiter
from limitkeeper.tasks.celery import limit_task

URL = os.environ["CELERY_TEST_BROKER"]
app = Celery("celery_tasks", broker=URL, backend=URL)
app.conf.update(broker_connection_retry_on_startup=True, worker_hijack_root_logger=False)
limiter = Limiter("leaky bucket queue 20/s", store=URL, name="tasks")


def note(name: str, number: int) -> None:
    """Records a run with the time of the server, which is also the limiter's."""
    server = redis.Redis.from_url(URL)
    seconds, microseconds = server.time()  # type: ignore[misc]
    server.rpush(name, f"{number} {seconds * 1_000_000 + microseconds} {os.getpid()}")


@app.task
@limit_task(limiter, key="mail")
def limited(number: int) -> int:
    note("limited", number)
    return number


@app.task
def unlimited(number: int) -> int:
    note("unlimited", number)
    return number
