"""The decorators of limiters and bulkheads, for functions, methods, coroutines and (async) generators.

A decorated call enters a context first and leaves it at the end. The context of a limiter's `limit` acquires when it is entered
and does nothing when it is left; that of a bulkhead holds a place until the call, or the generator, has ended.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from .algorithms.limit_parser import parse_limits
from .errors import ConfigurationError, LimitkeeperError
from .limiter_base import Cost, Key
from .rate import Duration

if TYPE_CHECKING:
    from .limiter import WaitingLimiter

#: The `key` and `cost` of `limit`: values, or functions of the call's arguments.
KeyArgument = Key | int | Mapping[str, str | int | None] | Callable[..., Key | int | Mapping[str, str | int | None]]
CostArgument = Cost | Callable[..., Cost]
Args = tuple[object, ...]
Kwargs = dict[str, object]


class CallContext(Protocol):
    """A context manager, sync and async."""

    def __enter__(self) -> object: ...

    def __exit__(self, *exc: Any) -> object: ...

    async def __aenter__(self) -> object: ...

    async def __aexit__(self, *exc: Any) -> object: ...


class Acquired:
    """The context of one call of a function that a limiter limits."""

    __slots__ = ("_arguments", "_limiter")

    def __init__(self, limiter: WaitingLimiter, key: Key, cost: Cost, timeout: Duration | None) -> None:
        self._limiter, self._arguments = limiter, (key, cost, timeout)

    def __enter__(self) -> None:
        self._limiter._acquire(*self._arguments)

    def __exit__(self, *exc: Any) -> None:
        pass

    async def __aenter__(self) -> None:
        await self._limiter._aacquire(*self._arguments)

    async def __aexit__(self, *exc: Any) -> None:
        pass


def called(value: object, args: Args, kwargs: Kwargs) -> Any:
    return value(*args, **kwargs) if callable(value) else value


def key_of(key: object, args: Args, kwargs: Kwargs) -> Key:
    """The key of a decorated call; an int is converted with str()."""
    found = called(key, args, kwargs)
    if isinstance(found, int) and not isinstance(found, bool):
        return str(found)
    if isinstance(found, Mapping):
        return {name: key_of(one, (), {}) if one is not None else None for name, one in found.items()}  # type: ignore[misc]
    return found  # type: ignore[no-any-return]


def misplaced_argument(value: object) -> str:
    """Why `limit` takes keywords only: the first argument of other libraries' decorators is the limit, or the function."""
    if callable(value):
        if getattr(value, "__name__", "") == "<lambda>":
            return "limit() takes keywords only; write @limiter.limit(key=lambda …: …)"
        return "limit() takes keywords only; write @limiter.limit(), with parentheses"
    if isinstance(value, str) and reads_as_limit(value):
        return f"limit() takes keywords only, and the limiter has its limit already: write Limiter({value!r}).limit(key=…)"
    return f"limit() takes keywords only: write limit(key={value!r})"


def refuse_limit_options(name: str, misplaced: Mapping[str, object]) -> None:
    """Refuses unknown arguments of a limiter; `burst` and the like are options of its limit. Values may be secret."""
    for option in misplaced:
        remedy = f"{name}(TokenBucket('5/s', burst=10)), or {name}('5/s burst 10')"
        raise TypeError(
            f"{name}() takes no argument {option!r}, only limits, store and name; write an option of a limit in it: {remedy}"
        )


def refuse_rate_as_key(key: object) -> None:
    """Refuses a constant key that reads as a limit. Keys of calls are never inspected."""
    if isinstance(key, str) and reads_as_limit(key):
        remedy = f"write Limiter({key!r}).limit(), or key=lambda …: … for a key of each call"
        raise ConfigurationError(f"key={key!r} is a limit, not a key: all calls would share one key of that name; {remedy}")


def refuse_name_as_key(function: Any, key: object) -> None:
    """Refuses a constant key that is the name of a parameter."""
    try:
        names = inspect.signature(function).parameters if isinstance(key, str) else ()
    except (TypeError, ValueError):  # no function, or a builtin without a signature
        return
    if key in names:
        got = f"key={key!r} is one key for all calls, and the name of a parameter"
        raise ConfigurationError(f"expected a key of each call, got {got}; write key=lambda {', '.join(names)}: {key}")


def reads_as_limit(text: str) -> bool:
    try:
        return bool(parse_limits(text))
    except LimitkeeperError:
        return False


def check_callback(function: Any, callback: object, what: str) -> None:
    """Finds a callback with the wrong number of parameters when it is given: it must take what the function requires."""
    if not callable(callback):
        return
    try:
        wanted, offered = inspect.signature(function), inspect.signature(callback)
    except (TypeError, ValueError):  # some builtins have no signature
        return
    required = [one for one in wanted.parameters.values() if one.default is one.empty]
    args = [None for one in required if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    named = {one.name: None for one in required if one.kind is one.KEYWORD_ONLY}
    try:
        offered.bind(*args, **named)
    except TypeError as error:
        raise ConfigurationError(
            f"{what}: the function is given the arguments of the call, {getattr(function, '__name__', function)}{wanted}, "
            f"and takes {offered}: {error}"
        ) from None


def limited(limiter: WaitingLimiter, function: Any, key: KeyArgument, cost: CostArgument, timeout: Duration | None) -> Any:
    """Wraps `function` in a function of the same kind that acquires first."""
    refuse_name_as_key(function, key)
    check_callback(function, key, "key")
    check_callback(function, cost, "cost")

    def context(args: Args, kwargs: Kwargs) -> Acquired:
        return Acquired(limiter, key_of(key, args, kwargs), called(cost, args, kwargs), timeout)

    return decorated(function, context)


def is_kind(function: object, check: Callable[[Any], bool]) -> bool:
    """Whether a function, or an object that is called as one (its `__call__`), passes a check of `inspect`."""
    return check(function) or check(getattr(type(function), "__call__", None))  # noqa: B004 of the type: a class makes objects


def decorated(function: Any, context: Callable[[Args, Kwargs], CallContext]) -> Any:
    """Wraps `function` in a function of the same kind that runs within the context of its arguments."""
    if not callable(function) or isinstance(function, (staticmethod, classmethod)):
        raise TypeError(f"limit() expects a function, got {function!r}; put it below @staticmethod and @classmethod")

    if is_kind(function, inspect.isasyncgenfunction):

        @functools.wraps(function)
        async def agenerate(*args: object, **kwargs: object) -> AsyncIterator[object]:
            async with context(args, kwargs):
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
    if is_kind(function, inspect.iscoroutinefunction):

        @functools.wraps(function)
        async def acall(*args: object, **kwargs: object) -> object:
            async with context(args, kwargs):
                return await function(*args, **kwargs)

        return acall
    if is_kind(function, inspect.isgeneratorfunction):

        @functools.wraps(function)
        def generate(*args: object, **kwargs: object) -> Generator[object, object, object]:
            with context(args, kwargs):
                return (yield from function(*args, **kwargs))

        return generate

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        with context(args, kwargs):
            return function(*args, **kwargs)

    return call
