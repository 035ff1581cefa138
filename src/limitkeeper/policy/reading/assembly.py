"""Assembles a Policy from its parsed fields: identities first, then the rules that refer to them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ...algorithms import TokenBucket
from ...errors import ConfigurationError
from ..application_overrides import CalledOverrides, HashOverrides, algorithm_of
from ..compiled_rule import join_key
from ..model import (
    BUDGET_US,
    LOCAL,
    WAIT,
    Answer,
    Capacity,
    Cost,
    Exemption,
    Limits,
    OnFailure,
    OnRefusal,
    Overrides,
    Policy,
    Rule,
    Tiers,
)
from .diagnostics import INVALID, Invalid, ParseContext, split_remedy
from .identities import Identities
from .nodes import ListNode
from .rule_fields import limits_by
from .validators import ParsedFields

#: Options of a rule that do not go with `capacity`; of two of them, only some values.
WITHOUT_CAPACITY = ("limit", "concurrent", "override", "overrides", "charge", "once", "alert", "on_refusal", "cost")


class Assembly:
    """A policy together with the fields that it was made from, for the checks. `rules` are those without errors."""

    def __init__(self, fields: ParsedFields, context: ParseContext, source: Path | None) -> None:
        self.context = context
        self.fields = fields
        self.identities = Identities(fields.get("identify"), context)
        self.rule_fields: tuple[ParsedFields, ...] = fields.get("limits", ())
        self.exemptions: tuple[tuple[ParsedFields, Exemption], ...] = fields.get("exempt", ())
        self.rules = [(one, rule) for one in self.rule_fields if (rule := self._rule(one)) is not INVALID]
        values = same_fields(Policy, fields) | {"identify": self.identities.by_name, "files": tuple(context.files)}
        values |= {"exempt": tuple(exemption for _, exemption in self.exemptions), "rules": tuple(rule for _, rule in self.rules)}
        self.policy = Policy(**values, budget_us=fields.get("budget", BUDGET_US), source=source)

    def _rule(self, fields: ParsedFields) -> Rule | Invalid:
        limit: Limits | ParsedFields | Tiers | Invalid = fields.get("limit", INVALID if "limit" in fields else ())
        instead = "concurrent" in fields.values or "capacity" in fields.values
        if not self._may_be_concurrent(fields) or not self._may_have_capacity(fields) or not ("limit" in fields or instead):
            return INVALID
        if isinstance(limit, ParsedFields):
            limit = self._tiers(limit)
        algorithm = TokenBucket.kind if limit is INVALID else algorithm_of(limit)
        override, overrides = self._override(fields, algorithm), self._overrides(fields, algorithm)
        if limit is INVALID or override is INVALID or overrides is INVALID:
            return INVALID
        values = {"name": "", "on_failure": self.fields.get("on_failure", OnFailure())} | same_fields(Rule, fields)
        values |= {"limit": limit, "override": tuple(override.items()), "overrides": overrides}
        instances, safe = self.fields.get("instances"), fields.get("safe_concurrency", self.fields.get("safe_concurrency"))
        if "capacity" in fields:
            added = {"guarantees": fields.get("guarantee", ()), "shares": fields.get("share", ())}
            given: Capacity = values["capacity"]  # from Python it may be complete
            values["capacity"] = dataclasses.replace(given, **{name: value for name, value in added.items() if value})
        values["total_concurrency"] = None if safe is None else safe * (instances or 1)
        failure: OnFailure = values["on_failure"]
        if failure.action == LOCAL and failure.share == "1" and instances is not None:
            values["on_failure"] = OnFailure(LOCAL, f"1/{instances}")
        return Rule(**values, answer=Answer(**same_fields(Answer, fields)))

    def _may_be_concurrent(self, fields: ParsedFields) -> bool:
        """Reports options of a rule that concern a rate only."""
        waits = fields.get("on_refusal", OnRefusal()).action == WAIT
        others = [name for name in ("cost", "once", *(("on_refusal",) if waits else ())) if name in fields]
        if "concurrent" in fields and others:
            message = f"{others[0]!r} is about a rate, and a rule with 'concurrent' counts requests at a time"
            remedy = "write concurrent in a rule of its own"
            self.context.error(fields.key(others[0]), message, remedy, others[0])
        return "concurrent" not in fields or ("concurrent" in fields.values and not others)

    def _may_have_capacity(self, fields: ParsedFields) -> bool:
        """Reports options that need a capacity, and those that do not go with one."""
        if "capacity" not in fields:
            others = [name for name in ("guarantee", "share") if name in fields]
            message, remedy = "a part of a capacity, and this rule has none", "add capacity: 350/s"
        else:
            wrong = {
                "on_refusal": fields.get("on_refusal", OnRefusal()).action == WAIT,
                "cost": fields.get("cost", Cost()).source == "response",
            }
            others = [name for name in WITHOUT_CAPACITY if name in fields and wrong.get(name, True)]
            message, remedy = (
                "about the limit of one key, and a capacity is one rate for all",
                "write the capacity in a rule of its own",
            )
        if others:
            self.context.error(fields.key(others[0]), f"{others[0]!r} is {message}", remedy, others[0])
        return not others and fields.valid("capacity", "guarantee", "share")

    def _tiers(self, fields: ParsedFields) -> Tiers | Invalid:
        """Limits by identity; values that are not listed have the limit of the identity's default."""
        by = fields.get("by")
        if by is None:
            return INVALID
        limits = tuple((value, some) for value, some in fields.values.items() if value not in ("by", "default"))
        if not limits and "default" not in fields:
            remedy = "write {by: plan, free: …, pro: …}"
            return self.context.error(fields.node.position, f"no value of {by!r} has a limit", remedy)
        default = "default" if "default" in fields else self.identities.default(by)
        if default is None and by in self.identities.by_name:
            message = f"requests without {by!r}, and other values of it, have no limit"
            return self.context.error(fields.key("by"), message, "add default: with a limit", by)
        if default is not None and default not in fields:
            message = f"the default value {default!r} of {by!r} has no limit here"
            return self.context.error(fields.key("by"), message, f"add {default}: or default: with a limit", by)
        return Tiers(by, limits, fields[default]) if default is not None and fields.valid() else INVALID

    def _override(self, fields: ParsedFields, algorithm: str) -> dict[str, Limits] | Invalid:
        """The limits of single keys; a rate alone has the rule's algorithm."""
        if not fields.valid("override", "key"):
            return INVALID
        key, position = fields.get("key", ()), fields.key("override")
        found: dict[str, Limits] = {}
        parser = limits_by(algorithm)
        entries = [(one, parser.parse(one.limit_node, self.context)) for one in fields.get("override", ())]
        fields.values["override"] = tuple([one._replace(limits=limits) for one, limits in entries if limits is not INVALID])
        if len(fields.values["override"]) < len(entries):
            return INVALID
        for entry in fields.values["override"]:
            at = entry.key_node.position
            if not key:
                message = "this rule has one key for all requests, so no key can have its own limit"
                return self.context.error(position, message, "add key: to the rule, or remove override", "override")
            if len(entry.parts) != len(key):
                parts = ", ".join(part[0] for part in key)
                if not isinstance(fields.at("override"), ListNode):
                    message = f"the key has {len(key)} parts, and a single value can't name them"
                    return self.context.error(position, message, f"write a list: - {{key: [{parts}], limit: …}}", "override")
                message = f"expected {counted(len(key))}, as the rule's key has, got {counted(len(entry.parts))}"
                return self.context.error(at, message, f"write {parts}")
            if all(part is None for part in entry.parts):
                return self.context.error(at, "no part of this key is present", "write at least one")
            text = join_key(list(entry.parts)) if len(entry.parts) > 1 else str(entry.parts[0])
            if text in found:
                self.context.error(at, "this key already has a limit", "remove one of them")
            found[text] = entry.limits
        return found

    def _overrides(self, rule: ParsedFields, algorithm: str) -> Overrides | Invalid | None:
        if not rule.valid("overrides"):
            return INVALID
        fields: Overrides | ParsedFields | None = rule.get("overrides")
        if not isinstance(fields, ParsedFields):
            return fields
        url, name, call = fields.get("url", self.fields.get("store", "memory://")), fields.get("redis_hash"), fields.get("call")
        if call is None and not isinstance(name, str):
            return INVALID
        if call is None and not url.startswith(("redis", "valkey", "unix")):
            message = "a Redis hash needs the URL of its server, and the policy's store is not Redis"
            return self.context.error(fields.key("redis_hash"), message, "add url: redis://localhost:6379", name)
        try:
            if call is not None:
                return CalledOverrides(call, fields.get("keep", 10_000_000), algorithm=algorithm)
            return HashOverrides(url, name, fields.get("refresh", 5_000_000), algorithm=algorithm)
        except ConfigurationError as error:  # found only by the Redis client
            message, remedy = split_remedy(error)
            position = fields.at("url").position if "url" in fields else fields.key("redis_hash" if call is None else "call")
            return self.context.error(position, message, remedy or "write it like redis://localhost:6379/0")


def same_fields(model: Any, fields: ParsedFields) -> dict[str, Any]:
    """The valid values of the fields that a class of the model has under the same name."""
    return {one.name: fields.values[one.name] for one in dataclasses.fields(model) if one.name in fields.values}


def counted(parts: int) -> str:
    return "1 part" if parts == 1 else f"{parts} parts"
