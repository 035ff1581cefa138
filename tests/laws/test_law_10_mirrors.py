"""Law 10: twins agree, compared with ==: compiled and plain, sync and async, a meter and a bucket."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_process import answers, written

import limitkeeper
from effort import effort
from limitkeeper import GCRA, LeakyBucket, Limit, Limiter, MemoryStore, TokenBucket
from limitkeeper.testing import ManualClock
from limitkeeper.testing.limiter_trace_player import TracePlayer, make_limiter
from limitkeeper.testing.strategies import limits, traces

EXPECTED = os.environ.get("LIMITKEEPER_EXPECT", "any")
PLAIN = os.environ.get("LIMITKEEPER_PLAIN_PATH")
some_limits = st.lists(limits(), min_size=1, max_size=4, unique_by=str)
played = some_limits.flatmap(lambda some: st.tuples(st.just(some), traces(some, several_keys=True, backwards=True)))


def test_this_is_the_build_that_was_expected() -> None:
    """LIMITKEEPER_EXPECT=compiled or =plain: the run fails when it runs on the other one."""
    assert EXPECTED in ("compiled", "plain", "any"), f"LIMITKEEPER_EXPECT={EXPECTED!r}: write compiled, plain or any"
    build = "compiled" if limitkeeper.compiled else "plain"
    assert EXPECTED in ("any", build), (
        f"expected the {EXPECTED} build, but this is the {build} one, from {limitkeeper.__path__[0]}"
    )


def recorded(examples: int) -> list[str]:
    """Traces of every kind, one to a line."""
    lines: list[str] = []

    @effort(examples)
    @given(played)
    def collect(drawn: tuple[list[Limit], list[Any]]) -> None:
        lines.append(written(*drawn))

    collect()
    return lines


@pytest.mark.skipif(PLAIN is None, reason="LIMITKEEPER_PLAIN_PATH does not say where the plain copy is; `make test` sets it")
def test_the_plain_copy_gives_equal_answers() -> None:
    """Traces played here and in an interpreter that runs the plain source: all results are equal."""
    lines = recorded(200)
    environment = {**os.environ, "PYTHONPATH": os.path.abspath(str(PLAIN))}
    command = [sys.executable, str(Path(__file__).with_name("trace_process.py"))]
    results = subprocess.run(
        command, input="\n".join(lines), env=environment, capture_output=True, text=True, check=True, timeout=600
    )
    build, *theirs = results.stdout.splitlines()
    assert build == "plain", f"{PLAIN} holds the {build} build"
    assert len(theirs) == len(lines)
    parted = [line for line, their in zip(lines, theirs, strict=True) if answers(line) != their]
    assert not parted, f"{len(parted)} of {len(lines)} traces differ; the shortest: {min(parted, key=len)}"


@effort(150)
@given(played)
def test_async_answers_as_sync(drawn: tuple[list[Limit], list[Any]]) -> None:
    """Every verb of an AsyncLimiter answers as the Limiter's does."""
    some, trace = drawn
    results = []
    for mode in ("sync", "async"):
        clock = ManualClock(1_700_000_123.456789)
        limiter = make_limiter(mode, {str(limit): limit for limit in some}, MemoryStore(clock=clock))
        results.append(TracePlayer(limiter, clock).play(trace))
    assert results[0] == results[1]


@effort(200)
@given(limits(LeakyBucket).flatmap(lambda meter: st.tuples(st.just(meter), traces([meter], several_keys=True, backwards=True))))
def test_a_meter_is_a_token_bucket_seen_from_the_other_side(drawn: tuple[LeakyBucket, list[Any]]) -> None:
    """`LeakyBucket(rate, c)` and `TokenBucket(rate, burst=c)` give the same answers on every trace."""
    meter, trace = drawn
    results = []
    for limit in (meter, TokenBucket(meter.rate, burst=meter.capacity)):
        clock = ManualClock(1_700_000_123.456789)
        results.append(TracePlayer(Limiter({"limit": limit}, store=MemoryStore(clock=clock)), clock).play(trace))
    assert results[0] == results[1]


def test_gcra_is_the_token_bucket() -> None:
    """The same code and the same state, under another name."""
    assert GCRA is TokenBucket
    assert GCRA("5/s burst 10") == TokenBucket("5/s", burst=10)
