"""What a gate answered to one request: go on, or be refused and told why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.algorithms.claim import NamedLimit
    from cython.cimports.limitkeeper.decision import Decision
else:
    from ..algorithms.claim import NamedLimit
    from ..decision import Decision

from .model import DEGRADE, Policy, Rule

#: Why somebody was refused.
QUOTA, QUEUE_FULL, SHUT_OUT, STORE = "quota", "queue full", "shut out", "store"


@cython.cclass
class Entry:
    """One limit of one rule, as it is asked: `named` is the store's, `label` the policy name that header fields show.

    `compiled_rule` is the rule as the gate runs it. `field_template` is free for the web room: what can be written down once (the bytes of
    `"label";q=…;w=…`) is kept there.
    """

    __slots__ = ("compiled_rule", "field_template", "label", "named", "rule")

    def __init__(self, rule: Rule, named: NamedLimit, label: str, compiled_rule: Any = None) -> None:
        self.rule = rule
        self.named = named
        self.label = label
        self.compiled_rule = compiled_rule
        self.field_template: Any = None

    def __repr__(self) -> str:
        return f"<Entry {self.label}: {self.named.limit}>"


@cython.cclass
class Refusal:
    """Why, and when to come back. `retry_after` is whole seconds, rounded up; None: never (or nobody knows).

    `rule` is the refusing rule of the highest priority (ties: who takes longest), which gives status, message and body;
    `violated` are the labels of all entries that refused. `rule` is None for a shut-out. `retry_us` is `retry_after` to the
    microsecond, for those who can be told more exactly than whole seconds.
    """

    # Not a dataclass: freezing one costs more than the decision that refused.
    __slots__ = ("limit", "message", "reason", "remaining", "retry_after", "retry_us", "rule", "status", "violated")

    def __init__(
        self,
        reason: str,
        status: int,
        retry_after: int | None,
        message: str,
        rule: Rule | None = None,
        violated: tuple[str, ...] = (),
        limit: int = 0,
        remaining: int = 0,
        retry_us: int = 0,
    ) -> None:
        self.reason = reason
        self.status = status
        self.retry_after = retry_after
        self.message = message
        self.rule = rule
        self.violated = violated
        self.limit = limit
        self.remaining = remaining
        self.retry_us = retry_us

    def __repr__(self) -> str:
        return f"<Refusal {self.status} {self.reason}: {self.message}>"


@cython.cclass
class Evaluation:
    """One request's answer.

    allowed    go on to the handler
    decision   of all limits together; None when nothing limits this request (exempt, no rule meant, shut out, store failed open)
    entries    the limits that were asked, in the order of `decision.decisions`
    keys       their keys, in the same order
    policy     the version of the policy that this request saw
    refusal    when not allowed
    shadows    names of the rules that would have refused, had they not been in shadow
    wait_us    how long it waited
    origin     the request names the page that made it: its script may read only what the response exposes
    needs_settlement       True: `done` (or `adone`) must be called when the response is known
    """

    # fmt: off
    __slots__ = (
        "allowed",
        "began_us",
        "claims",
        "compiled",
        "context",
        "costs",
        "decision",
        "entries",
        "gate",
        "idempotent",
        "keys",
        "near_rule",
        "needs_settlement",
        "origin",
        "reason",
        "refusal",
        "shadow",
        "shadows",
        "special",
        "wait_us",
    )
    # fmt: on

    def __init__(self, gate: Any, compiled: Any) -> None:
        self.gate = gate
        self.compiled = compiled
        self.context: Any = None
        self.allowed = True
        self.decision: Decision | None = None
        self.entries: list[Entry] = []
        self.keys: list[str] = []
        self.refusal: Refusal | None = None
        self.shadows: tuple[str, ...] = ()
        self.wait_us = 0
        self.began_us = 0
        self.origin = False
        self.needs_settlement = False
        # What the gate keeps while it decides: costs in the entries' order, claims, what is asked in shadow or once.
        self.costs: Any = None
        self.claims: Any = None
        self.shadow: Any = None
        self.idempotent: Any = None
        self.special = False
        self.near_rule: Any = None  # the compiled_rule that was last counted as near its end
        self.reason = QUOTA

    def __bool__(self) -> bool:
        return self.allowed

    @property
    def policy(self) -> Policy:
        policy: Policy = self.compiled.policy
        return policy

    @property
    def degrade(self) -> Callable[..., Any] | None:
        """What answers instead of the handler, when the refusing rule says so."""
        refusal = self.refusal
        if refusal is None or refusal.rule is None or refusal.rule.on_refusal.action != DEGRADE:
            return None
        handler: Callable[..., Any] = self.compiled.handler(refusal.rule)
        return handler

    def count_response(self, status: int) -> None:
        """The handler began its response: counted with its time. Every middleware calls it once for an allowed request."""
        self.gate.count_response(self, status)

    def settle(self, status: int, size: int = 0) -> None:
        """The response has gone: settles what depends on its outcome or its size. A no-op unless `needs_settlement`. Status 0 is an
        unknown outcome, which stays charged."""
        if self.needs_settlement:
            self.gate.settle(self, status, size)

    async def asettle(self, status: int, size: int = 0) -> None:
        if self.needs_settlement:
            await self.gate.asettle(self, status, size)


if not cython.compiled:
    new_evaluation = Evaluation  # compiled, evaluation.pxd makes one without calling it
