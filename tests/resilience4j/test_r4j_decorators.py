"""Functions behind a RateLimiter, and results that drain it."""

import asyncio
import functools

import pytest

from limitkeeper import MemoryStore
from limitkeeper.resilience4j import Outcome, RateLimiter, RateLimiterConfig, RequestNotPermitted
from limitkeeper.testing import ManualClock


def limiter_of(timeout=0, drain=None, limit=10):
    config = RateLimiterConfig(limit, "1s", timeout, drain_permissions_on_result=drain)
    return RateLimiter("backend", config, store=MemoryStore(clock=ManualClock()))


def available(limiter):
    return limiter.metrics.available_permissions


def test_a_decorated_function_takes_one_permission_and_is_refused_without():
    """Arguments and results pass through; a refused call never starts."""
    limiter, calls = limiter_of(limit=1), []

    @limiter.decorate
    def greet(name, mark="!"):
        """Says hello."""
        calls.append(name)
        return f"hello {name}{mark}"

    assert greet("a", mark="?") == "hello a?"
    with pytest.raises(RequestNotPermitted):
        greet("b")
    assert calls == ["a"]
    assert (greet.__name__, greet.__doc__) == ("greet", "Says hello.")


def test_a_decorated_function_waits_up_to_the_timeout():
    """And follows later changes of it."""
    limiter = limiter_of(timeout="1s")
    call = limiter.decorate(lambda: limiter.store.clock.now_us(), permits=10)
    assert [call(), call()] == [0, 1_000_000]
    limiter.change_timeout_duration(0)
    with pytest.raises(RequestNotPermitted):
        call()


def test_permits_may_be_more_and_may_come_from_the_arguments():
    """A number, or a function of the call's own arguments."""
    limiter = limiter_of()

    @limiter.decorate(permits=lambda items, **_: len(items))
    def send(items, *, to):
        return to

    assert send([1, 2, 3], to="x") == "x"
    assert available(limiter) == 7
    limiter.decorate(lambda: None, permits=5)()
    assert available(limiter) == 2
    assert send([], to="y") == "y"
    assert available(limiter) == 2


def test_methods_are_decorated_as_functions_are():
    """The instance is the first argument."""
    limiter = limiter_of()

    class Client:
        @limiter.decorate(permits=lambda self, n: n)
        def fetch(self, n):
            return self, n

    client = Client()
    assert client.fetch(4) == (client, 4)
    assert available(limiter) == 6


def test_execute_calls_once():
    """Arguments go to the function, permits to the limiter."""
    limiter = limiter_of()
    assert limiter.execute(divmod, 7, 2, permits=3) == (3, 1)
    assert available(limiter) == 7


def test_coroutine_functions_are_awaited():
    """Waiting, permits and refusals are the same."""
    limiter = limiter_of(timeout="100ms")

    async def plain(n):
        await asyncio.sleep(0)
        return n

    fetch = limiter.decorate(plain, permits=lambda n: n)

    class Caller:
        async def __call__(self):
            return "called"

    async def main():
        assert await fetch(10) == 10
        assert await fetch(1) == 1
        with pytest.raises(RequestNotPermitted):
            await fetch(2)
        with pytest.raises(RequestNotPermitted):
            await limiter.decorate(functools.partial(plain, 5), permits=2)()
        assert await limiter.decorate(Caller(), permits=0)() == "called"
        assert isinstance(limiter.decorate(Caller, permits=0)(), Caller)

    asyncio.run(main())
    assert limiter.store.clock.now_us() == 100_000


def test_what_is_no_function_is_refused():
    """And an async generator function, which has no start of its own to wait for."""

    async def stream():
        yield 1

    for wrong in ("name", staticmethod(len), classmethod(len)):
        with pytest.raises(TypeError, match=r"takes a function, not .* put it below @staticmethod and @classmethod"):
            limiter_of().decorate(wrong)
    with pytest.raises(TypeError, match=r"async generator function; use limitkeeper\.AsyncLimiter\.limit"):
        limiter_of().decorate(stream)


def test_a_result_may_drain_the_permissions():
    """The server answered 429: other callers need not try now."""
    limiter = limiter_of(drain=lambda outcome: outcome.result == 429)
    call = limiter.decorate(lambda status: status)
    assert call(200) == 200
    assert available(limiter) == 9
    assert call(429) == 429
    assert available(limiter) == 0


def test_an_error_may_drain_the_permissions():
    """And propagates to the caller."""
    limiter = limiter_of(drain=lambda outcome: isinstance(outcome.error, ConnectionError))

    @limiter.decorate
    def call(error):
        raise error

    with pytest.raises(KeyError):
        call(KeyError())
    assert available(limiter) == 9
    with pytest.raises(ConnectionError):
        call(ConnectionError())
    assert available(limiter) == 0


def test_results_and_errors_of_coroutines_drain_too():
    """The same predicate, the same draining."""
    limiter = limiter_of(drain=lambda outcome: outcome.result == 429 or isinstance(outcome.error, ConnectionError))

    @limiter.decorate
    async def call(status):
        if status == 0:
            raise ConnectionError
        return status

    assert asyncio.run(call(200)) == 200
    assert available(limiter) == 9
    assert asyncio.run(call(429)) == 429
    assert available(limiter) == 0
    limiter.store.clock.advance(1)
    with pytest.raises(ConnectionError):
        asyncio.run(call(0))
    assert available(limiter) == 0


def test_results_can_be_reported_by_hand():
    """For callers that do not decorate: on_result, on_error, on_success."""
    seen = []

    def drain(outcome):
        seen.append(outcome)
        return False

    limiter, error = limiter_of(drain=drain), KeyError("x")
    limiter.on_result(5)
    limiter.on_error(error)
    limiter.on_success()
    assert seen == [Outcome(result=5), Outcome(error=error), Outcome()]
    assert available(limiter) == 10


def test_a_predicate_that_fails_drains_nothing_and_hides_nothing(caplog):
    """The result and the error of the call propagate unchanged; the failure is logged."""
    limiter = limiter_of(drain=lambda outcome: outcome.result.status == 429)
    assert limiter.decorate(lambda: 5)() == 5
    with pytest.raises(ZeroDivisionError):
        limiter.decorate(lambda: 1 // 0)()
    assert available(limiter) == 8
    assert "drain_permissions_on_result of RateLimiter 'backend' failed" in caplog.text
