"""Explains which rules of a policy apply to a request, with which key and limit, and why the others do not. Charges nothing.

`explain` asks a gate about each rule; `RequestExplanation` shows the result as text and as JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import TYPE_CHECKING

from ..algorithms.claim import Claim
from ..decision import Decision, Decisions
from ..errors import StoreUnavailable
from ..stores.guarded import GuardedStore
from .burst_conflicts import BUCKETS, burst_of, shares_key
from .compiled_policy import CompiledPolicy, MatchedRules
from .compiled_rule import CompiledRule, Entry, bounded, identity_of, key_of, key_without_names
from .idempotency import is_repetition, mark_of
from .model import BLOCKED, LOCAL, SHADOW, WAIT, Capacity, Key, Policy, Rule, Tiers
from .path_matcher import matching
from .reading.diagnostics import shorten
from .refusal import BLOCKED as BLOCKED_KEY
from .refusal import CAPACITY, PENALTY_BOX, QUEUE_FULL, QUOTA, degrades, is_concurrent, precedence, refusal_of, retry_of
from .request_context import RequestContext
from .waiting_requests import is_full_queue

if TYPE_CHECKING:
    from .gate import Gate

EXEMPT = "the request is exempt"


def limit_text(entry: Entry) -> str:
    return f"{entry.named.limit.count} at a time" if is_concurrent(entry) else str(entry.named.limit)


def capacity_text(capacity: Capacity, key: str) -> str:
    """A capacity with what it promises to a key."""
    guarantee, weight = dict(capacity.guarantees).get(key), dict(capacity.shares).get(key, 1)
    promised = f"{guarantee} guaranteed, and " if guarantee is not None else ""
    return f"capacity {capacity.rate} ({promised}a share of {weight})"


@dataclass(frozen=True, slots=True)
class RuleExplanation:
    """Whether one rule applies to a request; if so its key, limits, cost and decision, otherwise the reason."""

    rule: Rule
    applies: bool
    reason: str = ""
    key: str | None = None
    entries: tuple[Entry, ...] = ()
    cost: int = 1
    decision: Decision | None = None
    operator: str = ""  # what an operator has set for this key
    exempted_by: str = ""  # the exemptions that hold
    penalty_us: int = 0  # when to retry, where the client is in the penalty box of this process
    reserves: bool = True  # whether its limits can be charged at a later start
    after_wait: RuleExplanation | None = None  # its refusing limits, asked for a start within the wait of the request

    @property
    def full_reason(self) -> str:
        return f"{self.reason}: {self.exempted_by}" if self.exempted_by else self.reason

    @property
    def shadow(self) -> bool:
        return self.rule.on_refusal.action == SHADOW

    @property
    def refuses(self) -> bool:
        return self.decision is not None and not self.decision and not self.shadow

    def parts(self) -> list[tuple[Entry, Decision]]:
        """Its limits with their decisions."""
        return [] if self.decision is None else list(zip(self.entries, self.decision.decisions, strict=True))

    @property
    def retry_after(self) -> float:
        """When to retry, in seconds, as the response says it."""
        retry_us = retry_of(self.entries, self.decision) if self.decision is not None and not self.decision else 0
        return inf if retry_us < 0 else retry_us / 1e6


def explain(gate: Gate, request: RequestContext) -> list[RuleExplanation]:
    """Explains every rule of the gate's policy. StoreUnavailable where the store can't be asked: what is left is not known."""
    compiled = gate.compiled
    matched = compiled.match(request)
    hosts: dict[int, list[str]] = {}
    shape = compiled.find(request).shape
    for pattern in (pattern for reading in shape.readings for pattern in matching(reading, shape.method, None)):
        hosts.setdefault(pattern.rule, []).append(pattern.match.host)
    exempt = True if matched.exempt else compiled.exempted_rules(matched, request)
    exemptions = ", ".join(exemptions_of(compiled, request))
    box = gate._penalty_box
    penalty = None if box is None else box.penalty_of(compiled, request)
    penalty_us = 0 if penalty is None else penalty.retry_us
    found = []
    for index, rule in enumerate(compiled.rules):
        exempted = exempt is True or (exempt and rule.name in exempt)  # type: ignore[operator]
        reason = EXEMPT if exempted else why_not(rule, request, matched, hosts.get(index))
        key = None if reason else rule.key_for(request)
        if not isinstance(key, str):
            absent = f"no part of its key ({key_text(rule.config.key)}) is present"
            by = exemptions if reason == EXEMPT else ""
            found.append(RuleExplanation(rule.config, False, reason or absent, exempted_by=by, penalty_us=penalty_us))
            continue
        if rule.capacity is not None:
            cost, share = rule.cost_for(request), rule.capacity.share
            peek = share.peek(bounded(key), cost)
            found.append(RuleExplanation(rule.config, True, "", key, (rule.capacity_entry,), cost, peek, penalty_us=penalty_us))
            continue
        entries = rule.entries_for(request, key)
        key = bounded(key)
        cost = rule.cost_for(request) if entries else 1
        mark = None if rule.shadow or entries is rule.blocked else mark_of(rule, request, entries, key, cost)
        repeats = is_repetition(compiled.store, mark)
        cost = 0 if repeats else cost
        claims = [Claim(entry.named, key, cost) for entry in entries]
        decision = decide_uncommitted(compiled, rule.config, claims, 0) if claims and entries is not rule.blocked else None
        if entries and decision is None:
            decision = Decision(False, 0, 0, -1, name=rule.name)
        limits = rule.operator_limits(key)
        operator = "" if limits is None else "blocked by an operator" if limits == BLOCKED else "override of an operator"
        reserves = repeats or all(compiled.store.can_reserve(claim.limit) for claim in claims)
        explained = RuleExplanation(rule.config, True, "", key, entries, cost, decision, operator, "", penalty_us, reserves)
        found.append(explained)
    return explain_wait(compiled, found)


def explain_wait(compiled: CompiledPolicy, rules: list[RuleExplanation]) -> list[RuleExplanation]:
    """Where every refusing rule waits, and the store can reserve: the same, with `after_wait`. The refusing limits are asked
    together, as those of a request that waits (waiting_requests.py)."""
    refusing = [one for one in rules if one.refuses and one.rule.capacity is None]
    waits = all(one.rule.on_refusal.action == WAIT and one.retry_after < inf for one in refusing)
    if not refusing or not waits or not all(one.reserves for one in rules if not one.shadow):
        return rules
    asked = [(one, entry) for one in refusing for entry, part in one.parts() if not part]
    claims = [Claim(entry.named, one.key or "", one.cost) for one, entry in asked]
    decision = decide_uncommitted(compiled, refusing[0].rule, claims, min(one.rule.on_refusal.wait_us for one in refusing))
    answers: dict[str, list[tuple[Entry, Decision]]] = {}
    for (one, entry), part in zip(asked, decision.decisions, strict=True):
        answers.setdefault(one.rule.name, []).append((entry, part))
    found = []
    for one in rules:
        entries, parts = zip(*pairs, strict=True) if (pairs := answers.get(one.rule.name)) else ((), ())
        after = replace(one, entries=entries, decision=Decisions.join(list(parts))) if pairs else None
        found.append(replace(one, after_wait=after))
    return found


def decide_uncommitted(compiled: CompiledPolicy, rule: Rule, claims: list[Claim], wait_us: int) -> Decision:
    decision: Decision = compiled.store.decide(claims, wait_us, commit=False)
    if GuardedStore.answered_here(decision):
        raise StoreUnavailable(f"the store could not be asked; on_failure of {rule.name!r} is {rule.on_failure.action}")
    return decision


def why_not(rule: CompiledRule, request: RequestContext, matched: MatchedRules, hosts: list[str] | None) -> str:
    """Which part of a rule's `match` or `when` does not hold; "" when all of it does. `hosts` are the rule's hosts for the path;
    None: the path does not match."""
    if rule not in matched.rules:
        if hosts is None:
            return "method and path do not match"
        names = " or ".join(dict.fromkeys(hosts))
        return EXEMPT if "" in hosts else f"expected the host {names}, got {request.host() or 'none'}"
    when = rule.config.when
    for name in when.present:
        if identity_of(rule.identities, request, name) is None:
            return f"{name} is absent"
    for name in when.absent:
        if identity_of(rule.identities, request, name) is not None:
            return f"{name} is present"
    for name, values in when.equals:
        value = identity_of(rule.identities, request, name)
        if value not in values:
            return f"{name} is {value or 'absent'}, not {' or '.join(values)}"
    return ""


class RequestExplanation:
    """One request explained. `identities` holds the value of each of the policy's identities."""

    def __init__(self, policy: Policy, request: RequestContext, rules: list[RuleExplanation]) -> None:
        self.policy = policy
        self.request = request
        self.rules = rules
        self.identities = {name: identity_of(dict(policy.identify), request, name) for name in policy.identify}

    @property
    def penalty_us(self) -> int:
        """When to retry, where the client is in the penalty box, which refuses before any rule; otherwise 0."""
        return max((one.penalty_us for one in self.rules), default=0)

    @property
    def refusing(self) -> list[RuleExplanation]:
        """Rules that would refuse this request now: a blocked key alone; a capacity, where no limit refuses."""
        found = [one for one in self.rules if one.decision is not None and not one.decision]
        blocked = [one for one in found if one.decision is not None and not one.decision.limit]
        limits = [one for one in found if one.rule.capacity is None and not one.shadow]
        return blocked[:1] or limits or [one for one in found if not one.shadow][:1]

    def text(self) -> str:
        applying = [self._columns(one) for one in self.rules if one.applies]
        others = [[one.rule.name, one.full_reason] for one in self.rules if not one.applies]
        identities = [[name, "absent" if value is None else shorten(str(value))] for name, value in self.identities.items()]
        lines = [f"{self.request.method} {self.request.path}", *table(identities), ""]
        lines += ["applies:", *table(applying)] if applying else ["no rule applies"]
        if others:
            lines += ["", "does not apply:", *table(others)]
        return "\n".join([*lines, *self._settings(), "", self._verdict()])

    def _columns(self, one: RuleExplanation) -> list[str]:
        names = key_text(one.rule.key)
        key = f"{names} = {shorten(one.key or '')}" if names else "one key for all requests"
        limits = "; ".join(map(limit_text, one.entries)) or "unlimited"
        if one.rule.capacity is not None:
            limits = capacity_text(one.rule.capacity, one.key or "")
        source = one.operator or self._limit_source(one.rule)
        return [one.rule.name, key, f"{limits} ({source})" if source else limits, self._remaining(one)]

    def _burst_cut(self, one: RuleExplanation) -> tuple[int, str] | None:
        """The largest burst that the other rules allow a key of this rule on this route, and which of them; None: its own."""
        own = burst_of([entry.named.limit for entry in one.entries if isinstance(entry.named.limit, BUCKETS)], one.cost)
        found = [
            (burst, other.rule.name)
            for other in self.rules
            if other is not one and other.applies and not other.shadow and other.rule.capacity is None
            if shares_key(one.rule.key, other.rule.key)
            if (burst := burst_of([entry.named.limit for entry in other.entries], other.cost)) is not None
        ]
        return min(found) if found and own is not None and min(found)[0] < own else None

    def _settings(self) -> list[str]:
        """What the policy declares for all rules: capacity, penalty box, retry amplification."""
        policy, box, counted, found = self.policy, self.policy.penalty_box, self.policy.retry_amplification, []
        if policy.instances is not None and policy.safe_concurrency is not None:
            n, safe = policy.instances, policy.safe_concurrency
            found.append(f"capacity: {n} instances × {safe} = {n * safe} concurrent requests, {(n - 1) * safe} while one is down")
        if box is not None:
            lengths = ", then ".join(f"{step / 1e6:g} s" for step in (box.for_us, *box.then_us))
            found.append(f"penalty box: beyond {box.limit} refusals of one {key_text(box.key)}, for {lengths}")
        if counted is not None:
            found.append(f"retry amplification: attempts per {key_text(counted.key)} in {counted.window_us / 1e6:g} s")
        return ["", *found] if found else []

    def _limit_source(self, rule: Rule) -> str:
        """Which override or tier gave the limit."""
        identities = dict(self.policy.identify)
        key = key_of(identities, self.request, rule.key) if rule.override else None
        if isinstance(key, str) and not {key, key_without_names(identities, rule.key, key)}.isdisjoint(dict(rule.override)):
            return "override"
        return f"{rule.limit.by} = {self.identities.get(rule.limit.by) or 'absent'}" if isinstance(rule.limit, Tiers) else ""

    def _remaining(self, one: RuleExplanation) -> str:
        if one.decision is None:
            return ""
        remaining = "; ".join(f"{each.remaining} of {each.limit} left" for each in one.decision.decisions)
        cost = "" if one.cost == 1 else f", costs {one.cost}"
        cut = f", burst cut to {found[0]} by {found[1]}" if (found := self._burst_cut(one)) else ""
        refused = "" if one.decision else f", refused: {retry_text(one.retry_after, one.rule)}"
        local = one.rule.on_failure.action == LOCAL and self.policy.instances is not None
        share = f", local share {one.rule.on_failure.share}" if local else ""
        return remaining + cost + cut + share + (", in shadow" if one.shadow else "") + refused

    def _verdict(self) -> str:
        if self.penalty_us:
            return f"→ refused by the {PENALTY_BOX} with 429: {retry_text(self.penalty_us / 1e6)}"
        refusing = self.refusing
        if not refusing:
            return "→ allowed"
        waiting = [one.after_wait for one in refusing if one.after_wait is not None]
        wait_us = min(one.rule.on_refusal.wait_us if one.rule.on_refusal.action == WAIT else 0 for one in refusing)
        longest, names = max(one.retry_after for one in refusing), rule_names(refusing)
        if waiting:
            refusing = [one for one in waiting if one.refuses]
            longest = max(one.decision.wait_us / 1e6 for one in waiting if one.decision is not None)
        if not refusing if waiting else longest * 1e6 <= wait_us:
            full = next((one for one in self.rules if one.refuses and one.rule.capacity is not None), None)
            after = f"asks {full.rule.name}, which refuses now: {retry_text(full.retry_after)}" if full else "allowed"
            return f"→ waits {longest:.3g} s for {names}, then {after}"
        when = retry_text(max(one.retry_after for one in refusing), *[one.rule for one in refusing])
        first, names = max(refusing, key=lambda one: (*precedence(one.rule), one.retry_after)), rule_names(refusing)
        assert first.decision is not None
        reason = BLOCKED_KEY if not first.decision.limit else QUOTA if first.rule.capacity is None else CAPACITY
        if degrades(first.rule, reason):
            return f"→ refused by {names}, answered by the handler of {first.rule.name}: {when}"
        if waiting and any(is_full_queue(*pair, wait_us) for one in refusing for pair in one.parts()):
            reason, when = QUEUE_FULL, f"{QUEUE_FULL}, {when}"
        status = refusal_of(first.entries, first.decision, reason, 0).status
        return f"→ refused by {names} with {status}: {when}"

    def as_dict(self) -> dict[str, object]:
        """The same for JSON. A `retry_after` of never is null."""
        return {
            "request": {"method": self.request.method, "path": self.request.path},
            "policy": self.policy.name,
            "identities": self.identities,
            "allowed": not self.refusing and not self.penalty_us,
            "penalty": self.penalty_us / 1e6,
            "settings": self._settings()[1:],
            "rules": [self._rule_dict(one) for one in self.rules],
        }

    def _rule_dict(self, one: RuleExplanation) -> dict[str, object]:
        if not one.applies:
            return {"name": one.rule.name, "applies": False, "reason": one.full_reason}
        decisions = one.decision.decisions if one.decision is not None else ()
        limits = [
            {
                "label": entry.label,
                "limit": limit_text(entry) if one.rule.capacity is None else capacity_text(one.rule.capacity, one.key or ""),
                "of": each.limit,
                "remaining": each.remaining,
                "retry_after": None if each.retry_after == inf else each.retry_after,
            }
            for entry, each in zip(one.entries, decisions, strict=True)
        ]
        return {
            "name": one.rule.name,
            "applies": True,
            "key": one.key,
            "parts": [list(part) for part in one.rule.key],
            "cost": one.cost,
            "shadow": one.shadow,
            "operator": one.operator or None,
            "burst_cut": dict(zip(("to", "by"), cut, strict=True)) if (cut := self._burst_cut(one)) else None,
            "local_share": one.rule.on_failure.share if one.rule.on_failure.action == LOCAL else None,
            "retry_spread": one.rule.retry_after.spread_us / 1e6,
            "limits": limits,
            "allowed": one.decision is None or bool(one.decision),
        }


