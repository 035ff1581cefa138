"""One decision through Redis, one connection, beside one EVALSHA of the smallest token-bucket script through redis-py, and beside
a floor: the same bytes on a bare socket, with the system calls that no client can do without (send, poll, recv).

Client CPU is the CPU time of this process (user and system); a wall clock on loopback measures the server and the scheduler. The
cases take turns in short slices, a figure is the median over the slices, and a ratio the median of the ratios of neighbouring
slices.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import redis

from limitkeeper import Limiter, TokenBucket
from limitkeeper.stores.redis import RedisStore
from servers.valkey import Valkey

#: GCRA in six lines: the minimum for a limiter on Redis.
MINIMAL = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local tat = tonumber(redis.call('GET', KEYS[1]) or 0)
if tat < now then tat = now end
local new = tat + tonumber(ARGV[1])
if new - now > tonumber(ARGV[2]) then return 0 end
redis.call('SET', KEYS[1], string.format('%.0f', new), 'PX', math.ceil((new - now) / 1000) + 1)
return 1
"""
KEY = "user:123456"
FLOOR = "floor: the same bytes on a bare socket"


def hit_bytes(store: RedisStore) -> bytes:
    """What a hit sends, the limit registered."""
    floor = Limiter(TokenBucket("1000000/s"), store=store, name="floor")
    for _ in range(2):  # registered at the first, noted as such at the second
        floor.hit(KEY)
    request = store.hit_request(floor.named[0], KEY, 1)
    assert request is not None
    return store.route.pack(request)


def bare_exchange(server: Valkey, data: bytes) -> Callable[[], Any]:
    """One exchange of these bytes for a reply."""
    bare = socket.create_connection(("127.0.0.1", server.port))
    bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    bare.setblocking(False)
    poller = select.poll()
    poller.register(bare, select.POLLIN)

    def exchange() -> bytes:
        bare.send(data)
        poller.poll(1000)
        return bare.recv(65536)

    return exchange


def cases(server: Valkey, store: RedisStore, client: redis.Redis) -> dict[str, Callable[[], Any]]:
    sha = client.script_load(MINIMAL)
    allow, deny = Limiter(TokenBucket("1000000/s"), store=store), Limiter(TokenBucket("1/h"), store=store)
    five = Limiter({f"limit {size}": TokenBucket("1000000/s", burst=size) for size in range(10**6, 10**6 + 5)}, store=store)
    deny.hit(KEY)
    return {
        FLOOR: bare_exchange(server, hit_bytes(store)),
        "redis-py, EVALSHA of a minimal script": lambda: client.evalsha(sha, 1, KEY, "1", "1000000"),
        "limitkeeper, allow": lambda: allow.hit(KEY),
        "limitkeeper, deny": lambda: deny.hit(KEY),
        "limitkeeper, five limits": lambda: five.hit(KEY),
    }


def keep_together(server: Valkey) -> None:
    """Client and server take turns on one core: across cores the wake-up of a sleeping one costs more than the measured work."""
    if hasattr(os, "sched_setaffinity") and server.process is not None:
        core = {max(os.sched_getaffinity(0))}
        os.sched_setaffinity(0, core)
        os.sched_setaffinity(server.process.pid, core)


def rows(slices: int = 40, calls: int = 250) -> list[dict[str, Any]]:
    """For each case: client CPU in µs a decision, decisions/s, and how many times less CPU than redis-py."""
    with Valkey() as server, RedisStore(server.url) as store, server.client() as client:
        some = cases(server, store, client)
        keep_together(server)
        cpu: dict[str, list[float]] = {name: [] for name in some}
        wall: dict[str, list[float]] = {name: [] for name in some}
        for call in some.values():
            call()
        for _ in range(slices):
            for name, call in some.items():
                spent, begun = time.process_time_ns(), time.perf_counter_ns()
                for _ in range(calls):
                    call()
                cpu[name].append((time.process_time_ns() - spent) / calls / 1000)
                wall[name].append(calls / (time.perf_counter_ns() - begun) * 1e9)
        first = "redis-py, EVALSHA of a minimal script"
        return [
            {
                "case": name,
                "client CPU µs": round(median(cpu[name]), 2),
                "decisions/s": round(median(wall[name])),
                "× less CPU": round(median(a / b for a, b in zip(cpu[first], cpu[name], strict=True)), 2),
                "× floor": round(median(a / b for a, b in zip(cpu[name], cpu[FLOOR], strict=True)), 2),
            }
            for name in some
        ]


if __name__ == "__main__":
    for row in rows():
        print(row)
