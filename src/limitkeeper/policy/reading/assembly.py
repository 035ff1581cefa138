"""A policy made of what was said: identities first, then the rules that name them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...errors import ConfigurationError
from ..compiled_policy import join_key
from ..model import Headers, Limits, OnFailure, Policy, Rule, Tiers
from ..overrides import HashOverrides
from .fields import Said
from .identities import Identities
from .nodes import ListNode
from .parse_context import ParseContext
from .rules import RuleDraft, TiersDraft
from .sections import ExemptionDraft, Loaded
from .validators import BAD, only_configuration


class Assembly:
    """A policy with the drafts that it was made of, for those who check it."""

    def __init__(self, loaded: Loaded, page: ParseContext, source: Path | None) -> None:
        said = loaded.said
        self.page = page
        self.said = said
        self.identities = Identities(said.get("identify"), page)
        self.drafts: tuple[RuleDraft, ...] = said.get("limits", ())
        self.exemptions: tuple[ExemptionDraft, ...] = said.get("exempt", ())
        self.rules: list[tuple[RuleDraft, Rule]] = []
        for draft in self.drafts:
            rule = self._rule(draft)
            if rule is not None:
                self.rules.append((draft, rule))
        self.policy = self._policy(source)

    def _policy(self, source: Path | None) -> Policy:
        said = self.said
        return Policy(
            name=said.get("name", "limitkeeper"),
            store=said.get("store", "memory://"),
            identify=self.identities.made,
            exempt=tuple(draft.exemption for draft in self.exemptions),
            rules=tuple(rule for _, rule in self.rules),
            penalty_box=said.get("penalty_box"),
            headers=said.get("headers", Headers()),
            budget_us=said.get("budget", 20_000),
            safe_concurrency=said.get("safe_concurrency"),
            problem=said.get("problem", False),
            source=source,
            files=tuple(self.identities.files),
        )

    def _rule(self, draft: RuleDraft) -> Rule | None:
        limit = self._tiers(draft.limit) if isinstance(draft.limit, TiersDraft) else draft.limit
        override = self._override(draft)
        overrides = self._overrides(draft)
        if limit is BAD or override is BAD or overrides is BAD:
            return None
        return draft.rule(limit, overrides, override, self.said.get("on_failure", OnFailure()))

    def _tiers(self, tiers: TiersDraft) -> Any:
        """Limits by an identity; whoever is not listed has those of the identity's default."""
        if tiers.by is None:
            return BAD
        node, listed = tiers.said.node, dict(tiers.limits)
        if not listed and "default" not in tiers.said:
            self.page.wrong(
                node.place, "", f"no limit is said for any value of {tiers.by!r}", "write {by: plan, free: …, pro: …}"
            )
            return BAD
        otherwise: Limits | None = tiers.otherwise
        if "default" not in tiers.said:
            otherwise = self._otherwise(tiers, listed)
        if otherwise is None or not tiers.said.whole(*tiers.said.node.entries):
            return BAD
        return Tiers(tiers.by, tiers.limits, otherwise)

    def _otherwise(self, tiers: TiersDraft, listed: dict[str, Limits]) -> Limits | None:
        by = tiers.by or ""
        if by not in self.identities.made:
            return None  # told elsewhere
        default = self.identities.default(by)
        if default in tiers.said.node.entries:
            return listed.get(default or "")
        if default is None:
            told, remedy = f"nothing is said for requests without {by!r} and for its other values", "add default: with a limit"
        else:
            told, remedy = (
                f"the default value {default!r} of {by!r} has no limit here",
                f"add {default}: or default: with a limit",
            )
        self.page.wrong(tiers.said.word("by"), by, told, remedy)
        return None

    # Limits of single keys --------------------------------------------------------------------------------------------------

    def _override(self, draft: RuleDraft) -> Any:
        said = draft.said
        value = said.get("override", () if "override" not in said else BAD)
        if value is BAD or not value:
            return value
        if not said.whole("key"):
            return BAD
        if not draft.key:
            told = "this rule has one key for everybody, so no key can have a limit of its own"
            self.page.wrong(said.word("override"), "override", told, "give the rule a key:, or leave override out")
            return BAD
        if isinstance(said.at("override"), ListNode):
            return self._listed_override(draft, value)
        if len(draft.key) > 1:
            told = f"the key has {len(draft.key)} parts, and one value can't name them"
            remedy = f"write a list: - {{key: [{', '.join(part[0] for part in draft.key)}], limit: …}}"
            self.page.wrong(said.word("override"), "override", told, remedy)
            return BAD
        return value

    def _listed_override(self, draft: RuleDraft, entries: Any) -> Any:
        found: dict[str, Limits] = {}
        for parts, limits, said in entries:
            node = said.at("key")
            if len(parts) != len(draft.key):
                told = f"the key of this rule has {counted(len(draft.key))}, and this one has {counted(len(parts))}"
                self.page.wrong(node.place, "", told, f"write {', '.join(part[0] for part in draft.key)}")
                return BAD
            if not any(part is not None for part in parts):
                self.page.wrong(node.place, "", "no part of this key is there", "say at least one")
                return BAD
            key = join_key(list(parts)) if len(parts) > 1 else str(parts[0])
            if key in found:
                self.page.wrong(node.place, "", "this key has a limit already", "say it once")
            found[key] = limits
        return tuple(found.items())

    def _overrides(self, draft: RuleDraft) -> Any:
        said = draft.said.get("overrides", None if "overrides" not in draft.said else BAD)
        if not isinstance(said, Said):
            return said
        url, name = said.get("url", self.said.get("store", "memory://")), said.get("redis_hash")
        if not isinstance(name, str) or not isinstance(url, str):
            return BAD
        if not url.startswith(("redis", "valkey", "unix")):
            told = "a Redis hash needs the URL of its server: the policy's store is none"
            self.page.wrong(said.word("redis_hash"), name, told, "add url: redis://localhost:6379")
            return BAD
        try:
            return HashOverrides(url, name, said.get("refresh", 5_000_000))
        except ConfigurationError as error:  # what only the client knows of its URLs
            message, remedy = only_configuration(error)
            place = said.at("url").place if "url" in said else said.word("redis_hash")
            self.page.wrong(place, "", message, remedy or "write it like redis://localhost:6379/0")
            return BAD


def counted(parts: int) -> str:
    return "1 part" if parts == 1 else f"{parts} parts"
