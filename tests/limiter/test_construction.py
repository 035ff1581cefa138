"""Making limiters and stores: accepted arguments, errors for the others, numbers, and closing."""

from __future__ import annotations

import asyncio

import pytest

from limitkeeper import (
    AsyncLimiter,
    ConfigurationError,
    FixedWindow,
    InvalidLimit,
    Limiter,
    MemoryStore,
    RateLimited,
    SlidingWindowCounter,
    TokenBucket,
    store_from_url,
)

limiter_classes = pytest.mark.parametrize("limiter_class", [Limiter, AsyncLimiter], ids=["Limiter", "AsyncLimiter"])


@limiter_classes
def test_a_limiter_without_a_store_has_its_own(limiter_class):
    """By default a limiter keeps its state in this process, apart from other limiters."""
    one, two = limiter_class("5/s"), limiter_class("5/s")
    assert isinstance(one.store, MemoryStore)
    assert one.store is not two.store


@limiter_classes
@pytest.mark.parametrize("option", [{"burst": 10}, {"capacity": 3, "name": "api"}, {"align": "first"}], ids=str)
def test_an_option_of_a_limit_given_to_the_limiter_is_refused_with_the_remedy(limiter_class, option):
    """`burst` and the like belong to the limit; the error shows how to write them there."""
    remedy = rf"{limiter_class.__name__}\('5/s burst 10'\)"
    with pytest.raises(TypeError, match=rf"takes no argument '(burst|capacity|align)', .*{remedy}"):
        limiter_class("5/s", **option)


@limiter_classes
def test_a_store_may_be_a_url(limiter_class):
    """`store=` takes a URL."""
    assert isinstance(limiter_class("5/s", store="memory://").store, MemoryStore)


@limiter_classes
@pytest.mark.parametrize("limits", [None, 5, 5.0, b"5/s", Ellipsis, TokenBucket, {"a": 5}, {"a": None}, [5]], ids=repr)
def test_what_is_no_limit_is_a_configuration_error(limiter_class, limits):
    """A limiter of something that is no limit is an error that names the right form."""
    with pytest.raises(ConfigurationError, match="expected a limit"):
        limiter_class(limits)


@limiter_classes
@pytest.mark.parametrize("limits", [{}, [], ()], ids=repr)
def test_a_limiter_needs_a_limit(limiter_class, limits):
    """A limiter of nothing is a ConfigurationError."""
    with pytest.raises(ConfigurationError, match="at least one limit"):
        limiter_class(limits)


@limiter_classes
@pytest.mark.parametrize("limits", ["", {"a": ""}, [""], "5"], ids=repr)
def test_an_unreadable_text_is_an_invalid_limit(limiter_class, limits):
    """A limit's text that can't be read is an InvalidLimit wherever it stands."""
    with pytest.raises(InvalidLimit):
        limiter_class(limits)


@limiter_classes
@pytest.mark.parametrize("name", ["", 5, b"api", True], ids=repr)
def test_a_name_must_be_a_text(limiter_class, name):
    """A limiter's name is a text that is not empty."""
    with pytest.raises(ConfigurationError, match="name must be a non-empty string"):
        limiter_class("5/s", name=name)


@limiter_classes
@pytest.mark.parametrize("name", ["", 1, None], ids=repr)
def test_a_limits_name_must_be_a_text(limiter_class, name):
    """The names of a mapping are texts that are not empty."""
    with pytest.raises(ConfigurationError, match="name must be a non-empty string"):
        limiter_class({name: "5/s"})


@limiter_classes
@pytest.mark.parametrize("store", [5, Ellipsis, MemoryStore, {}], ids=repr)
def test_a_store_must_be_a_store(limiter_class, store):
    """`store=` that is no store is a ConfigurationError that names the right form."""
    with pytest.raises(ConfigurationError, match="memory://"):
        limiter_class("5/s", store=store)


@limiter_classes
def test_the_repr_names_the_limits(limiter_class):
    """The repr shows the kind of limiter and its limits."""
    assert repr(limiter_class("5/s")) == f"<{limiter_class.__name__} 'token bucket 5/s burst 5'>"
    assert repr(limiter_class({"user": "5/s"})) == f"<{limiter_class.__name__} 'user': token bucket 5/s burst 5>"


@limiter_classes
def test_limits_may_come_in_a_sequence(limiter_class):
    """A list or tuple of limits and texts is several limits."""
    assert limiter_class((TokenBucket("5/s"), "fixed window 9/min")).names == ("token bucket 5/s burst 5", "fixed window 9/min")


# Stores from configuration


def test_a_memory_store_from_its_url():
    """memory:// is a MemoryStore, and may set its number of keys."""
    assert store_from_url("memory://").capacity.max_keys == 1_000_000
    assert store_from_url("memory://?max_keys=50").capacity.max_keys == 50


