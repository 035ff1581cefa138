"""The whole public API with the types that a user expects. Read by mypy, never executed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from typing import Any, assert_type

from limitkeeper import (
    GCRA,
    AsyncLimiter,
    BulkheadFull,
    ConfigurationError,
    Decision,
    FixedWindow,
    GuardedStore,
    InvalidCost,
    InvalidLimit,
    LeakyBucket,
    LeakyBucketQueue,
    LeasedStore,
    Limit,
    Limiter,
    LimitkeeperError,
    MemoryStore,
    RateLimited,
    RedisStore,
    RemoteStore,
    Reservation,
    SeveralWorkers,
    ShardedStore,
    SharedStore,
    SlidingWindowCounter,
    SlidingWindowLog,
    StoreError,
    StoreTimeout,
    StoreUnavailable,
    TokenBucket,
    compiled,
    store_from_url,
)
from limitkeeper.observe import Event, Publisher
from limitkeeper.stores import Store
from limitkeeper.testing import ManualClock, unlimited


def limits() -> list[Limit]:
    bucket = TokenBucket("5/s burst 10")
    assert_type(bucket, TokenBucket)
    assert_type(bucket.count, int)
    assert_type(bucket.period, int)
    assert_type(bucket.capacity, int)
    assert_type(bucket.burst, int)
    assert_type(str(bucket), str)
    assert_type(hash(bucket), int)
    assert_type(bucket == TokenBucket(5, per=1, burst=10, initial=0), bool)
    assert_type(GCRA("5/s"), TokenBucket)
    return [
        bucket,
        TokenBucket(5, per="minute"),
        TokenBucket(5, per=timedelta(minutes=1)),
        TokenBucket(5, per=0.5),
        LeakyBucket("5/s", 10),
        LeakyBucket("5/s", capacity=10),
        LeakyBucketQueue("5/s"),
        LeakyBucketQueue("5/s", capacity=10),
        FixedWindow("1000/min"),
        FixedWindow("1000/min", align="first"),
        SlidingWindowLog("5/min"),
        SlidingWindowCounter("5/min"),
    ]


def stores() -> None:
    clock = ManualClock(start=0.0)
    assert_type(clock.now_us(), int)
    clock.advance(1.5)
    assert_type(store_from_url("memory://"), Store)
    with MemoryStore(max_keys=1000, clock=clock) as store:
        assert_type(len(store), int)
        store.sweep()
        Limiter("5/s", store=store)
    Limiter("5/s", store="memory://?max_keys=10", name="search")
    far = ShardedStore([LeasedStore(RedisStore("redis://one"), lease=50), RedisStore("redis://two", prefix="app")])
    nodes = ShardedStore({"a": RemoteStore("limitkeeper://one", timeout="50ms"), "b": RemoteStore("limitkeeper://two:7071")})
    Limiter("5/s", store=far)
    Limiter("5/s", store=nodes)
    guarded = GuardedStore(SharedStore("/run/limits"), budget="20ms", on_failure="local", share="1/4")
    assert_type(guarded.state, str)
    assert_type(guarded.stats().degraded, int)
    assert_type(guarded.events, Publisher)
    assert_type(guarded.answered_here(Limiter("5/s", store=guarded).hit("a")), bool)
    assert_type(compiled, bool)


def answers(decision: Decision) -> None:
    assert_type(decision.allowed, bool)
    assert_type(bool(decision), bool)
    assert_type(decision.limit, int)
    assert_type(decision.remaining, int)
    assert_type(decision.retry_after, float)
    assert_type(decision.reset_after, float)
    assert_type(decision.wait, float)
    assert_type(decision.name, str)
    assert_type(decision.decisions, tuple[Decision, ...])
    assert_type(decision.to_dict(), dict[str, Any])
    assert_type(decision == decision, bool)
    assert_type(hash(decision), int)


def one_colour() -> None:
    limiter = Limiter(TokenBucket("5/s burst 10"))
    assert_type(limiter.hit("user:42"), Decision)
    assert_type(limiter.hit("user:42", 3), Decision)
    assert_type(limiter.peek("user:42", cost=3), Decision)
    assert_type(limiter.acquire("user:42", cost=2, timeout=2.0), Decision)
    assert_type(limiter.acquire("user:42", timeout="250ms"), Decision)
    assert_type(limiter.acquire("user:42", timeout=timedelta(seconds=1)), Decision)
    assert_type(limiter.acquire("user:42", timeout=None), Decision)
    assert_type(limiter.hit_many(["a", "b"]), list[Decision])
    assert_type(limiter.hit_many(iter("ab"), cost=[1, 2]), list[Decision])
    limiter.refund("user:42", cost=2)
    limiter.reset("user:42")
    assert_type(limiter.waiting(), int)
    assert_type(limiter.waiting("user:42"), int)
    stats = limiter.stats()
    assert_type(stats.allowed, int)
    assert_type(stats.refused, int)
    assert_type(stats.waiting, int)
    assert_type(stats.keys, int)
    assert_type(stats.overflow, int)
    assert_type(limiter.name, str)
    with limiter.reserve("user:42", cost=500, max_wait=5) as reservation:
        assert_type(reservation, Reservation)
        assert_type(reservation.wait, float)
        assert_type(reservation.decision, Decision)
        assert_type(reservation.settle(425), bool)
        assert_type(reservation.cancel(), bool)
    with Limiter("5/s") as acquired:
        assert_type(acquired, Decision)
    assert_type(limiter.hit(), Decision)
    assert_type(limiter.acquire(timeout=1), Decision)
    limiter.close()
    with unlimited():
        limiter.hit("user:42")


def several() -> None:
    limiter = Limiter({"user": TokenBucket("5/s burst 10"), "tenant": FixedWindow("1000/min")})
    assert_type(limiter.hit({"user": "u42", "tenant": "acme"}, cost={"tenant": 3}), Decision)
    assert_type(limiter.hit({"user": "u42", "tenant": None}), Decision)
    assert_type(limiter.hit_many([{"user": "u42", "tenant": None}, "u43"]), list[Decision])
    limiter.reserve("a", cost={"tenant": 500}).settle({"tenant": 425})
    Limiter("token bucket 5/s burst 10; fixed window 1000/min")
    Limiter([TokenBucket("5/s"), "fixed window 1000/min"])
    Limiter({"user": "5/s", "tenant": FixedWindow("9/s")})


async def the_other_colour() -> None:
    limiter = AsyncLimiter(TokenBucket("5/s burst 10"))
    assert_type(await limiter.hit("user:42"), Decision)
    assert_type(await limiter.peek("user:42", cost=3), Decision)
    assert_type(await limiter.acquire("user:42", cost=2, timeout=2.0), Decision)
    assert_type(await limiter.hit_many(["a", "b"], cost=[1, 2]), list[Decision])
    await limiter.refund("user:42", cost=2)
    await limiter.reset("user:42")
    assert_type(limiter.waiting(), int)
    assert_type(limiter.stats().allowed, int)
    async with limiter.reserve("user:42", cost=500, max_wait="5s") as reservation:
        assert_type(reservation.decision, Decision)
        assert_type(reservation.wait, float)
        assert_type(await reservation.settle(425), bool)
    held = await limiter.reserve("user:42")
    assert_type(await held.cancel(), bool)
    async with AsyncLimiter("5/s") as acquired:
        assert_type(acquired, Decision)
    assert_type(await limiter.hit(cost=2), Decision)
    await limiter.aclose()


limiter = Limiter("5/s")


@limiter.limit(key=lambda user, size: user, cost=lambda user, size: size)
def upload(user: str, size: int) -> bytes:
    return user.encode() * size


@limiter.limit(key="everybody", timeout="1s")
async def fetch(url: str) -> str:
    return url


@limiter.limit(key="everybody")
def numbers(to: int) -> Iterator[int]:
    yield from range(to)


@limiter.limit(key="everybody")
async def later(to: int) -> AsyncIterator[int]:
    for number in range(to):
        yield number


class Account:
    @limiter.limit(key=lambda self: "account")
    def touch(self, times: int = 1) -> list[str]:
        return ["touched"] * times


async def decorated() -> None:
    assert_type(upload("ann", size=3), bytes)
    assert_type(await fetch("a"), str)
    assert_type(numbers(3), Iterator[int])
    assert_type(later(3), AsyncIterator[int])
    assert_type(Account().touch(2), list[str])


def events() -> None:
    def received(event: Event) -> None:
        assert_type(event.kind, str)
        assert_type(event.limiter, str)

    assert_type(limiter.events, Publisher)
    stop = limiter.events.on("refused", received)
    assert_type(stop, Callable[[], None])
    stop()


def failing() -> None:
    try:
        limiter.acquire("a", timeout=0)
    except RateLimited as refused:
        assert_type(refused.decision, Decision)
        assert_type(refused.retry_after, float)
    kinds: list[type[LimitkeeperError]] = [
        ConfigurationError,
        BulkheadFull,
        InvalidCost,
        InvalidLimit,
        StoreError,
        StoreTimeout,
        StoreUnavailable,
    ]
    wrong: list[type[ValueError]] = [InvalidCost, InvalidLimit]
    warned: list[type[UserWarning]] = [SeveralWorkers]
    print(kinds, wrong, warned)
