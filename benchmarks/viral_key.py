"""A viral key behind a gateway: `python benchmarks/viral_key.py [HITS]`. Prints a table; RESULTS.md stays as it is. Linux only.

Three homes decide the same traffic, with and without a key that has 60 % of it:

    hashed    homes are service nodes that count in RAM; the gateway hashes a key to its home
    pinned    homes are Valkey servers; the gateway takes any of three nodes, which calls the key's home (ShardedStore, hot=False)
    leased    as pinned, but nodes lease a hot key from its home and decide it in RAM (ShardedStore's default)

The machine has fewer cores than the fleet, so wall-clock time would be meaningless. Measured is the CPU time of every home (utime
+ stime); with a core for each, the busiest one bounds the fleet: capacity = decisions / CPU seconds of the busiest.
"""

from __future__ import annotations

import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from random import Random

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tests"), str(HERE.parent / "tests" / "service"), str(HERE)]

from report import Table  # noqa: E402
from running import Running  # noqa: E402

from limitkeeper import Limiter  # noqa: E402
from limitkeeper.stores import RedisStore, ShardedStore  # noqa: E402
from limitkeeper.stores.sharded.slots import homes, slot_of  # noqa: E402
from servers.valkey import Valkey  # noqa: E402

LIMIT = "token bucket 1000/s burst 2000"
HOMES, VIRAL, USERS, BATCH = 3, 0.6, 10_000, 50


def traffic(hits: int, viral: float) -> list[str]:
    random = Random(7)
    return ["viral" if random.random() < viral else f"user:{random.randrange(USERS)}" for _ in range(hits)]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def send(node: Running, keys: list[str]) -> None:
    for start in range(0, len(keys), BATCH):
        with node.redis.pipeline(transaction=False) as pipeline:
            for key in keys[start : start + BATCH]:
                pipeline.execute_command("LK.HIT", "api", key)
            pipeline.execute()


def hashed(keys: list[str], policy: Path) -> list[float]:
    """CPU seconds of each service node, when a gateway hashes keys to them."""
    owners = homes(tuple((str(one), 1.0) for one in range(HOMES)))
    parts: list[list[str]] = [[] for _ in range(HOMES)]
    for key in keys:
        parts[int(owners[slot_of(key)])].append(key)
    with ExitStack() as stack:
        nodes = [stack.enter_context(Running(policy=policy)) for _ in range(HOMES)]
        for node in nodes:
            send(node, ["warm up"] * BATCH)
        before = [cpu_seconds(node.process.pid) for node in nodes]
        with ThreadPoolExecutor(HOMES) as pool:
            list(pool.map(send, nodes, parts))
        return [cpu_seconds(node.process.pid) - was for node, was in zip(nodes, before, strict=True)]


def through_nodes(keys: list[str], hot: int) -> list[float]:
    """CPU seconds of each Valkey server, when any of three nodes calls them; `hot`: the hits a second of a hot key, 0: none is.
    CPU seconds of each Valkey server, when any of three nodes calls them; `hot`: the hits a second of a hot key, 0: none is."""
    with ExitStack() as stack:
        servers = [stack.enter_context(Valkey()) for _ in range(HOMES)]
        nodes = []
        for _ in range(HOMES):
            shards = {str(number): RedisStore(server.url) for number, server in enumerate(servers)}
            nodes.append(Limiter(LIMIT, store=ShardedStore(shards, hot=hot), name="api"))
            stack.callback(nodes[-1].store.close)
        pids = [server.process.pid for server in servers if server.process is not None]
        for node in nodes:
            node.hit_many([f"warm up {number}" for number in range(BATCH)])
        before = [cpu_seconds(pid) for pid in pids]
        for number, key in enumerate(keys):
            nodes[number % HOMES].hit(key)
        return [cpu_seconds(pid) - was for pid, was in zip(pids, before, strict=True)]


def main() -> None:
    hits = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    table = Table(("arrangement", "viral key", "CPU of all homes", "of the busiest", "its share", "capacity, decisions/s"))
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder, "limitkeeper.yaml")
        policy.write_text(f"limits: [{{name: api, match: /api, limit: {LIMIT}}}]\n")
        for viral in (0.0, VIRAL):
            keys = traffic(hits, viral)
            for name, cpu in (
                ("hashed", hashed(keys, policy)),
                ("pinned", through_nodes(keys, 0)),
                ("leased", through_nodes(keys, 200)),
            ):
                busiest, total = max(cpu), sum(cpu)
                figures = f"{total:.2f} s", f"{busiest:.2f} s", f"{busiest / total:.0%}", f"{hits / busiest:,.0f}"
                table.rows.append((name, f"{viral:.0%}", *figures))
    print(f"{hits} decisions, {HOMES} homes")
    print(table.plain())


if __name__ == "__main__":
    main()
