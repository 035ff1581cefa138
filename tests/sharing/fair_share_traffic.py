"""Traffic of several tenants on a virtual clock, for the tests of fair shares."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from limitkeeper.sharing import FairShare
from limitkeeper.testing import ManualClock


def arrivals(demands: Mapping[str, float], seconds: float, rng: random.Random) -> list[tuple[float, str]]:
    """Poisson arrivals: (time in seconds, tenant), in order."""
    found = []
    for tenant, per_second in demands.items():
        at = rng.expovariate(per_second)
        while at < seconds:
            found.append((at, tenant))
            at += rng.expovariate(per_second)
    return sorted(found)


def admitted(
    total: str, demands: Mapping[str, float], seconds: float = 20.0, seed: int = 1, **options: Any
) -> list[tuple[float, str]]:
    """The requests that a FairShare admits: (time, tenant)."""
    clock = ManualClock(1000.0)
    share = FairShare(total, clock=clock, **options)
    found = []
    for at, tenant in arrivals(demands, seconds, random.Random(seed)):
        clock.advance(max(0.0, 1000.0 + at - clock.now_us() / 1e6))
        if share.hit(tenant):
            found.append((at, tenant))
    return found


def per_second(found: Sequence[tuple[float, str]], tenant: str, seconds: float = 20.0) -> float:
    return sum(1 for _, one in found if one == tenant) / seconds


def jain(amounts: Sequence[float]) -> float:
    """Jain's fairness index: 1 when all are equal, 1/n when one has everything."""
    return sum(amounts) ** 2 / (len(amounts) * sum(amount * amount for amount in amounts))


def max_min(capacity: float, demands: Mapping[str, float], weights: Mapping[str, int]) -> dict[str, float]:
    """The weighted max-min shares, by filling: the slow, obvious way."""
    shares = dict.fromkeys(demands, 0.0)
    asking = {tenant for tenant, demand in demands.items() if demand > 0}
    while asking and capacity > 1e-9:
        level = min(
            capacity / sum(weights.get(tenant, 1) for tenant in asking),
            min((demands[tenant] - shares[tenant]) / weights.get(tenant, 1) for tenant in asking),
        )
        for tenant in asking:
            shares[tenant] += level * weights.get(tenant, 1)
        capacity -= level * sum(weights.get(tenant, 1) for tenant in asking)
        asking = {tenant for tenant in asking if demands[tenant] - shares[tenant] > 1e-9}
    return shares
