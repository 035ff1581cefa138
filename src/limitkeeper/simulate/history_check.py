"""Checks a history against the bound that its mode states (law 11), and against conservation (law 13).

server or lease   any interval T admits at most the limit's own bound, and
                    + the bound of the leases; rate × d for a node whose clock went back by d: its leases live longer
                    + what leases gave back late: a bucket may have filled up meanwhile
                    + what failovers forgot; min(burst, rate × d) for a server whose clock went forward by d
                    + one burst for each loss of a shard that was given up (on_loss="rehash")
a node alone      any interval T admits at most the bound of its declared share, for each process
conservation      what is left on the servers is never more than if exactly the admitted calls had been charged; and equal
                    when no call failed and no process crashed: nothing is lost but by faults
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from ..algorithms.claim import Claim, NamedLimit
from ..algorithms.limit import Limit
from ..stores.guarded.share import shared_limit
from ..stores.leased.strict_mode_derating import derate
from ..stores.memory import MemoryStore
from ..testing import ManualClock
from ..testing.admission_bounds import Costs, check_bound
from .fault_run import MAX_DRIFT, SIZE, Admission, History
from .network import MAX_AHEAD_US
from .virtual_time import BEGIN_US


def broken_promises(history: History) -> list[str]:
    """What a history did that its mode excludes; empty: nothing."""
    return [*history.errors, *over_admissions(history), *created_or_lost(history)]


def rate_of(limit: Limit) -> Fraction:
    """Units in a microsecond."""
    return Fraction(int(limit.count), int(limit.period))


def over_admissions(history: History) -> Iterator[str]:
    groups: dict[tuple[str, str, int], tuple[Costs, Costs]] = {}
    for costs, found in ((0, history.admitted), (1, history.returned)):
        for one in found:
            alone = one.source == "local_share"
            if one.source == "closed":
                yield f"{one.key}: admitted while the guard refuses everything"
            elif one.source != "open":
                moment = one.share_us if alone else BEGIN_US + one.at_us
                group = groups.setdefault((one.limit, one.key, one.process if alone else 0), ([], []))
                group[costs].append((moment, one.cost))  # type: ignore[attr-defined]
    for (name, key, process), (admitted, returned) in groups.items():
        limit = history.limits[name].limit
        limit, extra = share_bound(history, limit, process) if process else store_bound(history, limit, name, key)
        try:
            check_bound(limit, admitted, returned, extra)
        except AssertionError as error:
            who = f"process {process} alone" if process else "servers and leases"
            yield f"{key}, {who}: {error} (allowed beyond the limit's own bound: {float(extra):.1f})"


def share_bound(history: History, limit: Limit, process: int) -> tuple[Limit, Fraction]:
    """The share of a node, and what the steps of its clock add."""
    share = shared_limit(limit, Fraction(1, len(history.schedule.nodes)))
    return share, steps_bound(share, history.node_steps[process])


def store_bound(history: History, limit: Limit, name: str, key: str) -> tuple[Limit, Fraction]:
    """The limit as it is charged, and what the mode and its faults add to its own bound."""
    extra = Fraction(history.leased.get(name, 0.0)) + history.lost[name, key] + steps_bound(limit, history.server_steps)
    extra += history.losses * limit.capacity + history.unsure[name, key] + history.late[name, key]
    if history.leased and limit.gain:
        back_us = max(sum(-step for step in steps if step < 0) for steps in history.node_steps.values())
        extra += rate_of(limit) * (back_us + MAX_DRIFT * history.life_us)
    if history.takeovers:
        extra += limit.capacity + rate_of(limit) * history.end_us
    if history.schedule.mode == "strict" and limit.gain:
        derated = derate(limit, history.life_us)
        return derated, extra + rate_of(derated) * history.life_us
    return limit, extra


def steps_bound(limit: Limit, steps: list[int]) -> Fraction:
    """A step forward refills a bucket at most once, with what is reserved ahead. Steps move windows: one more may end in each."""
    if limit.gain:
        most = limit.capacity + rate_of(limit) * MAX_AHEAD_US
        return sum((min(most, rate_of(limit) * step) for step in steps if step > 0), Fraction())
    return Fraction(limit.capacity * (len(steps) + bool(steps)))


def created_or_lost(history: History) -> Iterator[str]:
    """Conservation, on the limits that are never full or empty."""
    if history.server_steps or history.losses or history.takeovers:
        return
    named = history.limits["wide"]
    exact = not (history.failed_calls or history.crashes or history.failovers)
    for (name, key), left in history.left.items():
        if name != "wide" or (name, key) in history.lost:
            continue
        expected = replayed(history, named, key)
        if left > expected:
            yield f"{key}: {left} of {SIZE} are left, and {expected} would be if all admitted calls had been charged"
        elif exact and left < expected:
            yield f"{key}: {left} of {SIZE} are left, not {expected}: tokens were lost, and no call failed"


def replayed(history: History, named: NamedLimit, key: str) -> int:
    """What is left on a bare store that was charged what was admitted, net of returns."""

    def of_store(found: list[Admission]) -> list[Admission]:
        return [one for one in found if (one.limit, one.key) == (named.name, key) and one.source in ("store", "lease")]

    admitted = of_store(history.admitted)
    charged = sum(one.cost for one in admitted) - sum(one.cost for one in of_store(history.settled))
    clock = ManualClock((BEGIN_US + min(one.at_us for one in admitted)) / 1e6)
    bare = MemoryStore(clock=clock)
    limit = NamedLimit(named.limiter, named.name, named.limit)
    bare.give_back([Claim(limit, key, -charged)])
    clock.advance((BEGIN_US + history.end_us - clock.now_us()) / 1e6)
    return bare.decide([Claim(limit, key, 1)], commit=False).remaining
