"""Retry: which calls are repeated, when, and how often.

    wait before attempt n + 1 = what the server asks for + U(0, min(cap, base · 2^(n − 1)))        "full jitter"

U is uniform, so that clients that are refused together return evenly spread: of 1000 at most 10 % come in any twentieth of the
spread. Repeated are idempotent methods, and others that carry an Idempotency-Key header or are marked by the caller; never a
request whose body is a stream that was already sent. A token bucket per host bounds the retries: a failing server gets at most
its rate in additional calls. Rejected: exponential backoff without jitter, and a fixed share of jitter; both keep waves together.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from ..algorithms import TokenBucket
from ..errors import ConfigurationError
from ..rate import Duration, duration_us

IDEMPOTENT = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE"})
#: Too Many Requests, Bad Gateway, Service Unavailable, Gateway Timeout, and 529: overloaded.
STATUSES = frozenset({429, 502, 503, 504, 529})


@dataclass(frozen=True)
class Retry:
    """When and how often a refused or failed request is sent again.

    Attributes:
        attempts: how often a request is sent at most, the first time included; 1 never retries.
        base: the first interval over which returns are spread at random; it doubles with each attempt.
        cap: the longest such interval.
        budget: the token bucket of one host's retries.
        methods: those that may be repeated without being marked.
        statuses: the responses that count as refusals.
    """

    attempts: int = 4
    base: Duration = "500ms"
    cap: Duration = "30s"
    budget: TokenBucket | str = "1/s burst 10"
    methods: Collection[str] = IDEMPOTENT
    statuses: Collection[int] = STATUSES
    bucket: TokenBucket = field(init=False)
    base_us: int = field(init=False)
    cap_us: int = field(init=False)

    def __post_init__(self) -> None:
        if isinstance(self.attempts, bool) or not isinstance(self.attempts, int) or self.attempts < 1:
            raise ConfigurationError(f"attempts must be a whole number of at least 1, got {self.attempts!r}; 1 never retries")
        bucket = self.budget if isinstance(self.budget, TokenBucket) else TokenBucket(self.budget)
        # the fields are frozen
        vars(self).update(bucket=bucket, base_us=duration_us(self.base), cap_us=duration_us(self.cap))

    def spread_us(self, attempt: int) -> int:
        """The interval over which the returns after attempt number `attempt` are spread."""
        return min(self.cap_us, self.base_us << min(40, attempt - 1))
