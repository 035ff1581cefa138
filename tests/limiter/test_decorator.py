"""The decorator: on functions, methods and coroutines."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from limitkeeper import AsyncLimiter, ConfigurationError, InvalidCost, Limiter, RateLimited, SlidingWindowCounter


@pytest.fixture(params=[Limiter, AsyncLimiter], ids=["Limiter", "AsyncLimiter"])
def limiter(request, store):
    """Limits of two at once, sync and async: both decorate everything."""
    return request.param("1/s burst 2", store=store)


def left(limiter, key):
    found = limiter.peek(key)
    return (asyncio.run(found) if inspect.isawaitable(found) else found).remaining


def test_a_function(limiter):
    """A decorated function runs while there is room, and raises RateLimited when there is none."""

    @limiter.limit(key="a")
    def double(number):
        return 2 * number

    assert [double(1), double(number=2)] == [2, 4]
    with pytest.raises(RateLimited) as caught:
        double(3)
    assert caught.value.retry_after == 1.0


def test_a_refused_call_does_not_run(limiter):
    """The body of a refused call is not entered."""
    ran = []

    @limiter.limit(key="a")
    def run():
        ran.append(1)

    for _ in range(4):
        try:
            run()
        except RateLimited:
            pass
    assert len(ran) == 2


def test_a_function_stays_itself(limiter):
    """Name, docstring and signature are those of the function."""

    @limiter.limit(key="a")
    def greet(name: str, *, loud: bool = False) -> str:
        """Greets."""
        return name

    assert (greet.__name__, greet.__doc__) == ("greet", "Greets.")
    assert str(inspect.signature(greet)) == "(name: 'str', *, loud: 'bool' = False) -> 'str'"


def test_key_and_cost_may_be_functions_of_the_call(limiter):
    """`key` and `cost` are called with the call's own arguments."""

    @limiter.limit(key=lambda user, size: user, cost=lambda user, size: size)
    def upload(user, size):
        return user

    upload("ann", size=2)
    with pytest.raises(RateLimited):
        upload("ann", 1)
    assert upload("bob", 1) == "bob"
    assert (left(limiter, "ann"), left(limiter, "bob")) == (0, 1)


def test_an_int_key_passes_through_str(limiter):
    """Decorators pass ints through str(): 42 and "42" are the same key."""

    @limiter.limit(key=lambda user: user)
    def visit(user):
        return user

    visit(42)
    visit("42")
    with pytest.raises(RateLimited):
        visit(42)


@pytest.mark.parametrize("key", [None, 1.5, b"a", True], ids=repr)
def test_a_key_of_another_type_is_a_type_error(limiter, key):
    """What is neither str nor int nor a mapping is a TypeError, and the body does not run."""

    @limiter.limit(key=lambda: key)
    def visit():
        pytest.fail("the body ran")

    with pytest.raises(TypeError):
        visit()


def test_a_wrong_cost_is_an_error(limiter):
    """A cost that is no whole number is an InvalidCost."""

    @limiter.limit(key="a", cost=lambda: 1.5)
    def visit():
        pytest.fail("the body ran")

    with pytest.raises(InvalidCost):
        visit()


def test_a_mapping_of_keys(store):
    """With several limits the key function may give a mapping, ints and None in it too."""
    limiter = Limiter({"user": "1/s", "tenant": "2/s"}, store=store)

    @limiter.limit(key=lambda user, tenant: {"user": user, "tenant": tenant})
    def visit(user, tenant):
        return user

    assert visit(1, "acme") == 1
    assert visit(2, "acme") == 2
    with pytest.raises(RateLimited, match="'tenant'"):
        visit(3, "acme")
    assert visit(4, None) == 4


def test_a_mapping_that_names_the_wrong_limits_is_an_error(store):
    """A key function whose mapping names other limits is a ConfigurationError."""
    limiter = Limiter({"user": "1/s", "tenant": "2/s"}, store=store)
    with pytest.raises(ConfigurationError):
        limiter.limit(key=lambda: {"user": "a"})(print)()


def test_a_timeout_waits_first(limiter, clock):
    """With a timeout a call waits for its turn, and is refused when that takes longer."""

    @limiter.limit(key="a", timeout=1.5)
    def run():
        return clock.now_us()

    start = clock.now_us()
    assert [run() - start for _ in range(3)] == [0, 0, 1_000_000]
    assert run() - start == 2_000_000


def test_a_timeout_that_is_too_short_refuses_at_once(limiter, clock):
    """A wait beyond the timeout is refused without sleeping."""

    @limiter.limit(key="a", cost=2, timeout="1500ms")
    def run():
        return 1

    run()
    before = clock.now_us()
    with pytest.raises(RateLimited):
        run()
    assert clock.now_us() == before


def test_a_timeout_of_none_waits_as_long_as_it_takes(limiter, clock):
    """With timeout None a call is never refused for its wait."""

    @limiter.limit(key="a", cost=2, timeout=None)
    def run():
        return clock.now_us()

    assert run() + 2_000_000 == run()


