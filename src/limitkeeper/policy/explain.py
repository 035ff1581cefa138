"""Explains which rules of a policy apply to a request, with which key and limit, and why the others do not. Charges nothing.

`explain` asks a gate about each rule; `RequestExplanation` shows the result as text and as JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, inf
from typing import TYPE_CHECKING

from ..algorithms.claim import Claim
from ..decision import Decision
from .compiled_policy import CompiledExemption, CompiledRule, Entry, MatchedRules, identity_of, key_of
from .identity.client_ip import ClientIp
from .identity.paths import normalize_path
from .model import DEGRADE, SHADOW, WAIT, Exemption, Policy, Rule, Tiers
from .path_matcher import PathMatcher, host_matches_any, limits_host
from .reading.parse_context import shorten
from .request_context import RequestContext
from .request_line import Request

if TYPE_CHECKING:
    from .gate import Gate

EXEMPT = "the request is exempt"


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

    @property
    def shadow(self) -> bool:
        return self.rule.on_refusal.action == SHADOW


def explain(gate: Gate, request: RequestContext) -> list[RuleExplanation]:
    """Explains every rule of the gate's policy."""
    compiled = gate.compiled
    matched = compiled.find(request.method, request.path)
    request.captured = matched.captured or request.captured
    exempt = True if matched.exempt else compiled.exempted_rules(matched, request)
    found = []
    for rule in compiled.rules:
        reason = EXEMPT if exempt is True or (exempt and rule.name in exempt) else why_not(rule, request, matched)  # type: ignore[operator]
        key = None if reason else rule.key_for(request)
        if not reason and not isinstance(key, str):
            reason = f"no part of its key ({', '.join(' | '.join(part) for part in rule.config.key)}) is present"
        if reason or not isinstance(key, str):
            found.append(RuleExplanation(rule.config, False, reason))
            continue
        entries = rule.entries_for(request, key)
        if not entries:
            found.append(RuleExplanation(rule.config, True, "unlimited", key))
            continue
        cost = rule.cost_for(request)
        decision = gate.store.decide([Claim(entry.named, key, cost) for entry in entries], 0, commit=False)
        found.append(RuleExplanation(rule.config, True, "", key, entries, cost, decision))
    return found


