"""Request: one operation of a store that a server answers, as connections and batches see it."""

from __future__ import annotations

import asyncio
from typing import Any, Generic, TypeVar

from ...errors import StoreError

T = TypeVar("T")


class Request(Generic[T]):
    """When it is not `pending` any more, `answer` is its answer."""

    __slots__ = ("answer", "error", "future", "in_flight", "pending", "used")

    answer: T
    pending: bool
    in_flight: bool  # sent in a batch, and neither answered nor failed
    error: StoreError | None  # after `Route.execute`
    future: asyncio.Future[None]  # of the task that waits for it, in a batch
    used: float  # seconds of the budget that were used before it was submitted to a batch


AnyRequest = Request[Any]
