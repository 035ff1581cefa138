"""Snapshot: the counters of a policy's gate as plain values, read by every sink (Prometheus, OpenTelemetry, dashboards).

The gate adds to plain integers while it decides; a `Snapshot` is made on request. Rules and outcomes have names, keys never do:
cardinality is bounded by the policy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from ..errors import ConfigurationError

if TYPE_CHECKING:
    from ..stores.guarded.store import GuardStats

#: Upper bounds of the decision latency buckets, in microseconds; one more bucket is unbounded.
DECISION_BOUNDS_US = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 1_000_000)
#: Upper bounds of the response time buckets, in milliseconds; the alert rules need 800 ms and 2 s among them.
RESPONSE_BOUNDS_MS = (5, 10, 25, 50, 100, 200, 400, 600, 800, 1_000, 1_500, 2_000, 3_000, 5_000, 10_000)


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts per bucket (not cumulative; one more than bounds) and the sum of the observed values, in the bounds' unit."""

    bounds: tuple[int, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        return sum(self.counts)

    def __add__(self, other: Histogram) -> Histogram:
        counts = tuple([one + more for one, more in zip(self.counts, other.counts, strict=True)])
        return Histogram(self.bounds, counts, self.sum + other.sum)

    def cumulative(self) -> Iterator[tuple[int, int]]:
        """(upper bound, observations up to it); the unbounded bucket, whose value is `count`, is left out."""
        total = 0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            total += count
            yield bound, total


@dataclass(frozen=True, slots=True)
class RuleSnapshot:
    """Outcomes of one rule since the gate was created; a reload keeps them while the rule keeps its name."""

    name: str
    passed: int = 0  # allowed, and charged
    refused: int = 0  # by this rule; several may refuse one request
    waited: int = 0  # passed after waiting their turn
    queue_full: int = 0  # refused because too many requests were waiting
    degraded: int = 0  # refused, and answered by the degrade handler
    shadow_refused: int = 0  # would have been refused; allowed
    near: int = 0  # passed with less than a fifth of the limit left
    alerts: int = 0  # how often the spending of a key crossed the rule's alert mark
    given_back: int = 0  # charges taken back because the outcome does not count
    replayed: int = 0  # not charged: a repetition under the same idempotency key
    failed_open: int = 0  # decided so because the store failed
    failed_closed: int = 0
    failed_local: int = 0
    waiting: int = 0  # requests waiting now
    responses: Histogram | None = None  # response times of requests that this rule allowed
    statuses: dict[str, int] = field(default_factory=dict)  # responses by status class: {"2xx": 12, "4xx": 1}


@dataclass(frozen=True, slots=True)
class BulkheadSnapshot:
    """The size and counters of one bulkhead."""

    name: str
    max_concurrent: int
    max_waiting: int | None  # None: without bound
    in_use: int  # now
    waiting: int  # now
    permitted: int = 0  # calls that got a place
    rejected: int = 0  # calls that got none, timeouts included
    timed_out: int = 0  # rejected after waiting
    waited: int = 0  # permitted after waiting


@dataclass(frozen=True, slots=True)
class BudgetSnapshot:
    """A spend guard's budget for this window, of all processes, and the counters of this one."""

    name: str
    amount: float
    remaining: float
    alerts: int = 0  # published by this process
    refused: int = 0  # calls that exceeded what was left


@dataclass(frozen=True, slots=True)
class Offender:
    """A key that is refused often. `key` is a keyed hash unless the gate shows keys; `error` is the most by which `count` may be
    too high (a bounded sketch forgets replaced keys)."""

    rule: str
    key: str
    count: int
    error: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All counters of a gate, or of bulkheads or budgets: `policy` is "" then. `store` has the guarded store's state and
    counters, None without a guard.

    `offenders` are the heaviest of the `offered` recent refusals (`Offenders.top()`, `.offered`)."""

    policy: str
    rules: tuple[RuleSnapshot, ...] = ()
    requests: int = 0
    allowed: int = 0
    refused: int = 0
    unlimited: int = 0  # no rule applies
    exempt: int = 0
    penalty_box: int = 0  # refused without asking the store
    penalty_box_clients: int = 0  # now
    attempts: int | None = None  # requests that are not exempt; None: the policy does not count them
    distinct_requests: float | None = None  # estimate of how many of them differ in client, method or path
    decisions: Histogram | None = None
    reloads: int = 0
    reloads_refused: int = 0
    offenders: tuple[Offender, ...] = ()
    offered: int = 0
    store: GuardStats | None = None
    bulkheads: tuple[BulkheadSnapshot, ...] = ()
    budgets: tuple[BudgetSnapshot, ...] = ()

    def snapshot(self) -> Snapshot:
        """Itself: a snapshot is a source for sinks too."""
        return self


S = TypeVar("S", RuleSnapshot, Snapshot)


def total(snapshots: Sequence[Snapshot]) -> Snapshot:
    """The sum of several processes that enforce one policy."""
    names = [one.name for one in snapshots[0].rules]
    rules = [[found for each in snapshots for found in each.rules if found.name == name] for name in names]
    offenders: dict[tuple[str, str], tuple[int, int]] = {}
    for one in [found for each in snapshots for found in each.offenders]:
        count, error = offenders.get((one.rule, one.key), (0, 0))
        offenders[one.rule, one.key] = count + one.count, error + one.error
    heaviest = sorted([Offender(*key, *counts) for key, counts in offenders.items()], key=lambda one: one.error - one.count)
    return replace(
        _summed(snapshots),
        rules=tuple([_total_rule(found) for found in rules]),
        decisions=_total_histogram([one.decisions for one in snapshots]),
        offenders=tuple(heaviest[:10]),
        store=_total_guard([one.store for one in snapshots if one.store is not None]),
    )


def _total_rule(found: Sequence[RuleSnapshot]) -> RuleSnapshot:
    statuses: Counter[str] = sum([Counter(one.statuses) for one in found], Counter())
    return replace(_summed(found), responses=_total_histogram([one.responses for one in found]), statuses=dict(statuses))


def _total_histogram(found: Sequence[Histogram | None]) -> Histogram | None:
    histograms = [one for one in found if one is not None]
    return reduce(add, histograms) if histograms else None


def _total_guard(found: Sequence[GuardStats]) -> GuardStats | None:
    """The state of the guard that is furthest from closed, and the sums of the counters."""
    if not found:
        return None
    worst = max(found, key=lambda one: ("closed", "half open", "open").index(one.state))
    return type(worst)(worst.state, worst.since_us, *[sum(counts) for counts in zip(*[one[2:] for one in found], strict=True)])


def _summed(found: Sequence[S]) -> S:
    """The first of them, with the sums of all counters."""
    counters = [field.name for field in fields(found[0]) if field.type == "int"]
    return replace(found[0], **{name: sum([getattr(one, name) for one in found]) for name in counters})


@runtime_checkable
class SnapshotSource(Protocol):
    """A policy gate, a bulkhead or a spend guard, as sinks see it."""

    def snapshot(self) -> Snapshot: ...


def check_source(gate: SnapshotSource) -> SnapshotSource:
    if not isinstance(gate, SnapshotSource):
        raise ConfigurationError(f"expected a Gate (a middleware has it as `.gate`) or a Bulkhead, got {gate!r}")
    return gate
