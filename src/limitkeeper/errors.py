"""Everything limitkeeper raises, drawn as a tree.

    LimitkeeperError
    ├── RateLimited           a wait or a decorated call was refused; carries `.decision`
    ├── InvalidLimit          also a ValueError: the text or numbers of a limit
    ├── InvalidCost           also a ValueError: a cost that is no whole number ≥ 0
    ├── ConfigurationError    things that do not go together
    ├── SeveralWorkers        also a UserWarning, and only ever warned of: several workers count for themselves
    └── StoreError            the place that keeps the state failed
        ├── StoreUnavailable  it could not be reached
        └── StoreTimeout      it did not answer in time

A refused `hit` is a value (a falsy `Decision`), never an exception.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .decision import Decision


class LimitkeeperError(Exception):
    """The base of every error of this package."""


class RateLimited(LimitkeeperError):
    """Refused. `decision` says by which limit and when to come back."""

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


class InvalidLimit(LimitkeeperError, ValueError):
    """The text or the numbers of a limit make no sense; the message shows them and what to write."""


class InvalidCost(LimitkeeperError, ValueError):
    """A cost must be an int ≥ 0."""


class ConfigurationError(LimitkeeperError):
    """Parts that do not go together, or a name that nobody knows."""


class SeveralWorkers(LimitkeeperError, UserWarning):
    """A warning: this process is one of several workers, and each keeps its limits in its own memory."""


class StoreError(LimitkeeperError):
    """The store failed."""


class StoreUnavailable(StoreError):
    """The store could not be reached."""


class StoreTimeout(StoreError):
    """The store did not answer within its budget."""
