"""Calls without a key: the limiter's own cell, `with limiter:`, and the decorator without a key, sync and async."""

from __future__ import annotations

import asyncio
import pickle

import pytest

from limitkeeper import AsyncLimiter, Limiter, MemoryStore, RateLimited, RedisStore, SharedStore
from limitkeeper.algorithms.no_key import NO_KEY
from limitkeeper.errors import ConfigurationError, InvalidCost


def test_the_own_cell_is_no_keys_cell(make):
    """It is not even the cell of the empty key, nor of a text that looks like its name."""
    limiter = make("fixed window 1/min")
    assert limiter.hit()
    assert not limiter.hit()
    assert all(limiter.hit(key) for key in ("", "\0own", "no key", "None"))
    assert not limiter.peek()


def test_reset_without_a_key_resets_only_the_own_cell(make):
    """Keys keep their state."""
    limiter = make("fixed window 1/min")
    limiter.hit()
    limiter.hit("a")
    limiter.reset()
    assert limiter.hit()
    assert not limiter.hit("a")


def test_refunds_reservations_and_costs_without_a_key(make):
    """As with a key."""
    limiter = make("fixed window 10/min")
    limiter.hit(cost=4)
    limiter.refund(cost=1)
    assert limiter.peek().remaining == 7
    with limiter.reserve(cost=5) as reservation:
        reservation.settle(2)
    assert limiter.peek().remaining == 5


def test_several_limits_without_a_key(make):
    """All are charged, each in its own cell."""
    limiter = make({"a": "fixed window 2/min", "b": "fixed window 3/h"})
    assert limiter.hit(cost={"b": 2})
    found = limiter.hit(cost={"b": 2})
    assert (found.allowed, found.name) == (False, "b")
    assert limiter.hit({"a": "", "b": ""}).remaining == 1


def test_none_is_not_a_missing_key(make):
    """A key that is None by mistake would limit all such callers together: it is an error."""
    with pytest.raises(TypeError, match="a key must be a str, got NoneType: None; callers without a key need one: their address"):
        make("5/s").hit(None)


def test_limiters_of_the_same_rule_share_their_own_cell_on_one_store(store):
    """And limiters of another name do not."""
    one, two, other = (
        Limiter("fixed window 1/min", store=store),
        Limiter("fixed window 1/min", store=store),
        Limiter("fixed window 1/min", store=store, name="other"),
    )
    assert (bool(one.hit()), bool(two.hit()), bool(other.hit())) == (True, False, True)


def test_a_block_waits_for_one_unit(clock, store):
    """Five blocks at 10/s with a burst of 1 take 0.4 s; an exception gives nothing back."""
    limiter = Limiter("10/s burst 1", store=store)
    begun = clock.now_us()
    for _ in range(4):
        with limiter as decision:
            assert decision.allowed
    with pytest.raises(ValueError, match="inside"), limiter:
        raise ValueError("inside")
    assert clock.now_us() - begun == 400_000
    assert limiter.peek().retry_after == pytest.approx(0.1)


def test_an_async_block_waits_for_one_unit(clock, store):
    """The idiom of aiolimiter."""

    async def main() -> int:
        limiter = AsyncLimiter("10/s burst 1", store=store)
        begun = clock.now_us()
        for _ in range(5):
            async with limiter:
                pass
        return clock.now_us() - begun

    assert asyncio.run(main()) == 400_000


def test_waiters_without_a_key_are_counted(clock, store):
    """Among those of the limiter."""

    async def main() -> list[int]:
        limiter = AsyncLimiter("1/s burst 1", store=MemoryStore())
        await limiter.acquire()
        task = asyncio.create_task(limiter.acquire())
        await asyncio.sleep(0)
        waiting = limiter.waiting()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return [waiting, limiter.waiting()]

    assert asyncio.run(main()) == [1, 0]


def test_events_without_a_key(store):
    """Have no key."""
    seen = []
    limiter = Limiter("1/min", store=store)
    limiter.events.on("allowed", seen.append)
    limiter.hit()
    assert [event.key for event in seen] == [None]


def test_shared_and_redis_stores(tmp_path, valkey):
    """The own cell is shared through them."""
    for make_store in (lambda: SharedStore(tmp_path / "limits"), lambda: RedisStore(valkey.url, timeout="60s")):
        stores = [make_store(), make_store()]
        limiters = [Limiter("fixed window 1/h", store=store, name="own") for store in stores]
        assert [bool(limiter.hit()) for limiter in limiters] == [True, False]
        assert limiters[0].hit("")
        for store in stores:
            store.close()


# The decorator -------------------------------------------------------------------------------------------------------


def test_a_decorator_without_a_key_limits_all_calls_together(make):
    """A refused call raises."""
    call = make("fixed window 1/min").limit()(lambda who: who)
    assert call("a") == "a"
    with pytest.raises(RateLimited):
        call("b")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("5/minute", r"write Limiter\('5/minute'\)\.limit\(key=…\)"),
        ("user", r"write limit\(key='user'\)"),
        (print, r"write @limiter\.limit\(\), with parentheses"),
        (lambda user: user, r"write @limiter\.limit\(key=lambda …: …\)"),
    ],
)
def test_positional_arguments_are_refused_with_the_remedy(value, message, make):
    """In other libraries the first argument is the limit."""
    with pytest.raises(TypeError, match=message):
        make("5/s").limit(value)


def test_a_constant_key_that_reads_as_a_limit_is_refused(make):
    """Keys of calls are never inspected."""
    limiter = make("5/s")
    with pytest.raises(ConfigurationError, match="key='5/minute' is a limit, not a key"):
        limiter.limit(key="5/minute")
    assert limiter.limit(key=lambda: "5/minute")(lambda: 1)() == 1
    assert limiter.hit("5/minute")


def test_a_key_function_that_cannot_be_called_is_found_when_it_is_given(make):
    """Not by the first call."""
    limiter = make("5/s")

    def view(request, size=1, *, user):
        return size

    for options in ({"key": lambda: "a"}, {"key": lambda request: "a"}, {"key": "a", "cost": lambda request, size: 1}):
        with pytest.raises(ConfigurationError, match=r"is given the arguments of the call, view\(request, size=1, \*, user\)"):
            limiter.limit(**options)(view)
    for key in (lambda request, user: user, lambda *args, **named: "a", lambda request, **named: "a"):
        assert limiter.limit(key=key)(view)("r", user="u") == 1


def test_a_second_key_is_not_a_cost(make):
    """The message shows how to write several keys."""
    with pytest.raises(InvalidCost, match="got the text 'b'; a call takes one key: use hit_many"):
        make("5/s").hit("a", "b")


def test_no_key_survives_pickling():
    """As the same object."""
    assert pickle.loads(pickle.dumps(NO_KEY)) is NO_KEY
    assert repr(NO_KEY) == "no key"


def test_a_name_can_not_be_that_of_an_own_cell():
    """Which is kept under the limiter's name with a suffix."""
    with pytest.raises(ConfigurationError, match="a limiter's name must be"):
        Limiter("5/s", name="api\0own")
