"""Workers of one service ask each other: a UNIX socket for each, in a folder of the parent that only this user can enter.

A line of JSON goes in and one comes back. The counters of all workers are read on request, and then are exact; nothing
is published meanwhile. Rejected: counters in the shared file (a write for every decision), or written at intervals (late, and a
cost without a reader). A worker that does not answer in time is left out, and the answer says how many did.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..observe.snapshot import BudgetSnapshot, BulkheadSnapshot, Histogram, Offender, RuleSnapshot, Snapshot
from ..stores.guarded.store import GuardStats

TIMEOUT, MAX_LINE = 2.0, 1 << 24
Answer = Callable[[dict[str, Any]], Awaitable[Any]]


class WorkerPeers:
    """`answer` answers what other workers ask; `ask_all` asks every worker, this one included. Without a folder it is alone."""

    def __init__(self, folder: str | None, answer: Answer) -> None:
        self._folder = None if folder is None else Path(folder)
        self._answer = answer
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        if self._folder is not None:
            self._own = self._folder / f"worker-{os.getpid()}.sock"
            self._server = await asyncio.start_unix_server(self._serve, self._own, limit=MAX_LINE)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._own.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ValueError):
            found = await self._answer(json.loads(await reader.readline()))
            writer.write(json.dumps(found).encode() + b"\n")
            await writer.drain()
        writer.close()

    async def ask_all(self, asked: dict[str, Any], timeout: float = TIMEOUT) -> tuple[list[Any], int]:
        """The answers, this worker's first, and how many workers there are."""
        own = self._answer(asked)
        if self._folder is None:
            return [await own], 1
        others = [path for path in self._folder.glob("worker-*.sock") if path != self._own]
        first, *found = await asyncio.gather(own, *[self._ask(path, asked, timeout) for path in others])
        answers = [first, *[one for one in found if one is not None]]
        return answers, 1 + sum([path.exists() for path in others])

    async def _ask(self, path: Path, asked: dict[str, Any], timeout: float) -> Any:
        try:
            async with asyncio.timeout(timeout):
                reader, writer = await asyncio.open_unix_connection(path, limit=MAX_LINE)
                with closing(writer):
                    writer.write(json.dumps(asked).encode() + b"\n")
                    return json.loads(await reader.readline())
        except ConnectionRefusedError:  # of a worker that was killed
            path.unlink(missing_ok=True)
        except (OSError, ValueError, TimeoutError):
            pass
        return None


def encode(snapshot: Snapshot) -> dict[str, Any]:
    return {**asdict(snapshot), "store": None if snapshot.store is None else list(snapshot.store)}


def decode(data: dict[str, Any]) -> Snapshot:
    rules = [RuleSnapshot(**{**one, "responses": _histogram(one["responses"])}) for one in data["rules"]]
    offenders = [Offender(**one) for one in data["offenders"]]
    store = None if data["store"] is None else GuardStats(*data["store"])
    bulkheads = [BulkheadSnapshot(**one) for one in data["bulkheads"]]
    budgets = [BudgetSnapshot(**one) for one in data["budgets"]]
    found = {"rules": tuple(rules), "offenders": tuple(offenders), "bulkheads": tuple(bulkheads), "budgets": tuple(budgets)}
    return Snapshot(**{**data, **found, "decisions": _histogram(data["decisions"]), "store": store})


def _histogram(data: dict[str, Any] | None) -> Histogram | None:
    return None if data is None else Histogram(tuple(data["bounds"]), tuple(data["counts"]), data["sum"])
