"""Leases of a real server by real processes: four of them on one key, within the stated bound and near the limit."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import headgate
from headgate import LeasedStore, MemoryStore, TokenBucket

#: One worker: asks as fast as it is told to until the end, and prints the moments (ms) of what was admitted, and what it asked.
WORKER = """
import sys, time
from headgate import LeasedStore, Limiter, RedisStore

url, prefix, rule, options, rate, end = sys.argv[1:]
end, pause = float(end), 1 / float(rate)
parent = RedisStore(url, prefix=prefix)
store = LeasedStore(parent, **eval(options))
limiter = Limiter(rule, store=store)
admitted, offered = [], 0
while time.time() < end:
    offered += 1
    if limiter.hit("k"):
        admitted.append(int(time.time() * 1e6))
    time.sleep(pause)
print(offered, store.asked, *admitted)
store.close()
"""


def fleet(valkey, name: str, rule: str, rate: float, seconds: float, **options) -> list[list[int]]:
    """What each of four processes printed."""
    import time

    environment = {**os.environ, "PYTHONPATH": os.path.dirname(headgate.__path__[0])}
    arguments = [valkey.url, f"leased {name}", rule, repr(options), str(rate), str(time.time() + 1.0 + seconds)]
    command = [sys.executable, "-c", textwrap.dedent(WORKER), *arguments]
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    answers = [process.communicate(timeout=60)[0] for process in running]
    assert [process.returncode for process in running] == [0] * 4
    return [[int(word) for word in answer.split()] for answer in answers]


def most_in_a_second(told: list[list[int]]) -> int:
    moments = sorted(moment for one in told for moment in one[2:])
    first = most = 0
    for last, moment in enumerate(moments):
        while moments[first] <= moment - 1_000_000:
            first += 1
        most = max(most, last + 1 - first)
    return most


def test_four_processes_stay_within_the_bound_and_cost_little(valkey):
    """Four processes above the limit: no second holds more than burst, rate and bound, and the server hears little."""
    told = fleet(valkey, "plain", "400/s burst 40", rate=400, seconds=2.0, life="200ms")
    bound = LeasedStore(MemoryStore(), life="200ms").over_admission(TokenBucket("400/s burst 40"), nodes=4)
    admitted, offered, asked = sum(len(one) - 2 for one in told), sum(one[0] for one in told), sum(one[1] for one in told)
    assert most_in_a_second(told) <= 440 + bound
    assert admitted >= 0.8 * 400 * 2
    assert asked <= 0.15 * offered


def test_four_strict_processes_never_exceed_the_limit(valkey):
    """In strict mode no second holds more than burst and rate."""
    told = fleet(valkey, "strict", "400/s burst 40", rate=400, seconds=1.5, life="100ms", strict=True)
    assert most_in_a_second(told) <= 440
