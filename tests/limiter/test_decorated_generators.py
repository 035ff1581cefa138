"""The decorator on generators: it takes one permit, and everything that is sent, thrown or closed goes through it."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from limitkeeper import AsyncLimiter, Limiter, RateLimited


@pytest.fixture(params=[Limiter, AsyncLimiter], ids=["Limiter", "AsyncLimiter"])
def limiter(request, store):
    """Limits of two at once, sync and async: both decorate everything."""
    return request.param("1/s burst 2", store=store)


def test_generators(limiter):
    """A decorated generator function is charged when its first value is requested, once."""

    @limiter.limit(key="a")
    def count(to):
        yield from range(to)

    assert inspect.isgeneratorfunction(count)
    assert list(count(5)) == [0, 1, 2, 3, 4]
    assert next(count(1)) == 0
    with pytest.raises(RateLimited):
        next(count(1))


def test_generators_send_and_receive(limiter):
    """send, throw, close and the return value of a generator work through the decorator."""
    closed = []

    @limiter.limit(key="a")
    def talk():
        try:
            got = yield "ready"
            try:
                got = yield f"got {got}"
            except KeyError:
                got = yield "caught"
            return got
        finally:
            closed.append(True)

    first = talk()
    assert [next(first), first.send("x"), first.throw(KeyError)] == ["ready", "got x", "caught"]
    with pytest.raises(StopIteration) as stopped:
        first.send("end")
    assert stopped.value.value == "end"
    second = talk()
    next(second)
    second.close()
    assert closed == [True, True]


def test_async_generators(limiter):
    """A decorated async generator function is charged when its first value is requested, once."""

    @limiter.limit(key="a")
    async def count(to):
        for number in range(to):
            yield number

    async def main():
        assert inspect.isasyncgenfunction(count)
        assert [number async for number in count(3)] == [0, 1, 2]
        assert [number async for number in count(0)] == []
        with pytest.raises(RateLimited):
            await anext(count(1))

    asyncio.run(main())


@pytest.fixture
def talk(limiter):
    """An async generator that records what it receives, and what ended it."""

    @limiter.limit(key="a")
    async def exchange(heard):
        try:
            got = None
            while True:
                try:
                    got = yield ("got", got)
                except KeyError:
                    got = "a key error"
        except BaseException as error:
            heard.append(type(error))
            raise
        finally:
            heard.append("closed")

    return exchange


def test_asend_works_through_the_decorator(talk):
    """What is sent reaches the generator, and its answer comes back."""

    async def main():
        heard = []
        spoken = talk(heard)
        answers = [await anext(spoken), await spoken.asend(1), await spoken.asend(2)]
        await spoken.aclose()
        return answers

    assert asyncio.run(main()) == [("got", None), ("got", 1), ("got", 2)]


def test_athrow_works_through_the_decorator(talk):
    """An exception thrown in reaches the generator, which may catch it and continue."""

    async def main():
        heard = []
        spoken = talk(heard)
        await anext(spoken)
        answer = await spoken.athrow(KeyError)
        await spoken.aclose()
        return answer

    assert asyncio.run(main()) == ("got", "a key error")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, asyncio.CancelledError], ids=lambda error: error.__name__)
def test_any_exception_thrown_in_reaches_the_generator(talk, error):
    """An uncaught exception reaches the generator unchanged, and propagates."""

    async def main():
        heard = []
        spoken = talk(heard)
        await anext(spoken)
        try:
            await spoken.athrow(error)
        except error:
            return heard

    assert asyncio.run(main()) == [error, "closed"]


def test_aclose_closes_the_generator_inside(talk):
    """Closing the decorated generator closes the one inside, at once."""

    async def main():
        heard = []
        spoken = talk(heard)
        await anext(spoken)
        await spoken.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(spoken)
        return heard

    assert asyncio.run(main()) == [GeneratorExit, "closed"]


def test_breaking_out_of_async_for_and_closing_runs_the_finally(talk):
    """Breaking out of `async for` and closing the generator runs its finally block."""

    async def main():
        heard = []
        spoken = talk(heard)
        async for _ in spoken:
            break
        await spoken.aclose()
        return heard

    assert asyncio.run(main()) == [GeneratorExit, "closed"]


def test_an_exception_of_the_generator_comes_out(limiter):
    """An exception of an async generator propagates unchanged."""

    @limiter.limit(key="a")
    async def fail():
        yield 1
        raise LookupError("inside")

    async def main():
        with pytest.raises(LookupError, match="inside"):
            async for _ in fail():
                pass

    asyncio.run(main())
