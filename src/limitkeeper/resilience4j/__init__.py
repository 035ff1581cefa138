"""Resilience4j's rate limiter in Python's spelling, with the refill-rate-limiter's gradual refill, on limitkeeper's token bucket.

    registry = RateLimiterRegistry.of(RateLimiterConfig(limit_for_period=10, limit_refresh_period="1s", timeout_duration=0))
    backend = registry.rate_limiter("backend")
    fetch = backend.decorate(fetch)               # waits for permission, or raises RequestNotPermitted

A RateLimiter is a `Limiter` over one `TokenBucket` and one key.
"""

from .config import Outcome, RateLimiterConfig
from .errors import AcquirePermissionCancelled, RequestNotPermitted
from .events import EventPublisher, EventType, RateLimiterEvent
from .rate_limiter import Metrics, RateLimiter
from .registry import RateLimiterRegistry

__all__ = [
    "AcquirePermissionCancelled",
    "EventPublisher",
    "EventType",
    "Metrics",
    "Outcome",
    "RateLimiter",
    "RateLimiterConfig",
    "RateLimiterEvent",
    "RateLimiterRegistry",
    "RequestNotPermitted",
]
