"""Replays a log through a policy on a manual clock: which rule would have refused whom, and what each key asked for.

The rules are the real ones, on a memory store. Rules that would wait or degrade count as refusing. Logs often have times in whole
seconds: the requests of one second are spread evenly over it, since at one instant every second would be a burst.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappushpop
from itertools import groupby, islice
from operator import itemgetter

from ..errors import ConfigurationError
from ..policy import Gate, Policy, WrittenRequest
from ..policy.identity.paths import application_path
from ..policy.model import SHADOW, OnRefusal, Rule
from ..stores import MemoryStore
from ..testing import ManualClock
from .request_log import LogEntry

#: Requests that are held to be ordered by time; `replay` uses no more.
MAX_REQUESTS = 1_000_000
#: Demand is counted in windows of at least so many seconds.
DEMAND_S = 10.0


@dataclass(slots=True)
class RuleReplay:
    """One rule: how many requests of each key it was asked about and would have refused, and each key's count by window."""

    window_s: float = DEMAND_S
    asked: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    windows: Counter[tuple[str, int]] = field(default_factory=Counter)

    def demands(self) -> dict[str, float]:
        """The highest rate of each key over one window, in RPS."""
        found: dict[str, float] = {}
        for (key, _), count in self.windows.items():
            found[key] = max(found.get(key, 0.0), count / self.window_s)
        return found


#: A request of the log with its time, and (rule, key, whether it refuses) of every rule that applies.
Outcome = tuple[str, str, bool]
Replayed = tuple[float, LogEntry, list[Outcome]]
#: Time, line, request.
Timed = tuple[float, int, LogEntry]


def in_time(entries: Iterable[LogEntry], read_ahead: int = MAX_REQUESTS) -> Iterator[tuple[float, LogEntry]]:
    """The requests by time, ordered among `read_ahead` of them (logs are written as requests end, so nearly in order); where all
    of the first ones have whole seconds, those of one second are spread over it."""
    timed = ((entry.time, number, entry) for number, entry in enumerate(entries) if entry.time is not None)
    waiting = list(islice(timed, read_ahead))
    heapify(waiting)
    whole = all(time == int(time) for time, _, _ in waiting)
    for time, group in groupby(ordered(timed, waiting), key=itemgetter(0)):
        same = list(group)
        step = 1.0 / len(same) if whole else 0.0
        for number, (_, _, entry) in enumerate(same):
            yield time + number * step, entry


def ordered(more: Iterable[Timed], waiting: list[Timed]) -> Iterator[Timed]:
    """All of a heap and what follows it, each time the smallest of the heap."""
    for one in more:
        yield heappushpop(waiting, one)
    while waiting:
        yield heappop(waiting)


def decided(entries: Iterable[LogEntry], policy: Policy, read_ahead: int = MAX_REQUESTS) -> Iterator[Replayed]:
    """Replays a log request by request; ConfigurationError when none has a time."""
    clock = ManualClock()
    rules = tuple(replayed(rule) for rule in policy.rules)
    with Gate(replace(policy, rules=rules), store=MemoryStore(clock=clock), imports=False) as gate:
        for time, entry in in_time(entries, read_ahead):
            clock.advance(max(0.0, time - clock.now_us() / 1e6))
            yield time, entry, list(outcomes(gate, entry))
    if not clock.now_us():
        raise ConfigurationError("no request of the log has a time, so no rate can be computed; add one to the log format")


def replay(entries: Iterable[LogEntry], policy: Policy) -> dict[str, RuleReplay]:
    """Replays the first MAX_REQUESTS of a log, and counts by rule and key."""
    found = {rule.name: RuleReplay(max(DEMAND_S, period_s(rule))) for rule in policy.rules}
    for time, _, outcomes_of_rules in decided(islice(entries, MAX_REQUESTS), policy):
        for name, key, refuses in outcomes_of_rules:
            one = found[name]
            one.asked[key] += 1
            one.windows[key, int(time // one.window_s)] += 1
            one.refused[key] += refuses
    return found


def outcomes(gate: Gate, entry: LogEntry) -> Iterator[Outcome]:
    """Decides a request, and says which of its rules refuse."""
    given = {name: entry.fields[name] for name in gate.policy.identify if name in entry.fields and name != "ip"}
    request = WrittenRequest(entry.method, application_path(entry.path), peer=entry.ip or "127.0.0.1", identities=given)
    matched = gate.compiled.match(request)
    evaluation = gate.ask(request)
    violated = () if evaluation.refusal is None else evaluation.refusal.violated
    for rule in matched.rules:
        key = rule.key_for(request) if not matched.exempt and rule.applies(request) else None
        if isinstance(key, str):
            refuses = any(label == rule.name or label.rpartition(".")[0] == rule.name for label in violated)
            yield rule.name, key if rule.config.key else "", refuses or rule.name in evaluation.shadows
    evaluation.settle(entry.status)


def replayed(rule: Rule) -> Rule:
    """The rule with a refusal instead of a wait or a degrade handler."""
    return rule if rule.on_refusal.action == SHADOW else replace(rule, on_refusal=OnRefusal())


def period_s(rule: Rule) -> float:
    limits = rule.limit if isinstance(rule.limit, tuple) else rule.limit.otherwise
    return max((limit.rate.period / 1e6 for limit in limits), default=0.0)
