"""SyncAdapter: calls an async limiter like a sync one, so that one law tests both modes."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import cast

from ..limiter import AsyncLimiter, Limiter, Limits
from ..reservation import AsyncReservation
from ..stores.contract import Store

MODES = ("sync", "async")


class SyncAdapter:
    """Runs each coroutine of an async object to its end, in an event loop of its own."""

    def __init__(self, inner: object) -> None:
        self.inner = inner

    def __bool__(self) -> bool:
        return bool(self.inner)

    def __getattr__(self, name: str) -> object:
        found = getattr(self.inner, name)
        return _sync(found) if inspect.ismethod(found) else found


def _sync(method: Callable[..., object]) -> Callable[..., object]:
    def call(*args: object, **kwargs: object) -> object:
        result = method(*args, **kwargs)
        return _run(result) if inspect.isawaitable(result) else result

    return call


def _run(awaitable: Awaitable[object]) -> object:
    async def wait() -> object:
        return await awaitable

    result = asyncio.run(wait())
    return SyncAdapter(result) if isinstance(result, AsyncReservation) else result


def make_limiter(mode: str, limits: Limits, store: Store, name: str | None = None) -> Limiter:
    """A limiter of this mode, called as a sync one."""
    if mode == "sync":
        return Limiter(limits, store, name)
    return cast(Limiter, SyncAdapter(AsyncLimiter(limits, store, name)))
