"""Features of a policy two at a time: neither makes the other a lie."""

from __future__ import annotations

import asyncio

import pytest

from headgate import MemoryStore
from headgate.policy import Policy, WrittenFacts
from headgate.policy.gate import Gate
from headgate.testing import ManualClock

COLOURS = ("ask", "aask")


def gate_of(text: str, store: MemoryStore | None = None) -> Gate:
    return Gate(Policy.read(text), store=MemoryStore(clock=ManualClock(1_000_000)) if store is None else store)


def told(gate: Gate, facts: WrittenFacts, colour: str = "ask"):
    return asyncio.run(gate.aask(facts)) if colour == "aask" else gate.ask(facts)


TENANTS = """
identify: {tenant: {path: tenant_id}}
shut_out: {after: fixed window 2/min, for: 60s, key: [tenant, ip]}
limits: [{name: tenant, match: "/t/{tenant_id}/**", key: tenant, limit: fixed window 3/min}]
"""


@pytest.mark.parametrize("colour", COLOURS)
def test_shutting_out_by_a_part_of_the_path_leaves_the_other_rules_as_they_are(colour):
    """Once somebody is shut out, keys that the path tells are still there: he stays out, and others are limited as before."""
    gate = gate_of(TENANTS)
    answers = [told(gate, WrittenFacts("GET", "/t/one/x", peer="192.0.2.1"), colour) for _ in range(8)]
    assert [answer.allowed for answer in answers] == [True] * 3 + [False] * 5
    assert answers[-1].refusal.reason == "shut out"
    others = [told(gate, WrittenFacts("GET", "/t/two/x", peer="192.0.2.2"), colour).allowed for _ in range(5)]
    assert others == [True] * 3 + [False] * 2
