"""A RateLimiter's permissions: taken, reserved, drained, changed. All on a manual clock."""

import pickle

import pytest

from limitkeeper import ConfigurationError, InvalidCost, InvalidLimit, MemoryStore, RateLimited
from limitkeeper.resilience4j import RateLimiter, RateLimiterConfig, RequestNotPermitted
from limitkeeper.testing import ManualClock, unlimited
from stand_ins import WrappedStore


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def make(clock):
    def make(limit=10, period="1s", timeout=0, **options):
        return RateLimiter("backend", RateLimiterConfig(limit, period, timeout, **options), store=MemoryStore(clock=clock))

    return make


def available(limiter):
    return limiter.metrics.available_permissions


# The numbers of refill-rate-limiter: 10 per second, capacity 10, 2 at the start -----------------------------------------------


def test_at_the_start_one_of_two_is_taken(make):
    """t = 0: take 1, one is left."""
    limiter = make(initial_permits=2)
    assert limiter.reserve_permission() == 0
    assert available(limiter) == 1


def test_at_50_ms_two_are_refused_without_patience_and_nothing_changes(make, clock):
    """1.5 are available: with a timeout of 0 the result is −1, and the half stays."""
    limiter = make(initial_permits=2)
    limiter.reserve_permission()
    clock.advance(0.05)
    assert limiter.reserve_permission(2) == -1
    assert available(limiter) == 1
    clock.advance(0.05)
    assert limiter.reserve_permission(2) == 0


def test_at_50_ms_two_wait_50_ms_with_patience(make, clock):
    """With a timeout of 100 ms the half that is missing is reserved: 50 000 000 ns."""
    limiter = make(initial_permits=2, timeout="100ms")
    limiter.reserve_permission()
    clock.advance(0.05)
    assert limiter.reserve_permission(2) == 50_000_000
    assert available(limiter) == -1
    clock.advance(0.05)
    assert available(limiter) == 0


def test_at_50_ms_a_blocked_caller_sleeps_50_ms(make, clock):
    """acquire_permission sleeps on the store's clock until its permissions are there."""
    limiter = make(initial_permits=2, timeout="100ms")
    limiter.acquire_permission()
    clock.advance(0.05)
    assert limiter.acquire_permission(2)
    assert clock.now_us() == 100_000


def test_at_5_s_four_of_ten_leave_six(make, clock):
    """The bucket is full, not fuller: take 4, 6 are left."""
    limiter = make(initial_permits=2, timeout="100ms")
    limiter.reserve_permission()
    clock.advance(0.05)
    limiter.reserve_permission(2)
    clock.advance(4.95)
    assert limiter.reserve_permission(4) == 0
    assert available(limiter) == 6


# Taking ------------------------------------------------------------------------------------------------------------------------


def test_permissions_grow_gradually(make, clock):
    """One after 100 ms, not ten after a second."""
    limiter = make(initial_permits=0)
    seen = []
    for _ in range(12):
        clock.advance(0.1)
        seen.append(available(limiter))
    assert seen == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 10]


def test_reservations_line_up_in_the_future(make, clock):
    """Each reservation starts where the last one ended; the debt is paid by time."""
    limiter = make(initial_permits=0, timeout="1s")
    assert [limiter.reserve_permission(n) for n in (1, 2, 3)] == [100_000_000, 300_000_000, 600_000_000]
    assert available(limiter) == -6
    assert limiter.reserve_permission(5) == -1
    assert available(limiter) == -6
    assert limiter.metrics.nanos_to_wait == 700_000_000
    clock.advance(0.65)
    assert available(limiter) == 0
    assert limiter.metrics.nanos_to_wait == 50_000_000


def test_a_refusal_is_immediate(make, clock):
    """A wait longer than the timeout is refused at once; no caller sleeps through the timeout."""
    limiter = make(initial_permits=0, timeout="99ms")
    assert not limiter.acquire_permission()
    assert clock.now_us() == 0
    assert available(limiter) == 0


def test_the_timeout_itself_is_long_enough(make, clock):
    """A wait exactly as long as the timeout is granted, one microsecond more is not."""
    assert make(initial_permits=0, timeout="100ms").acquire_permission()
    assert clock.now_us() == 100_000
    assert make(initial_permits=0, timeout="99999us").reserve_permission() == -1


@pytest.mark.parametrize("verb", ["acquire_permission", "reserve_permission", "wait_for_permission"])
def test_more_than_the_capacity_is_an_error(make, verb):
    """It can never be granted, so it is an error instead of a refusal; nothing changes."""
    limiter = make(timeout="1d")
    with pytest.raises(RequestNotPermitted, match="can never permit this call: it holds at most 10 permissions") as caught:
        getattr(limiter, verb)(11)
    assert caught.value.retry_after == float("inf")
    assert available(limiter) == 10


