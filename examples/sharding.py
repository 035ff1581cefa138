"""Sharding without its two known problems: counters lost when shards change, and hot keys.

    python examples/sharding.py

Four stores hold the counters of 10 000 users; each user has one home shard. After a fifth store is added, a fifth of the users
moves to it with their counters. Then one user causes all the traffic: with leases, its home shard is called rarely, and the
latency of other users there does not change. The example runs on a ManualClock, so every run prints the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from random import Random
from statistics import quantiles
from typing import Any

from limitkeeper import Decision, Limiter, MemoryStore
from limitkeeper.stores.sharded import ShardedStore
from limitkeeper.testing import ManualClock

USERS = [f"user:{i}" for i in range(10_000)]
NAMES = ("north", "east", "south", "west")


class Server(MemoryStore):
    """A simulated remote store: it counts its calls and serves them one at a time, 20 µs each."""

    local = False
    service_us = 20

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock=clock)
        self.calls = 0
        self.idle_at_us = 0

    def serve(self) -> None:
        self.calls += 1
        self.idle_at_us = max(self.idle_at_us, self.clock.now_us()) + self.service_us

    def took_us(self) -> int:
        """Duration of the last call, including the calls queued before it."""
        return self.idle_at_us - int(self.clock.now_us())

    def decide(self, claims: Any, max_wait_us: int | None = 0, **options: Any) -> Decision:
        self.serve()
        return super().decide(claims, max_wait_us, **options)

    def give_back(self, claims: Any, charged_at: int = -1, source: str = "store") -> bool:
        self.serve()
        return super().give_back(claims, charged_at)


def homes(store: ShardedStore) -> dict[str, str]:
    return {user: store.home_of(user) for user in USERS}


def shares(store: ShardedStore) -> str:
    counts = Counter(homes(store).values())
    return ", ".join(f"{name} {counts[name] / len(USERS):.1%}" for name in store.shards)


def moved(before: dict[str, str], after: dict[str, str]) -> str:
    changes = {user: (before[user], home) for user, home in after.items() if before[user] != home}
    old, new = ({change[i] for change in changes.values()} for i in (0, 1))
    way = f"from {min(old)}" if len(old) == 1 else f"to {min(new)}" if len(new) == 1 else "between several shards"
    return f"  moved                 {len(changes) / len(USERS):.1%}, all of them {way}"


def kept(limiter: Limiter) -> str:
    return f"  counters              {sum(limiter.peek(user).remaining == 2 for user in USERS)} of {len(USERS)} unchanged"


def moving() -> Iterator[str]:
    """Adds a shard and removes another; every counter is kept."""
    clock = ManualClock()
    with ShardedStore({name: Server(clock) for name in NAMES}) as store:
        limiter = Limiter("fixed window 5/h", store=store)
        limiter.hit_many(USERS, cost=3)
        yield f"four shards:            {shares(store)}"
        before = homes(store)
        store.add("centre", Server(clock))
        yield from (f"fifth shard added:      {shares(store)}", moved(before, homes(store)), kept(limiter))
        before = homes(store)
        store.remove("north").close()
        yield from (f"north removed:          {shares(store)}", moved(before, homes(store)), kept(limiter))


def viral(hot: bool, seconds: float = 2.0, rate: int = 10_000) -> tuple[int, int, int]:
    """One user causes all the traffic, ten times its limit. Returns (hits, admitted, calls to its home shard)."""
    clock = ManualClock()
    servers = {name: Server(clock) for name in NAMES}
    with ShardedStore(servers, hot=hot) as store:
        limiter = Limiter("1000/s", store=store)
        hits = round(seconds * rate)
        admitted = 0
        for _ in range(hits):
            admitted += bool(limiter.hit("viral"))
            clock.advance(1 / rate)
        return hits, admitted, servers[store.home_of("viral")].calls


def neighbours(way: str, seconds: float = 1.0, viral: int = 60_000, others: int = 40_000) -> float:
    """99th percentile, in µs, of other users' decision times during `viral` hits per second of one user, who is
    "absent", "pinned" to its home shard, or "leased" from it.

    Four servers of 50 000 calls per second. The calls before the user is detected as hot (a tenth of a second) are left out.
    """
    clock, chance = ManualClock(), Random(1)
    servers = {name: Server(clock) for name in NAMES}
    took: list[int] = []
    with ShardedStore(servers, hot=way == "leased") as store:
        limiter = Limiter("1000/s", store=store)
        for i in range(round(seconds * (viral + others))):
            user = "viral" if chance.random() * (viral + others) < viral else USERS[chance.randrange(len(USERS))]
            if user != "viral" or way != "absent":
                limiter.hit(user)
            if user != "viral" and i >= (viral + others) // 10:
                took.append(servers[store.home_of(user)].took_us())
            clock.advance(1 / (viral + others))
    return float(quantiles(took, n=100)[98])


def text() -> Iterator[str]:
    yield from moving()
    yield ""
    yield "one user causes all the traffic, 10 000 hits per second with a limit of 1000, for two seconds:"
    for words, hot in (("pinned to its home", False), ("leased from its home", True)):
        hits, admitted, asked = viral(hot)
        yield f"  {words:<22}{admitted} admitted, {asked} calls to its home shard: {asked / hits:.3f} per decision"
    yield ""
    yield "decision time of other users during 60 000 hits per second of that user, 99th percentile:"
    for way in ("absent", "pinned", "leased"):
        yield f"  {way:<22}{neighbours(way) / 1000:.2f} ms"


if __name__ == "__main__":
    print(*text(), sep="\n")
