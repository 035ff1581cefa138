"""The metrics that are read from a Snapshot: name, kind, labels and reader of each, shared by all sinks.

Labels are the policy, its rules, and fixed words; never a key. So the policy bounds the number of series: 38 for each rule (18
of them are the histogram of response times) and 36 for the policy with a guarded store, two more
with retry_amplification. Every series exists from the start, at
zero: a counter that appears with its first event hides that event from `rate` and `increase`.

Gates of the same policy name are added up, as two processes of one program would be; of a ratio the largest counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .events import PENALTY_BOX
from .snapshot import Snapshot

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
STATES = ("closed", "half open", "open")
#: Status classes; 1xx is a websocket's handshake. An invalid status counts as a failure.
CLASSES = ("1xx", "2xx", "3xx", "4xx", "5xx")

Labels = tuple[str, ...]
Value = Any  # a number, or a Histogram
Samples = Iterable[tuple[Labels, Value]]
Reader = Callable[[Snapshot], Samples]


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric: `read(snapshot)` gives (label values, value), where None is no value. A `Histogram` is in units of `scale`
    seconds. `largest`: of several gates the largest value counts, not the sum."""

    name: str
    kind: str
    help: str
    labels: Labels
    read: Reader
    scale: float = 1.0
    largest: bool = False

    def collect(self, snapshots: Iterable[Snapshot]) -> dict[Labels, Value]:
        """The values of several gates together."""
        found: dict[Labels, Value] = {}
        for snapshot in snapshots:
            for read, value in self.read(snapshot):
                if value is not None:
                    labels = tuple([escape_unprintable(label) for label in read])
                    known = found.get(labels)
                    found[labels] = value if known is None else max(known, value) if self.largest else known + value
        return found


def escape_unprintable(text: str) -> str:
    """A label's value with control characters and half characters as escapes; line breaks are escaped by the sinks."""
    if text.isprintable():
        return text
    return "".join([one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode("ascii") for one in text])


@dataclass(frozen=True, slots=True)
class Scope:
    """What a metric counts for: its labels, and of a snapshot the label values with the object that has the numbers."""

    labels: Labels
    find: Callable[[Snapshot], Iterable[tuple[Labels, Any]]]

    def read(self, name: str) -> tuple[Labels, Reader]:
        """Labels and reader of an attribute."""
        return self.labels, lambda snapshot: [(labels, getattr(one, name)) for labels, one in self.find(snapshot)]

    def split(self, label: str, names: dict[str, str]) -> tuple[Labels, Reader]:
        """Labels and reader of several attributes, by the value of one more label."""
        return (*self.labels, label), lambda snapshot: [
            ((*labels, value), getattr(one, name)) for labels, one in self.find(snapshot) for value, name in names.items()
        ]


def _state(snapshot: Snapshot) -> Samples:
    if snapshot.store is not None:
        for state in STATES:
            yield (snapshot.policy, state.replace(" ", "_")), int(snapshot.store.state == state)


def _statuses(snapshot: Snapshot) -> Samples:
    for rule in snapshot.rules:
        other = sum(count for status, count in rule.statuses.items() if status not in CLASSES)
        for status in CLASSES:
            yield (snapshot.policy, rule.name, status), rule.statuses.get(status, 0) + (other if status == "5xx" else 0)


def _top_offender_ratio(snapshot: Snapshot) -> Samples:
    """For each rule, its heaviest offender's guaranteed share of all recent refusals by rules. Refusals of the penalty box belong
    to no rule and are subtracted: a client that goes on retrying there would make every share look small, its own too."""
    known = {rule.name: 0 for rule in snapshot.rules}
    refused = snapshot.offered
    for one in snapshot.offenders:
        rule = one.rule if one.rule in known else one.rule.rpartition(".")[0]  # the second limit of a rule is `rule.2`
        if rule in known:
            known[rule] = max(known[rule], one.count - one.error)
        elif one.rule == PENALTY_BOX:
            refused -= one.count - one.error
    for rule, count in known.items():
        yield (snapshot.policy, rule), min(1.0, count / refused) if refused > 0 else 0.0


def offender_metric(most: int) -> MetricSpec:
    """The heaviest offenders, one series each: at most `most` for each policy at a time; the series change over time."""

    def read(snapshot: Snapshot) -> Samples:
        for one in snapshot.offenders[:most]:
            yield (snapshot.policy, one.rule, one.key), one.count - one.error

    text = "Recent refusals of the keys that are refused most (at least so many). The key is a keyed hash."
    return MetricSpec("offender_refusals", GAUGE, text, ("policy", "rule", "key"), read)


POLICY = Scope(("policy",), lambda snapshot: [((snapshot.policy,), snapshot)] if snapshot.policy else [])
RULE = Scope(("policy", "rule"), lambda snapshot: [((snapshot.policy, rule.name), rule) for rule in snapshot.rules])
STORE = Scope(("policy",), lambda snapshot: [] if snapshot.store is None else [((snapshot.policy,), snapshot.store)])
BULKHEAD = Scope(("bulkhead",), lambda snapshot: [((one.name,), one) for one in snapshot.bulkheads])
BUDGET = Scope(("budget",), lambda snapshot: [((one.name,), one) for one in snapshot.budgets])
#: Attributes of `Snapshot` and `RuleSnapshot` by label value.
REQUESTS = {"allowed": "allowed", "refused": "refused"}
RELOADS = {"loaded": "reloads", "refused": "reloads_refused"}
DECISIONS = {"passed": "passed", "refused": "refused"}
WITHOUT_STORE = {"open": "failed_open", "closed": "failed_closed", "local": "failed_local"}

