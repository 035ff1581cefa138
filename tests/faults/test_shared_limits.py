"""The pitfalls of shared limits on a real server: being exact over processes, keys that stay behind, keys too big."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time

import pytest

import limitkeeper
from limitkeeper import FixedWindow, Limiter, RedisStore, TokenBucket
from servers.valkey import Valkey, version_of

CALLS = 40
LIMIT = 1000

CLIENT = f"""
import sys, threading
from limitkeeper import Limiter, store_from_url
from limitkeeper.stores.redis import RedisStore
from limitkeeper.stores.shared import SharedStore
kinds = {{
    "redis": lambda url: RedisStore(url, timeout=60),
    "memory": store_from_url,
    "shared": lambda url: SharedStore(url.removeprefix("shared://"), timeout=60),
}}
store = kinds[sys.argv[1].partition(":")[0]](sys.argv[1])
limiter = Limiter("fixed window {LIMIT}/400d", store=store, name=sys.argv[2])
admitted = []
sys.stdin.readline()

def work():
    admitted.append(sum(bool(limiter.hit("everybody")) for _ in range({CALLS})))

threads = [threading.Thread(target=work) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(sum(admitted), len(admitted), limiter.peek("everybody").remaining)
store.close()
"""


def processes(url: str, name: str, count: int = 4) -> list[tuple[int, int]]:
    """What each of so many processes with eight threads was admitted, and how much it found left; all begin together."""
    env = {**os.environ, "PYTHONPATH": os.path.dirname(limitkeeper.__path__[0])}
    command = [sys.executable, "-c", CLIENT, url, name]
    started = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True) for _ in range(count)]
    for process in started:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    received = [[int(word) for word in process.communicate(timeout=120)[0].split()] for process in started]
    assert [threads for _, threads, _ in received] == [8] * count, "a thread failed"
    return [(admitted, left) for admitted, _, left in received]


@pytest.mark.parametrize("kind", ["redis", "shared"])
def test_four_processes_with_eight_threads_share_one_limit(kind, valkey, tmp_path):
    """4 × 8 × 40 calls on one key through one server or one file: exactly the limit of 1000 is admitted, not one more or less."""
    received = processes(valkey.url if kind == "redis" else f"shared://{tmp_path}/limits", f"exact {time.time_ns()}")
    assert (sum(admitted for admitted, _ in received), min(left for _, left in received)) == (LIMIT, 0)
    assert all(admitted > 0 for admitted, _ in received)


def test_processes_that_share_nothing_multiply_the_limit():
    """The seed's pitfall: with a memory store each, every process admits all its calls."""
    assert processes("memory://", "pitfall", 2) == [(8 * CALLS, LIMIT - 8 * CALLS)] * 2


def test_keys_that_are_used_once_vanish(eventually):
    """100 000 keys that were each seen once are gone from the server after two idle windows."""
    with Valkey() as server, server.client() as client, RedisStore(server.url, timeout=60) as store:
        limiter = Limiter(FixedWindow("5/s"), store=store)
        most = 0
        for first in range(0, 100_000, 2000):
            assert all(limiter.hit_many([f"visitor:{number}" for number in range(first, first + 2000)]))
            most = max(most, client.dbsize())
        assert most > 4000
        some = [name for name in itertools.islice(client.scan_iter(count=100), 100) if b"visitor" in name]
        assert all(client.pttl(name) in range(-2, 2001) and client.pttl(name) != -1 for name in some)
        eventually(lambda: client.dbsize() <= 1)  # two windows, and the time that the server takes to sweep
        assert not any(b"visitor" in name for name in client.scan_iter(count=1000))
        assert client.dbsize() == 1, "the entry of the limit itself"


def test_a_token_bucket_key_is_small(valkey):
    """A key of a token bucket takes at most 120 bytes of the server, its name included."""
    with RedisStore(valkey.url, timeout=60) as store, valkey.client() as client:
        client.flushall()
        Limiter(TokenBucket("5/s burst 10"), store=store).hit("user:42")
        sizes = {name: client.memory_usage(name) for name in client.scan_iter() if b"user:42" in name}
        assert len(sizes) == 1
        most = 128 if version_of(valkey.program).startswith("6.") else 120  # Redis 6.2 adds 18 bytes of its own to any key
        assert all(0 < size <= most for size in sizes.values()), sizes
