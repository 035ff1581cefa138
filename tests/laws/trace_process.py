"""Plays traces from JSON lines and writes the results; run by another interpreter, or another build.

A line is `[[text of a limit, …], [[name of a step, field, …], …]]`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from limitkeeper import Limiter, MemoryStore
from limitkeeper.algorithms.limit_parser import parse_limit
from limitkeeper.testing import ManualClock, strategies
from limitkeeper.testing.limiter_trace_player import TracePlayer


def written(limits: list[Any], trace: list[Any]) -> str:
    return json.dumps([[str(limit) for limit in limits], [[type(step).__name__, *step] for step in trace]])


def read(line: str) -> tuple[list[Any], list[Any]]:
    texts, steps = json.loads(line)
    return [parse_limit(text) for text in texts], [step_of(name, *fields) for name, *fields in steps]


def step_of(name: str, *fields: Any) -> Any:
    """A step; JSON has no tuples."""
    return getattr(strategies, name)(*(as_tuple(field) for field in fields))


def as_tuple(field: Any) -> Any:
    return tuple(as_tuple(one) for one in field) if isinstance(field, list) else field


def answers(line: str) -> str:
    """A limiter's result of each step, as JSON; infinity is written as Python's json writes it."""
    limits, trace = read(line)
    clock = ManualClock(1_700_000_123.456789)
    limiter = Limiter({f"limit {number}": limit for number, limit in enumerate(limits)}, store=MemoryStore(clock=clock))
    return json.dumps(TracePlayer(limiter, clock).play(trace))


if __name__ == "__main__":
    import limitkeeper

    print("compiled" if limitkeeper.compiled else "plain")
    for line in sys.stdin:
        print(answers(line))
