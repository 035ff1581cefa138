"""A scenario as values: clients, gateway and services. scenario_reading.py reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..algorithms import Limit
from ..plan.slo import Slo
from .calls import CallSettings
from .clients import ClientSettings
from .distributions import ServiceTime
from .gateway import GatewaySettings


@dataclass(frozen=True)
class ServiceSettings:
    """One service: its pods, and the calls that it makes."""

    name: str
    time: ServiceTime = field(default_factory=ServiceTime)
    pods: int = 1
    concurrency: int = 1
    queue: int | None = None
    contention: float = 0.0
    coherency: float = 0.0
    calls: tuple[CallSettings, ...] = ()


@dataclass(frozen=True)
class Scenario:
    """What is simulated: `Scenario.load(path)`, or `Scenario.of(…)` with the fields of the file.

    Either a `limit` for every user of the clients (a trace through a limiter), or a gateway with a policy and services behind it.
    """

    clients: tuple[ClientSettings, ...]
    name: str = ""
    about: str = ""
    seed: int = 1
    duration_us: int = 60_000_000
    interval_us: int = 1_000_000
    slo: Slo | None = None
    limit: Limit | None = None
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    services: Mapping[str, ServiceSettings] = field(default_factory=dict)

    @staticmethod
    def load(path: str | Path) -> Scenario:
        """Reads a file; PolicyError shows all mistakes."""
        from .scenario_reading import load_scenario

        return load_scenario(path)

    @staticmethod
    def of(**fields: object) -> Scenario:
        """A scenario that is written in Python, with the fields of the file."""
        from .scenario_reading import scenario_of

        return scenario_of(**fields)
