"""Refill first, then take: the error of the other order, in figures."""

from hypothesis import example, given, settings
from hypothesis import strategies as st
from refill_orders import RecomputeWhenEmpty, RefillFirst, StoredFirst

from limitkeeper import MemoryStore
from limitkeeper.resilience4j import RateLimiter, RateLimiterConfig
from limitkeeper.testing import ManualClock

SECOND = 1_000_000_000


def limiter_of(limit, period, capacity=None, initial=None, timeout=0):
    clock = ManualClock()
    config = RateLimiterConfig(limit, period, timeout, permit_capacity=capacity, initial_permits=initial)
    return RateLimiter("backend", config, store=MemoryStore(clock=clock)), clock


def test_stored_first_admits_twenty_of_ten_after_idling():
    """The order of refill-rate-limiter, taken literally: the stored ten, and then the ten of the idle minute."""
    literal = StoredFirst(capacity=10, nanos_per_permission=SECOND // 10, permissions=10)
    assert [literal.reserve(60 * SECOND) for _ in range(30)].count(0) == 20


def test_refill_first_admits_ten_of_ten_after_idling():
    """limitkeeper after the same idle minute."""
    limiter, clock = limiter_of(10, "1s")
    clock.advance(60)
    assert [limiter.reserve_permission() for _ in range(30)].count(0) == 10


def test_recomputing_an_integer_loses_fractions():
    """10 per second, called every 70 ms for a minute: 428 admitted of the 600 that a minute refills."""
    literal = RecomputeWhenEmpty(maximum=10, interval=100)
    assert sum(literal.acquire(now) for now in range(70, 60_001, 70)) == 428


def test_refill_first_loses_no_fraction():
    """limitkeeper on the same calls admits every whole permission refilled by the last of them, at 59.99 s: 599."""
    limiter, clock = limiter_of(10, "1s", initial=0)
    admitted = 0
    for _ in range(70, 60_001, 70):
        clock.advance(0.07)
        admitted += limiter.acquire_permission()
    assert clock.now_us() == 59_990_000
    assert admitted == 599


def test_recomputing_admits_twice_the_maximum_too():
    """The integer bucket has the other error as well: after idling, its stored tokens and then the idle time's."""
    literal = RecomputeWhenEmpty(maximum=10, interval=100, tokens=10)
    assert sum(literal.acquire(60_000) for _ in range(30)) == 20


def test_where_nothing_is_stored_the_orders_agree():
    """With an empty bucket there is nothing to take first: the waits of reservations in a row are the same."""
    literal = StoredFirst(capacity=10, nanos_per_permission=SECOND // 10, permissions=0)
    limiter, _ = limiter_of(10, "1s", initial=0, timeout="1s")
    for permits in (1, 2, 3, 4, 1):
        assert limiter.reserve_permission(permits) == literal.reserve(0, permits, SECOND)


@settings(deadline=None, max_examples=150)
@given(
    limit=st.integers(1, 40),
    period_ns=st.sampled_from([1, 7, 333, 500, 1000, 12_345, 100_000_000, 999_999_999, 1_000_000_000, 60_000_000_000]),
    extra=st.integers(0, 20),
    share=st.integers(0, 100),
    steps=st.lists(st.tuples(st.integers(0, 3_000_000), st.integers(1, 60), st.integers(0, 5_000_000)), min_size=1, max_size=25),
)
@example(limit=1, period_ns=1, extra=0, share=0, steps=[(0, 1, 1)])  # many permissions are refilled in a tick of the clock
def test_limitkeeper_answers_as_the_exact_time_index_does(limit, period_ns, extra, share, steps):
    """Any rate, waits and permissions, positive and negative, are those of the model in fractions, to the nanosecond."""
    capacity = limit + extra
    initial = capacity * share // 100
    limiter, clock = limiter_of(limit, f"{period_ns}ns", capacity, initial)
    model = RefillFirst(capacity, limit, period_ns, initial)
    for step_us, asked, timeout_us in steps:
        clock.advance(step_us / 1e6)
        now = clock.now_us() * 1000
        permits = min(asked, capacity)
        limiter.change_timeout_duration(f"{timeout_us}us")
        assert limiter.reserve_permission(permits) == model.reserve(now, permits, timeout_us * 1000)
        assert limiter.metrics.available_permissions == model.available(now)
