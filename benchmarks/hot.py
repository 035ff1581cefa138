"""One key, again and again: the cost of a decision, beside the floor of any limiter."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count as counting
from typing import Any

from peers import SYNC, Peer
from report import Section, Table, number
from timing import Case, Effort, measure, one_core

from limitkeeper import (
    FixedWindow,
    LeakyBucket,
    LeakyBucketQueue,
    Limiter,
    SlidingWindowCounter,
    SlidingWindowLog,
    TokenBucket,
)

KEY = "user:123456"
PLENTY, HOUR = 10**9, 3600

RULES: dict[str, Callable[[str], Any]] = {
    "token bucket": TokenBucket,
    "leaky bucket, meter": lambda rate: LeakyBucket(rate, int(rate.split("/")[0])),
    "fixed window": FixedWindow,
    "fixed window, first-aligned": lambda rate: FixedWindow(rate, align="first"),
    "sliding counter": SlidingWindowCounter,
    "sliding log": SlidingWindowLog,
}
ONE_STEP = [name for name in RULES if name != "sliding log"]
QUEUE = "leaky bucket, queue"


def limitkeeper_cases() -> list[Case]:
    cases = []
    for name, rule in RULES.items():
        for verdict, rate in (("allow", f"{PLENTY}/h"), ("deny", "1/h")):
            limiter = Limiter(rule(rate))
            limiter.hit(KEY)
            if bool(limiter.hit(KEY)) is not (verdict == "allow"):
                raise AssertionError(f"{name} at {rate} does not {verdict}")
            cases.append(Case(f"{name} {verdict}", "o.hit(k)", {"o": limiter, "k": KEY}))
    queue, busy = Limiter(LeakyBucketQueue("1/h")), Limiter(LeakyBucketQueue(f"{PLENTY}/ms"))
    queue.hit(KEY)
    cases.append(Case(f"{QUEUE} deny", "o.hit(k)", {"o": queue, "k": KEY}))
    cases.append(Case(f"{QUEUE} mixed", "o.hit(k)", {"o": busy, "k": KEY}))
    kept = Limiter(TokenBucket(f"{PLENTY}/h"))
    cases.append(Case("token bucket allow, answer kept until the next", "d = o.hit(k)", {"o": kept, "k": KEY}))
    return cases


def floor_cases(floors: Any) -> list[Case]:
    def function(key: str, cost: int = 1) -> None:
        return None

    cases = [
        Case("dict.get", "o.get(k)", {"o": {KEY: 1}, "k": KEY}),
        Case("empty Python function", "o(k)", {"o": function, "k": KEY}),
    ]
    if floors is not None:
        bottom = floors.Floors()
        cases = [
            Case("floor A: empty compiled method", "o.empty(k)", {"o": bottom, "k": KEY}),
            Case("floor B: clock and a fresh Decision", "o.fresh(k)", {"o": bottom, "k": KEY}),
            Case("floor B, answer kept until the next", "d = o.fresh(k)", {"o": bottom, "k": KEY}),
            Case("compiled method that reads the clock", "o.clock(k)", {"o": bottom, "k": KEY}),
            *cases,
        ]
    return cases


def peer_case(peer: Peer, verdict: str) -> Case:
    names = peer.build(PLENTY if verdict == "allow" else 1, HOUR) | {"k": KEY}
    before = None
    if peer.log and verdict == "allow":
        fresh = counting()
        before = lambda: f"user:{next(fresh)}"  # noqa: E731
    exec(peer.call, dict(names))  # the one that is allowed, where only one is
    return Case(f"{peer.name} {verdict}", peer.call, names, before, most=1000)


def peer_cases(failed: dict[str, str]) -> list[Case]:
    cases = []
    for peer in SYNC:
        for verdict in ("allow", "deny"):
            try:
                cases.append(peer_case(peer, verdict))
            except Exception as error:  # not installed, or changed: reported, and stops nothing
                failed[f"{peer.name} {verdict}"] = f"{type(error).__name__}: {error}"
    return cases


def run(floors: Any, effort: Effort, note: Callable[[str], None]) -> Section:
    section = Section(
        "One hot key",
        "`limiter.hit(key)` → a full Decision, dropped at once (or kept). Allow: 10⁹ per hour. Deny: 1 per hour, used up. "
        "The queue admits only when its turn is now, so it is timed refusing, and mixed (10⁹ per ms). A peer counts with the "
        "fastest of its rules, limitkeeper with the slowest of its own.",
    )
    failed: dict[str, str] = {}
    with one_core():
        took, more = measure([*floor_cases(floors), *limitkeeper_cases(), *peer_cases(failed)], effort, note)
    section.fail(failed | more)
    judge(section, took)
    section.details = [floor_table(took), rule_table(took), peer_table(took)]
    return section


def judge(section: Section, took: dict[str, float]) -> None:
    floor_a, floor_b = took.get("floor A: empty compiled method"), took.get("floor B: clock and a fresh Decision")
    ours = {name: value for name, value in took.items() if name.rsplit(" ", 1)[0] in (*ONE_STEP, QUEUE)}
    for name, value in ours.items():
        section.figure(f"{name} / floor A", floor_a and value / floor_a, None, "×")
        section.figure(f"{name} / floor B", floor_b and value / floor_b, 1.35, "×")
    kept, floor_kept = took["token bucket allow, answer kept until the next"], took.get("floor B, answer kept until the next")
    section.figure("token bucket allow, answer kept / floor B, kept", floor_kept and kept / floor_kept, None, "×")
    section.notes.append("a store may fill in its last Decision again once the caller has dropped it; floor B always makes one")
    for package, goal in (("limits", 25.0), ("throttled-py", 25.0), ("rust-py-rate-limit", 1.5)):
        for verdict in ("allow", "deny"):
            theirs = [value for name, value in took.items() if name.startswith(package) and name.endswith(verdict)]
            slowest = max(value for name, value in ours.items() if name.endswith(verdict))
            ratio = min(theirs) / slowest if theirs else None
            section.figure(f"{package}'s fastest rule / limitkeeper's slowest, {verdict}", ratio, goal, "×", at_least=True)


def floor_table(took: dict[str, float]) -> Table:
    names = [case.name for case in floor_cases(None)] + [name for name in took if "floor" in name or "reads the clock" in name]
    return Table(("floor", "ns"), [(name, number(took[name], "")) for name in names])


def rule_table(took: dict[str, float]) -> Table:
    table = Table(("limitkeeper, returning a Decision", "allow ns", "deny ns"))
    for name in RULES:
        table.rows.append((name, number(took[f"{name} allow"], ""), number(took[f"{name} deny"], "")))
    table.rows.append((f"{QUEUE} (mixed, deny)", number(took[f"{QUEUE} mixed"], ""), number(took[f"{QUEUE} deny"], "")))
    kept = "token bucket allow, answer kept until the next"
    table.rows.append(("token bucket, answer kept until the next", number(took[kept], ""), ""))
    return table


def peer_table(took: dict[str, float]) -> Table:
    table = Table(("peer", "allow ns", "deny ns", "allow / token bucket", "deny / token bucket"))
    for peer in SYNC:
        row = [peer.name]
        pair = [(took.get(f"{peer.name} {verdict}"), took[f"token bucket {verdict}"]) for verdict in ("allow", "deny")]
        row += [number(theirs, "") if theirs else "–" for theirs, _ in pair]
        row += [number(theirs / ours, "×") if theirs else "–" for theirs, ours in pair]
        table.rows.append(tuple(row))
    return table
