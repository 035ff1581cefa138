"""A server on a virtual clock, as a sender of the plan: the core is tested without a network, and without real time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from limitkeeper.client import ClientLimits
from limitkeeper.client.client_limits import CallInfo, Settlement
from limitkeeper.stores.sans_io import arun


class Lost(Exception):
    """A failure of the simulated network."""


@dataclass
class Reply:
    status: int = 200
    fields: dict[str, str] = field(default_factory=dict)


class SimulatedServer:
    """`answer(request)` gives the Reply, and `latency` is how long that takes; `arrivals` are the moments of the requests."""

    failures: tuple[type[Exception], ...] = (Lost,)
    unsent: tuple[type[Exception], ...] = ()

    def __init__(self, clock: Any, answer: Callable[[str], Reply], latency: float = 0.0) -> None:
        self.clock, self.answer, self.latency = clock, answer, latency
        self.arrivals: list[tuple[int, str]] = []

    def describe(self, request: str, metered: bool) -> CallInfo:
        return CallInfo("api", "GET", b"", None)

    def reply(self, response: Reply) -> tuple[int, dict[str, str]]:
        return response.status, response.fields

    def settle_at_end(self, response: Reply, held: Settlement) -> bool:
        return False

    async def asend(self, request: str, left: float) -> Reply:
        self.arrivals.append((self.clock.now_us(), request))
        reply = self.answer(request)
        if self.latency:
            await self.clock.asleep(self.latency)
        return reply

    async def adrain(self, request: str, response: Reply, left: float) -> Reply:
        return response

    async def call(self, limits: ClientLimits, request: str = "") -> Reply:
        reply: Reply = await arun(limits.send(request, self, asyncio.get_running_loop()))
        return reply


async def turns() -> None:
    """Lets every task of the loop run until it waits for time."""
    for _ in range(25):
        await asyncio.sleep(0)
