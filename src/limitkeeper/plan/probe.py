"""Probes a service: raises the offered load step by step, open loop, until the SLO or the error budget is broken.

Open loop: requests start on schedule (k / rate seconds after the step began), whether earlier ones have been answered or not, and
a latency counts from the scheduled start. A closed loop, whose clients wait for answers, slows down together with the service and
hides its queue (coordinated omission). A 429 is a refusal by a limiter: no error, no latency, and the end of the probe when more
than 5 % are refused, since the limiter would be measured. Rejected: starting k6, a second program with its own schedule and
formats; its output can be analyzed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from typing import Protocol
from urllib.parse import urlsplit

from ..clock import SYSTEM, Clock
from ..errors import ConfigurationError
from .load_latency_curve import LoadStep, step_of
from .measured_capacity import MAX_ERRORS
from .measurement_files import Measurements
from .percentiles import LatencySamples
from .quantities import rps
from .request_log import REFUSED_STATUS
from .slo import DEFAULT_SLO, Slo

#: Bounds of a probe, whatever is asked for.
MAX_RATE, MAX_SECONDS, MAX_IN_FLIGHT = 10_000.0, 3600.0, 900
MAX_REFUSED = 0.05


class Sender(Protocol):
    """Sends one request: its status, 0 without a response."""

    async def send(self) -> int: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """Loads from `start` RPS, each `factor` × the one before, up to `max_rate`, `step_s` seconds each, `seconds` in all."""

    url: str
    slo: Slo = DEFAULT_SLO
    start: float = 10.0
    factor: float = 1.5
    max_rate: float = 500.0
    step_s: float = 5.0
    seconds: float = 120.0
    method: str = "GET"
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    allow_remote: bool = False

    def check(self) -> None:
        """Raises ConfigurationError for a URL that is not this machine's, and for unbounded loads."""
        try:
            parts = urlsplit(self.url)
            valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # a port above 65535, a bracket that is not closed
            valid = False
        if not valid or not parts.hostname:
            raise ConfigurationError(f"expected an HTTP URL, got {self.url!r}; write it like http://127.0.0.1:8000/products")
        if not self.allow_remote and not is_loopback(parts.hostname):
            raise ConfigurationError(
                f"{parts.hostname} is not this machine; a probe overloads what it probes: add --allow-remote for a service "
                "that you operate and that has no other users during the probe"
            )
        bounds = (
            ("start", self.start, 0.0, self.max_rate),
            ("max_rate", self.max_rate, 0.0, MAX_RATE),
            ("factor", self.factor, 1.0, 10.0),
            ("step", self.step_s, 0.0, 600.0),
            ("seconds", self.seconds, 0.0, MAX_SECONDS),
        )
        for name, value, low, high in bounds:
            if not low < value <= high:
                raise ConfigurationError(f"{name} must be above {low:g} and at most {high:g}, got {value:g}")


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


@dataclass(slots=True)
class StepCounts:
    """Answers of one step. `delays`: how much later than scheduled requests were sent; times of the first and last answer."""

    samples: LatencySamples = field(default_factory=LatencySamples)
    delays: LatencySamples = field(default_factory=LatencySamples)
    errors: int = 0
    refused: int = 0
    first_us: int = 0
    last_us: int = 0

    def step(self, rate: float, seconds: float) -> LoadStep:
        """The step. Its throughput is that of the answers, which go on after the last request when the service is slower."""
        found = step_of(self.samples, seconds, rate, self.errors, self.refused)
        span = (self.last_us - self.first_us) / 1e6
        return found if span < seconds else replace(found, throughput=(self.samples.count - 1) / span)


