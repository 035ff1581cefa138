"""The simulator: decisions per second of a trace through a limiter, and the flash sale at full size, in CPU time of one core."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import Section, Table
from timing import Effort, one_core

from limitkeeper.simulate import Result, Scenario, Simulation

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "flash_sale"
LIMITS = ("token bucket 5/s burst 10", "fixed window 5/s", "sliding window log 5/s", "sliding window counter 5/s")
RUNS = ("without_limits", "layer_1", "layers_1_2_3")


def timed(scenario: Scenario) -> tuple[Result, float]:
    """A run, and the seconds of CPU that it took."""
    with one_core():
        begun = time.process_time()
        result = Simulation(scenario).run()
        return result, time.process_time() - begun


def trace(limit: str, seconds: int) -> Scenario:
    clients = {"all": {"arrivals": "50000/s", "users": {"count": 10_000, "zipf": 1.1}}}
    return Scenario.of(limit=limit, duration=f"{seconds}s", clients=clients)


def run(floors: Any, effort: Effort, note: Callable[[str], None]) -> Section:
    section = Section(
        "Simulator",
        "CPU time of one core. A trace: Poisson arrivals of 10 000 users by Zipf's law through one limiter. The "
        "flash sale: examples/flash_sale at full size, 120 simulated seconds up to 20 000 requests per second.",
    )
    for limit in LIMITS:
        note(limit)
        result, took = timed(trace(limit, effort.pick(10, 2)))
        goal = 300_000.0 if limit == LIMITS[0] else None
        section.figure(f"trace, {limit}: decisions per second", result.decisions / took, goal, "", at_least=True)
    table = Table(("flash sale", "attempts", "events", "events/s"))
    for name in RUNS if not effort.quick else RUNS[:1]:
        note(name)
        result, took = timed(Scenario.load(FOLDER / f"{name}.yaml"))
        section.figure(f"flash sale, {name}: seconds", took, 60.0, "")
        table.rows.append((name, f"{result.decisions:,}", f"{result.events:,}", f"{result.events / took:,.0f}"))
    section.details = [table]
    return section