def test_methods(limiter):
    """A decorated method gets its self, and the key function too."""

    class Account:
        def __init__(self, name):
            self.name = name

        @limiter.limit(key=lambda self: self.name)
        def touch(self):
            return self.name

    ann, bob = Account("ann"), Account("bob")
    assert [ann.touch(), ann.touch(), bob.touch()] == ["ann", "ann", "bob"]
    with pytest.raises(RateLimited):
        ann.touch()


def test_static_and_class_methods(limiter):
    """Below @staticmethod and @classmethod the decorator works as on a function."""

    class Account:
        @staticmethod
        @limiter.limit(key="static")
        def double(number):
            return 2 * number

        @classmethod
        @limiter.limit(key="class")
        def kind(cls):
            return cls.__name__

    assert [Account.double(1), Account().double(2)] == [2, 4]
    assert [Account.kind(), Account().kind()] == ["Account", "Account"]
    for call in (lambda: Account.double(1), Account.kind):
        with pytest.raises(RateLimited):
            call()


@pytest.mark.parametrize("kind", [staticmethod, classmethod], ids=["staticmethod", "classmethod"])
def test_above_a_static_or_class_method_it_is_an_error_with_the_remedy(limiter, kind):
    """Above @staticmethod or @classmethod, the decorator is a TypeError with the remedy: put it below."""
    with pytest.raises(TypeError, match="below @staticmethod and @classmethod"):
        limiter.limit(key="a")(kind(lambda *_: 1))


def test_it_decorates_nothing_but_functions(limiter):
    """What can't be called can't be decorated."""
    with pytest.raises(TypeError, match="limit\\(\\) expects a function, got 42"):
        limiter.limit(key="a")(42)


def test_coroutines(limiter, clock):
    """A decorated coroutine function stays one: it waits without blocking, and raises when refused."""

    @limiter.limit(key=lambda name: name)
    async def greet(name):
        await asyncio.sleep(0)
        return f"hello {name}"

    async def main():
        assert inspect.iscoroutinefunction(greet)
        assert await asyncio.gather(greet("ann"), greet("ann"), greet("bob")) == ["hello ann", "hello ann", "hello bob"]
        with pytest.raises(RateLimited):
            await greet("ann")

    asyncio.run(main())


def test_coroutines_wait_in_their_loop(limiter, clock):
    """With a timeout a coroutine waits on the store's clock while other tasks run."""

    @limiter.limit(key="a", timeout=5)
    async def run():
        return clock.now_us()

    async def main():
        return await asyncio.gather(*(run() for _ in range(3)))

    start = clock.now_us()
    assert [moment - start for moment in asyncio.run(main())] == [0, 0, 1_000_000]


def test_an_object_with_an_async_call_waits_in_its_loop(limiter, clock):
    """An object whose `__call__` is a coroutine function is decorated as one, and waits on the store's clock."""

    class Job:
        async def __call__(self):
            return "done"

    job = limiter.limit(key="a", timeout=5)(Job())

    async def main():
        assert await asyncio.gather(job(), job(), job()) == ["done"] * 3

    start = clock.now_us()
    assert inspect.iscoroutinefunction(job)
    asyncio.run(main())
    assert clock.now_us() - start == 1_000_000


def test_a_class_whose_objects_have_an_async_call_is_called_as_a_class(limiter):
    """A decorated class makes an object at once."""

    class Job:
        async def __call__(self):
            return "done"

    assert isinstance(limiter.limit(key="a")(Job)(), Job)


def test_a_coroutine_that_is_never_awaited_takes_nothing(limiter):
    """The charge is made when the coroutine runs, not when it is made."""

    @limiter.limit(key="a")
    async def run():
        return 1

    run().close()
    assert left(limiter, "a") == 2


def test_on_a_sliding_counter(clock, store):
    """A limit that can't reserve decorates too: calls wait in a queue."""
    limiter = Limiter(SlidingWindowCounter("1/s"), store=store)

    @limiter.limit(key="a", timeout=5)
    def run():
        return clock.now_us()

    assert run() + 2_000_000 == run()


def test_recursion_is_charged_every_time(limiter):
    """A decorated function that calls itself is limited on every call."""

    @limiter.limit(key="a")
    def down(number):
        return number if number == 0 else down(number - 1)

    with pytest.raises(RateLimited):
        down(2)


def test_the_name_of_a_parameter_is_no_key(limiter):
    """It would be one key for all calls; any other text is a constant key."""
    with pytest.raises(ConfigurationError, match="write key=lambda user: user"):
        limiter.limit(key="user")(lambda user: user)
    with pytest.raises(ConfigurationError, match="write key=lambda page, user: user"):
        limiter.limit(key="user")(lambda page, user: user)
    limiter.limit(key="users")(lambda user: user)
