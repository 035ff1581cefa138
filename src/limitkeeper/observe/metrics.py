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
from .snapshot import Histogram, Snapshot

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
    unit: str = ""
    scale: float = 1.0
    largest: bool = False

    def collect(self, snapshots: Iterable[Snapshot]) -> dict[Labels, Value]:
        """The values of several gates together."""
        found: dict[Labels, Value] = {}
        for snapshot in snapshots:
            for read, value in self.read(snapshot):
                if value is not None:
                    labels = tuple([escape_unprintable(label) for label in read])
                    found[labels] = self._join(found[labels], value) if labels in found else value
        return found

    def _join(self, one: Value, other: Value) -> Value:
        if self.kind == HISTOGRAM:
            counts = tuple(a + b for a, b in zip(one.counts, other.counts, strict=True))
            return Histogram(one.bounds, counts, one.sum + other.sum)
        return max(one, other) if self.largest else one + other


def escape_unprintable(text: str) -> str:
    """A label's value with control characters and half characters as escapes; line breaks are escaped by the sinks."""
    if text.isprintable():
        return text
    return "".join([one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode("ascii") for one in text])


def _of_policy(name: str) -> Reader:
    return lambda snapshot: [((snapshot.policy,), getattr(snapshot, name))] if snapshot.policy else []


def _by_outcome(outcomes: dict[str, str]) -> Reader:
    return lambda snapshot: [
        ((snapshot.policy, outcome), getattr(snapshot, name)) for outcome, name in outcomes.items() if snapshot.policy
    ]


def _of_rule(name: str) -> Reader:
    return lambda snapshot: [((snapshot.policy, rule.name), getattr(rule, name)) for rule in snapshot.rules]


def _by_rule(outcomes: dict[str, str]) -> Reader:
    return lambda snapshot: [
        ((snapshot.policy, rule.name, outcome), getattr(rule, name))
        for rule in snapshot.rules
        for outcome, name in outcomes.items()
    ]


def _of_bulkhead(name: str) -> Reader:
    return lambda snapshot: [((one.name,), getattr(one, name)) for one in snapshot.bulkheads]


def _of_budget(name: str) -> Reader:
    return lambda snapshot: [((one.name,), getattr(one, name)) for one in snapshot.budgets]


def _of_store(name: str) -> Reader:
    return lambda snapshot: [] if snapshot.store is None else [((snapshot.policy,), getattr(snapshot.store, name))]


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


POLICY, RULE, OUTCOME, BULKHEAD = ("policy",), ("policy", "rule"), ("policy", "outcome"), ("bulkhead",)
BUDGET = ("budget",)
#: Attributes of `Snapshot` and `RuleSnapshot` by label value.
REQUESTS = {"allowed": "allowed", "refused": "refused"}
RELOADS = {"loaded": "reloads", "refused": "reloads_refused"}
DECISIONS = {"passed": "passed", "refused": "refused"}
WITHOUT_STORE = {"open": "failed_open", "closed": "failed_closed", "local": "failed_local"}

