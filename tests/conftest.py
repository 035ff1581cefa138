"""What tests share: a clock at noon that moves when told to, a store on it, and limiters of both colours."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import limitkeeper
from fault_lab.witness import Watch
from limitkeeper import AsyncLimiter, Limiter, MemoryStore
from limitkeeper.testing import ManualClock
from servers.valkey import Valkey
from stand_ins import NOON, Driven, HeldClock, WrappedStore

# `make test` tries the same examples every time, so that it fails for what was changed; a soak looks for new ones.
# Neither minds how long an example takes: a machine that stalls is no fault of ours.
PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("steady", derandomize=True, database=None, **PATIENT)
settings.register_profile("soak", derandomize=False, **PATIENT)
settings.load_profile("soak" if os.environ.get("LIMITKEEPER_SOAK") == "1" else "steady")


#: What is not compiled is the same source in both builds: `make test` runs these once, with the compiled one (LIMITKEEPER_EXPECT
#: is "plain" in its second run only). So do tests whose point is a server: the middleware before it is tried in process in both.
ONCE = (
    "policy/test_cli_policy.py",
    "policy/identity/*.py",
    "policy/reading/*.py",
    "policy/test_overrides.py",
    "policy/test_policy_docs.py",
    "policy/test_file_watcher*.py",
    "observe/*.py",
)
SERVED = ("test_behind_", "test_frameworks_behind_", "test_django_asgi_behind_")


def second_run() -> bool:
    return os.environ.get("LIMITKEEPER_EXPECT") == "plain" and os.environ.get("LIMITKEEPER_SOAK") != "1"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if second_run() and any(collection_path.match(f"tests/{pattern}") for pattern in ONCE) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left = [item for item in items if second_run() and item.name.startswith(SERVED)]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]


def pytest_report_header() -> str:
    return f"limitkeeper: {'compiled' if limitkeeper.compiled else 'plain'}, from {limitkeeper.__path__[0]}"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOON)


@pytest.fixture
def held() -> HeldClock:
    return HeldClock()


@pytest.fixture
def store(clock: ManualClock) -> MemoryStore:
    return MemoryStore(clock=clock)


@pytest.fixture(params=[True, False], ids=["near", "far"])
def wrapped(request: pytest.FixtureRequest, store: MemoryStore) -> WrappedStore:
    """Somebody else's store around the manual one: near (it never waits) and far."""
    return WrappedStore(store, local=request.param)


@pytest.fixture(params=["sync", "async"])
def make(request: pytest.FixtureRequest, store: MemoryStore) -> Callable[..., Any]:
    """Makes a limiter on the manual store; an async one is driven, so that one test speaks for both colours."""

    def build(limits: Any, store: Any = store, name: str | None = None) -> Any:
        if request.param == "sync":
            return Limiter(limits, store=store, name=name)
        return Driven(AsyncLimiter(limits, store=store, name=name))

    return build


@pytest.fixture
def python() -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Runs code in an interpreter of its own, with the same build of limitkeeper."""
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(limitkeeper.__path__[0])}

    def run(code: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", textwrap.dedent(code)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    return run


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Waits until something is true that other threads bring about; half a minute is enough for anything on any machine."""

    def wait_for(condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 30
        while not condition():
            if time.monotonic() > end:
                raise AssertionError("it did not come true within half a minute")
            time.sleep(0.001)

    return wait_for


@pytest.fixture
def watch() -> Iterator[Watch]:
    """A witness of how late this process is during a test: `took < watch.allows(0.3)`."""
    with Watch() as watching:
        yield watching


@pytest.fixture(scope="session")
def valkey() -> Iterator[Valkey]:
    """One empty server for the whole run of this worker; tests use key prefixes of their own, or flush it."""
    with Valkey() as server:
        yield server
