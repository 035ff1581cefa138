"""What is read off a tally: every number under its name, with its labels, once for all sinks.

Labels are the policy, its rules, and fixed words; never a key. So the number of series is known from the policy: 38 for each
rule (18 of them are the histogram of response times) and 36 for the policy with a guarded store. Every series is there from the
start, at zero: a counter that appears with its first event hides that event from `rate` and `increase`.

Gates of the same policy name are added up, as two processes of one program would be; a share is that of the largest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .events import SHUT_OUT
from .snapshot import Histogram, Snapshot

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
STATES = ("closed", "half open", "open")
#: Classes of status; 1xx is a websocket's handshake. What is no status at all is a failure.
CLASSES = ("1xx", "2xx", "3xx", "4xx", "5xx")

Labels = tuple[str, ...]
Sample = tuple[Labels, Any]


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One number: `read(tally)` gives (values of its labels, value). A histogram's value is a `Histogram` in units of `scale`
    seconds. `largest`: of several gates the largest counts, not the sum."""

    name: str
    kind: str
    help: str
    labels: Labels
    read: Callable[[Snapshot], Iterable[Sample]]
    unit: str = ""
    scale: float = 1.0
    largest: bool = False

    def of(self, tallies: Iterable[Snapshot]) -> dict[Labels, Any]:
        """The values of several gates together."""
        found: dict[Labels, Any] = {}
        for tally in tallies:
            for labels, value in self.read(tally):
                before = found.get(labels)
                found[labels] = value if before is None else self._joined(before, value)
        return found

    def _joined(self, one: Any, other: Any) -> Any:
        if self.largest:
            return max(one, other)
        if self.kind != HISTOGRAM:
            return one + other
        counts = tuple(a + b for a, b in zip(one.counts, other.counts, strict=True))
        return Histogram(one.bounds, counts, one.sum + other.sum)


def _requests(tally: Snapshot) -> Iterator[Sample]:
    yield (tally.policy, "allowed"), tally.allowed
    yield (tally.policy, "refused"), tally.refused


def _of_policy(name: str) -> Callable[[Snapshot], Iterable[Sample]]:
    return lambda tally: [((tally.policy,), getattr(tally, name))]


def _of_rule(name: str) -> Callable[[Snapshot], Iterable[Sample]]:
    return lambda tally: [((tally.policy, rule.name), getattr(rule, name)) for rule in tally.rules]


def _by_rule(outcomes: dict[str, str]) -> Callable[[Snapshot], Iterable[Sample]]:
    return lambda tally: [
        ((tally.policy, rule.name, outcome), getattr(rule, name)) for rule in tally.rules for outcome, name in outcomes.items()
    ]


def _of_store(name: str) -> Callable[[Snapshot], Iterable[Sample]]:
    return lambda tally: [] if tally.store is None else [((tally.policy,), getattr(tally.store, name))]


def _state(tally: Snapshot) -> Iterator[Sample]:
    if tally.store is not None:
        for state in STATES:
            yield (tally.policy, state.replace(" ", "_")), int(tally.store.state == state)


def _reloads(tally: Snapshot) -> Iterator[Sample]:
    yield (tally.policy, "loaded"), tally.reloads
    yield (tally.policy, "refused"), tally.reloads_refused


def _statuses(tally: Snapshot) -> Iterator[Sample]:
    for rule in tally.rules:
        other = sum(count for status, count in rule.statuses.items() if status not in CLASSES)
        for status in CLASSES:
            yield (tally.policy, rule.name, status), rule.statuses.get(status, 0) + (other if status == "5xx" else 0)


def _decision_times(tally: Snapshot) -> Iterator[Sample]:
    if tally.decisions is not None:
        yield (tally.policy,), tally.decisions


def _response_times(tally: Snapshot) -> Iterator[Sample]:
    for rule in tally.rules:
        if rule.responses is not None:
            yield (tally.policy, rule.name), rule.responses


def _share(tally: Snapshot) -> Iterator[Sample]:
    """For each rule, the part of all that rules refused lately that is surely its heaviest offender's. Those who are shut out are
    refused by no rule: with them, whoever goes on would make everybody else's part look small, and his own too."""
    known = {rule.name: 0 for rule in tally.rules}
    refused = tally.offered
    for one in tally.offenders:
        rule = one.rule if one.rule in known else one.rule.rpartition(".")[0]  # the second limit of a rule is `rule.2`
        if rule in known:
            known[rule] = max(known[rule], one.count - one.error)
        elif one.rule == SHUT_OUT:
            refused -= one.count - one.error
    for rule, count in known.items():
        yield (tally.policy, rule), min(1.0, count / refused) if refused > 0 else 0.0


