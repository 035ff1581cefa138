"""Suggests changes to a policy from a log or from live metrics, with reasons, and which keys would have been refused.

From a log, a keyed rule needs what all keys but the heaviest 1 % (at least one) ask for at their peaks, × 1.25: one client in a
loop raises nothing. It is raised to that when it refuses more than 1 % of the keys, and lowered to twice that when it allows
more than four times that. A rule without a key protects capacity: it follows a measured ceiling only. From metrics, a rule that
refuses more than 1 % is raised by a fifth while latencies keep within four fifths of the SLO; shared rules are lowered by a fifth
when it is broken.

A lowered limit first runs beside the old one as `RULE-next` in shadow, and replaces it (stage "force") once the shadow refuses at
most 0.1 %. A raised limit refuses no further client, and no shadow can show it. Nothing is changed but the text that is returned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from fractions import Fraction
from math import ceil, floor
from pathlib import Path
from typing import TYPE_CHECKING

from ..algorithms.limit import Limit
from ..errors import ConfigurationError
from ..policy.model import SHADOW, Rule
from ..policy.reading.load import read
from .log_replay import RuleReplay, replay
from .policy_editor import NEXT, add_next, remove_rule, replace_scalar, rule_nodes, set_field
from .quantities import rps
from .request_log import LogEntry
from .slo import DEFAULT_SLO, Slo

if TYPE_CHECKING:
    from .prometheus_text import RuleMetrics

KEEP, RAISE, LOWER, ENFORCE = "keep", "raise", "lower", "enforce"
STAGES = ("shadow", "force")
SEVERAL = "it has several limits; change them by hand"
#: Fewer keys than this say nothing about what keys need.
MIN_KEYS = 20
HEADROOM, STEP = Fraction(5, 4), Fraction(1, 5)
MAX_REFUSED, MAX_SHADOW_REFUSED = 0.01, 0.001


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A proposed change of one rule; `refused` are the keys that the new limit would have refused, with counts, from a log."""

    rule: str
    action: str
    reason: str
    old: str = ""
    new: str = ""
    refused: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Suggestions:
    """All suggestions for a policy, and its text with the changes of the stage."""

    suggestions: tuple[Suggestion, ...]
    before: str
    after: str
    name: str

    @property
    def diff(self) -> str:
        lines = unified_diff(self.before.splitlines(True), self.after.splitlines(True), self.name, f"{self.name} (proposed)")
        return "".join(lines)


def suggest_from_log(
    path: str | Path, entries: Iterable[LogEntry], *, ceiling: float | None = None, stage: str = "shadow"
) -> Suggestions:
    """Proposes changes of a policy file from the requests of a log. `ceiling` in RPS bounds rules without a key."""
    text, folder = policy_text_of(path)
    policy, requests = read(text, folder), list(entries)
    counted = replay(requests, policy)
    found = [pending_shadow(rule, policy.rules) or from_demand(rule, counted[rule.name], ceiling) for rule in policy.rules]
    forced = replay(requests, read(apply(text, found, "force", folder), folder))
    named = tuple(with_refused(one, forced) for one in found)
    return Suggestions(named, text, apply(text, found, stage, folder), str(path))


def suggest_from_metrics(
    path: str | Path,
    metrics: Mapping[str, RuleMetrics],
    *,
    slo: Slo = DEFAULT_SLO,
    ceiling: float | None = None,
    stage: str = "shadow",
) -> Suggestions:
    """Proposes changes of a policy file from the counters of its rules."""
    text, folder = policy_text_of(path)
    rules = read(text, folder).rules
    found = [pending_shadow(rule, rules) or from_counters(rule, metrics.get(rule.name), slo, ceiling) for rule in rules]
    return Suggestions(tuple(found), text, apply(text, found, stage, folder), str(path))


def policy_text_of(path: str | Path) -> tuple[str, Path]:
    """A policy's text and folder."""
    try:
        return Path(path).read_text(encoding="utf-8-sig"), Path(path).parent
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: can't read the policy: {error}") from None


def pending_shadow(rule: Rule, rules: Sequence[Rule]) -> Suggestion | None:
    """The suggestion for a rule whose next version runs in shadow: to wait for that."""
    behind = any(one.name == rule.name + NEXT for one in rules)
    return Suggestion(rule.name, KEEP, f"its next limit runs in shadow, as {rule.name + NEXT!r}") if behind else None


def single_limit(rule: Rule) -> Limit | None:
    """The rule's limit where it has exactly one; tiers and several limits are changed by hand."""
    return rule.limit[0] if isinstance(rule.limit, tuple) and len(rule.limit) == 1 else None


def suggestion(rule: Rule, action: str, reason: str, new: str = "") -> Suggestion:
    limit = single_limit(rule)
    return Suggestion(rule.name, action, reason, "" if limit is None else str(limit), new)


