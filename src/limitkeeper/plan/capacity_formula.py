"""The formula of capacity, from numbers: how many requests per second a service sustains, and the limit with a safety margin.

    total concurrency = pods × concurrency per pod                       requests in progress at once
    ceiling           = total concurrency / p95 latency                  requests per second, the lowest over all dependencies
    limit             = margin × ceiling                                 rounded down; margin 0.5 … 0.8, usually 0.7
    burst             = total concurrency − limit × p95                  slots that are free while the limit is in full use

p95 stands in for the mean of Little's law (concurrency = rate × mean latency). The mean would give the rate at which every slot
is busy all the time, where any variation makes a queue; with p95 the slots are busy for mean/p95 of the time. Rejected: p50,
which stays low while queues form.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import floor

from ..errors import ConfigurationError
from ..rate import Duration
from .quantities import Number, duration_text, number_of, round_down, rps, seconds_of, whole_number

#: The margins that are common, and those that most teams use.
BAND, USUAL_BAND = (Fraction(1, 2), Fraction(4, 5)), (Fraction(3, 5), Fraction(4, 5))
DEFAULT_MARGIN = Fraction(7, 10)
_DEPENDENCY = re.compile(r"(?P<amount>[\d.]+)(?:\s*@\s*(?P<latency>[\d.]+\s*[a-zµ]+))?(?:\s+x(?P<calls>[\d.]+))?", re.I)


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The largest rate that one resource sustains, in requests per second of the planned service, and how it was computed."""

    name: str
    rate: Fraction
    formula: str

    @staticmethod
    def parse(name: str, text: str) -> Ceiling:
        """ "300" (RPS), "100@80ms" (concurrency and p95 of a call), each with " x2" for two calls per request."""
        found = _DEPENDENCY.fullmatch(text.strip())
        remedy = "write RPS or concurrency@latency, with the calls per request: 300, 100@80ms, '100@80ms x2'"
        if found is None:
            raise ConfigurationError(f"dependency {name!r}: expected a capacity, got {text!r}; {remedy}")
        amount = number_of(found["amount"], f"dependency {name!r}", remedy)
        calls = number_of(found["calls"] or 1, f"dependency {name!r}: calls per request", remedy)
        formula = found["amount"]
        if found["latency"]:
            latency = seconds_of(found["latency"], f"dependency {name!r}: latency")
            amount, formula = amount / latency, f"{formula} / {duration_text(latency)}"
        return Ceiling(name, amount / calls, formula if calls == 1 else f"{formula} / {found['calls']} calls")