def why_not(rule: CompiledRule, request: RequestContext, matched: MatchedRules) -> str:
    """Which part of a rule's `match` or `when` does not hold; "" when all of it does."""
    if rule not in matched.rules:
        return "method and path do not match"
    hosts = matched.hosts[matched.rules.index(rule)] if matched.hosts else ()
    if hosts and not limits_host(hosts, request):
        return f"expected the host {' or '.join(hosts)}, got {request.host() or 'none'}"
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

    def __init__(self, policy: Policy, line: Request, request: RequestContext, rules: list[RuleExplanation]) -> None:
        self.policy = policy
        self.line = line
        self.request = request
        self.rules = rules
        self.exemptions = list(matching_exemptions(policy, request))
        self.identities = {name: identity_of(dict(policy.identify), request, name) for name in policy.identify}

    @property
    def refusing(self) -> list[RuleExplanation]:
        """Rules that would refuse this request now."""
        return [one for one in self.rules if one.decision is not None and not one.decision and not one.shadow]

    # Text ----------------------------------------------------------------------------------------------------------------

    def text(self) -> str:
        applying = [self._columns(one) for one in self.rules if one.applies]
        others = [[one.rule.name, self._reason(one)] for one in self.rules if not one.applies]
        identities = [[name, "absent" if value is None else shorten(str(value))] for name, value in self.identities.items()]
        lines = [str(self.line), *table(identities), ""]
        lines += ["applies:", *table(applying)] if applying else ["no rule applies"]
        if others:
            lines += ["", "does not apply:", *table(others)]
        return "\n".join([*lines, "", self._verdict()])

    def _reason(self, one: RuleExplanation) -> str:
        """Why a rule does not apply; with the exemptions that hold."""
        return f"{EXEMPT}: {', '.join(self.exemptions)}" if one.reason == EXEMPT and self.exemptions else one.reason

    def _columns(self, one: RuleExplanation) -> list[str]:
        names = ", ".join(" | ".join(part) for part in one.rule.key)
        key = f"{names} = {shorten(one.key or '')}" if names else "one key for all requests"
        limits = "; ".join(str(entry.named.limit) for entry in one.entries) or "unlimited"
        source = self._limit_source(one.rule)
        return [one.rule.name, key, f"{limits} ({source})" if source else limits, self._remaining(one)]

    def _limit_source(self, rule: Rule) -> str:
        """Which override or tier gave the limit."""
        identities = dict(self.policy.identify)
        keys = [key_of(identities, self.request, rule.key, plain) for plain in (False, True)] if rule.override else []
        if any(key in dict(rule.override) for key in keys):
            return "override"
        return f"{rule.limit.by} = {self.identities.get(rule.limit.by) or 'absent'}" if isinstance(rule.limit, Tiers) else ""

    def _remaining(self, one: RuleExplanation) -> str:
        if one.decision is None:
            return ""
        remaining = "; ".join(f"{each.remaining} of {each.limit} left" for each in one.decision.decisions)
        cost = "" if one.cost == 1 else f", costs {one.cost}"
        refused = "" if one.decision else f", refused: {retry_text(one.decision.retry_after)}"
        return remaining + cost + (", in shadow" if one.shadow else "") + refused

    def _verdict(self) -> str:
        refusing = self.refusing
        if not refusing:
            return "→ allowed"
        waits = [one.decision.retry_after for one in refusing if one.decision is not None]
        names, longest = ", ".join(one.rule.name for one in refusing), max(waits)
        actions = [one.rule.on_refusal for one in refusing]
        if longest <= min(action.wait_us if action.action == WAIT else 0 for action in actions) / 1e6:
            return f"→ waits {longest:.3g} s for {names}, then allowed"
        first, _ = max(zip(refusing, waits, strict=True), key=lambda pair: (pair[0].rule.priority, pair[1]))
        if first.rule.on_refusal.action == DEGRADE:
            return f"→ refused by {names}, answered by the handler of {first.rule.name}: {retry_text(longest)}"
        return f"→ refused by {names} with {first.rule.answer.status or 429}: {retry_text(longest)}"

    # JSON ----------------------------------------------------------------------------------------------------------------

    def as_dict(self) -> dict[str, object]:
        """The same for JSON. A `retry_after` of never is null."""
        return {
            "request": {"method": self.line.method, "path": self.line.path},
            "policy": self.policy.name,
            "identities": self.identities,
            "allowed": not self.refusing,
            "rules": [self._rule_dict(one) for one in self.rules],
        }

    def _rule_dict(self, one: RuleExplanation) -> dict[str, object]:
        if not one.applies:
            return {"name": one.rule.name, "applies": False, "reason": self._reason(one)}
        decisions = one.decision.decisions if one.decision is not None else ()
        limits = [
            {
                "label": entry.label,
                "limit": str(entry.named.limit),
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
            "limits": limits,
            "allowed": one.decision is None or bool(one.decision),
        }


def matching_exemptions(policy: Policy, request: RequestContext) -> Iterator[str]:
    """The exemptions that hold for a request, by their path in the policy."""
    identities = dict(policy.identify)
    ip = identities.get("ip")
    address = ip if hasattr(ip, "address") else ClientIp()
    hits, _ = PathMatcher([exemption.match for exemption in policy.exempt]).find(request.method, normalize_path(request.path))
    for number, hosts in hits:
        exemption = policy.exempt[number]
        if hosts and not host_matches_any(hosts, request.host()):
            continue
        if CompiledExemption(exemption).applies(identities, request, address):
            yield f"exempt[{number}]{describe_exemption(exemption)}"


def describe_exemption(exemption: Exemption) -> str:
    """The conditions of an exemption; values of headers are secret."""
    parts = [match.path or match.host or "every path" for match in exemption.match]
    parts += [*exemption.networks, *(f"header {name}" for name, _ in exemption.headers)]
    parts += [f"{name} = {' or '.join(values)}" for name, values in exemption.when.equals]
    return f" ({', '.join(parts)})" if parts else ""


def retry_text(seconds: float) -> str:
    return "never" if seconds == inf else f"retry in {max(1, ceil(seconds))} s"


def table(rows: list[list[str]]) -> list[str]:
    """Rows as aligned columns, indented."""
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(max(map(len, rows), default=0))]
    return [("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))).rstrip() for row in rows]