# fmt: off
METRICS: tuple[MetricSpec, ...] = (
    MetricSpec("requests", COUNTER, "Requests that the gate decided: allowed, or refused.", *POLICY.split("outcome", REQUESTS)),
    MetricSpec("exempt_requests", COUNTER, "Requests allowed because they are exempt.", *POLICY.read("exempt")),
    MetricSpec("unlimited_requests", COUNTER, "Requests allowed because no rule applies.", *POLICY.read("unlimited")),
    MetricSpec("penalty_box_requests", COUNTER, "Requests refused without asking the store: their client is in the penalty box.",
               *POLICY.read("penalty_box")),
    MetricSpec("rule_decisions", COUNTER, "Decisions of a rule: passed, or refused.", *RULE.split("outcome", DECISIONS)),
    MetricSpec("near_limit", COUNTER, "Requests that passed with less than a fifth of the limit left.", *RULE.read("near")),
    MetricSpec("shadow_would_refuse", COUNTER, "Requests that a rule in shadow would refuse.", *RULE.read("shadow_refused")),
    MetricSpec("alerts", COUNTER, "How often the spending of a key crossed the rule's alert mark.", *RULE.read("alerts")),
    MetricSpec("waited", COUNTER, "Requests that passed after waiting their turn.", *RULE.read("waited")),
    MetricSpec("queue_full", COUNTER, "Requests refused because too many were waiting.", *RULE.read("queue_full")),
    MetricSpec("degraded", COUNTER, "Refused requests that a degrade handler answered.", *RULE.read("degraded")),
    MetricSpec("given_back", COUNTER, "Charges taken back because the outcome does not count.", *RULE.read("given_back")),
    MetricSpec("replayed", COUNTER, "Requests not charged: repetitions under one idempotency key.", *RULE.read("replayed")),
    MetricSpec("without_store", COUNTER, "Decisions made without the store because it failed, by answer: open, closed or local.",
               *RULE.split("answer", WITHOUT_STORE)),
    MetricSpec("waiting", GAUGE, "Requests that wait for their turn now.", *RULE.read("waiting")),
    MetricSpec("responses", COUNTER, "Responses to requests that a rule allowed, by status class; refusals excluded.",
               (*RULE.labels, "status"), _statuses),
    MetricSpec("response_seconds", HISTOGRAM, "Time from the decision to the response, of requests that a rule allowed.",
               *RULE.read("responses"), scale=1e-3),
    MetricSpec("decision_seconds", HISTOGRAM, "Duration of a decision.", *POLICY.read("decisions"), scale=1e-6),
    MetricSpec("penalty_box_clients", GAUGE, "Clients in the penalty box now.", *POLICY.read("penalty_box_clients")),
    MetricSpec("attempts", COUNTER, "Requests that are not exempt, where the policy counts retry_amplification.",
               *POLICY.read("attempts")),
    MetricSpec("distinct_requests", COUNTER, "Estimate of how many attempts differ in client, method or path within a window.",
               *POLICY.read("distinct_requests")),
    MetricSpec("top_offender_ratio", GAUGE, "Share of the policy's recent refusals caused by one key of this rule, at least.",
               RULE.labels, _top_offender_ratio, largest=True),
    MetricSpec("store_state", GAUGE, "Guarded stores in this state: closed (healthy), half_open, or open (not asked).",
               ("policy", "state"), _state),
    MetricSpec("store_failures", COUNTER, "Calls to the store that failed, timeouts included.", *STORE.read("failures")),
    MetricSpec("store_timeouts", COUNTER, "Calls to the store that took longer than the budget.", *STORE.read("timeouts")),
    MetricSpec("store_opened", COUNTER, "How often the store's breaker opened.", *STORE.read("opened")),
    MetricSpec("store_probes", COUNTER, "Probes of a failed store.", *STORE.read("probes")),
    MetricSpec("bulkhead_size", GAUGE, "Calls that a bulkhead runs at a time.", *BULKHEAD.read("max_concurrent")),
    MetricSpec("bulkhead_in_use", GAUGE, "Calls that run in a bulkhead now.", *BULKHEAD.read("in_use")),
    MetricSpec("bulkhead_waiting", GAUGE, "Calls that wait for a place now.", *BULKHEAD.read("waiting")),
    MetricSpec("bulkhead_permitted", COUNTER, "Calls that got a place.", *BULKHEAD.read("permitted")),
    MetricSpec("bulkhead_rejected", COUNTER, "Calls that got no place.", *BULKHEAD.read("rejected")),
    MetricSpec("budget_amount", GAUGE, "Budget of a spend guard for one window, for all processes.",
               *BUDGET.read("amount"), largest=True),
    MetricSpec("budget_remaining", GAUGE, "What is left of the budget in this window, as of the last call.",
               *BUDGET.read("remaining"), largest=True),
    MetricSpec("budget_alerts", COUNTER, "Alerts of a spend guard: its mark was crossed.", *BUDGET.read("alerts")),
    MetricSpec("budget_refused", COUNTER, "Calls that a spend guard refused.", *BUDGET.read("refused")),
    MetricSpec("reloads", COUNTER, "New versions of the policy: loaded, or refused.", *POLICY.split("outcome", RELOADS)),
)
# fmt: on