# fmt: off
METRICS: tuple[MetricSpec, ...] = (
    MetricSpec("requests", COUNTER, "Requests that the gate decided: allowed, or refused.", OUTCOME, _by_outcome(REQUESTS)),
    MetricSpec("exempt_requests", COUNTER, "Requests allowed because they are exempt.", POLICY, _of_policy("exempt")),
    MetricSpec("unlimited_requests", COUNTER, "Requests allowed because no rule applies.", POLICY, _of_policy("unlimited")),
    MetricSpec("penalty_box_requests", COUNTER, "Requests refused without asking the store: their client is in the penalty box.",
               POLICY, _of_policy("penalty_box")),
    MetricSpec("rule_decisions", COUNTER, "Decisions of a rule: passed, or refused.", (*RULE, "outcome"), _by_rule(DECISIONS)),
    MetricSpec("near_limit", COUNTER, "Requests that passed with less than a fifth of the limit left.", RULE, _of_rule("near")),
    MetricSpec("shadow_would_refuse", COUNTER, "Requests that a rule in shadow would refuse.", RULE, _of_rule("shadow_refused")),
    MetricSpec("alerts", COUNTER, "How often the spending of a key crossed the rule's alert mark.", RULE, _of_rule("alerts")),
    MetricSpec("waited", COUNTER, "Requests that passed after waiting their turn.", RULE, _of_rule("waited")),
    MetricSpec("queue_full", COUNTER, "Requests refused because too many were waiting.", RULE, _of_rule("queue_full")),
    MetricSpec("degraded", COUNTER, "Refused requests that a degrade handler answered.", RULE, _of_rule("degraded")),
    MetricSpec("given_back", COUNTER, "Charges taken back because the outcome does not count.", RULE, _of_rule("given_back")),
    MetricSpec("replayed", COUNTER, "Requests not charged: repetitions under one idempotency key.", RULE, _of_rule("replayed")),
    MetricSpec("without_store", COUNTER, "Decisions made without the store because it failed, by answer: open, closed or local.",
               (*RULE, "answer"), _by_rule(WITHOUT_STORE)),
    MetricSpec("waiting", GAUGE, "Requests that wait for their turn now.", RULE, _of_rule("waiting")),
    MetricSpec("responses", COUNTER, "Responses to requests that a rule allowed, by status class; refusals excluded.",
               (*RULE, "status"), _statuses),
    MetricSpec("response_seconds", HISTOGRAM, "Time from the decision to the response, of requests that a rule allowed.",
               RULE, _of_rule("responses"), "seconds", 1e-3),
    MetricSpec("decision_seconds", HISTOGRAM, "Duration of a decision.", POLICY, _of_policy("decisions"), "seconds", 1e-6),
    MetricSpec("penalty_box_clients", GAUGE, "Clients in the penalty box now.", POLICY, _of_policy("penalty_box_clients")),
    MetricSpec("attempts", COUNTER, "Requests that are not exempt, where the policy counts retry_amplification.",
               POLICY, _of_policy("attempts")),
    MetricSpec("distinct_requests", COUNTER, "Estimate of how many attempts differ in client, method or path within a window.",
               POLICY, _of_policy("distinct_requests")),
    MetricSpec("top_offender_ratio", GAUGE, "Share of the policy's recent refusals caused by one key of this rule, at least.",
               RULE, _top_offender_ratio, "ratio", largest=True),
    MetricSpec("store_state", GAUGE, "Guarded stores in this state: closed (healthy), half_open, or open (not asked).",
               ("policy", "state"), _state),
    MetricSpec("store_failures", COUNTER, "Calls to the store that failed, timeouts included.", POLICY, _of_store("failures")),
    MetricSpec("store_timeouts", COUNTER, "Calls to the store that took longer than the budget.", POLICY, _of_store("timeouts")),
    MetricSpec("store_opened", COUNTER, "How often the store's breaker opened.", POLICY, _of_store("opened")),
    MetricSpec("store_probes", COUNTER, "Probes of a failed store.", POLICY, _of_store("probes")),
    MetricSpec("bulkhead_size", GAUGE, "Calls that a bulkhead runs at a time.", BULKHEAD, _of_bulkhead("max_concurrent")),
    MetricSpec("bulkhead_in_use", GAUGE, "Calls that run in a bulkhead now.", BULKHEAD, _of_bulkhead("in_use")),
    MetricSpec("bulkhead_waiting", GAUGE, "Calls that wait for a place now.", BULKHEAD, _of_bulkhead("waiting")),
    MetricSpec("bulkhead_permitted", COUNTER, "Calls that got a place.", BULKHEAD, _of_bulkhead("permitted")),
    MetricSpec("bulkhead_rejected", COUNTER, "Calls that got no place.", BULKHEAD, _of_bulkhead("rejected")),
    MetricSpec("budget_amount", GAUGE, "Budget of a spend guard for one window, for all processes.", BUDGET,
               _of_budget("amount"), largest=True),
    MetricSpec("budget_remaining", GAUGE, "What is left of the budget in this window, as of the last call.", BUDGET,
               _of_budget("remaining"), largest=True),
    MetricSpec("budget_alerts", COUNTER, "Alerts of a spend guard: its mark was crossed.", BUDGET, _of_budget("alerts")),
    MetricSpec("budget_refused", COUNTER, "Calls that a spend guard refused.", BUDGET, _of_budget("refused")),
    MetricSpec("reloads", COUNTER, "New versions of the policy: loaded, or refused.", OUTCOME, _by_outcome(RELOADS)),
)
# fmt: on
