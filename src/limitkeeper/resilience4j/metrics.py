"""What a RateLimiter can be asked about itself; each property is answered when it is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .permissions import KEY

if TYPE_CHECKING:
    from .rate_limiter import RateLimiter


class Metrics:
    """Live numbers of one RateLimiter."""

    def __init__(self, rate_limiter: RateLimiter) -> None:
        self._rate_limiter = rate_limiter

    @property
    def available_permissions(self) -> int:
        """Whole permissions there now; below zero when they are reserved ahead: −1 means that up to one is owed.

        Exact: what is there comes from a peek. Debt does not show in a peek, so it is read from the store's own state
        (at, taken, …), brought to the moment of that peek by the rule itself: floor((full − taken) / unit).
        """
        limiter = self._rate_limiter.limiter
        now = limiter.peek(KEY)
        if now.remaining > 0:
            return now.remaining
        (named,) = limiter.named
        limit = named.limit
        for key, state in limiter.store.items(named):
            if key == KEY:
                taken: int = limit.give_back(state, now.start_us // limit.tick, 0, -1)[1]
                return (limit.full - taken) // limit.unit
        return 0

    @property
    def number_of_waiting_threads(self) -> int:
        """Callers of this process that sleep until their permission comes: threads, and tasks too."""
        return self._rate_limiter.waiting()

    @property
    def nanos_to_wait(self) -> int:
        """Nanoseconds until one permission could be had, with no other traffic; 0 when it is there."""
        return self._rate_limiter.limiter.peek(KEY).retry_us * 1000

    def __repr__(self) -> str:
        return (
            f"Metrics(available_permissions={self.available_permissions}, "
            f"number_of_waiting_threads={self.number_of_waiting_threads}, nanos_to_wait={self.nanos_to_wait})"
        )
