"""Leases: a hit from RAM beside a hit of the in-process store, and the parent's operations below and above the limit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import Section, Table, number
from timing import Case, Effort, measure, one_core

from limitkeeper import FixedWindow, LeasedStore, Limiter, MemoryStore, SlidingWindowCounter, SlidingWindowLog, TokenBucket

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "stores" / "leased"))
from leased_fleet import Fleet, poisson

PLENTY = "1000000000/s burst 1000000000"
RULES: list[Any] = [TokenBucket("1000/s burst 100"), FixedWindow("1000/s"), SlidingWindowLog("1000/s")]
RULES += [SlidingWindowCounter("1000/s")]
LOADS = (0.5, 0.8, 2.0, 10.0)


class Other(MemoryStore):
    """A store of another kind: called through the contract, not through MemoryStore's own fast path."""


def hits(effort: Effort, note: Callable[[str], None]) -> tuple[dict[str, float], dict[str, str]]:
    """Nanoseconds of a hit in memory, and of one that a lease answers: granted and refused."""
    leased, dry = LeasedStore(MemoryStore(), lease=900_000_000, life="1h"), LeasedStore(MemoryStore(), life="1h")
    refused = Limiter("1/400d", store=dry)
    limiters = {
        "MemoryStore": Limiter(PLENTY, store=MemoryStore()),
        "another store, through the contract": Limiter(PLENTY, store=Other()),
        "LeasedStore, from a batch": Limiter(PLENTY, store=leased),
        "LeasedStore, refused": refused,
    }
    for limiter in limiters.values():
        limiter.hit("user:100042")
        limiter.hit("user:100042")
    cases = [Case(name, "o.hit(k)", {"o": limiter, "k": "user:100042"}) for name, limiter in limiters.items()]
    with one_core():
        found = measure(cases, effort, note)
    leased.close()
    dry.close()
    return found


def operations(limit: Any, lease: int | None, nodes: int, load: float, seconds: float) -> tuple[float, int, int]:
    """(operations per decision, admitted, the most in any second) of a fleet on a virtual clock."""
    fleet = Fleet(limit, nodes, lease=lease)
    report = fleet.play(poisson([1000 * load / nodes] * nodes, seconds))
    return report.per_decision, len(report.admitted), report.most_in(1_000_000)


def rows(effort: Effort, note: Callable[[str], None]) -> list[tuple[str, ...]]:
    """One row for each rule, lease and number of nodes."""
    found = []
    for limit in RULES:
        for lease in (None, 20):
            for nodes in (1, 4, 16):
                note(f"{limit.kind}, lease={lease}, {nodes} nodes")
                seconds = effort.pick(4, 1)
                received = [operations(limit, lease, nodes, load, seconds / max(1.0, load / 2)) for load in LOADS]
                what = f"{limit.kind}, {'a lease of 20' if lease else 'following demand'}, {nodes} nodes"
                found.append((what, *(f"{one[0]:.4f}" for one in received)))
    return found


def run(floors: Any, effort: Effort, note: Callable[[str], None]) -> Section:
    section = Section(
        "Leases",
        "A hit that a LeasedStore answers from RAM beside a hit of the in-process store; and a fleet on a virtual clock, Poisson "
        "arrivals at a multiple of 1000/s, leases of 100 ms: what the parent hears per decision, everything counted.",
    )
    took, failed = hits(effort, note)
    section.fail(failed)
    base = took["MemoryStore"]
    section.figure("leased hit / in-process hit", took["LeasedStore, from a batch"] / base, 3, "×")
    section.figure("refused from RAM / in-process hit", took["LeasedStore, refused"] / base, 3, "×")
    for nodes in (1, 4):
        for load, goal in ((2.0, 0.1), (10.0, 0.02)):
            asked, _, _ = operations(RULES[0], None, nodes, load, effort.pick(4, 2))
            section.figure(f"bucket, {nodes} nodes, {load:g} × load: operations per decision", asked, goal, "")
    asked, _, _ = operations(RULES[0], 20, 1, 0.5, effort.pick(16, 4))
    section.figure("bucket, a lease of 20, 0.5 × load: operations per decision", asked, 1.01 / 20, "")
    times = Table(("hit", "ns"))
    times.rows = [(name, number(ns, "")) for name, ns in took.items()]
    table = Table(("operations of the parent per decision", *(f"{load:g} × load" for load in LOADS)))
    table.rows = rows(effort, note)
    section.details = [times, table]
    return section
