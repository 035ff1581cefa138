"""State in Redis: the cost of a decision for the client, the server and the wire, beside one EVALSHA of the smallest script.

The cases take turns in short slices on one server; a figure is the median over the slices, a ratio the median of the ratios of
neighbouring slices. CPU is the processes' own CPU time, not wall-clock time.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import redis_async
import redis_server
import redis_sync
from report import Section, Table, number, spaced
from timing import Effort

from limitkeeper import Limiter, RedisStore, TokenBucket
from servers.valkey import Valkey

KEY = "user:123456"


def round_trips(limits: int) -> float:
    """Commands that the server received for one decision on so many limits."""
    with Valkey() as server, RedisStore(server.url) as store, server.client() as watching:
        limiter = Limiter({f"limit {size}": TokenBucket("1000/s", burst=1000 + size) for size in range(limits)}, store=store)
        limiter.hit(KEY)
        before = watching.info("commandstats")["cmdstat_evalsha"]["calls"]
        writes = watching.info("stats")["total_reads_processed"]
        for _ in range(100):
            limiter.hit(KEY)
        calls = watching.info("commandstats")["cmdstat_evalsha"]["calls"] - before
        reads = watching.info("stats")["total_reads_processed"] - writes - 2
        return max(calls, reads) / 100


def bytes_of_a_key() -> int:
    """MEMORY USAGE of one token bucket's key, of a limiter with a name as long as its rule's."""
    with Valkey() as server, RedisStore(server.url) as store, server.client() as watching:
        Limiter("100/h burst 200", store=store).hit(KEY)
        sizes = [watching.memory_usage(key) for key in watching.scan_iter() if KEY.encode() in key]
        return int(max(sizes))


def run(floors: Any, effort: Effort, note: Callable[[str], None]) -> Section:
    section = Section("Redis", __doc__.split("\n\n")[1].replace("\n", " "))
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    try:
        note("sync, one connection")
        sync = redis_sync.rows(effort.pick(40, 6))
        note("the server's CPU")
        costs = redis_server.rows(effort.pick(25, 4))
    finally:
        if cores is not None:
            os.sched_setaffinity(0, cores)
    note("asyncio, 64 tasks")
    begun = time.monotonic()
    tasks = redis_async.rows(effort.pick(25, 4))
    note(f"asyncio took {time.monotonic() - begun:.0f} s")
    for row in sync:
        if row["case"].startswith("limitkeeper"):
            most, least = (None, None) if "five" in row["case"] else (1.6, 1.8)
            section.figure(f"sync: client CPU of {row['case']} / floor", row["× floor"], most, "×")
            section.figure(f"sync: redis-py's client CPU / {row['case']}", row["× less CPU"], least, "×", at_least=True)
    for row in tasks[1:]:
        if row["case"].startswith("limitkeeper"):
            section.figure(f"asyncio, 64 tasks: {row['case']} / redis-py", row["× redis-py"], 5, "×", at_least=True)
            if "× valkey-glide" in row:
                section.figure(f"asyncio, 64 tasks: {row['case']} / valkey-glide", row["× valkey-glide"], 1.5, "×", at_least=True)
    section.figure("round trips per decision, 1 limit", round_trips(1), 1, "")
    section.figure("round trips per decision, 5 limits", round_trips(5), 1, "")
    goals = {"limitkeeper, allow": 1.15, "limitkeeper, deny": 1.15, "limitkeeper, batches of 50": 0.6}
    for row in costs:
        if row["case"].startswith("limitkeeper"):
            section.figure(f"server CPU: {row['case']} / minimal script", row["× minimal"], goals.get(row["case"]), "×")
    section.figure("bytes of a token bucket's key", bytes_of_a_key(), 120, "")
    client = Table(("sync, one connection", "client CPU, µs", "decisions/s"))
    client.rows = [(row["case"], number(row["client CPU µs"], ""), spaced(row["decisions/s"])) for row in sync]
    together = Table(("asyncio, 64 tasks", "decisions/s", "client CPU, µs", "server CPU, µs"))
    together.rows = [
        (row["case"], spaced(row["decisions/s"]), number(row["client CPU µs"], ""), number(row["server CPU µs"], ""))
        for row in tasks
    ]
    server = Table(("server", "CPU per decision, µs"))
    server.rows = [(row["case"], number(row["server CPU µs"], "")) for row in costs]
    section.details = [client, together, server]
    if not any("valkey-glide" in row["case"] for row in tasks):
        section.notes.append("not measured: valkey-glide (not installed)")
    return section