def offender_measure(most: int) -> MetricSpec:
    """The heaviest offenders, one series each: at most `most` for each policy, and others as time goes by."""

    def read(tally: Snapshot) -> Iterator[Sample]:
        for one in tally.offenders[:most]:
            yield (tally.policy, one.rule, one.key), one.count - one.error

    text = "Refusals lately of those who are refused most (at least so many). The key is a keyed hash."
    return MetricSpec("offender_refusals", GAUGE, text, ("policy", "rule", "key"), read)


POLICY, RULE = ("policy",), ("policy", "rule")
#: Attributes of `RuleTally` by the word for them.
DECISIONS = {"passed": "passed", "refused": "refused"}
WITHOUT_STORE = {"open": "failed_open", "closed": "failed_closed", "local": "failed_local"}

# fmt: off
MEASURES: tuple[MetricSpec, ...] = (
    MetricSpec("requests", COUNTER, "Requests that came to the gate: allowed, or refused.", ("policy", "outcome"), _requests),
    MetricSpec("exempt_requests", COUNTER, "Requests allowed because they are exempt.", POLICY, _of_policy("exempt")),
    MetricSpec("unlimited_requests", COUNTER, "Requests allowed because no rule is meant.", POLICY, _of_policy("unlimited")),
    MetricSpec("shut_out_requests", COUNTER, "Requests refused without asking the store: their client is shut out.",
            POLICY, _of_policy("shut_out")),
    MetricSpec("rule_decisions", COUNTER, "Decisions of a rule: passed, or refused.", (*RULE, "outcome"), _by_rule(DECISIONS)),
    MetricSpec("near_limit", COUNTER, "Requests that passed with less than a fifth of the limit left.", RULE, _of_rule("near")),
    MetricSpec("shadow_would_refuse", COUNTER, "Requests that a rule in shadow would refuse.", RULE, _of_rule("shadow_refused")),
    MetricSpec("alerts", COUNTER, "How often the spending of a key crossed the rule's alert mark.", RULE, _of_rule("alerts")),
    MetricSpec("waited", COUNTER, "Requests that passed after they waited their turn.", RULE, _of_rule("waited")),
    MetricSpec("queue_full", COUNTER, "Requests refused because too many were waiting.", RULE, _of_rule("queue_full")),
    MetricSpec("degraded", COUNTER, "Refused requests that a degrade handler answered.", RULE, _of_rule("degraded")),
    MetricSpec("given_back", COUNTER, "Charges taken back because the outcome does not count.", RULE, _of_rule("given_back")),
    MetricSpec("replayed", COUNTER, "Requests not charged: repetitions under one idempotency key.", RULE, _of_rule("replayed")),
    MetricSpec("without_store", COUNTER, "Decisions made without the store because it failed, by how: open, closed or local.",
            (*RULE, "answer"), _by_rule(WITHOUT_STORE)),
    MetricSpec("waiting", GAUGE, "Requests that wait for their turn now.", RULE, _of_rule("waiting")),
    MetricSpec("responses", COUNTER, "Responses to requests that a rule allowed, by status class; refusals excluded.",
            (*RULE, "status"), _statuses),
    MetricSpec("response_seconds", HISTOGRAM, "Time from the decision to the response, of requests that a rule let pass.",
            RULE, _response_times, "seconds", 1e-3),
    MetricSpec("decision_seconds", HISTOGRAM, "Time that a decision took.", POLICY, _decision_times, "seconds", 1e-6),
    MetricSpec("shut_out_clients", GAUGE, "Clients that are shut out now.", POLICY, _of_policy("shut_out_now")),
    MetricSpec("top_offender_ratio", GAUGE, "Share of the policy's recent refusals caused by one key of this rule, at least.",
            RULE, _share, "ratio", largest=True),
    MetricSpec("store_state", GAUGE, "Guarded stores in this state: closed (all is well), half_open, or open (asked no more).",
            ("policy", "state"), _state),
    MetricSpec("store_failures", COUNTER, "Calls to the store that failed, timeouts included.", POLICY, _of_store("failures")),
    MetricSpec("store_timeouts", COUNTER, "Calls to the store that took longer than the budget.", POLICY, _of_store("timeouts")),
    MetricSpec("store_opened", COUNTER, "How often the store's breaker opened.", POLICY, _of_store("opened")),
    MetricSpec("store_probes", COUNTER, "Probes of a store that failed.", POLICY, _of_store("probes")),
    MetricSpec("reloads", COUNTER, "Policies that came to replace the running one: loaded, or refused.",
            ("policy", "outcome"), _reloads),
)
# fmt: on
