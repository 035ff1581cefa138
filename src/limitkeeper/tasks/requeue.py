"""TaskLimit: the common part of the decorators of all task queues: the key and cost of a task, and how long it is put back."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from ..decorators import Args, CostArgument, KeyArgument, Kwargs, called, key_of
from ..errors import RateLimited
from ..limiter_base import Cost, Key
from ..rate import Duration, duration_us
from ..reservation import Charge


class Requeue(NamedTuple):
    """A task is put back for so many milliseconds; `reserved`: its start is charged, and it runs when it comes back."""

    milliseconds: int
    reserved: bool


class TaskLimit:
    """The options of a decorator. `key` None is the name of the task."""

    def __init__(self, key: KeyArgument | None, cost: CostArgument, max_countdown: Duration) -> None:
        self._key, self._cost = key, cost
        self.max_wait_us = duration_us(max_countdown)
        self.max_wait = self.max_wait_us / 1e6

    def arguments(self, name: str, args: Args, kwargs: Kwargs) -> tuple[Key, Cost]:
        """The key and cost of one task."""
        return name if self._key is None else key_of(self._key, args, kwargs), called(self._cost, args, kwargs)

    def requeue(self, charge: Charge) -> Requeue | None:
        """None: the task runs now. A start beyond the longest countdown is not reserved: the task asks again then."""
        decision = charge.decision
        if decision:
            return Requeue(ceil(decision.wait_us / 1000), True) if decision.wait_us else None
        if decision.retry_us < 0:
            raise RateLimited(decision)
        return Requeue(ceil(min(decision.retry_us or 1, self.max_wait_us) / 1000), False)
