"""A gate with one rule of every kind, and traffic that changes every number."""

from __future__ import annotations

from typing import Any

from limitkeeper import FixedWindow, MemoryStore, TokenBucket
from limitkeeper.policy import Evaluation, Gate, Policy, WrittenRequest
from limitkeeper.policy.identity.identify import Header
from limitkeeper.policy.model import (
    LOCAL,
    SHADOW,
    WAIT,
    Charge,
    Exemption,
    Match,
    OnFailure,
    OnRefusal,
    PenaltyBoxConfig,
    RetryAmplification,
    Rule,
)
from limitkeeper.testing import ManualClock
from stand_ins import NOON, WrappedStore

USER = (("user",),)


def rule(name: str, limit: Any, path: str = "", **more: Any) -> Rule:
    match = (Match(path=path),) if path else ()
    return Rule(name, (limit,), match=match, **{"key": USER, **more})


RULES = (
    rule("checkout", FixedWindow("5/min"), "/checkout", alert=0.8),
    rule("search", TokenBucket("100/min"), "/search"),
    rule("slow", TokenBucket("10/s burst 1"), "/slow", on_refusal=OnRefusal(WAIT, wait_us=500_000)),
    rule("trial", FixedWindow("1/min"), "/search", on_refusal=OnRefusal(SHADOW)),
    rule("login", FixedWindow("3/min"), "/login", charge=Charge(statuses=((401, 403),))),
)


def policy(name: str = "shop", rules: tuple[Rule, ...] = RULES, **more: Any) -> Policy:
    return Policy(
        name=name,
        identify={"user": Header("x-user")},
        rules=rules,
        exempt=(Exemption(match=(Match(path="/healthz"),)),),
        penalty_box=PenaltyBoxConfig(FixedWindow("20/min"), 60_000_000, USER),
        retry_amplification=RetryAmplification(USER),
        **more,
    )


def gate_on(clock: Any, name: str = "shop", **more: Any) -> Gate:
    return Gate(policy(name), store=MemoryStore(clock=clock), secret=b"a secret of ours", **more)


def asked(gate: Gate, path: str, user: str = "ann", status: int | None = 200) -> Evaluation:
    """One request, and its response when it is admitted."""
    evaluation = gate.ask(WrittenRequest("POST", path, headers={"x-user": user}))
    if evaluation.allowed and status is not None:
        evaluation.count_response(status)
        evaluation.settle(status, 100)
    return evaluation


def busy_gate(clock: ManualClock | None = None, name: str = "shop") -> Gate:
    """A gate with every event but a failing store: refusals, shadows, alerts, a wait, a give-back, penalty box."""
    gate = gate_on(ManualClock(NOON) if clock is None else clock, name)
    for _ in range(8):
        asked(gate, "/checkout")
    for _ in range(3):
        asked(gate, "/checkout", "bob", 500)
    for _ in range(3):
        asked(gate, "/search")
    for _ in range(2):
        asked(gate, "/slow")
    asked(gate, "/login", status=200)
    asked(gate, "/healthz")
    asked(gate, "/elsewhere")
    for _ in range(27):
        asked(gate, "/checkout", "eve")
    gate.reload(policy(name))
    gate.reload_refused(ValueError("line 3: no such word"))
    return gate


def failing_gate() -> Gate:
    """A gate whose remote store fails: one rule admits, one refuses, one decides on a share."""
    rules = (
        rule("open", FixedWindow("5/min"), "/open"),
        rule("closed", FixedWindow("5/min"), "/closed", on_failure=OnFailure("closed")),
        rule("local", FixedWindow("4/min"), "/local", on_failure=OnFailure(LOCAL, "1/4")),
    )
    clock = ManualClock(NOON)
    store = WrappedStore(MemoryStore(clock=clock))
    store.failing = {"decide"}
    gate = Gate(policy("failing", rules), store=store, clock=clock, secret=b"a secret of ours")
    for path in ("/open", "/open", "/closed", "/local", "/local"):
        asked(gate, path)
    return gate