def test_wait_for_permission_raises_with_the_retry_time(make):
    """RequestNotPermitted is a RateLimited with its decision."""
    limiter = make(initial_permits=0)
    with pytest.raises(RequestNotPermitted, match="'backend' does not permit this call within its timeout") as caught:
        limiter.wait_for_permission(3)
    assert isinstance(caught.value, RateLimited)
    assert caught.value.retry_after == 0.3
    assert pickle.loads(pickle.dumps(caught.value)).retry_after == 0.3


@pytest.mark.parametrize("permits", [-1, 1.0, True, "1", None])
def test_permits_are_whole_numbers(make, permits):
    """Anything else is an error, and no event."""
    limiter, received = make(), []
    limiter.event_publisher.on_event(received.append)
    for verb in (limiter.acquire_permission, limiter.reserve_permission, limiter.wait_for_permission):
        with pytest.raises(InvalidCost):
            verb(permits)
    assert received == []


def test_asking_for_nothing_is_granted_at_once(make):
    """No permission is needed for no permits, whatever is reserved ahead."""
    limiter = make(initial_permits=0, timeout="1s")
    limiter.reserve_permission(5)
    assert limiter.reserve_permission(0) == 0
    assert available(limiter) == -5


def test_the_default_config_makes_no_caller_wait(make):
    """50 per 500 ns: a million a second pass a clock of microseconds untouched."""
    limiter = RateLimiter.of_defaults("quick", store=MemoryStore(clock=(clock := ManualClock())))
    for _ in range(1000):
        assert limiter.reserve_permission(50) == 0
        clock.advance(0.000_001)


def test_what_grows_within_a_microsecond_is_not_held_beyond_the_capacity(make):
    """100 per µs with room for 50: reservations come 50 to a microsecond, the clock's resolution."""
    limiter = RateLimiter("quick", RateLimiterConfig(), store=MemoryStore(clock=ManualClock()))
    assert [limiter.reserve_permission(50) for _ in range(4)] == [0, 1000, 2000, 3000]


def test_a_rate_limiter_is_a_limitkeeper_limiter(make):
    """One token bucket, one key, the limiter's own counters."""
    limiter = make()
    limiter.acquire_permission(4)
    limiter.reserve_permission(6)
    limiter.reserve_permission(1)
    assert {name: str(limit) for name, limit in limiter.limiter.limits.items()} == {"backend": "token bucket 10/s burst 10"}
    assert limiter.limiter.stats()[:2] == (2, 1)
    assert len(limiter.store) == 1


def test_rate_limiters_of_one_name_and_store_share_permissions(clock):
    """State belongs to the name; without a common store they are independent."""
    store, config = MemoryStore(clock=clock), RateLimiterConfig(10, "1s", 0)
    one, same, other = RateLimiter("b", config, store=store), RateLimiter("b", config, store=store), RateLimiter("b", config)
    one.acquire_permission(7)
    assert (available(same), available(other)) == (3, 10)


def test_limiting_can_be_turned_off_in_tests(make):
    """Within `unlimited()` every call passes."""
    limiter = make(initial_permits=0)
    with unlimited():
        assert limiter.acquire_permission(10)
        assert limiter.reserve_permission(10) == 0
    assert not limiter.acquire_permission()


def test_a_rate_limiter_wants_a_config():
    """A function that returns one goes to `of`."""
    with pytest.raises(ConfigurationError, match="expected a RateLimiterConfig"):
        RateLimiter("b", {"limit_for_period": 5})
    assert RateLimiter.of("b", lambda: RateLimiterConfig(5, "1s")).config == RateLimiterConfig(5, "1s")
    assert RateLimiter.of("b", RateLimiterConfig(5, "1s"), tags={"a": "b"}).tags == {"a": "b"}


def test_a_store_that_it_made_is_closed_with_it():
    """And one that it was given is not."""
    limiter = RateLimiter("b", RateLimiterConfig(5, "1s"))
    limiter.change_limit_for_period(6)
    limiter.acquire_permission()
    limiter.close()
    assert len(limiter.store) == 0
    store = MemoryStore()
    limiter = RateLimiter("b", RateLimiterConfig(5, "1s"), store=store)
    limiter.acquire_permission()
    limiter.close()
    assert len(store) == 1


# Draining ----------------------------------------------------------------------------------------------------------------------


def test_draining_takes_what_is_there(make, clock):
    """All whole permissions go; the fraction of one is kept."""
    limiter = make(initial_permits=7)
    clock.advance(0.05)
    assert limiter.drain_permissions() == 7
    assert available(limiter) == 0
    clock.advance(0.05)
    assert available(limiter) == 1


def test_draining_an_indebted_limiter_takes_nothing(make):
    """What is reserved ahead stays reserved."""
    limiter = make(initial_permits=0, timeout="1s")
    limiter.reserve_permission(3)
    assert limiter.drain_permissions() == 0
    assert available(limiter) == -3


