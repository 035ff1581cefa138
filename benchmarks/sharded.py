"""Sharding: the cost of a route and of a decision on several shards, the duration of a hand-over, and the viral user."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from report import Section, Table, number
from timing import Case, Effort, measure, one_core

from limitkeeper import Limiter, MemoryStore, TokenBucket
from limitkeeper.stores.sharded import ShardedStore
from limitkeeper.stores.sharded.slots import SLOTS, homes, slot_of

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import sharding

RULE = "1000/s burst 1000000"


class Other(MemoryStore):
    """A store of another kind: called through the contract, not through MemoryStore's own fast path."""


def routes(effort: Effort, note: Callable[[str], None]) -> tuple[dict[str, float], dict[str, str]]:
    """Nanoseconds of a hit, directly and through a ShardedStore of four."""
    several = {"second": TokenBucket("1000/s"), "hour": TokenBucket("1000000/h")}
    one, two = (ShardedStore([kind() for _ in range(4)]) for kind in (MemoryStore, Other))
    limiters = {
        "memory, direct": Limiter(RULE, store=MemoryStore()),
        "memory, sharded": Limiter(RULE, store=one),
        "other store, direct": Limiter(RULE, store=Other()),
        "other store, sharded": Limiter(RULE, store=two),
        "two limits, direct": Limiter(several, store=MemoryStore()),
        "two limits, sharded": Limiter(several, store=one),
    }
    cases = [Case(name, "o.hit(k)", {"o": limiter, "k": "user:100042"}) for name, limiter in limiters.items()]
    left, right = (next(f"u{i}" for i in range(999) if one.home_of(f"u{i}") == name) for name in ("0", "1"))
    apart = {"second": left, "hour": right}
    cases.append(Case("two limits on two shards", "o.hit(k)", {"o": limiters["two limits, sharded"], "k": apart}))
    with one_core():
        return measure(cases, effort, note)


def shares(keys: int) -> tuple[float, float]:
    """(the share of keys that a fifth shard moves, the largest share of four shards over the even one)."""
    four, five = (homes(tuple((f"shard {i}", 1.0) for i in range(size))) for size in (4, 5))
    slots = [slot_of(f"user:{i}") for i in range(keys)]
    moved = sum(four[slot] != five[slot] for slot in slots) / keys
    return moved, max(Counter(four[slot] for slot in slots).values()) * 4 / keys


def handoff(keys: int) -> tuple[int, float]:
    """(keys moved, seconds) when a fifth shard joins four that hold so many keys."""
    store = ShardedStore([MemoryStore() for _ in range(4)])
    limiter = Limiter("1/h", store=store)
    limiter.hit_many([f"user:{i}" for i in range(keys)])
    homes((*((str(i), 1.0) for i in range(4)), ("new", 1.0)))  # work done before anything closes is not measured
    moved: dict[str, int] = {}
    begun = time.perf_counter()
    store.add("new", MemoryStore(), progress=lambda received: moved.update({received.shard: received.keys}))
    return sum(moved.values()), time.perf_counter() - begun


def longest_pause(keys: int) -> float:
    """The longest time, in seconds, for which one shard's moving keys are closed while a fifth joins."""
    store = ShardedStore([MemoryStore() for _ in range(4)])
    Limiter("1/h", store=store).hit_many([f"user:{i}" for i in range(keys)])
    marks = [time.perf_counter()]
    slots = [0]

    def received(one: Any) -> None:
        if one.slots != slots[-1]:
            slots.append(one.slots)
            marks.append(time.perf_counter())

    store.add("new", MemoryStore(), progress=received)
    return max(later - earlier for earlier, later in pairwise(marks))


def run(floors: Any, effort: Effort, note: Callable[[str], None]) -> Section:
    section = Section(
        "Sharding",
        "A hit through a ShardedStore of 4 beside one of the shard itself; a fifth shard joining; and `examples/sharding.py`: "
        "one key with all the traffic, and its neighbours on simulated servers of 50 000 calls a second.",
    )
    took, failed = routes(effort, note)
    section.fail(failed)
    for kind, goal in (("memory", 1000), ("other store", 1000), ("two limits", None)):
        over = took[f"{kind}, sharded"] - took[f"{kind}, direct"]
        section.figure(f"overhead of routing, {kind}", over, goal, "ns")
    note("shares and hand-over")
    moved, largest = shares(100_000)
    section.figure("keys moved by a fifth shard (a fifth is 20 %)", 100 * moved, 22, "%")
    section.figure("largest of four shares over the even one", largest, 1.1, "×")
    keys = effort.pick(200_000, 20_000)
    changed, seconds = handoff(keys)
    section.figure(f"hand-over, {keys} keys held: per key moved", 1e9 * seconds / changed, None, "ns")
    section.figure("longest pause of a key that moves", 1000 * longest_pause(keys), None, "ms")
    note("the viral user")
    hits, _, asked = sharding.viral(hot=True)
    section.figure("viral key: operations of its home per decision", asked / hits, 0.1, "")
    waits = {way: sharding.neighbours(way) for way in ("absent", "pinned", "leased")}
    section.figure("neighbours' p99 beside a leased viral key / without it", waits["leased"] / waits["absent"], 1.25, "×")
    section.figure("neighbours' p99 beside a pinned viral key / without it", waits["pinned"] / waits["absent"], None, "×")
    table = Table(("hit", "ns"))
    table.rows = [(name, number(ns, "")) for name, ns in took.items()]
    section.details = [table]
    section.notes = [f"{SLOTS} slots; a route is a CRC-32 and an index, so it does not grow with the number of shards."]
    return section
