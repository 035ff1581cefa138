"""A Celery task at 10 per second, over all workers. Run it with: celery --app celery_task worker"""

import os

from celery import Celery

from limitkeeper import Limiter
from limitkeeper.tasks.celery import limit_task

REDIS = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379")

app = Celery("celery_task", broker=REDIS, backend=REDIS)
mails = Limiter("leaky bucket queue 10/s", store=REDIS, name="mails")


@app.task
@limit_task(mails, key="mails")
def send_mail(address: str) -> str:
    return f"sent to {address}"


if __name__ == "__main__":
    waiting = [send_mail.delay(f"user{number}@example.com") for number in range(5)]
    print([mail.get(timeout=60) for mail in waiting])
