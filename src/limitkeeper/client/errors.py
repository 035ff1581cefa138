"""The exceptions of outgoing calls. A call that would have to wait too long raises `RateLimited`, as everywhere."""

from __future__ import annotations

from typing import Any

from ..errors import LimitkeeperError, RateLimited


class RetriesExhausted(LimitkeeperError):
    """Every attempt was refused. `response` is the last one, with up to 64 KiB of its body; `reason` is "attempts", "budget" (too
    many retries to this host) or "time" (the next attempt would be too late)."""

    def __init__(self, host: str, attempts: int, reason: str, status: int, response: Any) -> None:
        super().__init__(host, attempts, reason, status, response)
        self.host, self.attempts, self.reason, self.status, self.response = host, attempts, reason, status, response

    def __str__(self) -> str:
        why = {"attempts": "no attempt is left", "budget": "the retry budget is empty", "time": "no time is left"}[self.reason]
        return f"{self.host!r} refused {self.attempts} attempts, the last with status {self.status}: {why}"


class Throttled(LimitkeeperError):
    """A call was not sent, because the server rejects most calls. `response` is the refusal of an attempt before, if any."""

    def __init__(self, host: str, probability: float, response: Any = None) -> None:
        super().__init__(host, probability, response)
        self.host, self.probability, self.response = host, probability, response

    def __str__(self) -> str:
        return f"{self.host!r} rejects most calls: {self.probability:.0%} are not sent"


class BudgetSpent(RateLimited):
    """A spend guard refused a call: the budget of this window is spent. `retry_after` is the time to the next window."""

    def __str__(self) -> str:
        d = self.decision
        if d.retry_after == float("inf"):
            return f"the budget {d.name!r} is smaller than this one call"
        return f"the budget {d.name!r} is spent; it starts again in {d.retry_after:.0f} s"


class ClientClosed(LimitkeeperError):
    """The limits of a client were closed: calls that wait end with this, and new ones are not sent."""
