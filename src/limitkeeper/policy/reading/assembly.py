"""Assembles a Policy from its parsed fields: identities first, then the rules that refer to them."""

from __future__ import annotations

from pathlib import Path

from ...errors import ConfigurationError
from ..compiled_policy import join_key
from ..model import Headers, Limits, OnFailure, Overrides, Policy, Rule, Tiers
from ..overrides import HashOverrides
from .fields import ParsedFields
from .identities import Identities
from .nodes import ListNode
from .parse_context import ParseContext
from .rules import RuleDraft
from .sections import ExemptionDraft
from .validators import INVALID, Invalid, split_remedy


class Assembly:
    """A policy together with the drafts that it was made from, for the checks."""

    def __init__(self, fields: ParsedFields, context: ParseContext, source: Path | None) -> None:
        self.context = context
        self.fields = fields
        self.identities = Identities(fields.get("identify"), context)
        self.drafts: tuple[RuleDraft, ...] = fields.get("limits", ())
        self.exemptions: tuple[ExemptionDraft, ...] = fields.get("exempt", ())
        made = [(draft, self._rule(draft)) for draft in self.drafts]
        self.rules = [(draft, rule) for draft, rule in made if rule is not None]
        self.policy = Policy(
            name=fields.get("name", "limitkeeper"),
            store=fields.get("store", "memory://"),
            identify=self.identities.by_name,
            exempt=tuple(draft.exemption for draft in self.exemptions),
            rules=tuple(rule for _, rule in self.rules),
            penalty_box=fields.get("penalty_box"),
            headers=fields.get("headers", Headers()),
            budget_us=fields.get("budget", 20_000),
            safe_concurrency=fields.get("safe_concurrency"),
            problem=fields.get("problem", False),
            source=source,
            files=tuple(self.identities.files),
        )

    def _rule(self, draft: RuleDraft) -> Rule | None:
        limit = self._tiers(draft.limit) if isinstance(draft.limit, ParsedFields) else draft.limit
        override, overrides = self._override(draft), self._overrides(draft)
        if limit is INVALID or override is None or overrides is INVALID:
            return None
        return draft.rule(limit, overrides, override, self.fields.get("on_failure", OnFailure()))

    def _tiers(self, fields: ParsedFields) -> Tiers | Invalid:
        """Limits by identity; values that are not listed have the limit of the identity's default."""
        by = fields.get("by")
        if by is None:
            return INVALID
        limits = tuple((value, fields.get(value)) for value in fields if value not in ("by", "default"))
        if not limits and "default" not in fields:
            self.context.error(fields.node.position, f"no value of {by!r} has a limit", "write {by: plan, free: …, pro: …}")
            return INVALID
        otherwise = fields.get("default") if "default" in fields else self._limits_of_default(fields, by)
        if otherwise is None or not fields.valid(*fields.node.entries):
            return INVALID
        return Tiers(by, limits, otherwise)

    def _limits_of_default(self, fields: ParsedFields, by: str) -> Limits | None:
        if by not in self.identities.by_name:
            return None  # reported elsewhere
        default = self.identities.default(by)
        if default is None:
            message = f"requests without {by!r}, and other values of it, have no limit"
            self.context.error(fields.key("by"), message, "add default: with a limit", by)
            return None
        if default not in fields:
            message = f"the default value {default!r} of {by!r} has no limit here"
            self.context.error(fields.key("by"), message, f"add {default}: or default: with a limit", by)
        limits: Limits | None = fields.get(default)
        return limits

    # Overrides --------------------------------------------------------------------------------------------------------------

    def _override(self, draft: RuleDraft) -> dict[str, Limits] | None:
        """The limits of single keys; None after an error."""
        fields = draft.fields
        if not fields.valid("override", "key"):
            return None
        position, parts = fields.key("override"), ", ".join(part[0] for part in draft.key)
        if draft.override and not draft.key:
            message = "this rule has one key for all requests, so no key can have its own limit"
            self.context.error(position, message, "add key: to the rule, or remove override", "override")
            return None
        found: dict[str, Limits] = {}
        for entry in draft.override:
            if len(entry.parts) != len(draft.key):
                if not isinstance(fields.at("override"), ListNode):
                    message = f"the key has {len(draft.key)} parts, and a single value can't name them"
                    self.context.error(position, message, f"write a list: - {{key: [{parts}], limit: …}}", "override")
                else:
                    message = f"expected {counted(len(draft.key))}, as the rule's key has, got {counted(len(entry.parts))}"
                    self.context.error(entry.key_node.position, message, f"write {parts}")
                return None
            if all(part is None for part in entry.parts):
                self.context.error(entry.key_node.position, "no part of this key is present", "write at least one")
                return None
            key = join_key(list(entry.parts)) if len(entry.parts) > 1 else str(entry.parts[0])
            if key in found:
                self.context.error(entry.key_node.position, "this key already has a limit", "remove one of them")
            found[key] = entry.limits
        return found

    def _overrides(self, draft: RuleDraft) -> Overrides | Invalid | None:
        if not draft.fields.valid("overrides"):
            return INVALID
        fields: Overrides | ParsedFields | None = draft.fields.get("overrides")
        if not isinstance(fields, ParsedFields):
            return fields
        url, name = fields.get("url", self.fields.get("store", "memory://")), fields.get("redis_hash")
        if not isinstance(name, str):
            return INVALID
        if not url.startswith(("redis", "valkey", "unix")):
            message = "a Redis hash needs the URL of its server, and the policy's store is not Redis"
            self.context.error(fields.key("redis_hash"), message, "add url: redis://localhost:6379", name)
            return INVALID
        try:
            return HashOverrides(url, name, fields.get("refresh", 5_000_000))
        except ConfigurationError as error:  # found only by the Redis client
            message, remedy = split_remedy(error)
            position = fields.at("url").position if "url" in fields else fields.key("redis_hash")
            self.context.error(position, message, remedy or "write it like redis://localhost:6379/0")
            return INVALID


def counted(parts: int) -> str:
    return "1 part" if parts == 1 else f"{parts} parts"
