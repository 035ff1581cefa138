"""The exceptions of limitkeeper.

    LimitkeeperError
    ├── RateLimited           an acquire or a decorated call was refused; has `.decision`
    ├── BulkheadFull          all places of a bulkhead are taken, and none became free in time
    ├── InvalidLimit          also a ValueError: the text or numbers of a limit, or a duration, are invalid
    ├── InvalidCost           also a ValueError: a cost is not an int ≥ 0
    ├── ConfigurationError    options that can't be combined, or an unknown name
    ├── SeveralWorkers        also a UserWarning, never raised: several workers count separately in memory
    └── StoreError            the store failed
        ├── StoreUnavailable  it could not be reached
        └── StoreTimeout      it did not reply in time

A refused `hit` is a value (a falsy `Decision`), never an exception.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .decision import Decision


class LimitkeeperError(Exception):
    """Base class of all exceptions of this package."""


class RateLimited(LimitkeeperError):
    """A call was refused. `decision` has the limit that refused it and when to retry."""

    def __init__(self, decision: Decision) -> None:
        super().__init__(decision)
        self.decision = decision

    @property
    def retry_after(self) -> float:
        return self.decision.retry_after

    def __str__(self) -> str:
        d = self.decision
        if d.retry_after == float("inf"):
            return f"{d.name!r} can never admit this cost: its limit is {d.limit}"
        return f"{d.name!r} refused: try again in {d.retry_after:.3f} s"


class BulkheadFull(LimitkeeperError):
    """A bulkhead had no place for a call. `name` and `max_concurrent` are the bulkhead's."""

    def __init__(self, name: str, max_concurrent: int, reason: str) -> None:
        super().__init__(name, max_concurrent, reason)
        self.name, self.max_concurrent, self.reason = name, max_concurrent, reason

    def __str__(self) -> str:
        return f"bulkhead {self.name!r} of {self.max_concurrent} {self.reason}"


class InvalidLimit(LimitkeeperError, ValueError):
    """The text or the numbers of a limit, or a duration, are invalid; the message shows them and what was expected."""


class InvalidCost(LimitkeeperError, ValueError):
    """A cost must be an int ≥ 0."""


class ConfigurationError(LimitkeeperError):
    """Options that can't be combined, or an unknown name."""


class SeveralWorkers(LimitkeeperError, UserWarning):
    """Warning: this process is one of several workers, and each counts in its own memory."""


class StoreError(LimitkeeperError):
    """The store failed."""


class StoreUnavailable(StoreError):
    """The store could not be reached."""


class StoreTimeout(StoreError):
    """The store did not reply within its time budget."""
