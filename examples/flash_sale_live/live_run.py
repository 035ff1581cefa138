"""One run of the live flash sale: starts the services, plays the load, and records what the services count meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from time import monotonic
from types import SimpleNamespace
from typing import Any

import asyncpg
from aiohttp import ClientError, ClientSession, ClientTimeout
from local_servers import services

from limitkeeper.simulate import Result, Scenario

from .load import Load, Sender
from .services import SCHEMA, SERVICES

Note = Callable[[str], object]


@dataclass
class LiveResult(Result):
    """What a run has measured. `passed`: requests of the partner that went past the limits, or would have."""

    kind: str = "measured"
    senders: dict[str, Sender] = field(default_factory=dict)
    passed: int = 0
    late_ms: float = 0.0


class Run:
    """Plays a scenario against services that enforce limits or not."""

    def __init__(self, scenario: Scenario, enforce: bool, addresses: dict[str, str], note: Note) -> None:
        self.result = LiveResult(scenario)
        self.enforce, self.addresses, self.note = enforce, addresses, note

    def play(self) -> LiveResult:
        environment = {**self.addresses, "ENFORCE": "1" if self.enforce else "0"}
        asyncio.run(create_tables(self.addresses["DATABASE_URL"]))
        with services("flash_sale_live.services", SERVICES, **environment) as found:
            urls = [found[f"{name.upper()}_URL"] for name in SERVICES]
            asyncio.run(self._play(found["GATEWAY_URL"], urls))
        return self.result

    async def _play(self, gateway: str, urls: list[str]) -> None:
        load, result = Load(self.result.scenario, gateway), self.result
        result.senders = {sender.settings.name: sender for sender in load.senders}
        result.classes = {name: sender.record for name, sender in result.senders.items()}
        async with ClientSession(timeout=ClientTimeout(total=5)) as session:
            began = monotonic()
            recording = asyncio.create_task(self._record(session, urls, began))
            try:
                await load.run()
            finally:
                recording.cancel()
                with suppress(asyncio.CancelledError):
                    await recording
            result.simulated_s = monotonic() - began
            await self._figures(session, urls)
        result.late_ms = load.late.percentile(99) * 1000 if load.late.count else 0.0
        await self._count_orders()

    async def _record(self, session: ClientSession, urls: list[str], began: float) -> None:
        """One row of the series per second."""
        before = began
        for number in count(1):
            await asyncio.sleep(1)
            places = await self._figures(session, urls)
            now = monotonic()
            row: dict[str, float] = {"time": now - began}
            for one in self.result.classes.values():
                row |= one.row(now - before)
            for name, place in places.items():
                row |= {f"{name}.in use": place.in_use, f"{name}.waiting": place.waiting}
            before = now
            self.result.series.append(row)
            if number % 5 == 0:
                self.note(progress(row, places))

    async def _figures(self, session: ClientSession, urls: list[str]) -> dict[str, Any]:
        """Reads the counters of all services."""
        result = self.result
        calls: dict[str, Any] = {}
        for url in urls:
            with suppress(ClientError, TimeoutError):
                async with session.get(f"{url}/figures") as answer:
                    found = await answer.json()
                for name, one in found["places"].items():
                    result.services[name] = SimpleNamespace(**one, pods=(0,), concurrency=one["size"])  # type: ignore[assignment]
                calls |= {name: SimpleNamespace(name=name, **one) for name, one in found["calls"].items()}
                result.passed = max(result.passed, found["passed"])
        result.calls = list(calls.values()) or result.calls
        return result.services

    async def _count_orders(self) -> None:
        """Orders that were written more than once, and orders whose clients got an error."""
        connection = await asyncpg.connect(self.addresses["DATABASE_URL"])
        written = dict(await connection.fetch("SELECT request, count(*) FROM orders GROUP BY request"))
        await connection.close()
        for name, sender in self.result.senders.items():
            sender.record.duplicates = sum(many - 1 for request, many in written.items() if request.startswith(f"{name} "))
            sender.record.inconsistent = len(sender.failed & written.keys())


async def create_tables(url: str) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute(SCHEMA)
    await connection.close()


def progress(row: dict[str, float], places: dict[str, Any]) -> str:
    """One line: what happened in the last second."""

    def of(column: str) -> float:
        return sum(value for name, value in row.items() if name.endswith(f".{column}"))

    used = ", ".join(f"{name} {places[name].in_use} of {places[name].size}" for name in ("gateway", "order") if name in places)
    counts = f"{of('attempts'):4.0f} attempts/s, {of('ok'):3.0f} ok, {of('refused'):3.0f} refused, {of('failed'):3.0f} failed"
    return f"{row['time']:4.0f} s  {counts}   {used}"
