"""Errors of waiting for a permission: RequestNotPermitted and AcquirePermissionCancelled."""

from __future__ import annotations

from ..errors import LimitkeeperError, RateLimited


class RequestNotPermitted(RateLimited):
    """Refused. `decision` says when to retry; `retry_after` is inf when the number can never be available."""

    def __str__(self) -> str:
        d = self.decision
        if d.retry_after == float("inf"):
            return f"RateLimiter {d.name!r} can never permit this call: it holds at most {d.limit} permissions"
        return f"RateLimiter {d.name!r} does not permit this call within its timeout: try again in {d.retry_after:.3f} s"


class AcquirePermissionCancelled(LimitkeeperError):
    """The `cancel` event of a waiting caller was set; its reservation was given back."""