class Probe:
    """One probe. `measurements` grows with every step, so what was measured before an interruption is kept."""

    def __init__(
        self,
        settings: ProbeSettings,
        sender: Sender | None = None,
        clock: Clock = SYSTEM,
        on_step: Callable[[LoadStep], object] = lambda step: None,
        on_progress: Callable[[float, float], object] = lambda share, rate: None,
    ) -> None:
        settings.check()
        self.settings, self._clock = settings, clock
        self._on_step, self._on_progress = on_step, on_progress
        self._sender = sender
        self.measurements = Measurements(settings.url, "probe")
        self.stopped = "it was interrupted"
        self._counts = StepCounts()

    async def run(self) -> Measurements:
        """Runs all steps; `stopped` says why it ended. A cancelled probe keeps its finished steps."""
        rate, settings = self.settings.start, self.settings
        sender = self._sender or self._open()
        try:
            await sender.send()  # opens a connection; not counted
            began = self._clock.now_us()
            while True:
                left = settings.seconds - (self._clock.now_us() - began) / 1e6
                if left < min(settings.step_s, 0.5):
                    self.stopped = f"the time of {settings.seconds:g} s is over"
                    break
                done = settings.seconds - left
                step = await self._step(sender, rate, min(settings.step_s, left), done)
                reason = self._end_of(step)
                if reason:
                    self.stopped = reason
                    break
                rate = min(rate * settings.factor, settings.max_rate)
        finally:
            self.measurements.notes = [f"The probe ended: {self.stopped}."]
            await sender.close()
        return self.measurements

    def _open(self) -> Sender:
        from .httpx import HttpSender

        settings = self.settings
        timeout = max(10.0, 2 * settings.slo.longest[1])
        return HttpSender(settings.url, settings.method, settings.headers, settings.body, timeout, MAX_IN_FLIGHT)

    async def _step(self, sender: Sender, rate: float, seconds: float, done: float) -> LoadStep:
        counts = self._counts = StepCounts()
        begin = self._clock.now_us()
        in_flight: set[asyncio.Task[None]] = set()
        total = max(1, round(rate * seconds))
        try:
            for number in range(total):
                scheduled = begin + round(number / rate * 1e6)
                await self._clock.asleep(max(0.0, (scheduled - self._clock.now_us()) / 1e6))
                if len(in_flight) >= MAX_IN_FLIGHT:
                    counts.errors += total - number
                    break
                counts.delays.add(max(0, self._clock.now_us() - scheduled) / 1e6)
                task = asyncio.create_task(self._one(sender, scheduled, counts))
                in_flight.add(task)
                task.add_done_callback(in_flight.discard)
                self._on_progress((done + number / rate) / self.settings.seconds, rate)
            await asyncio.gather(*in_flight)
        finally:
            for task in in_flight:
                task.cancel()
        step = counts.step(rate, seconds)
        self._record(step, counts.samples)
        return step

    def _record(self, step: LoadStep, samples: LatencySamples) -> None:
        """Adds a step; the samples are those of the loads within the SLO, since the last load is meant to break it."""
        found = self.measurements
        found.steps.append(step)
        if step.meets(self.settings.slo, MAX_ERRORS):
            found.samples.extend(samples)
        found.requests, found.errors = found.requests + step.requests, found.errors + step.errors
        found.refused += step.refused
        self._on_step(step)

    async def _one(self, sender: Sender, scheduled: int, counts: StepCounts) -> None:
        status = await sender.send()
        now = self._clock.now_us()
        if status == REFUSED_STATUS:
            counts.refused += 1
        elif status == 0 or status >= 500:
            counts.errors += 1
        else:
            counts.samples.add(max(0, now - scheduled) / 1e6)
            counts.first_us = counts.first_us or now
            counts.last_us = now

    def _end_of(self, step: LoadStep) -> str:
        """Why the probe ends after this step; "" to go on."""
        broken = [str(check) for check in step.checks(self.settings.slo) if not check.met]
        if step.refused_share > MAX_REFUSED:
            return f"{step.refused_share:.0%} were refused with 429 at {rps(step.load)}: a limiter answers, not the service"
        if step.error_share > MAX_ERRORS:
            return f"{step.error_share:.1%} errors at {rps(step.load)}"
        if broken:
            slow = self._counts.delays.percentile(95.0) > 0.1 * float(self.settings.slo.objectives[0][1])
            sender = "; this machine sent late and may be the cause: probe from another one" if slow else ""
            return f"{', '.join(broken)} at {rps(step.load)}{sender}"
        if step.load >= self.settings.max_rate:
            return f"the largest load of {rps(self.settings.max_rate)} is reached"
        return ""


def probe(settings: ProbeSettings, **options: object) -> Measurements:
    """Probes a URL and returns the measurements, for `analyze`."""
    return asyncio.run(Probe(settings, **options).run())  # type: ignore[arg-type]
