"""How many honest newcomers a full store refuses, for several mixes of made-up and honest keys: `python benchmarks/overflow.py`.

The store is full of active keys. Made-up keys come once each; then, or meanwhile, honest newcomers come. All times are virtual,
so the figures depend on the secret of the hash only, by a few percent. docs/stores/memory.md prints them.
"""

from __future__ import annotations

import itertools

from limitkeeper import Limiter, MemoryStore
from limitkeeper.testing import ManualClock

MAX_KEYS = 10_000
CELLS = MAX_KEYS // 4 + 1024
HONEST = 1000


def full(rule: str) -> tuple[ManualClock, Limiter]:
    """A limiter on a store that is full for a year."""
    clock = ManualClock(1_700_000_000.0)
    store = MemoryStore(MAX_KEYS, clock=clock)
    filler = Limiter("fixed window 1/400d", store=store)
    for number in range(MAX_KEYS):
        filler.hit(f"known {number}")
    return clock, Limiter(rule, store=store)


def after_a_flood(rule: str, per_cell: float, calls: int) -> float:
    """The share of honest calls refused after `per_cell` made-up keys for each overflow cell."""
    _, limiter = full(rule)
    for number in range(round(per_cell * CELLS)):
        limiter.hit(f"made up {number}")
    refused = sum(not limiter.hit(f"honest {number}") for number in range(HONEST) for _ in range(calls))
    return refused / HONEST / calls


def during_a_flood(rule: str, share: float, honest: int = 60, seconds: int = 240) -> float:
    """The share of honest calls refused while made-up keys come at `share` times the rate of all overflow cells together."""
    clock, limiter = full(rule)
    refused = asked = 0
    numbers = itertools.count()
    (limit,) = limiter.limits.values()
    rate = limit.count / (limit.period / 1e6)
    for second in range(seconds):
        clock.advance(1)
        flood = round(share * CELLS * rate)
        for turn in range(flood):
            limiter.hit(f"made up {next(numbers)}")
            if second >= seconds // 2 and turn % max(1, flood // honest) == 0:
                asked += 1
                refused += not limiter.hit(f"honest {next(numbers)}")
    return refused / asked


if __name__ == "__main__":
    print(f"max_keys {MAX_KEYS}, {CELLS} overflow cells; honest calls refused:")
    for rule, calls in (
        ("fixed window 10/d", 1),
        ("fixed window 10/d", 5),
        ("fixed window 100/d", 1),
        ("fixed window 100/d", 20),
    ):
        burst = int(rule.split()[2].split("/")[0])
        shares = [f"{times:g} x: {after_a_flood(rule, times * burst, calls):.1%}" for times in (0.25, 0.5, 0.75, 1, 1.5)]
        print(f"{rule}, {calls} call(s) each, after a flood of n x cells x limit:", *shares, sep="  ")
    for rule in ("10/min burst 10", "60/min burst 60"):
        shares = [f"{share:g} x: {during_a_flood(rule, share):.1%}" for share in (0.5, 0.9, 1.1, 2, 4)]
        print(f"{rule}, one call each, during a flood at n x cells x rate:", *shares, sep="  ")