@dataclass(frozen=True, slots=True)
class Capacity:
    """A service's capacity. `concurrency` is what one pod safely handles at once, `threads` and `db_pool` its sizes per pod."""

    pods: int
    concurrency: int
    p95: Fraction
    margin: Fraction = DEFAULT_MARGIN
    mean: Fraction | None = None
    threads: int | None = None
    db_pool: int | None = None
    dependencies: tuple[Ceiling, ...] = ()
    service: str = "service"

    @property
    def total_concurrency(self) -> int:
        return self.pods * self.concurrency

    @property
    def service_ceiling(self) -> Fraction:
        """The ceiling of the service itself, without its dependencies."""
        return self.total_concurrency / self.p95

    @property
    def ceilings(self) -> tuple[Ceiling, ...]:
        """The service and its dependencies, the lowest ceiling first."""
        formula = f"{self.pods} × {self.concurrency} / {duration_text(self.p95)}"
        own = Ceiling(self.service, self.service_ceiling, formula)
        return tuple(sorted((own, *self.dependencies), key=lambda one: one.rate))

    @property
    def ceiling(self) -> Fraction:
        return self.ceilings[0].rate

    @property
    def limit(self) -> Fraction:
        return round_down(self.ceiling * self.margin)

    def band(self, margins: tuple[Fraction, Fraction] = BAND) -> tuple[Fraction, Fraction]:
        """The limits of two margins."""
        return self.ceiling * margins[0], self.ceiling * margins[1]

    @property
    def one_pod_down(self) -> Fraction:
        """The ceiling with one pod less."""
        own = (self.pods - 1) * self.concurrency / self.p95
        return min([own, *(one.rate for one in self.dependencies)])

    @property
    def little(self) -> Fraction | None:
        """Little's law with the mean latency: the rate at which every slot is always busy."""
        return None if self.mean is None else self.total_concurrency / self.mean

    @property
    def burst(self) -> int:
        """The slots that are free while the limit is in full use; at least 1."""
        return max(1, floor(self.total_concurrency - self.limit * self.p95))

    def reasons(self) -> list[str]:
        """What was computed and why, in sentences."""
        low, high = self.band()
        usual = self.band(USUAL_BAND)
        first = self.ceilings[0]
        return [
            f"{self.pods} pods × {self.concurrency} concurrent requests = {self.total_concurrency} concurrent requests.",
            f"{self.total_concurrency} / {duration_text(self.p95)} (p95) = {rps(self.service_ceiling)}: "
            f"the ceiling of the {self.service}, not the target.",
            *self._dependency_reasons(first),
            f"Limits are usually 50–80 % of the ceiling: {rps(low)} to {rps(high)}; most teams stay within 60–80 %, "
            f"{rps(usual[0])} to {rps(usual[1])}.",
            f"{rps(self.ceiling)} × {float(self.margin):g} = {rps(self.limit)}: the limit.",
            self._pod_reason(),
            self._little_reason(),
            *self._pool_reasons(),
        ]

    def _dependency_reasons(self, lowest: Ceiling) -> list[str]:
        if not self.dependencies:
            return []
        others = ", ".join(f"{one.name} {rps(one.rate)}" for one in self.ceilings[1:])
        return [f"The lowest ceiling is that of {lowest.name}: {lowest.formula} = {rps(lowest.rate)} (the others: {others})."]

    def _pod_reason(self) -> str:
        if self.pods == 1:
            return "There is one pod: while it restarts, nothing is served."
        enough = "above the limit" if self.one_pod_down >= self.limit else "below the limit"
        return f"With one pod down the ceiling is {rps(self.one_pod_down)}, {enough} of {rps(self.limit)}."

    def _little_reason(self) -> str:
        careful = "p95 is the careful choice: it leaves slots free for slow requests, and rises as soon as a queue forms"
        if self.little is None or self.mean is None:
            return f"Little's law with the mean latency would give more than p95 does; {careful}."
        busy = float(self.mean / self.p95)
        return (
            f"Little's law with the mean ({duration_text(self.mean)}) gives {rps(self.little)}, with every slot always busy; "
            f"{careful} ({busy:.0%} of the slots are busy at the ceiling)."
        )

    def _pool_reasons(self) -> list[str]:
        pools = [(size, name) for size, name in ((self.threads, "threads"), (self.db_pool, "database connections")) if size]
        if not pools:
            return []
        size, name = min(pools)
        part = f"at most {size / self.concurrency:.0%} of its time"
        share = f": {self.concurrency} at once fit only while each holds one for {part}" if size < self.concurrency else ""
        return [
            f"Of the pools of a pod, the {size} {name} bind first{share}.",
            f"The sizes of pools do not give {self.concurrency}: measure it, with a load test that watches p95 and CPU.",
        ]

    def warnings(self) -> list[str]:
        """What to look at before the limit is used."""
        found = []
        if not BAND[0] <= self.margin <= BAND[1]:
            found.append(f"a margin of {float(self.margin):g} is outside 0.5–0.8, which leaves room for failures and bursts")
        if self.pods > 1 and self.one_pod_down < self.limit:
            found.append(f"one pod down: the ceiling is {rps(self.one_pod_down)}, below the limit; lower the margin, or add pods")
        if self.mean is not None and self.mean > self.p95:
            found.append("the mean is above p95: a few requests take very long; look at p99 and at timeouts")
        return found


def capacity(
    *,
    pods: Number = 1,
    concurrency: Number | None = None,
    p95: Duration,
    margin: Number = DEFAULT_MARGIN,
    mean: Duration | None = None,
    threads: Number | None = None,
    db_pool: Number | None = None,
    dependencies: Mapping[str, str] | Iterable[Ceiling] = (),
    service: str = "service",
) -> Capacity:
    """The capacity of a service from its numbers; ConfigurationError names the number that is impossible.

    capacity(pods=10, concurrency=40, p95="800ms").limit == 350
    """
    sizes = {
        name: None if value is None else whole_number(value, name, remedy)
        for name, value, remedy in (
            ("threads", threads, "write the size of the thread pool of one pod, as in 50"),
            ("db_pool", db_pool, "write the database connections of one pod, as in 20"),
        )
    }
    if concurrency is None:
        known = [size for size in sizes.values() if size is not None]
        if not known:
            raise ConfigurationError("concurrency is missing; write how many requests one pod safely handles at once, as in 40")
        concurrency = min(known)
    slots = whole_number(concurrency, "concurrency", "write the requests that one pod safely handles at once, as in 40")
    workers = sizes["threads"]
    if workers is not None and slots > workers:
        raise ConfigurationError(f"concurrency {slots} exceeds the {workers} threads of a pod; lower it to {workers} at most")
    if isinstance(dependencies, Mapping):
        dependencies = [Ceiling.parse(name, text) for name, text in dependencies.items()]
    found = Capacity(
        whole_number(pods, "pods", "write the number of instances, as in 10"),
        slots,
        seconds_of(p95, "p95"),
        number_of(margin, "margin", "write a share of the ceiling between 0.5 and 0.8, as in 0.7", most=1),
        None if mean is None else seconds_of(mean, "mean"),
        workers,
        sizes["db_pool"],
        tuple(dependencies),
        service,
    )
    if found.limit <= 0:
        raise ConfigurationError(f"the limit would be below one request per hour ({float(found.ceiling):.3g} RPS × {margin})")
    return found
