"""What a gate answered to one request: go on, or be refused and told why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..algorithms.claim import NamedLimit
from ..decision import Decision
from .model import DEGRADE, Rule

#: Why somebody was refused.
QUOTA, QUEUE_FULL, SHUT_OUT, STORE = "quota", "queue full", "shut out", "store"


class Entry:
    """One limit of one rule, as it is asked: `named` is the store's, `label` the policy name that header fields show.

    `posting` is free for the web room: what can be written down once (bytes of `"label";q=…;w=…`) is kept there.
    """

    __slots__ = ("label", "named", "posting", "rule")

    def __init__(self, rule: Rule, named: NamedLimit, label: str) -> None:
        self.rule = rule
        self.named = named
        self.label = label
        self.posting: Any = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why, and when to come back. `retry_after` is whole seconds, rounded up; None: never (or nobody knows).

    `rule` is the refusing rule of the highest priority (ties: who takes longest), which gives status, message and body;
    `violated` are the labels of all entries that refused. `rule` is None for a shut-out.
    """

    reason: str
    status: int
    retry_after: int | None
    message: str
    rule: Rule | None = None
    violated: tuple[str, ...] = ()
    limit: int = 0
    remaining: int = 0


class Passage:
    """One request's answer.

    allowed    go on to the handler
    decision   of all limits together; None when nothing limits this request (exempt, no rule meant, shut out, store failed open)
    entries    the limits that were asked, in the order of `decision.decisions`
    keys       their keys, in the same order
    refusal    when not allowed
    shadows    names of the rules that would have refused, had they not been in shadow
    wait_us    how long it waited
    owes       True: `done` (or `adone`) must be called when the response is known
    """

    __slots__ = ("allowed", "began_us", "decision", "entries", "gate", "keys", "owes", "refusal", "shadows", "tab", "wait_us")

    def __init__(self, gate: Any, allowed: bool) -> None:
        self.gate = gate
        self.allowed = allowed
        self.decision: Decision | None = None
        self.entries: tuple[Entry, ...] = ()
        self.keys: tuple[str, ...] = ()
        self.refusal: Refusal | None = None
        self.shadows: tuple[str, ...] = ()
        self.wait_us = 0
        self.began_us = 0
        self.owes = False
        self.tab: Any = None

    def __bool__(self) -> bool:
        return self.allowed

    @property
    def degrade(self) -> Callable[..., Any] | None:
        """What answers instead of the handler, when the refusing rule says so."""
        refusal = self.refusal
        if refusal is None or refusal.rule is None or refusal.rule.on_refusal.action != DEGRADE:
            return None
        handler: Callable[..., Any] = refusal.rule.on_refusal.handler
        return handler

    def responded(self, status: int) -> None:
        """The handler began its response: counted with its time. Every middleware calls it once for an allowed request."""
        self.gate.count_response(self, status)

    def done(self, status: int, size: int = 0) -> None:
        """The response has gone: settles what depends on its outcome or its size. A no-op unless `owes`."""
        if self.owes:
            self.gate.settle(self, status, size)

    async def adone(self, status: int, size: int = 0) -> None:
        if self.owes:
            await self.gate.asettle(self, status, size)
