"""What a policy's gate counted, as plain values: read by every sink (Prometheus, OpenTelemetry, logs, dashboards).

The gate adds to plain integers while it decides; a `Tally` is made when somebody looks. Rules and outcomes have names, keys never
do: cardinality is bounded by the policy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

#: Upper ends of the decision's latency buckets, in microseconds; one more bucket has no end.
DECISION_BOUNDS_US = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 1_000_000)
#: Upper ends of the response time buckets, in milliseconds; 800 ms and 2 s are edges of their own, for the alerts.
RESPONSE_BOUNDS_MS = (5, 10, 25, 50, 100, 200, 400, 600, 800, 1_000, 1_500, 2_000, 3_000, 5_000, 10_000)


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts per bucket (not cumulative; one more than bounds) and the sum of what was counted, in the bounds' unit."""

    bounds: tuple[int, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class RuleSnapshot:
    """One rule's outcomes since the gate was made; a reload keeps them while the rule keeps its name.

    passed          allowed, and charged
    refused         this rule refused (several may refuse one request)
    waited          passed after waiting its turn
    queue_full      refused because too many were waiting
    degraded        refused, and answered by its degrade handler
    shadow_refused  would have been refused; let pass
    near            passed with less than a fifth of the limit left
    alerts          how often the spending of a key crossed the rule's alert mark
    given_back      charges taken back because the outcome does not count
    replayed        not charged: a repetition under the same idempotency key
    failed_open, failed_closed, failed_local   decided so because the store failed
    waiting         requests waiting now
    responses       response times of requests that this rule let pass
    statuses        how many responses by class of status: {"2xx": 12, "4xx": 1}
    """

    name: str
    passed: int = 0
    refused: int = 0
    waited: int = 0
    queue_full: int = 0
    degraded: int = 0
    shadow_refused: int = 0
    near: int = 0
    alerts: int = 0
    given_back: int = 0
    replayed: int = 0
    failed_open: int = 0
    failed_closed: int = 0
    failed_local: int = 0
    waiting: int = 0
    responses: Histogram | None = None
    statuses: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Offender:
    """Somebody who is refused often. `key` is a keyed hash unless the gate was told to show keys; `error` is how much `count`
    may be too high (a bounded sketch forgets who was replaced)."""

    rule: str
    key: str
    count: int
    error: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything a gate counted. `store` is the guarded store's state and counters (`GuardStats`), None without a guard.

    `offenders` are the heaviest among the `offered` refusals that were looked at lately (`Offenders.top()`, `.offered`)."""

    policy: str
    rules: tuple[RuleSnapshot, ...] = ()
    requests: int = 0
    allowed: int = 0
    refused: int = 0
    unlimited: int = 0  # no rule was meant
    exempt: int = 0
    shut_out: int = 0  # refused without asking the store
    shut_out_now: int = 0
    decisions: Histogram | None = None
    reloads: int = 0
    reloads_refused: int = 0
    offenders: tuple[Offender, ...] = ()
    offered: int = 0
    store: Any = None


class SnapshotSource:
    """Whatever can be looked at: `Gate` is one."""

    def tally(self) -> Snapshot:
        raise NotImplementedError
