"""Leases of a real server by real processes: four of them on one key, within the stated bound and near the limit."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import limitkeeper
from limitkeeper import LeasedStore, MemoryStore, TokenBucket

#: One worker: begins on command, calls at the given rate, and prints the number of calls, of calls of the server, how
#: long it did not get to run (µs), and the times (µs) of its admissions.
WORKER = """
import sys, time
from limitkeeper import LeasedStore, Limiter, RedisStore

url, prefix, rule, options, rate, seconds = sys.argv[1:]
pause = 1 / float(rate)
parent = RedisStore(url, prefix=prefix, timeout=60)
store = LeasedStore(parent, **eval(options))
limiter = Limiter(rule, store=store)
admitted, offered, away = [], 0, 0.0
print("ready", flush=True)
sys.stdin.readline()
last, end = time.time(), time.time() + float(seconds)
while last < end:
    offered += 1
    if limiter.hit("k"):
        admitted.append(int(time.time() * 1e6))
    time.sleep(pause)
    now = time.time()
    away, last = away + max(0, now - last - 0.02), now
print(offered, store.refill.replies, int(away * 1e6), *admitted)
store.close()
"""


#: A time is recorded after its decision: one of each process may be late.
IN_HAND = 4


def fleet(valkey, name: str, rule: str, rate: float, seconds: float, **options) -> list[list[int]]:
    """The output of four processes, which begin together."""
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(limitkeeper.__path__[0])}
    arguments = [valkey.url, f"leased {name}", rule, repr(options), str(rate), str(seconds)]
    command = [sys.executable, "-c", textwrap.dedent(WORKER), *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    running = [subprocess.Popen(command, env=environment, text=True, **pipes) for _ in range(4)]
    assert [process.stdout.readline() for process in running] == ["ready\n"] * 4
    for process in running:
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0] * 4
    return [[int(word) for word in answer.split()] for answer in answers]


def most_in_a_second(received: list[list[int]]) -> int:
    moments = sorted(moment for one in received for moment in one[3:])
    first = most = 0
    for last, moment in enumerate(moments):
        while moments[first] <= moment - 1_000_000:
            first += 1
        most = max(most, last + 1 - first)
    return most


def test_four_processes_stay_within_the_bound_and_cost_little(valkey):
    """Four processes above the limit: no second holds more than burst, rate and bound, and the server gets few calls."""
    received = fleet(valkey, "plain", "400/s burst 40", rate=400, seconds=2.0, life="200ms")
    bound = LeasedStore(MemoryStore(), life="200ms").over_admission(TokenBucket("400/s burst 40"), nodes=4)
    admitted, offered, asked = (
        sum(len(one) - 3 for one in received),
        sum(one[0] for one in received),
        sum(one[1] for one in received),
    )
    away = sum(one[2] for one in received) / 1e6
    assert most_in_a_second(received) <= 440 + bound + IN_HAND
    assert admitted >= 0.8 * 400 * (2 - away)
    assert asked <= 0.15 * offered + 50 * away


def test_four_strict_processes_never_exceed_the_limit(valkey):
    """In strict mode no second holds more than burst and rate."""
    received = fleet(valkey, "strict", "400/s burst 40", rate=400, seconds=1.5, life="100ms", strict=True)
    assert most_in_a_second(received) <= 440 + IN_HAND
