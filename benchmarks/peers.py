"""The peers, each called as in its own documentation, without code of ours in between.

A peer is a statement and the names in it; `k` is the key. `throttled-py` gets room for four million keys (else it keeps 1024, and
forgets exhausted ones). `pyrate-limiter` has no store for many keys, so it gets the factory that its documentation describes,
with a dict in it. `aiolimiter` and `asynciolimiter` have no keys and can't refuse.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

Build = Callable[[int, int], dict[str, Any]]


class Peer(NamedTuple):
    """`build(count, seconds)` makes the names used in `call`. A log gets a new key for each batch: it stays short."""

    package: str
    rule: str
    call: str
    build: Build
    log: bool = False

    @property
    def name(self) -> str:
        return f"{self.package}, {self.rule}"


def limits_with(strategy: str) -> Build:
    def build(count: int, seconds: int) -> dict[str, Any]:
        from limits import RateLimitItemPerSecond, storage, strategies

        return {"o": getattr(strategies, strategy)(storage.MemoryStorage()), "item": RateLimitItemPerSecond(count, seconds)}

    return build


def limits_aio(count: int, seconds: int) -> dict[str, Any]:
    from limits import RateLimitItemPerSecond
    from limits.aio import storage, strategies

    return {"o": strategies.FixedWindowRateLimiter(storage.MemoryStorage()), "item": RateLimitItemPerSecond(count, seconds)}


def throttled_with(using: str) -> Build:
    def build(count: int, seconds: int) -> dict[str, Any]:
        from throttled import MemoryStore, Throttled, per_duration

        quota = per_duration(timedelta(seconds=seconds), limit=count, burst=count)
        return {"o": Throttled(using=using, quota=quota, store=MemoryStore(options={"MAX_SIZE": 4_000_000}))}

    return build


def throttled_aio(count: int, seconds: int) -> dict[str, Any]:
    from throttled.asyncio import MemoryStore, Throttled, per_duration

    quota = per_duration(timedelta(seconds=seconds), limit=count, burst=count)
    return {"o": Throttled(using="token_bucket", quota=quota, store=MemoryStore(options={"MAX_SIZE": 4_000_000}))}


def pyrate_with(algorithm: str) -> Build:
    def build(count: int, seconds: int) -> dict[str, Any]:
        import pyrate_limiter as pyrate

        class Buckets(pyrate.BucketFactory):
            def __init__(self) -> None:
                self.clock = pyrate.MonotonicClock()
                self.buckets: dict[str, Any] = {}

            def wrap_item(self, name: str, weight: int = 1) -> Any:
                return pyrate.RateItem(name, self.clock.now(), weight=weight)

            def get(self, item: Any) -> Any:
                bucket = self.buckets.get(item.name)
                if bucket is None:
                    bucket = pyrate.StateBucket([pyrate.Rate(count, seconds * 1000)], getattr(pyrate, algorithm)())
                    self.buckets[item.name] = bucket
                return bucket

        return {"o": pyrate.Limiter(Buckets())}

    return build


def token_bucket(count: int, seconds: int) -> dict[str, Any]:
    from token_bucket import Limiter, MemoryStorage

    return {"o": Limiter(count / seconds, count, MemoryStorage())}


def rust_with(algorithm: str) -> Build:
    def build(count: int, seconds: int) -> dict[str, Any]:
        from rust_py_rate_limit import RateLimiter

        return {"o": RateLimiter(limit=count, window_seconds=seconds, algorithm=algorithm)}

    return build


def aiolimiter(count: int, seconds: int) -> dict[str, Any]:
    from aiolimiter import AsyncLimiter

    return {"o": AsyncLimiter(count, seconds)}


def asynciolimiter(count: int, seconds: int) -> dict[str, Any]:
    from asynciolimiter import LeakyBucketLimiter

    return {"o": LeakyBucketLimiter(count / seconds, capacity=count)}


SYNC = (
    Peer("limits", "fixed window", "o.hit(item, k)", limits_with("FixedWindowRateLimiter")),
    Peer("limits", "sliding counter", "o.hit(item, k)", limits_with("SlidingWindowCounterRateLimiter")),
    Peer("limits", "sliding log", "o.hit(item, k)", limits_with("MovingWindowRateLimiter"), log=True),
    Peer("throttled-py", "token bucket", "o.limit(k)", throttled_with("token_bucket")),
    Peer("throttled-py", "GCRA", "o.limit(k)", throttled_with("gcra")),
    Peer("throttled-py", "leaky bucket", "o.limit(k)", throttled_with("leaking_bucket")),
    Peer("throttled-py", "fixed window", "o.limit(k)", throttled_with("fixed_window")),
    Peer("throttled-py", "sliding counter", "o.limit(k)", throttled_with("sliding_window")),
    Peer("pyrate-limiter", "GCRA", "o.try_acquire(k, blocking=False)", pyrate_with("GCRA")),
    Peer("pyrate-limiter", "token bucket", "o.try_acquire(k, blocking=False)", pyrate_with("TokenBucket")),
    Peer("token-bucket", "token bucket", "o.consume(k)", token_bucket),
    Peer("rust-py-rate-limit", "fixed window, bare bool", "o.allow(k)", rust_with("fixed")),
    Peer("rust-py-rate-limit", "sliding counter, bare bool", "o.allow(k)", rust_with("sliding")),
    Peer("rust-py-rate-limit", "fixed window, with retry-after", "o.check(k)", rust_with("fixed")),
)

ASYNC = (
    Peer("aiolimiter", "leaky bucket, no keys, waits only", "await o.acquire()", aiolimiter),
    Peer("asynciolimiter", "leaky bucket, no keys, waits only", "await o.wait()", asynciolimiter),
    Peer("limits", "fixed window", "await o.hit(item, k)", limits_aio),
    Peer("throttled-py", "token bucket", "await o.limit(k)", throttled_aio),
    Peer("pyrate-limiter", "GCRA", "await o.try_acquire_async(k, blocking=False)", pyrate_with("GCRA")),
)


def named(package: str, rule: str) -> Peer:
    """One of the synchronous peers."""
    return next(peer for peer in SYNC if peer.package == package and peer.rule.startswith(rule))