def exemptions_of(compiled: CompiledPolicy, request: RequestContext) -> Iterator[str]:
    """The exemptions that hold for a request, by their path in the policy, with their conditions; headers are secret."""
    shape, header = compiled.find(request).shape, request.header("host")
    hosts = compiled.patterns_of_header(header) if header else ()
    readings = [[*matching(reading, shape.method, hosts)] for reading in shape.readings]
    exact = [[pattern.rule for pattern in patterns if pattern.match.path not in shape.inexact] for patterns in readings]
    matched = [{rule - len(compiled.rules) for rule in rules} for rules in exact]
    for number, exemption in enumerate(compiled.policy.exempt):
        compiled_one = compiled.exemptions[number]
        if all(number in some for some in matched) and compiled_one.applies(compiled.identities, request, compiled.client_ip):
            parts = [match.path or match.host or "every path" for match in exemption.match]
            parts += [*exemption.networks, *(f"header {name}" for name, _ in exemption.headers)]
            parts += [f"{name} = {' or '.join(values)}" for name, values in exemption.when.equals]
            yield f"exempt[{number}]" + (f" ({', '.join(parts)})" if parts else "")


def retry_text(seconds: float, *rules: Rule) -> str:
    """When to retry; the longest spread of the refusing rules follows the earliest moment."""
    spread_s = max((rule.retry_after.spread_us for rule in rules), default=0) / 1e6
    spread = f", spread over {spread_s:g} s" if spread_s else ""
    return "never" if seconds == inf else f"retry in {max(1, ceil(seconds))} s{spread}"


def rule_names(rules: list[RuleExplanation]) -> str:
    return ", ".join(one.rule.name for one in rules)


def key_text(key: Key) -> str:
    return ", ".join(" | ".join(part) for part in key)


def table(rows: list[list[str]]) -> list[str]:
    """Rows as aligned columns, indented."""
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(max(map(len, rows), default=0))]
    return [("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))).rstrip() for row in rows]
