"""Calls of several stores as steps: what is to be asked is written once, and made one by one or all at once.

A generator yields a Step, a few calls that do not depend on each other, and is sent their answers: a value each, or the
StoreError that a call ended with. A sync caller makes the calls one after the other, an async one all of them at once.
Rejected: writing every protocol twice, once with `await`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ...clock import SYSTEM
from ...errors import StoreError, StoreTimeout, StoreUnavailable
from .routing import Shard


class Call(NamedTuple):
    """One call of a shard."""

    shard: Any
    verb: str
    arguments: tuple[Any, ...]
    options: Mapping[str, Any] = MappingProxyType({})


class Step(NamedTuple):
    """Calls that may be made at once; where they are made one by one, `eager` ends with the first that refuses or fails."""

    calls: list[Call]
    eager: bool = False


Steps = Generator[Step, list[Any], Any]


class Closed(Exception):
    """A key's door is closed: it is being moved. Never leaves the store."""

    def __init__(self, shard: Shard) -> None:
        super().__init__(shard.name)
        self.shard = shard


def opened(shard: Shard) -> Shard:
    if not shard.open:
        raise Closed(shard)
    return shard


def fine(answers: list[Any]) -> list[Any]:
    """The answers, when no call failed."""
    for answer in answers:
        if isinstance(answer, StoreError):
            raise answer
    return answers


class Run:
    """Makes the calls of one attempt, within three quarters of a budget: the last call may take the fourth."""

    __slots__ = ("_budget_us", "_end_us", "_lost")

    def __init__(self, budget_us: int) -> None:
        self._budget_us = budget_us
        self._end_us = SYSTEM.now_us() + budget_us * 3 // 4 if budget_us else 0
        self._lost: Any = None

    def _over(self) -> StoreTimeout | None:
        if self._end_us and SYSTEM.now_us() > self._end_us:
            return StoreTimeout(f"a decision on several shards was not done within its budget of {self._budget_us} µs")
        return None

    def made(self, call: Call) -> Any:
        over = self._over()
        if over is not None:
            return over
        try:
            return getattr(call.shard.store, call.verb)(*call.arguments, **call.options)
        except StoreError as error:
            return self._noted(call, error)

    async def amade(self, call: Call) -> Any:
        over = self._over()
        if over is not None:
            return over
        store = call.shard.store
        try:
            if call.verb != "load":
                return await getattr(store, "a" + call.verb)(*call.arguments, **call.options)
            if store.local:
                return store.load(*call.arguments)
            return await asyncio.to_thread(store.load, *call.arguments)  # the contract has no awaited one
        except StoreError as error:
            return self._noted(call, error)

    def _noted(self, call: Call, error: StoreError) -> StoreError:
        if isinstance(error, StoreUnavailable):
            self._lost = call.shard.base or call.shard
        return error

    def blocked(self, error: Exception) -> tuple[Shard, Any]:
        """The shard that could not be asked, and why: None when its door was closed."""
        return (error.shard, None) if isinstance(error, Closed) else (self._lost, error)
