"""The asyncio API: an awaited hit, beside an awaited coroutine that does nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from statistics import median
from typing import Any

from peers import ASYNC
from report import Section, Table, number
from timing import BATCH_NS, Effort, one_core

from limitkeeper import AsyncLimiter, TokenBucket

KEY = "user:123456"
Loop = Callable[[int], Awaitable[float]]


class Nothing:
    async def hit(self, key: str, cost: int = 1) -> None:
        return None


def loop_of(call: str, names: dict[str, Any]) -> Loop:
    """A coroutine function that awaits `call` n times and returns the nanoseconds of one."""
    words = ", ".join(names)
    source = (
        f"async def loop(n, {words}):\n    begun = clock()\n    for _ in range(n): {call}\n    return (clock() - begun) / n\n"
    )
    space: dict[str, Any] = {"clock": time.perf_counter_ns}
    exec(source, space)
    return lambda n: space["loop"](n, **names)


def loops(failed: dict[str, str]) -> dict[str, Loop]:
    allow, deny = AsyncLimiter(TokenBucket("1000000000/h")), AsyncLimiter(TokenBucket("1/h"))
    made = {
        "empty coroutine": loop_of("await o.hit(k)", {"o": Nothing(), "k": KEY}),
        "limitkeeper allow": loop_of("await o.hit(k)", {"o": allow, "k": KEY}),
        "limitkeeper deny": loop_of("await o.hit(k)", {"o": deny, "k": KEY}),
    }
    for peer in ASYNC:
        try:
            made[peer.name] = loop_of(peer.call, peer.build(10**9, 3600) | {"k": KEY})
        except Exception as error:  # not installed, or changed
            failed[peer.name] = f"{type(error).__name__}: {error}"
    return made


async def timed(effort: Effort, note: Callable[[str], None], failed: dict[str, str]) -> dict[str, float]:
    sizes: dict[str, int] = {}
    made = loops(failed)
    for name, loop in list(made.items()):
        try:
            await loop(10)
            sizes[name] = max(1, min(5000, int(BATCH_NS / await loop(20))))
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
            del made[name]
    best: dict[str, list[float]] = {name: [] for name in made}
    for repeat in range(effort.pick(9, 3)):
        note(f"repeat {repeat + 1}, {len(made)} cases")
        rounds = [{name: await loop(sizes[name]) for name, loop in made.items()} for _ in range(effort.pick(25, 6))]
        for name in made:
            best[name].append(min(each[name] for each in rounds))
    return {name: median(values) for name, values in best.items()}


def run(floors: Any, effort: Effort, note: Callable[[str], None]) -> Section:
    section = Section(
        "asyncio",
        "`await limiter.hit(key)` on memory, in a loop inside one task, beside an awaited `async def` that returns None.",
    )
    failed: dict[str, str] = {}
    with one_core():
        took = asyncio.run(timed(effort, note, failed))
    section.fail(failed)
    empty = took["empty coroutine"]
    for verdict in ("allow", "deny"):
        section.figure(f"AsyncLimiter.hit / empty coroutine, {verdict}", took[f"limitkeeper {verdict}"] / empty, 2.2, "×")
    table = Table(("awaited", "ns", "/ empty coroutine"))
    table.rows = [(name, number(value, ""), number(value / empty, "×")) for name, value in took.items()]
    section.details = [table]
    return section
