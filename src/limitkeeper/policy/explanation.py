"""What a policy makes of one request, for people and for programs: which rules are meant, by which key, what remains, why not.

The values come from `gate.explain`, which peeks and charges nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, inf
from typing import Any

from .compiled_policy import CompiledExemption, identity_of, key_of
from .explain import Explained
from .identity.client_ip import ClientIp
from .identity.paths import tidy
from .model import DEGRADE, SHADOW, WAIT, Exemption, Policy, Rule, Tiers
from .path_matcher import PathMatcher, host_matches_any
from .reading.parse_context import short
from .request_line import Request

EVERYBODY = "one key for everybody"
#: What `gate.explain` says of a rule that is not asked because of an exemption.
EXEMPT = "the request is exempt"


class Explanation:
    """One request explained. `identities` is what each of the policy's identities says of it."""

    def __init__(self, policy: Policy, request: Request, facts: Any, rules: list[Explained]) -> None:
        self.policy = policy
        self.request = request
        self.facts = facts
        self.rules = rules
        self.exempting = list(exempting(policy, facts))
        self.identities: dict[str, str | None] = {}
        for name in policy.identify:
            value: Any = identity_of(dict(policy.identify), facts, name)
            self.identities[name] = value

    @property
    def refusing(self) -> list[Explained]:
        """Rules that would refuse this request now."""
        return [one for one in self.rules if one.decision is not None and not one.decision and not shadowed(one)]

    # For people ----------------------------------------------------------------------------------------------------------

    def text(self) -> str:
        """Lines to be read."""
        meant = [one for one in self.rules if one.meant]
        others = [one for one in self.rules if not one.meant]
        lines = [str(self.request), *self._identity_lines(), ""]
        lines += ["meant:", *table([self._row(one) for one in meant])] if meant else ["no rule is meant"]
        if others:
            lines += ["", "not meant:", *table([[one.rule.name, self._why(one)] for one in others])]
        return "\n".join([*lines, "", self._verdict()])

    def _why(self, one: Explained) -> str:
        """Why a rule is not meant; an exemption with its place in the file."""
        return f"{one.why}: {', '.join(self.exempting)}" if one.why == EXEMPT and self.exempting else one.why

    def _identity_lines(self) -> list[str]:
        return table([[name, "absent" if value is None else short(value)] for name, value in self.identities.items()])

    def _row(self, one: Explained) -> list[str]:
        return [one.rule.name, self._key(one), self._limits(one), self._left(one)]

    def _key(self, one: Explained) -> str:
        if not one.rule.key:
            return EVERYBODY
        names = " | ".join(one.rule.key[0]) if len(one.rule.key) == 1 else ", ".join(" | ".join(part) for part in one.rule.key)
        return f"{names} = {short(one.key or '')}"

    def _limits(self, one: Explained) -> str:
        said = "; ".join(str(entry.named.limit) for entry in one.entries) or "unlimited"
        because = self._because(one.rule)
        return f"{said} ({because})" if because else said

    def _because(self, rule: Rule) -> str:
        """Why this limit and no other of the rule."""
        identities = dict(self.policy.identify)
        keys = [key_of(identities, self.facts, rule.key, plain) for plain in (False, True)] if rule.override else []
        if any(key in dict(rule.override) for key in keys):
            return "override"
        if isinstance(rule.limit, Tiers):
            return f"{rule.limit.by} = {self.identities.get(rule.limit.by) or 'absent'}"
        return ""

    def _left(self, one: Explained) -> str:
        if one.decision is None:
            return ""
        cost = "" if one.cost == 1 else f", costs {one.cost}"
        left = "; ".join(f"{each.remaining} of {each.limit} left" for each in one.decision.decisions)
        mode = ", in shadow" if shadowed(one) else ""
        return left + cost + mode + ("" if one.decision else f", refused: {again(one.decision.retry_after)}")

    def _verdict(self) -> str:
        refusing = self.refusing
        if not refusing:
            return "→ allowed"
        told = [one.decision.retry_after for one in refusing if one.decision is not None]
        names, longest = ", ".join(one.rule.name for one in refusing), max(told)
        patience = min(one.rule.on_refusal.wait_us if one.rule.on_refusal.action == WAIT else 0 for one in refusing) / 1e6
        if longest <= patience:
            return f"→ waits {longest:.3g} s for {names}, then allowed"
        first, _ = max(zip(refusing, told, strict=True), key=lambda pair: (pair[0].rule.priority, pair[1]))
        if first.rule.on_refusal.action == DEGRADE:
            return f"→ refused by {names}, answered by the handler of {first.rule.name}: {again(longest)}"
        return f"→ refused by {names} with {first.rule.answer.status or 429}: {again(longest)}"

    # For programs --------------------------------------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """The same, for JSON. Seconds that never come are null."""
        return {
            "request": {"method": self.request.method, "path": self.request.path},
            "policy": self.policy.name,
            "identities": self.identities,
            "allowed": not self.refusing,
            "rules": [self._rule_dict(one) for one in self.rules],
        }

    def _rule_dict(self, one: Explained) -> dict[str, Any]:
        said: dict[str, Any] = {"name": one.rule.name, "meant": one.meant}
        if not one.meant:
            return said | {"why": self._why(one)}
        said |= {"key": one.key, "parts": [list(part) for part in one.rule.key], "cost": one.cost, "shadow": shadowed(one)}
        decisions = one.decision.decisions if one.decision is not None else ()
        said["limits"] = [
            {
                "label": entry.label,
                "limit": str(entry.named.limit),
                "of": each.limit,
                "remaining": each.remaining,
                "retry_after": None if each.retry_after == inf else each.retry_after,
            }
            for entry, each in zip(one.entries, decisions, strict=True)
        ]
        said["allowed"] = one.decision is None or bool(one.decision)
        return said


def exempting(policy: Policy, facts: Any) -> Iterator[str]:
    """The exemptions that hold for a request, as they stand in the policy."""
    identities: dict[str, Any] = dict(policy.identify)
    address = identities["ip"] if hasattr(identities.get("ip"), "address") else ClientIp()
    hits, _ = PathMatcher([exemption.match for exemption in policy.exempt]).find(facts.method, tidy(facts.path))
    for number, hosts in hits:
        exemption = policy.exempt[number]
        if (not hosts or host_matches_any(hosts, facts.host())) and CompiledExemption(exemption).applies(
            identities, facts, address
        ):
            yield f"exempt[{number}]{told(exemption)}"


def told(exemption: Exemption) -> str:
    """What an exemption says, in a few words; values of headers are secrets."""
    said = [match.path or match.host or "every path" for match in exemption.match]
    said += [*exemption.networks, *(f"header {name}" for name, _ in exemption.headers)]
    said += [f"{name} = {' or '.join(values)}" for name, values in exemption.when.equals]
    return f" ({', '.join(said)})" if said else ""


def shadowed(one: Explained) -> bool:
    return one.rule.on_refusal.action == SHADOW


def again(seconds: float) -> str:
    return "never" if seconds == inf else f"again in {max(1, ceil(seconds))} s"


def table(rows: list[list[str]]) -> list[str]:
    """Rows in columns, indented."""
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(max(len(row) for row in rows))]
    return [("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))).rstrip() for row in rows]
