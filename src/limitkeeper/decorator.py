"""The `limit` decorator: acquires before each call of a function, method, coroutine or (async) generator."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any

from .decision import Decision
from .limiter_base import Cost, Key
from .rate import Duration

if TYPE_CHECKING:
    from .waiting_limiter import WaitingLimiter

#: The `key` and `cost` of `limit`: values, or functions of the call's arguments.
KeyArgument = Key | int | Mapping[str, str | int | None] | Callable[..., Key | int | Mapping[str, str | int | None]]
CostArgument = Cost | Callable[..., Cost]
Args = tuple[object, ...]
Kwargs = dict[str, object]


def _called(value: object, args: Args, kwargs: Kwargs) -> Any:
    return value(*args, **kwargs) if callable(value) else value


def _key_of(key: object, args: Args, kwargs: Kwargs) -> Key:
    """The key of a decorated call; an int is converted with str()."""
    found = _called(key, args, kwargs)
    if isinstance(found, int) and not isinstance(found, bool):
        return str(found)
    if isinstance(found, Mapping):
        return {name: _key_of(one, (), {}) if one is not None else None for name, one in found.items()}  # type: ignore[misc]
    return found  # type: ignore[no-any-return]


def decorated(limiter: WaitingLimiter, function: Any, key: KeyArgument, cost: CostArgument, timeout: Duration | None) -> Any:
    """Wraps `function` in a function of the same kind that acquires first."""
    if not callable(function) or isinstance(function, (staticmethod, classmethod)):
        raise TypeError(f"limit() expects a function, got {function!r}; put it below @staticmethod and @classmethod")

    def enter(args: Args, kwargs: Kwargs) -> None:
        limiter._acquire(_key_of(key, args, kwargs), _called(cost, args, kwargs), timeout)

    def aenter(args: Args, kwargs: Kwargs) -> Awaitable[Decision]:
        return limiter._aacquire(_key_of(key, args, kwargs), _called(cost, args, kwargs), timeout)

    if inspect.isasyncgenfunction(function):

        @functools.wraps(function)
        async def agenerate(*args: object, **kwargs: object) -> AsyncIterator[object]:
            await aenter(args, kwargs)
            inner = function(*args, **kwargs)
            try:
                value = await anext(inner)
                while True:
                    try:
                        sent = yield value
                    except GeneratorExit:
                        raise
                    except BaseException as error:
                        value = await inner.athrow(error)
                    else:
                        value = await inner.asend(sent)
            except StopAsyncIteration:
                return
            finally:
                await inner.aclose()

        return agenerate
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def acall(*args: object, **kwargs: object) -> object:
            await aenter(args, kwargs)
            return await function(*args, **kwargs)

        return acall
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def generate(*args: object, **kwargs: object) -> Generator[object, object, object]:
            enter(args, kwargs)
            return (yield from function(*args, **kwargs))

        return generate

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        enter(args, kwargs)
        return function(*args, **kwargs)

    return call
