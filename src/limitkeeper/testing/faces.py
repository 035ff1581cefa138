"""Both colours of a limiter behind one face: an async one is driven to the end of each call, so that one law speaks for both."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from ..limiter import AsyncLimiter, Limiter
from ..reservation import AsyncReservation
from ..stores.contract import Store

COLOURS = ("sync", "async")


class Driven:
    """An async object whose coroutines are run to their end, each in an event loop of its own."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __bool__(self) -> bool:
        return bool(self.inner)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        return self._driving(found) if inspect.ismethod(found) else found

    def _driving(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            answer = method(*args, **kwargs)
            return driven(answer) if inspect.isawaitable(answer) else answer

        return call


def driven(awaitable: Any) -> Any:
    async def end() -> Any:
        return await awaitable

    answer = asyncio.run(end())
    return Driven(answer) if isinstance(answer, AsyncReservation) else answer


def face(colour: str, limits: Any, store: Store, name: str | None = None) -> Any:
    """A limiter of this colour, called as a sync one."""
    return Limiter(limits, store, name) if colour == "sync" else Driven(AsyncLimiter(limits, store, name))
