"""Fair shares: a hit of one of 1000 tenants beside a plain hit, in this process and on a Redis server."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from redis_server import spent_us
from report import Section, Table, number
from timing import Case, Effort, measure, one_core

from limitkeeper import Limiter, TokenBucket
from limitkeeper.sharing import FairShare
from limitkeeper.stores.redis import RedisStore
from servers.valkey import Valkey

TENANTS = [f"tenant:{n}" for n in range(1000)]
#: A window that admits every hit, and a rate that admits nearly none; in both each tenant has a backlog.
ADMITTED, REFUSED = {"total": "1000000/s", "window": "100s"}, {"total": "10000/s"}
GUARANTEES = {"tenant:0": "1000/s", "tenant:1": "1000/s"}
CALL = "o.hit(next(k))"


def turns() -> Iterator[str]:
    return cycle(TENANTS)


def in_process() -> dict[str, Any]:
    found: dict[str, Any] = {
        "plain hit": Limiter(TokenBucket("100000000/s")),
        "plain hit, refused": Limiter(TokenBucket("1/d")),
        "fair share": FairShare(**ADMITTED, guarantees=GUARANTEES),
        "fair share, refused": FairShare(**REFUSED, guarantees=GUARANTEES),
    }
    for name in TENANTS * 30:
        found["fair share, refused"].hit(name)
    for name in TENANTS:
        found["plain hit, refused"].hit(name)
    return found


def on_redis(effort: Effort) -> tuple[dict[str, float], float]:
    """Microseconds of server CPU for each hit, and round trips of a fair share for each decision."""
    with Valkey() as server, RedisStore(server.url) as store:
        limits: dict[str, Any] = {
            "one limit": Limiter(TokenBucket("100000000/s"), store),
            "fair share": FairShare(**ADMITTED | {"total": "1000/s"}, guarantees={}, store=store),
            "fair share, refused": FairShare("1000/s", store=store, name="refused", window="10s"),
        }
        for name in TENANTS * 3:
            limits["fair share, refused"].hit(name, 5)
        samples: dict[str, list[float]] = {name: [] for name in limits}
        for _ in range(effort.pick(15, 4)):
            for name, limit in limits.items():
                before = spent_us(server)
                for tenant in TENANTS:
                    limit.hit(tenant)
                samples[name].append((spent_us(server) - before) / len(TENANTS))
        with server.client() as client:
            scripts = client.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0)
            for tenant in TENANTS:
                limits["fair share"].hit(tenant)
            after = client.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0)
        return {name: median(values) for name, values in samples.items()}, (after - scripts) / len(TENANTS)


def run(floors: Any, effort: Effort, note: Callable[[str], None]) -> Section:
    section = Section(
        "Fair shares",
        "1000 tenants in turn, two of them with a guarantee, in this process and on one core: a hit of a FairShare "
        "beside one of a token bucket in memory. On Redis, without guarantees: server CPU of one hit (schedstat).",
    )
    with one_core():
        cases = [Case(name, CALL, {"o": limit, "k": turns()}, before=turns) for name, limit in in_process().items()]
        found, failed = measure(cases, effort, note)
    section.fail(failed)
    section.figure("admitted: fair share / plain hit", found["fair share"] / found["plain hit"], 5, "×")
    section.figure("refused: fair share / plain hit", found["fair share, refused"] / found["plain hit, refused"], 5, "×")
    note("redis")
    server, trips = on_redis(effort)
    section.figure("Redis: script calls for each decision", trips, 1, "")
    section.figure("Redis: server CPU, fair share / one limit", server["fair share"] / server["one limit"], 2, "×")
    section.figure("Redis: server CPU, refused / one limit", server["fair share, refused"] / server["one limit"], 2, "×")
    rows = [(name, number(ns, "ns")) for name, ns in found.items()] + [
        (f"Redis, server CPU: {name}", number(us, "µs")) for name, us in server.items()
    ]
    section.details.append(Table(("hit", "each"), rows))
    return section
