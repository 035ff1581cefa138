"""Resilience4j's rate limiter and bulkhead in Python's spelling; permissions refill gradually, as in the refill-rate-limiter.

    registry = RateLimiterRegistry.of(RateLimiterConfig(limit_for_period=10, limit_refresh_period="1s", timeout_duration=0))
    backend = registry.rate_limiter("backend")
    fetch = backend.decorate(fetch)               # waits for permission, or raises RequestNotPermitted

A RateLimiter is a `Limiter` over one `TokenBucket` and one key; a Bulkhead is a `limitkeeper.concurrency.Bulkhead`.
"""

from .bulkhead import Bulkhead, BulkheadConfig, BulkheadEvent, BulkheadEventType, BulkheadFull, BulkheadMetrics, BulkheadRegistry
from .config import Outcome, RateLimiterConfig
from .events import EventPublisher, EventType, RateLimiterEvent
from .rate_limiter import AcquirePermissionCancelled, Metrics, RateLimiter, RequestNotPermitted
from .registry import RateLimiterRegistry

__all__ = [
    "AcquirePermissionCancelled",
    "Bulkhead",
    "BulkheadConfig",
    "BulkheadEvent",
    "BulkheadEventType",
    "BulkheadFull",
    "BulkheadMetrics",
    "BulkheadRegistry",
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
