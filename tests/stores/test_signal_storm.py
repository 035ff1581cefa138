"""Signals may raise anywhere: nothing crashes, nothing stays locked, no caller is left waiting (see `signal_storm.py`)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from signal_storm import KINDS

import limitkeeper
from servers.valkey import Valkey

#: The kinds that keep their state on a server.
ON_REDIS = ("redis", "leased", "sharded", "guarded")
SCRIPT = Path(__file__).with_name("signal_storm.py")


INTERRUPTS = [200, pytest.param(1000, marks=pytest.mark.slow), pytest.param(10_000, marks=pytest.mark.soak)]


def storm(kind: str, interrupts: int, where: str, seed: int = 4) -> None:
    """Runs one; the stacks of one that does not end in time are part of the failure."""
    timeout = max(280, interrupts // 5)
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(limitkeeper.__path__[0])}
    command = [sys.executable, str(SCRIPT), kind, str(interrupts), where, str(seed)]
    running = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, errors = running.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        running.send_signal(signal.SIGUSR1)
        time.sleep(5)
        running.kill()
        out, errors = running.communicate()
        pytest.fail(f"{kind}: {interrupts} interrupts were not over within {timeout} s\n{errors}")
    assert running.returncode == 0, errors
    assert int(out) == interrupts
    assert "release" not in errors


@pytest.mark.untraced
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("interrupts", INTERRUPTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_storm_of_signals_leaves_a_store_intact(kind: str, interrupts: int, valkey: Valkey, tmp_path: Path) -> None:
    """Calls interrupted at any moment: no crash, no wrong answer, no phantom waiter, no lock left behind."""
    with valkey.client() as client:
        client.flushall()
    storm(kind, interrupts, valkey.url if kind in ON_REDIS else str(tmp_path / "shared"))
