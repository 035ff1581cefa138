"""Slow, exact models of every rule, against which the tests check the fast ones."""

from __future__ import annotations

from typing import Any

from limitkeeper import FixedWindow, LeakyBucket, LeakyBucketQueue, SlidingWindowCounter, SlidingWindowLog, TokenBucket

from .answer import Answer
from .bucket import BucketModel
from .counter import CounterModel
from .log import LogModel
from .queue import QueueModel
from .window import FixedWindowModel

MODELS: dict[type, Any] = {
    TokenBucket: BucketModel,
    LeakyBucket: BucketModel,
    LeakyBucketQueue: QueueModel,
    FixedWindow: FixedWindowModel,
    SlidingWindowLog: LogModel,
    SlidingWindowCounter: CounterModel,
}


def model_of(limit: Any, birth: int = 0) -> Any:
    """A model of this limit for one unseen key; `birth` (in ticks) is when the limit was first known."""
    return MODELS[type(limit)](limit, birth)


__all__ = ["MODELS", "Answer", "model_of"]
