"""The transport of httpx without a limit in effect: its overhead on a request, against a transport that answers at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from statistics import median
from typing import Any

import httpx
from report import Section, Table, number
from timing import BATCH_NS, Case, Effort, measure, one_core

from limitkeeper.client import ClientLimits
from limitkeeper.client.httpx import AsyncRateLimitTransport, RateLimitTransport
from tasks import Loop, loop_of

FIELDS = {"content-type": "application/json", "content-length": "2", "server": "x", "connection": "keep-alive"}
QUOTA = {"ratelimit-policy": '"a";q=1000000;w=60', "ratelimit": '"a";r=999999;t=60'}
RATE = "token bucket 1000000000/s"
NONE, OWN, LEARNED = "without a limit", "an own limit", "an own limit, and quota fields in the response"


class Constant(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """Answers at once, always with the same response."""

    def __init__(self, fields: dict[str, str]) -> None:
        self.response = httpx.Response(200, headers=fields)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return self.response

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return self.response


def transports(make: Callable[..., Any]) -> dict[str, Any]:
    """The bare transport, and the limited ones by their limits."""
    plain = Constant(FIELDS)
    limited = {NONE: make(ClientLimits(), plain), OWN: make(ClientLimits(RATE), plain)}
    return {"bare": plain, **limited, LEARNED: make(ClientLimits(RATE), Constant({**FIELDS, **QUOTA}))}


async def awaited(request: httpx.Request, effort: Effort) -> dict[str, float]:
    """Nanoseconds of each async case, taking turns."""
    call = "await t.handle_async_request(r)"
    loops: dict[str, Loop] = {
        name: loop_of(call, {"t": one, "r": request}) for name, one in transports(AsyncRateLimitTransport).items()
    }
    sizes = {name: max(1, int(BATCH_NS / max(1.0, await loop(100)))) for name, loop in loops.items()}
    best: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(effort.pick(9, 3)):
        smallest = dict.fromkeys(loops, float("inf"))
        for _ in range(effort.pick(25, 6)):
            for name, loop in loops.items():
                smallest[name] = min(smallest[name], await loop(sizes[name]))
        for name, value in smallest.items():
            best[name].append(value)
    return {name: median(values) for name, values in best.items()}


def run(floors: Any, effort: Effort, note: Callable[[str], None]) -> Section:
    section = Section(
        "Clients",
        "`RateLimitTransport` of httpx around a transport that answers at once, beside that transport alone: what a request "
        "costs more when it does not have to wait.",
    )
    request = httpx.Request("GET", "http://api.example.com/x", extensions={"timeout": httpx.Timeout(5).as_dict()})
    with one_core():
        cases = [
            Case(name, "t.handle_request(k)", {"t": one, "k": request}) for name, one in transports(RateLimitTransport).items()
        ]
        sync, failed = measure(cases, effort, note)
        note("tasks")
        tasks = asyncio.run(awaited(request, effort))
    section.fail(failed)
    for kind, found in (("sync", sync), ("async", tasks)):
        for name in (NONE, OWN):
            section.figure(f"{kind}, {name}: overhead", (found[name] - found["bare"]) / 1000, 5, "µs")
        section.figure(f"{kind}, {LEARNED}: overhead", (found[LEARNED] - found["bare"]) / 1000, None, "µs")
    rows = [(name, number(sync[name], ""), number(tasks[name], "")) for name in sync]
    section.details = [Table(("transport", "sync, ns", "async, ns"), rows)]
    return section
