"""Why a request is, or is not, limited: every rule's say, with nothing charged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..algorithms.claim import Claim
from ..decision import Decision
from .compiled_policy import Entry
from .model import Rule
from .path_matcher import limits_host


@dataclass(frozen=True, slots=True)
class Explained:
    """One rule's say: whether it is meant, and if so its key, its limits, its cost and what a request now would be told."""

    rule: Rule
    meant: bool
    why: str = ""
    key: str | None = None
    entries: tuple[Entry, ...] = ()
    cost: int = 1
    decision: Decision | None = None


def explain(gate: Any, facts: Any) -> list[Explained]:
    """What every rule of the policy says to a request."""
    edition = gate.compiled
    plan = edition.find(facts.method, facts.path)
    facts.captured = plan.captured or facts.captured
    excused = True if plan.exempt else edition.exempted_rules(plan, facts)
    return [one(gate, clause, facts, plan, excused) for clause in edition.rules]


def one(gate: Any, clause: Any, facts: Any, plan: Any, excused: Any) -> Explained:
    rule = clause.config
    if excused is True or (excused and clause.name in excused):
        return Explained(rule, False, "the request is exempt")
    if clause not in plan.rules:
        return Explained(rule, False, "its match does not fit the method and path")
    hosts = plan.hosts[plan.rules.index(clause)] if plan.hosts else ()
    if hosts and not limits_host(hosts, facts):
        return Explained(rule, False, f"the host is {facts.host() or 'not said'!r}, not {' or '.join(hosts)}")
    unmet = unmet_condition(clause, facts)
    if unmet:
        return Explained(rule, False, unmet)
    key = clause.key_for(facts)
    if key is None:
        names = ", ".join(" | ".join(part) for part in rule.key)
        return Explained(rule, False, f"no part of its key ({names}) is there")
    entries = clause.entries_for(facts, key)
    if not entries:
        return Explained(rule, True, "unlimited", key)
    cost = clause.cost_for(facts)
    decision = gate.store.decide([Claim(entry.named, key, cost) for entry in entries], 0, commit=False)
    return Explained(rule, True, "", key, entries, cost, decision)


def unmet_condition(clause: Any, facts: Any) -> str:
    """Which part of a rule's `when` does not hold; "" when all of it does."""
    from .compiled_policy import identity_of

    when = clause.config.when
    for name in when.present:
        if identity_of(clause.identities, facts, name) is None:
            return f"{name} is not present"
    for name in when.absent:
        if identity_of(clause.identities, facts, name) is not None:
            return f"{name} is present"
    for name, values in when.equals:
        value = identity_of(clause.identities, facts, name)
        if value not in values:
            return f"{name} is {value or 'absent'}, not {' or '.join(values)}"
    return ""
