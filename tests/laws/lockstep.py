"""Plays a limiter and its exact model side by side: after every step their results must be equal."""

from __future__ import annotations

from typing import Any

from limitkeeper import Limiter, MemoryStore
from limitkeeper.testing import ManualClock
from limitkeeper.testing.limiter_trace_player import TracePlayer
from models.player import WorldPlayer

#: 2023-11-14, on no round minute.
BEGIN = 1_700_000_123.456789


def lockstep(limits: dict[str, Any], trace: list[Any], sweeping: bool = False) -> None:
    """`sweeping`: idle keys are forgotten between any two steps."""
    clock = ManualClock(BEGIN)
    store = MemoryStore(clock=clock)
    limiter = Limiter(limits, store=store)
    real, ideal = TracePlayer(limiter, clock), WorldPlayer(limits, clock.now_us())
    for number, step in enumerate(trace):
        if ideal.open_to_choice(step):
            continue
        if sweeping:
            store.sweep()
        result, expected = real.step(step), ideal.step(step)
        assert store.now_us() == ideal.now_us, f"step {number}, {step}: the store's time is {store.now_us()}, not {ideal.now_us}"
        assert result == expected, f"step {number}, {step}:\n  limiter {result}\n  model   {expected}"
        starts = [r.decision.start_us if r.decision else None for r in real.reservations]
        assert starts == [turn.start_us for turn in ideal.turns], f"step {number}, {step}: reservations start at other moments"
