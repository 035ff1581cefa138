"""What waiting for a permission raises."""

from __future__ import annotations

from ..errors import LimitkeeperError, RateLimited


class RequestNotPermitted(RateLimited):
    """Refused. `decision` says when to come back; `retry_after` is inf when more was asked for than can ever be there."""

    def __str__(self) -> str:
        d = self.decision
        if d.retry_after == float("inf"):
            return f"RateLimiter {d.name!r} can never permit this call: it holds at most {d.limit} permissions"
        return f"RateLimiter {d.name!r} does not permit this call within its timeout: try again in {d.retry_after:.3f} s"


class AcquirePermissionCancelled(LimitkeeperError):
    """Somebody set the `cancel` event of a caller that waited; what it had reserved was given back."""
