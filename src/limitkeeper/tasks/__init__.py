"""Limits on the tasks of a queue, for all workers together: `tasks.celery` and `tasks.arq`.

A task that may not run yet is put back into the queue until its start, so that it does not hold a worker. The start is reserved:
when the task comes back, it runs without a second decision. Tasks thus keep their order, each is put back once, and the full
rate is used. Rejected: hits; every refused task would come back at the same `retry_after`, and all but one be refused again.
"""

__all__: list[str] = []