def test_draining_is_no_call(make):
    """The limiter's counters count callers only; draining has its own event."""
    limiter, received = make(), []
    limiter.limiter.events.on("drained", lambda event: received.append((event.limiter, event.cost)))
    limiter.drain_permissions()
    assert limiter.limiter.stats()[:2] == (0, 0)
    assert received == [("backend", 10)]


# Changes -----------------------------------------------------------------------------------------------------------------------


def test_the_timeout_can_be_changed(make):
    """From the next call on."""
    limiter = make(initial_permits=0)
    assert limiter.reserve_permission() == -1
    limiter.change_timeout_duration("100ms")
    assert limiter.config.timeout_duration == "100ms"
    assert limiter.reserve_permission() == 100_000_000
    with pytest.raises(InvalidLimit):
        limiter.change_timeout_duration(-1)
    assert limiter.config.timeout_duration == "100ms"


def test_a_changed_limit_keeps_what_is_missing(make):
    """4 taken of 10 are 4 taken of 20; the capacity follows the limit when none was given."""
    limiter = make()
    limiter.acquire_permission(4)
    limiter.change_limit_for_period(20)
    assert limiter.config == RateLimiterConfig(20, "1s", 0)
    assert available(limiter) == 16
    limiter.change_limit_for_period(5)
    assert available(limiter) == 1


def test_a_change_loses_no_permission_that_is_taken_meanwhile(clock):
    """Every call that a change makes to the store may be followed by another caller's."""
    taken = []

    class Busy(WrappedStore):
        def decide(self, claims, max_wait_us=0, **options):
            decision = super().decide(claims, max_wait_us, **options)
            self.take()
            return decision

        def items(self, limit):
            found = super().items(limit)
            self.take()
            return found

        def take(self):
            if changing:
                taken.append(other.acquire_permission())

    changing = False
    store = MemoryStore(clock=clock)
    limiter = RateLimiter("busy", RateLimiterConfig(10, "1h", 0), store=Busy(store))
    other = RateLimiter("busy", RateLimiterConfig(20, "1h", 0), store=store)
    limiter.acquire_permission(4)
    changing = True
    limiter.change_limit_for_period(20)
    changing = False
    assert all(taken)
    assert taken
    assert limiter.metrics.available_permissions == 16 - len(taken)


def test_a_changed_limit_counts_from_the_moment_of_the_change(make, clock):
    """Time before it counts at the old rate, time after it at the new one."""
    limiter = make(permit_capacity=100, initial_permits=100)
    limiter.acquire_permission(100)
    clock.advance(2)
    limiter.change_limit_for_period(1)
    clock.advance(3)
    assert available(limiter) == 23


def test_a_changed_limit_keeps_what_is_reserved_ahead(make, clock):
    """Debt is kept in permissions, at most the new capacity, and paid at the new rate."""
    limiter = make(initial_permits=0, timeout="1s")
    limiter.reserve_permission(6)
    limiter.change_limit_for_period(5)
    assert available(limiter) == -5
    clock.advance(1)
    assert available(limiter) == 0


def test_a_limit_that_is_changed_back_owes_at_most_its_capacity(make, clock):
    """What a higher limit permitted meanwhile does not lock callers out once the limit is the lower one again."""
    limiter = make()
    limiter.acquire_permission()
    limiter.change_limit_for_period(1000)
    for _ in range(60):
        limiter.drain_permissions()
        clock.advance(1)
    limiter.change_limit_for_period(10)
    assert available(limiter) == -10
    clock.advance(1)
    assert available(limiter) == 0


def test_a_change_to_the_same_limit_keeps_what_is_reserved_ahead(make):
    """Permissions that are reserved beyond the capacity stay reserved."""
    limiter = make(timeout="5s")
    limiter.drain_permissions()
    while limiter.reserve_permission() >= 0:
        pass
    limiter.change_limit_for_period(10)
    assert available(limiter) == -50


def test_a_changed_limit_gives_no_new_start(make):
    """Permissions at the start were for the start; an untouched limiter that was not born full is not filled by a change."""
    limiter = make(permit_capacity=100, initial_permits=10)
    limiter.change_limit_for_period(50)
    assert (limiter.config.initial_permits, available(limiter)) == (10, 10)
    limiter.change_limit_for_period(5)
    assert (limiter.config.permit_capacity, available(limiter)) == (100, 10)


def test_a_limit_may_shrink_below_the_permissions_at_the_start(make):
    """Then it starts full."""
    limiter = make(initial_permits=8)
    limiter.change_limit_for_period(3)
    assert (limiter.config.permit_capacity, limiter.config.initial_permits) == (3, 3)


def test_a_nonsense_limit_changes_nothing(make):
    """The old configuration stays."""
    limiter = make()
    with pytest.raises(InvalidLimit):
        limiter.change_limit_for_period(0)
    assert limiter.config.limit_for_period == 10
