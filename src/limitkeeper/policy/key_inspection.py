"""The keys of a rule in a store: lists, shows and resets them, for `limitkeeper keys`. Listing and showing charge nothing."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import islice
from math import ceil, inf
from typing import NamedTuple

from ..algorithms.claim import Claim
from ..errors import ConfigurationError
from ..observe.metrics import escape_unprintable
from ..stores import Store, store_from_url
from ..stores.urls import masked
from .compiled_rule import CompiledRule, Entry
from .explain import limit_text, table
from .reading.diagnostics import shorten

#: The most keys of a limit that are read: each costs one call of the store.
MAX_KEYS = 10_000


class StoredKey(NamedTuple):
    """A key that has state under one limit of a rule. `retry_after` and `reset_after` are in seconds."""

    key: str
    limit: str
    remaining: int
    of: int
    retry_after: float | None  # None: never
    reset_after: float


class StoredKeys:
    """The keys of one rule. A rule with tiers or overrides has several limits, and a key may have state under each."""

    def __init__(self, rule: CompiledRule, store: Store) -> None:
        self.rule, self.store = rule, store
        if rule.config.capacity is not None:
            raise ConfigurationError(
                f"the rule {rule.name!r} divides a capacity among its keys, and keeps no limit for each of them"
            )

    def list(self, pattern: str = "*") -> list[StoredKey]:
        """The keys that match a pattern; those with the smallest part left come first."""
        found = [
            self._peek(entry, key)
            for entry in distinct([entry for some in self.rule.entries_by_limits.values() for entry in some])
            for key in islice((key for key, _ in self.store.rate_items(entry.named) if fnmatchcase(key, pattern)), MAX_KEYS)
        ]
        return sorted(found, key=lambda one: (one.remaining / one.of, -one.reset_after, one.key))

    def show(self, key: str) -> Sequence[StoredKey]:
        """The state of one key under each limit of the rule, those of overrides at run time included."""
        return [self._peek(entry, key) for entry in distinct(all_entries(self.rule, key))]

    def reset(self, key: str) -> None:
        """Deletes the state of a key under all limits of the rule, those of overrides at run time included."""
        entries = {one.named.identity: one for one in all_entries(self.rule, key)}
        if entries:
            self.store.reset([Claim(one.named, key) for one in entries.values()])

    def _peek(self, entry: Entry, key: str) -> StoredKey:
        decision = self.store.decide([Claim(entry.named, key)], 0, commit=False)
        retry_after = None if decision.retry_after == inf else decision.retry_after
        return StoredKey(key, limit_text(entry), decision.remaining, decision.limit, retry_after, decision.reset_after)


def all_entries(rule: CompiledRule, key: str) -> list[Entry]:
    """The limits under which a key may have state: all of the policy, and its overrides at run time, which another process may
    have used."""
    for limits in (rule.operator_limits(key), rule.application_limits(key)):
        if limits is not None:
            rule.override_entries(tuple(limits))
    return [entry for some in list(rule.entries_by_limits.values()) for entry in some]


def distinct(entries: list[Entry]) -> list[Entry]:
    return list({(entry.label, entry.named.limit): entry for entry in entries}.values())


def open_shared_store(url: str) -> Store:
    """A store that other processes use; ConfigurationError for one that lives in a single process."""
    if url.startswith("memory:"):
        remedy = "write --store URL, such as redis://localhost:6379 or limitkeeper://127.0.0.1:7071"
        raise ConfigurationError(f"the keys of {masked(url)} are in the memory of their process; {remedy}")
    return store_from_url(url)


def key_text(key: str) -> str:
    """A key for a terminal: clients choose keys, so control characters are shown as escapes."""
    return escape_unprintable(shorten(key))


def keys_text(keys: Sequence[StoredKey], more: int = 0) -> str:
    """One line per key, and how many more there are."""
    rows = [
        [key_text(one.key), one.limit, f"{one.remaining} of {one.of} left", f"as new in {ceil(one.reset_after):,} s"]
        for one in keys
    ]
    lines = [line.removeprefix("  ") for line in table(rows)]
    return "\n".join(lines + ([f"and {more} more; see --first and --match"] if more else []))
