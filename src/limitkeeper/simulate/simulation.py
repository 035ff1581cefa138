"""Runs a scenario: builds clients, gateway and services on one event loop, and records a row of the series per interval.

Everything random is drawn from generators that are seeded from the scenario's seed and the name of the part, so a run repeats
exactly, and a change of one part leaves the draws of the others as they are. Ctrl-C ends a run; what it has recorded is kept.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from ..plan.percentiles import PERCENTS
from ..plan.slo import SloCheck
from .calls import ServiceCall
from .clients import Client
from .event_loop import EventLoop
from .gateway import Gateway
from .over_admission import OverAdmission
from .recorder import ClassRecorder, jain
from .scenario import Scenario, ServiceSettings
from .services import Service
from .single_limiter_run import Trace

Progress = Callable[[float], object]
Row = dict[str, float]


@dataclass
class Result:
    """What a run has recorded. `series` has one row per interval; `simulated_s` is less than the duration when interrupted.
    `kind` is "simulated"; a live run, whose `simulated_s` are real seconds, has another one."""

    scenario: Scenario
    classes: dict[str, ClassRecorder] = field(default_factory=dict)
    series: list[Row] = field(default_factory=list)
    services: dict[str, Service] = field(default_factory=dict)
    calls: list[ServiceCall] = field(default_factory=list)
    admissions: dict[str, OverAdmission] = field(default_factory=dict)
    simulated_s: float = 0.0
    events: int = 0
    interrupted: bool = False
    kind: str = "simulated"

    @property
    def decisions(self) -> int:
        """Attempts of all clients."""
        return sum(one.attempts for one in self.classes.values())

    def slo_checks(self, name: str) -> list[SloCheck]:
        """The objectives and what a class of clients had."""
        slo = self.scenario.slo
        return [] if slo is None else slo.check(self.classes[name].percentile)

    def fairness(self) -> float:
        """Jain's index over the classes: the share of its requests that each got answered."""
        return jain([one.ok / one.sent for one in self.classes.values() if one.sent])

    def peak(self, column: str) -> float:
        """The highest value of a column of the series."""
        return max((row[column] for row in self.series), default=0.0)

    def as_dict(self) -> dict[str, object]:
        """For JSON: rates per second, latencies in seconds."""
        time = self.simulated_s or 1.0
        return {
            "name": self.scenario.name,
            "seed": self.scenario.seed,
            "simulated_s": self.simulated_s,
            "interrupted": self.interrupted,
            "events": self.events,
            "clients": {name: class_dict(one, time, self.slo_checks(name)) for name, one in self.classes.items()},
            "jain": self.fairness(),
            "limits": {
                name: {"admitted": one.admitted, "excess": one.excess, "worst_key": one.worst_key}
                for name, one in self.admissions.items()
            },
            "services": {
                name: {"requests": one.requests, "rejected": one.rejected, "failed": one.failed, "most_in_use": one.most_in_use}
                for name, one in self.services.items()
            },
            "calls": {
                one.name: {"calls": one.calls, "attempts": one.attempts, "timeouts": one.timeouts, "refused": one.refused}
                for one in self.calls
            },
            "series": self.series,
        }


def class_dict(one: ClassRecorder, time: float, checks: list[SloCheck]) -> dict[str, object]:
    counts = {name: getattr(one, name) for name in ("sent", "attempts", "retries", "ok", "refused", "failed")}
    latencies = {f"p{percent:g}": one.percentile(percent) for percent in PERCENTS}
    return {
        **counts,
        "goodput": one.ok / time,
        **latencies,
        "refused_by": dict(one.rules),
        "duplicate_orders": one.duplicates,
        "inconsistent_orders": one.inconsistent,
        "jain": one.fairness(),
        "slo_met": all(check.met for check in checks),
    }


class Simulation:
    """One run of a scenario: `run()` returns its Result."""

    def __init__(self, scenario: Scenario, seed: int | None = None, progress: Progress | None = None) -> None:
        self.scenario, self.seed, self.progress = scenario, scenario.seed if seed is None else seed, progress
        self.loop = EventLoop()
        self.result = Result(scenario)
        self.result.classes = {one.name: ClassRecorder(one.name, one.users) for one in scenario.clients}
        self._begin_us = self.loop.now

    def rng(self, name: str) -> Random:
        return Random(f"{self.seed} {name}")

    def run(self) -> Result:
        collects = gc.isenabled()
        try:
            gc.disable()  # a third of the time: hundreds of thousands of requests live at once, and none is in a cycle
            if self.scenario.limit is None:
                self._simulate()
            else:
                self._trace()
        except KeyboardInterrupt:
            self.result.interrupted = True
        finally:
            if collects:
                gc.enable()
        self.result.simulated_s = (self.loop.now - self._begin_us) / 1e6
        return self.result

    def _simulate(self) -> None:
        scenario, loop, result = self.scenario, self.loop, self.result
        result.services = {name: self._service(one) for name, one in scenario.services.items()}
        for name, settings in scenario.services.items():
            caller = result.services[name]
            caller.calls = [
                ServiceCall(caller, result.services[call.to], call, loop, self.rng(f"call {name} {number}"))
                for number, call in enumerate(settings.calls)
            ]
            result.calls += caller.calls
        gateway = Gateway(scenario.gateway, loop, result.services.get("gateway"))
        for settings_ in scenario.clients:
            record = result.classes[settings_.name]
            Client(settings_, loop, self.rng(f"client {settings_.name}"), gateway.send, record).begin(loop.now)
        try:
            self._play(loop.run)
        finally:
            result.events = loop.events
            result.admissions = {name: found for (name, _), found in gateway.admissions.items()}

    def _service(self, one: ServiceSettings) -> Service:
        sizes = (one.pods, one.concurrency, one.queue, one.contention, one.coherency)
        return Service(one.name, self.loop, self.rng(f"service {one.name}"), one.time, *sizes)

    def _play(self, until: Callable[[int], object]) -> None:
        """Runs interval after interval, and records a row at the end of each."""
        scenario, loop = self.scenario, self.loop
        end_us = self._begin_us + scenario.duration_us
        while loop.now < end_us:
            begin_us = loop.now
            until(min(begin_us + scenario.interval_us, end_us))
            self._record((loop.now - begin_us) / 1e6)
            if self.progress is not None:
                self.progress((loop.now - self._begin_us) / scenario.duration_us)

    def _record(self, interval_s: float) -> None:
        result = self.result
        row: Row = {"time": (self.loop.now - self._begin_us) / 1e6}
        for one in result.classes.values():
            row |= one.row(interval_s)
        for name, service in result.services.items():
            row |= {f"{name}.in use": service.in_use, f"{name}.waiting": service.waiting}
        for call in result.calls:
            if call.bulkheads:
                row[f"{call.name}.waiting"] = call.waiting
        result.series.append(row)

    def _trace(self) -> None:
        """Arrivals through one limiter (trace.py)."""
        assert self.scenario.limit is not None
        trace = Trace(self.scenario.limit, self.loop)
        self.result.admissions = {str(self.scenario.limit): trace.admissions}
        for one in self.scenario.clients:
            trace.add(one, self.rng(f"client {one.name}"), self.result.classes[one.name])
        self._play(trace.run)