def from_demand(rule: Rule, counted: RuleReplay, ceiling: float | None) -> Suggestion:
    limit, demands = single_limit(rule), sorted(counted.demands().values())
    if rule.on_refusal.action == SHADOW:
        return from_shadow(rule, sum(counted.refused.values()), sum(counted.asked.values()))
    if limit is None or not demands:
        return suggestion(rule, KEEP, SEVERAL if demands else "no request of the log matches it")
    keys, refused = len(demands), sum(1 for count in counted.refused.values() if count)
    usual = max(1, min(-(-99 * keys // 100), keys - 1))  # all but the heaviest 1 %, at least one of several
    need = Fraction(demands[usual - 1]).limit_denominator(1000) * HEADROOM
    rate = Fraction(limit.rate.count * 1_000_000, limit.rate.period)
    if not rule.key:
        return shared(rule, limit, rate, need, ceiling, bool(refused))
    if keys < MIN_KEYS:
        return suggestion(rule, KEEP, f"only {keys} keys were seen, {MIN_KEYS} are needed to judge")
    summary = f"{refused} of {keys} keys are refused; {usual} of {keys} keys ask for at most {rps(need / HEADROOM)}"
    if refused > MAX_REFUSED * keys and need > rate:
        return suggestion(rule, RAISE, f"{summary}, and need {rps(need)} with headroom", scaled(limit, need / rate))
    if need * 4 < rate:
        reason = f"{summary}; the limit of {rps(rate)} is more than four times the need, and twice the need is enough"
        return suggestion(rule, LOWER, reason, scaled(limit, need * 2 / rate))
    return suggestion(rule, KEEP, summary)


def shared(rule: Rule, limit: Limit, rate: Fraction, need: Fraction, ceiling: float | None, refuses: bool) -> Suggestion:
    """A limit for all keys together follows the ceiling."""
    if ceiling is None:
        reason = "it protects capacity, and no ceiling is given: measure one (`limitkeeper plan probe`), then use --ceiling"
        return suggestion(rule, KEEP, reason)
    top = Fraction(str(ceiling))
    if rate > top:
        return suggestion(rule, LOWER, f"{rps(rate)} exceed the ceiling of {rps(top)}", scaled(limit, top / rate, floor))
    if refuses and need > rate and top > rate:
        reason = f"requests are refused, and the ceiling of {rps(top)} has room"
        return suggestion(rule, RAISE, reason, scaled(limit, min(need, top) / rate, floor))
    return suggestion(rule, KEEP, f"it is within the ceiling of {rps(top)}")


def from_shadow(rule: Rule, refused: float, asked: float) -> Suggestion:
    if not asked:
        return suggestion(rule, KEEP, "in shadow; it was not asked yet")
    limit = single_limit(rule)
    reason = f"in shadow it would refuse {refused / asked:.2%} of {asked:,.0f} requests"
    if refused <= MAX_SHADOW_REFUSED * asked:
        return suggestion(rule, ENFORCE, reason, "" if limit is None else str(limit))
    return suggestion(rule, KEEP, f"{reason}: look at who they are")


def from_counters(rule: Rule, seen: RuleMetrics | None, slo: Slo, ceiling: float | None) -> Suggestion:
    limit = single_limit(rule)
    if seen is None:
        return suggestion(rule, KEEP, "it is not among the metrics")
    if rule.on_refusal.action == SHADOW:
        return from_shadow(rule, seen.shadow_refused, seen.passed + seen.refused + seen.shadow_refused)
    asked = seen.passed + seen.refused
    if limit is None or not asked:
        return suggestion(rule, KEEP, SEVERAL if asked else "it decided nothing yet")
    checks = slo.check(seen.percentile)
    latency = ", ".join(map(str, checks)) or "no response times"
    summary = f"{seen.refused / asked:.1%} refused, {seen.near / asked:.1%} near the limit, {latency}"
    if any(not check.met for check in checks):
        if rule.key:
            return suggestion(rule, KEEP, f"{summary}: the SLO is broken, which is for the shared limits to change")
        return suggestion(rule, LOWER, f"{summary}: the SLO is broken", scaled(limit, 1 - STEP))
    rate = Fraction(limit.rate.count * 1_000_000, limit.rate.period)
    top = rate * (1 + STEP) if rule.key else min(rate * (1 + STEP), Fraction(str(ceiling or 0)))
    room = bool(checks) and all(check.measured <= 0.8 * check.objective for check in checks)
    if seen.refused > MAX_REFUSED * asked and room and top > rate:
        new = scaled(limit, top / rate, ceil if rule.key else floor)
        return suggestion(rule, RAISE, f"{summary}: there is room below the SLO", new)
    return suggestion(rule, KEEP, summary)


def scaled(limit: Limit, factor: Fraction, rounded: Callable[[Fraction], int] = ceil) -> str:
    """The limit with count, burst and capacity × factor, rounded, at least 1. Under a ceiling it is rounded down."""

    def changed(found: re.Match[str]) -> str:
        return f"{found[1]}{max(1, rounded(int(found[2]) * factor))}"

    return re.sub(r"(burst |capacity |initial |^\D*)(\d+)", changed, str(limit))


def with_refused(one: Suggestion, forced: Mapping[str, RuleReplay]) -> Suggestion:
    counted = forced.get(one.rule.removesuffix(NEXT) if one.action == ENFORCE else one.rule)
    worst = () if counted is None else tuple((key, count) for key, count in counted.refused.most_common(5) if count)
    return Suggestion(one.rule, one.action, one.reason, one.old, one.new, worst)


def apply(text: str, suggestions: Sequence[Suggestion], stage: str, folder: Path | None = None) -> str:
    """The policy's text with the changes; PolicyError if it would not be valid."""
    if stage not in STAGES:
        raise ConfigurationError(f"unknown stage {stage!r}; write {' or '.join(STAGES)}")
    for one in suggestions:
        base = one.rule.removesuffix(NEXT)
        if one.action == RAISE or (one.action == LOWER and stage == "force"):
            text = replace_scalar(text, one.rule, "limit", one.new)
        elif one.action == LOWER:
            text = add_next(text, one.rule, one.new)
        elif one.action == ENFORCE and stage == "force":
            if base != one.rule and base in rule_nodes(text):
                text = remove_rule(replace_scalar(text, base, "limit", one.new), one.rule)
            else:
                text = set_field(text, one.rule, "on_refusal", "reject")
    read(text, folder)
    return text
