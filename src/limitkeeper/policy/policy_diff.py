"""Compares two policy files: what changes, and for which requests.

Rules are compared by name, because their state and counters belong to the name. A field has changed when its value in the model
differs and so does its text in the file: `5/s` and `5 per second` are equal. Values are shown as the files write them, secrets
masked. Rejected: a diff of the texts, which shows comments and moved lines, and not whom they concern.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .explain import key_text, table
from .model import Match, Policy, Rule, Tiers
from .reading.load import examine, open_source, parse_tree
from .reading.nodes import ListNode, MappingNode, Node

ADDED, REMOVED, CHANGED = "added", "removed", "changed"
#: Fields that have another name in the model than in the file.
IN_MODEL = {"budget": "budget_us", "safe_concurrency": "total_concurrency"}
IN_MODEL |= {**dict.fromkeys(("status", "message", "body"), "answer"), "guarantee": "capacity", "share": "capacity"}
#: Fields of a file that change no decision, or that are compared by themselves.
LEFT_OUT = ("description", "limits")


@dataclass(frozen=True)
class FieldChange:
    """A field, or an entry of a field ("override.acme"), with its texts; None: it is not written."""

    field: str
    old: str | None
    new: str | None


@dataclass(frozen=True)
class RuleChange:
    """What happens to a rule, and the requests that it concerns: its match, condition and key. `limit` is that of an added or
    removed rule."""

    kind: str
    rule: str
    requests: str
    limit: str | None = None
    fields: tuple[FieldChange, ...] = ()


@dataclass(frozen=True)
class SourcePolicy:
    """A policy without errors, with its tree and the secrets that its text holds."""

    policy: Policy
    tree: MappingNode
    secrets: tuple[str, ...]  # the longest first: one may be a part of another

    def field_text(self, node: MappingNode, name: str) -> str | None:
        """The value of a field in one line; None: it is not written."""
        if name not in node.entries:
            return None
        text = flow_text(node.child(name))
        for secret in self.secrets:
            text = text.replace(secret, "…")
        return text

    def rules(self) -> dict[str, tuple[Rule, MappingNode]]:
        limits = self.tree.child("limits")
        nodes: list[Any] = limits.items if isinstance(limits, ListNode) else [limits]
        return {rule.name: (rule, node) for rule, node in zip(self.policy.rules, nodes, strict=True)} if self.policy.rules else {}


#: A rule or a policy, and its node.
Written = tuple[Any, MappingNode]


def read_source_policy(path: str | Path) -> SourcePolicy:
    """Reads a policy file. Raises PolicyError with all errors."""
    policy, context = examine(path, keys_needed=False)
    tree = None if policy is None else parse_tree(open_source(path)[0], context)
    if policy is None or not isinstance(tree, MappingNode):
        raise context.policy_error()
    return SourcePolicy(policy, tree, tuple(sorted(context.secrets, key=len, reverse=True)))


def flow_text(node: Node) -> str:
    """A node as YAML in one line."""
    if isinstance(node, ListNode):
        return f"[{', '.join(map(flow_text, node.items))}]"
    if isinstance(node, MappingNode):
        return f"{{{', '.join(f'{key}: {flow_text(item)}' for key, (_, item) in node.entries.items())}}}"
    return node.text


@dataclass(frozen=True)
class PolicyDiff:
    """The changes from one policy to another: of the rules in the order of the new file, and of its other fields."""

    rules: tuple[RuleChange, ...]
    settings: tuple[FieldChange, ...]

    @staticmethod
    def of(old: SourcePolicy, new: SourcePolicy) -> PolicyDiff:
        before, after = old.rules(), new.rules()
        found = []
        for name, (rule, node) in after.items():
            if name not in before:
                found.append(RuleChange(ADDED, name, requests_of(rule), new.field_text(node, "limit")))
                continue
            changes = tuple(field_changes(old, before[name], new, (rule, node)))
            found += [RuleChange(CHANGED, name, requests_of(rule), fields=changes)] if changes else []
        for name, (rule, node) in before.items():
            if name not in after:
                found.append(RuleChange(REMOVED, name, requests_of(rule), old.field_text(node, "limit")))
        settings = field_changes(old, (old.policy, old.tree), new, (new.policy, new.tree))
        return PolicyDiff(tuple(found), tuple(settings))

    def text(self) -> str:
        lines: list[str] = []
        for one in self.rules:
            lines.append(f"{one.kind} rule {one.rule}: {one.requests}{f': {one.limit}' if one.limit else ''}")
            lines += table([[change.field, change_text(change)] for change in one.fields])
        if self.settings:
            lines += ["changed for all rules:", *table([[change.field, change_text(change)] for change in self.settings])]
        return "\n".join(lines) or "no rule and no setting changes"


def field_changes(old: SourcePolicy, before: Written, new: SourcePolicy, after: Written) -> Iterator[FieldChange]:
    """The fields that differ in the model and in the text; of a mapping, its entries."""
    (old_value, old_node), (new_value, new_node) = before, after
    for name in (name for name in {**old_node.entries, **new_node.entries} if name not in LEFT_OUT):
        was, now = (getattr(one, IN_MODEL.get(name, name), None) for one in (old_value, new_value))
        if was == now and was is not None and name != "overrides":
            continue
        old_entries, new_entries = entries_of(was), entries_of(now)
        for change in text_changes(old, old_node, new, new_node, name):
            key = change.field.removeprefix(f"{name}.")
            if key not in old_entries or key not in new_entries or old_entries[key] != new_entries[key]:
                yield change


def entries_of(value: Any) -> dict[str, Any]:
    """The limits by tier, or by key of an override."""
    pairs = value.limits if isinstance(value, Tiers) else value if isinstance(value, tuple) else ()
    return {pair[0]: pair[1] for pair in pairs if isinstance(pair, tuple) and len(pair) == 2}


def text_changes(
    old: SourcePolicy, old_node: MappingNode, new: SourcePolicy, new_node: MappingNode, name: str
) -> Iterator[FieldChange]:
    was, now = old_node.entries.get(name), new_node.entries.get(name)
    if was is not None and now is not None and isinstance(was[1], MappingNode) and isinstance(now[1], MappingNode):
        for key in {**was[1].entries, **now[1].entries}:
            for change in text_changes(old, was[1], new, now[1], key):
                yield replace(change, field=f"{name}.{change.field}")
        return
    texts = old.field_text(old_node, name), new.field_text(new_node, name)
    if texts[0] != texts[1]:
        yield FieldChange(name, *texts)


def change_text(change: FieldChange) -> str:
    if change.old is None or change.new is None:
        return f"{ADDED}: {change.new}" if change.old is None else f"{REMOVED}: {change.old}"
    return f"{change.old} → {change.new}"


def requests_of(rule: Rule) -> str:
    """The requests that a rule concerns, and by what they are counted."""
    conditions = [f"{name} is present" for name in rule.when.present] + [f"{name} is absent" for name in rule.when.absent]
    conditions += [f"{name} is {' or '.join(values)}" for name, values in rule.when.equals]
    where = f" where {' and '.join(conditions)}" if conditions else ""
    key = f", by {key_text(rule.key)}" if rule.key else ", all together"
    return (" or ".join(map(match_text, rule.match)) or "every request") + where + key


def match_text(match: Match) -> str:
    return " ".join(part for part in (",".join(sorted(match.methods)), match.host + match.path) if part)