@pytest.mark.parametrize(
    "url",
    [
        "",
        "memory",
        "http://example.com",
        "memory://host",
        "memory:///path",
        "memory://?max_keys=",
        "memory://?max_keys=many",
        "memory://?max_keys=-1",
        "memory://?max_keys=0",
        "memory://?size=5",
        "memory://?max_keys=5&size=5",
    ],
)
def test_a_url_that_is_none_shows_itself(url):
    """A URL that names no store or a wrong option is a ConfigurationError that names the mistake."""
    with pytest.raises(ConfigurationError) as caught:
        store_from_url(url)
    assert repr(url) in str(caught.value) or "max_keys" in str(caught.value)


@pytest.mark.parametrize("url", [None, 5, b"memory://"], ids=repr)
def test_a_url_must_be_a_text(url):
    """A URL of another type is a ConfigurationError."""
    with pytest.raises(ConfigurationError, match="must be a string"):
        store_from_url(url)


# Numbers


def test_stats_count_decisions(make):
    """stats() counts allowed and refused calls, callers that wait, keys, and decisions on overflow cells."""
    limiter = make("2/s")
    for _ in range(3):
        limiter.hit("a")
    limiter.hit("b")
    assert limiter.stats() == (3, 1, 0, 2, 0)
    assert limiter.stats()._asdict() == {"allowed": 3, "refused": 1, "waiting": 0, "keys": 2, "overflow": 0}


def test_a_peek_is_not_counted(make):
    """Peeks are not counted."""
    limiter = make("2/s")
    limiter.peek("a")
    limiter.peek("a", cost=9)
    assert limiter.stats()[:2] == (0, 0)


def test_giving_back_is_not_counted(make):
    """refund, reset and settle are not counted as decisions."""
    limiter = make("2/s")
    limiter.reserve("a", cost=2).settle(1)
    limiter.refund("a")
    limiter.reset("a")
    assert limiter.stats()[:2] == (1, 0)


def test_limiters_on_one_store_count_for_themselves(make):
    """Decisions are the limiter's own numbers; keys are its store's."""
    one, two = make("2/s"), make("2/s")
    one.hit("a")
    two.hit("b")
    assert (one.stats()[:2], two.stats()[:2]) == ((1, 0), (1, 0))
    assert one.stats().keys == 2


# Closing


def test_a_limiter_closes_a_store_that_it_made():
    """Closing a limiter with its own store drops its keys."""
    limiter = Limiter("5/s")
    limiter.hit("a")
    assert len(limiter.store) == 1
    limiter.close()
    assert len(limiter.store) == 0


def test_a_limiter_leaves_a_given_store_alone(store):
    """A limiter does not close a store that was passed to it."""
    limiter = Limiter("5/s", store=store)
    limiter.hit("a")
    limiter.close()
    assert len(store) == 1


def test_an_async_limiter_closes_a_store_that_it_made():
    """`aclose` does the same."""

    async def main():
        limiter = AsyncLimiter("5/s", store="memory://")
        await limiter.hit("a")
        assert len(limiter.store) == 1
        await limiter.aclose()
        return len(limiter.store)

    assert asyncio.run(main()) == 0


def test_a_store_is_a_context_manager_too(clock):
    """A store's block drops its keys at its end, in sync and async."""
    with MemoryStore(clock=clock) as store:
        Limiter("5/s", store=store).hit("a")
    assert len(store) == 0

    async def main():
        async with MemoryStore(clock=clock) as store:
            await AsyncLimiter("5/s", store=store).hit("a")
        return len(store)

    assert asyncio.run(main()) == 0


def test_rate_limited_is_what_refused_waits_raise(make):
    """RateLimited can be caught as the library's own error."""
    limiter = make(FixedWindow("1/min"))
    limiter.hit("a")
    with pytest.raises(RateLimited):
        limiter.acquire("a", timeout=0)


def test_async_with_a_sync_limiter_names_the_async_one(store):
    """Waiting would block the event loop."""

    async def main():
        async with Limiter("5/s", store=store):
            pass

    with pytest.raises(TypeError, match="write AsyncLimiter"):
        asyncio.run(main())


def test_messages_name_the_argument_or_an_example(store):
    """An invalid duration is named by its argument; an invalid limit's error has an example."""
    for limit in (SlidingWindowCounter("1/min"), "5/s"):
        with pytest.raises(ValueError, match="timeout='soon'"):
            Limiter(limit, store=store).acquire("a", timeout="soon")
    with pytest.raises(ValueError, match="max_wait='soon'"):
        Limiter("5/s", store=store).reserve("a", max_wait="soon")
    with pytest.raises(ConfigurationError, match="got 5; write '5/s burst 10'"):
        Limiter(5)  # type: ignore[arg-type]
