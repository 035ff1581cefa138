"""Gates for tests: rules in short form, evaluated in every mode."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from limitkeeper import MemoryStore
from limitkeeper.algorithms.limit_parser import parse_limits
from limitkeeper.policy import Evaluation, Gate, Policy, WrittenRequest
from limitkeeper.policy.identity.identify import Header
from limitkeeper.policy.model import Rule
from limitkeeper.testing import ManualClock
from stand_ins import NOON

MODES = ("ask", "aask", "quick")


def key(*parts: str) -> tuple[tuple[str, ...], ...]:
    """`key("user", "ip|tenant")`: joined parts, each with alternatives."""
    return tuple(tuple(part.split("|")) for part in parts)


def rule(name: str, limit: Any, **said: Any) -> Rule:
    """A rule whose limit is a text."""
    return Rule(name, tuple(parse_limits(limit)) if isinstance(limit, str) else limit, **said)


def policy(*rules: Rule, **said: Any) -> Policy:
    """A policy with identities from headers of the same name, and a budget that no busy machine uses up."""
    identify = {name: Header(name) for name in ("user", "tenant", "plan", "partner")}
    return Policy(rules=rules, **{"identify": identify, "budget_us": 60_000_000, **said})


def gate(*rules: Rule, clock: Any = None, store: Any = None, **said: Any) -> Gate:
    """A gate over a memory store on a clock stopped at noon."""
    if store is None:
        store = MemoryStore(clock=ManualClock(NOON) if clock is None else clock)
    return Gate(policy(*rules, **said), store=store)


async def until(so: Callable[[], Any]) -> None:
    """Lets other tasks run until the condition holds."""
    async with asyncio.timeout(30):
        while not so():
            await asyncio.sleep(0.001)


def request(line: str = "GET /", **headers: str) -> WrittenRequest:
    """`request("POST /checkout", user="42")`"""
    method, path = line.split(" ", 1)
    peer = headers.pop("peer", "192.0.2.7")
    return WrittenRequest(method, path, headers=headers, peer=peer)


def asked(gate: Gate, facts: WrittenRequest, mode: str = "ask") -> Evaluation:
    """The gate's answer in a mode."""
    if mode == "aask":
        return asyncio.run(gate.aask(facts))
    found = gate.ask_nowait(facts) if mode == "quick" else gate.ask(facts)
    assert found is not None
    return found


def passes(gate: Gate, times: int, line: str = "GET /", mode: str = "ask", **headers: str) -> list[bool]:
    """Whether each of so many equal requests passed."""
    return [asked(gate, request(line, **headers), mode).allowed for _ in range(times)]
