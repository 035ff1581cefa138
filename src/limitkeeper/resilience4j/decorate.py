"""Calls that wait for permission first, and tell how they ended."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from .config import Outcome

if TYPE_CHECKING:
    from .rate_limiter import RateLimiter


def decorated(rate_limiter: RateLimiter, function: Any, permits: Any) -> Any:
    """The same function behind a RateLimiter."""
    if not callable(function) or isinstance(function, staticmethod):
        raise TypeError(f"decorate() takes a function, not {function!r}; put it below @staticmethod and @classmethod")
    if inspect.isasyncgenfunction(function):
        raise TypeError(f"{function!r} is an async generator function; use limitkeeper.AsyncLimiter.limit for that")
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        return _coroutine(rate_limiter, function, permits)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        rate_limiter.wait_for_permission(_count(permits, args, kwargs))
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            rate_limiter.on_error(error)
            raise
        rate_limiter.on_result(result)
        return result

    return call


def _coroutine(rate_limiter: RateLimiter, function: Any, permits: Any) -> Any:
    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        await rate_limiter.wait_for_permission_async(_count(permits, args, kwargs))
        try:
            result = await function(*args, **kwargs)
        except Exception as error:
            await rate_limiter._settle_async(Outcome(error=error))
            raise
        await rate_limiter._settle_async(Outcome(result=result))
        return result

    return call


def _count(permits: Any, args: Any, kwargs: Any) -> int:
    return permits(*args, **kwargs) if callable(permits) else permits  # type: ignore[no-any-return]
