"""Sticky sharding, and what it is known to do badly: the counters that are reset, and the user that goes viral.

    python examples/sharding.py

Four stores keep the counters of 10 000 users, each user at home on one of them. A fifth store comes, and a fifth of the users
moves to it with their counters. Then one user brings all the traffic: leased from its home, it costs that home next to
nothing, and its neighbours there are answered as quickly as before. Time is a ManualClock, so every run prints the same.
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
    """A store as if it were far away: it counts what it is asked, and needs 20 µs for each call, one after the other."""

    local = False
    service_us = 20

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock=clock)
        self.asked = 0
        self.idle_at_us = 0

    def serve(self) -> None:
        self.asked += 1
        self.idle_at_us = max(self.idle_at_us, self.clock.now_us()) + self.service_us

    def took_us(self) -> int:
        """How long the last call took, those before it included."""
        return self.idle_at_us - int(self.clock.now_us())

    def decide(self, claims: Any, max_wait_us: int | None = 0, **options: Any) -> Decision:
        self.serve()
        return super().decide(claims, max_wait_us, **options)

    def give_back(self, claims: Any, charged_at: int = -1, source: str = "store") -> None:
        self.serve()
        super().give_back(claims, charged_at)


def homes(store: ShardedStore) -> dict[str, str]:
    return {user: store.home_of(user) for user in USERS}


def shares(store: ShardedStore) -> str:
    counts = Counter(homes(store).values())
    return ", ".join(f"{name} {counts[name] / len(USERS):.1%}" for name in store.shards)


def moved(before: dict[str, str], after: dict[str, str]) -> str:
    changes = {user: (before[user], home) for user, home in after.items() if before[user] != home}
    old, new = ({change[i] for change in changes.values()} for i in (0, 1))
    way = f"from {min(old)}" if len(old) == 1 else f"to {min(new)}" if len(new) == 1 else "hither and thither"
    return f"  moved                 {len(changes) / len(USERS):.1%}, all of them {way}"


def kept(limiter: Limiter) -> str:
    return f"  counters              {sum(limiter.peek(user).remaining == 2 for user in USERS)} of {len(USERS)} as they were"


def moving() -> Iterator[str]:
    """A shard comes and another goes; nobody's counter starts anew."""
    clock = ManualClock()
    with ShardedStore({name: Server(clock) for name in NAMES}) as store:
        limiter = Limiter("fixed window 5/h", store=store)
        limiter.hit_many(USERS, cost=3)
        yield f"four shards:            {shares(store)}"
        before = homes(store)
        store.add("centre", Server(clock))
        yield from (f"a fifth one comes:      {shares(store)}", moved(before, homes(store)), kept(limiter))
        before = homes(store)
        store.remove("north").close()
        yield from (f"north goes:             {shares(store)}", moved(before, homes(store)), kept(limiter))


def viral(hot: bool, seconds: float = 2.0, rate: int = 10_000) -> tuple[int, int, int]:
    """One user brings all the traffic, ten times what it may: (hits, admitted, what its home was asked)."""
    clock = ManualClock()
    servers = {name: Server(clock) for name in NAMES}
    with ShardedStore(servers, hot=hot) as store:
        limiter = Limiter("1000/s", store=store)
        hits = round(seconds * rate)
        admitted = 0
        for _ in range(hits):
            admitted += bool(limiter.hit("viral"))
            clock.advance(1 / rate)
        return hits, admitted, servers[store.home_of("viral")].asked


def neighbours(way: str, seconds: float = 1.0, viral: int = 60_000, others: int = 40_000) -> float:
    """The 99th percentile, in µs, of how long other users' decisions take beside `viral` hits a second of one user, who is
    "absent", "pinned" to its home, or "leased" from it.

    Four servers of 50 000 calls a second. What is asked before the user is found to be hot (a tenth of a second) is left out.
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
    yield "one user with all the traffic, 10 000 hits a second where 1000 may pass, for two seconds:"
    for words, hot in (("pinned to its home", False), ("leased from its home", True)):
        hits, admitted, asked = viral(hot)
        yield f"  {words:<22}{admitted} admitted, its home was asked {asked} times: {asked / hits:.3f} a decision"
    yield ""
    yield "how long the others' decisions take beside 60 000 hits a second of that user, 99th percentile:"
    for way in ("absent", "pinned", "leased"):
        yield f"  {way:<22}{neighbours(way) / 1000:.2f} ms"


if __name__ == "__main__":
    print(*text(), sep="\n")
