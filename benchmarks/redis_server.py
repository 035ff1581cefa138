"""The cost of a decision for the server, beside the smallest token-bucket script that one bare connection sends in the same way.

Server CPU is the CPU time of the server's process from the kernel (schedstat, in nanoseconds; Linux only). Commands are prepared
before, so that nothing else is in the slices; the cases take turns, and a figure is the median over the slices.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import hiredis
from redis_sync import MINIMAL

from limitkeeper import Limit, SlidingWindowLog, TokenBucket
from limitkeeper.algorithms.claim import Claim, NamedLimit
from limitkeeper.stores.redis.key_names import KeyNames
from limitkeeper.stores.redis.limit_and_state_codec import entry_of
from limitkeeper.stores.redis.script_request import AnyRequest, DecideOptions, encode_call, encode_decide, encode_hit
from servers.valkey import Valkey

KEYS = [f"user:{n}" for n in range(1000)]
NAMES = KeyNames()


class Bare:
    """One connection: bytes out, one reply in."""

    def __init__(self, server: Valkey) -> None:
        self.socket = socket.create_connection(("127.0.0.1", server.port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.reader = hiredis.Reader()

    def send(self, command: bytes) -> None:
        self.socket.sendall(command)
        while (reply := self.reader.gets()) is False:
            self.reader.feed(self.socket.recv(65536))
        if isinstance(reply, Exception):
            raise reply


def evalsha(sha: bytes, keys: Sequence[bytes], *arguments: bytes) -> bytes:
    return hiredis.pack_command(("EVALSHA", sha, len(keys), *keys, *arguments))  # type: ignore[no-any-return]


def named(limit: Limit, name: str = "bench") -> NamedLimit:
    return NamedLimit(name, str(limit), limit)


def cases(client: Any) -> dict[str, tuple[list[bytes], int]]:
    """Commands, and how many decisions each of them is."""

    def sent(requests: Sequence[AnyRequest]) -> bytes:
        script, keys, body = encode_call(requests)
        client.script_load(script.source)
        return evalsha(script.sha, keys, body)

    sha = client.script_load(MINIMAL).encode()
    allow, deny, log = named(TokenBucket("100000/s")), named(TokenBucket("1/h")), named(SlidingWindowLog("100/s"))
    five = [named(TokenBucket("100000/s", burst=size)) for size in range(10**5, 10**5 + 5)]
    hits = [encode_hit(entry_of(NAMES, allow), key) for key in KEYS]
    return {
        "minimal script": ([evalsha(sha, [b"minimal:" + key.encode()], b"10", b"1000000") for key in KEYS], 1),
        "minimal script, deny": ([evalsha(sha, [b"deny:" + key.encode()], b"3600000000", b"3600000000") for key in KEYS], 1),
        "limitkeeper, allow": ([sent([hit]) for hit in hits], 1),
        "limitkeeper, deny": ([sent([encode_hit(entry_of(NAMES, deny), key)]) for key in KEYS], 1),
        "limitkeeper, batches of 50": ([sent(hits[at : at + 50]) for at in range(0, len(hits), 50)], 50),
        "limitkeeper, allow, with patience": (
            [sent([encode_decide(NAMES, [Claim(allow, key)], DecideOptions(10**6))]) for key in KEYS],
            1,
        ),
        "limitkeeper, five limits": (
            [sent([encode_decide(NAMES, [Claim(one, key) for one in five], DecideOptions())]) for key in KEYS],
            1,
        ),
        "limitkeeper, log of 100": ([sent([encode_hit(entry_of(NAMES, log), key)]) for key in KEYS], 1),
    }


def spent_us(server: Valkey) -> float:
    assert server.process is not None
    return int(Path(f"/proc/{server.process.pid}/schedstat").read_text().split()[0]) / 1000


def rows(slices: int = 15) -> list[dict[str, Any]]:
    """For each case: server CPU in µs a decision, and how many times that of the minimal script."""
    with Valkey() as server, server.client() as client:
        some = cases(client)
        link = Bare(server)
        cpu: dict[str, list[float]] = {name: [] for name in some}
        for _ in range(slices):
            for name, (commands, each) in some.items():
                before = spent_us(server)
                for command in commands:
                    link.send(command)
                cpu[name].append((spent_us(server) - before) / len(commands) / each)
        link.socket.close()
        base = cpu["minimal script"]
        return [
            {
                "case": name,
                "server CPU µs": round(median(found), 2),
                "× minimal": round(median(a / b for a, b in zip(found, base, strict=True)), 2),
            }
            for name, found in cpu.items()
        ]


if __name__ == "__main__":
    for row in rows():
        print(row)
