"""Shared fixtures: a clock at noon that moves on demand, a store on it, and limiters sync and async."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import re
import subprocess
import sys
import textwrap
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from fnmatch import translate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import limitkeeper
from effort import scaled
from fault_lab.scheduling_delay import Watch
from limitkeeper import AsyncLimiter, Limiter, MemoryStore
from limitkeeper.testing import ManualClock
from servers.faketime import faketime_library
from servers.valkey import Valkey
from stand_ins import NOON, Driven, HeldClock, WrappedStore

# `make test` tries the same examples every time, so that only a change makes it fail; a soak looks for new ones.
# Neither has a deadline for an example: a slow machine is no failure.
PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("steady", derandomize=True, database=None, max_examples=scaled(100), **PATIENT)
settings.register_profile("soak", derandomize=False, **PATIENT)
settings.load_profile("soak" if os.environ.get("LIMITKEEPER_SOAK") == "1" else "steady")


# A service that a test starts gets free ports, also where the test names none: the default ones may be in use.
os.environ |= {f"LIMITKEEPER_{name}": "127.0.0.1:0" for name in ("HTTP", "RESP", "GRPC", "ADMIN")}

#: What `make test` runs on the plain build as well: the laws and the core, whose modules are compiled. `make test-all` runs
#: a sample on the plain build, with coverage. (LIMITKEEPER_EXPECT is "plain" in the second run of `make test` only.)
ON_BOTH_BUILDS = (
    "conventions/test_compiled.py",
    "laws/*.py",
    "limiter/*.py",
    "source_documents/*.py",
    "stores/*.py",
    "web/test_request_bounds.py",  # operations inside a compiled module are not counted
)
#: What only `make test-all` runs, as patterns of test ids: fault runs, whole fleets, installations, matrices of servers, and of
#: tests that start a service or wait in real time all but a sample.
SLOW = (
    "conventions/test_install.py",
    "conventions/test_public_types.py",
    "demo/test_docs_pictures.py",
    "demo/test_sharding_example.py",
    "docs/test_docs.py::*[[]docs/howto/testing-frameworks.md]",
    "docs/test_docs.py::*[[]docs/policy-cli.md]",
    "docs/test_docs.py::*[[]docs/web/django.md]",
    "docs/test_docs.py::*[[]docs/flash-sale.md]",
    "docs/test_docs.py::*[[]docs/fault-schedules.md]",
    "docs/test_docs.py::*[[]docs/simulate.md]",
    "docs/test_tutorials_served.py",
    "faults/*.py",
    "laws/test_law_14_budgets.py::test_whatever_hangs*[[]b*",
    "laws/test_law_14_budgets.py::test_whatever_hangs*[[]endless*",
    "policy/test_file_watcher_served.py",
    "policy/test_file_watcher.py::test_a_file_that_is_being_written*",
    "plan/test_probe.py::test_requests_start_on_schedule*",
    "service/test_clients_page.py",
    "service/test_envoy_grpc.py::test_on_redis_and_without_it",
    "service/test_envoy_grpc.py::test_mutual_tls",
    "service/test_envoy_grpc.py::test_the_token_is_required",
    "service/test_envoy_grpc.py::test_workers_share*",
    "service/test_envoy_grpc.py::test_a_killed_worker*",
    "service/test_gateway_config.py::*503*",
    "service/test_gateway_config.py::test_when_the_service_is_down*",
    "service/test_gateway_examples.py::test_traefik",
    "service/test_many_clients.py",
    "service/test_serve.py::test_a_hang_up*",
    "service/test_serve.py::test_a_missing_package*",
    "service/test_serve.py::test_a_new_worker*",
    "service/test_serve.py::test_errors_end_it*",
    "service/test_serve.py::test_the_shared_file_is_removed*",
    "service/test_serve.py::test_several_workers_refuse*",
    "service/test_service_dashboard.py::test_d*",
    "service/test_service_dashboard.py::test_a_token*",
    "service/test_service_dashboard.py::test_it_can_be_used*",
    "service/test_service_on_redis.py",
    "shop/test_shop_capacity.py",
    "shop/test_shop_checkout.py",
    "shop/test_shop_services.py",
    "shop/test_shop_served.py",
    "shop/test_shop_users.py",
    "simulate/test_faults.py::test_a_broken_store*",
    "simulate/test_faults.py::test_a_seed_repeats*[[]f*",
    "simulate/test_faults.py::test_a_seed_repeats*[[]g*",
    "simulate/test_simulate_flash_sale.py::test_one_looping_user*",
    "simulate/test_simulate_flash_sale.py::test_ten_pods*",
    "simulate/test_simulate_flash_sale.py::test_two_regions*",
    "simulate/test_simulate_flash_sale.py::test_with_limits*[[]layer_1]",
    "simulate/test_simulate_report.py::test_a_page_opens*",
    "simulate/test_simulate_report.py::test_charts_are_written_as_png",
    "stores/guarded/test_guarded_contract.py::TestGuardedAsyncStore*",
    "stores/leased/test_leased_contract.py::TestLeasesOfFifty*",
    "stores/leased/test_leased_fleet.py",
    "stores/leased/test_leased_processes.py",
    "stores/redis/test_redis_cluster.py::TestRedisCluster*",
    "stores/redis/test_redis_cluster.py::test_a_node_that_hangs*",
    "stores/redis/test_redis_failures.py::test_no_answer_is_worth*",
    "stores/redis/test_redis_sentinel.py",
    "stores/sharded/test_sharded_contract.py::TestHotShards*",
    "stores/test_signal_storm.py::*[[]redis-*",
    "stores/test_signal_storm.py::*[[]leased*",
    "stores/test_signal_storm.py::*[[]sharded-*",
    "stores/test_signal_storm.py::*[[]guarded-*",
    "web/test_request_endings.py::test_the_endings_of_a_call[[]past its deadline, [ar]*",
)
#: Tests whose tasks run on asyncio's event loop, and on uvloop's too; those of
#: QUICK_ON_UVLOOP in `make test`, the others in `make test-all`.
ON_BOTH_LOOPS = (
    "laws/test_law_8*.py",
    "laws/test_law_14*.py",
    "limiter/*.py",
    "real_time/*.py",
    "stores/*.py",
    "stores/[!s]*/*.py",
    "stores/sharded/*.py",
)
QUICK_ON_UVLOOP = (
    "laws/test_law_8_first_come_first_served.py",
    "limiter/test_waiting_tasks.py",
    "stores/guarded/test_guarded_hang.py",
    "stores/leased/test_leased_background.py",
    "stores/redis/test_redis_async.py",
)
#: Tests that start a real server process, by the fixture or helper that starts it.
SERVER_FIXTURES = {"valkey", "server", "other_server", "network"}
#: Of the cases that every web framework passes, plain ASGI and WSGI pass all in `make test`, the others every seventh.
SAMPLED_FRAMEWORK_TESTS = ("test_in_process", "test_behind_", "test_frameworks_behind_", "test_django_asgi_behind_")


def matches(path: Path, patterns: tuple[str, ...]) -> bool:
    return any(path.match(f"tests/{pattern}") for pattern in patterns)


SLOW_TESTS = re.compile("|".join(translate(f"tests/{pattern}{'' if '::' in pattern else '::*'}") for pattern in SLOW))


def is_second_run() -> bool:
    return os.environ.get("LIMITKEEPER_EXPECT") == "plain" and os.environ.get("LIMITKEEPER_SOAK") != "1"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    is_test = collection_path.name.startswith("test_")
    return True if is_test and is_second_run() and not matches(collection_path, ON_BOTH_BUILDS) else None


def is_beyond_the_sample(item: pytest.Item) -> bool:
    """Whether a case of the framework matrix is left to `make test-all`."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    if not item.name.startswith(SAMPLED_FRAMEWORK_TESTS) or "case" not in parameters:
        return False
    served = not item.name.startswith("test_in_process")
    everywhere = parameters.get("framework", "plain") == "plain" and not served
    return not everywhere and zlib.crc32(str(parameters["case"]).encode()) % 7 != 0


def is_left_out(item: pytest.Item) -> bool:
    """Whether a run leaves out a test: the second one what is about a server, the one for coverage most cases of a test (with
    LIMITKEEPER_SAMPLE=3 all but every third)."""
    sample = int(os.environ.get("LIMITKEEPER_SAMPLE", "1"))
    is_beyond = hasattr(item, "callspec") and zlib.crc32(item.nodeid.encode()) % sample != 0
    return is_beyond or (is_second_run() and "_behind_" in item.name)


def uvloop_factory() -> Any:
    """A parameter of `new_loop`."""
    with suppress(ImportError):
        import uvloop

        return pytest.param(uvloop.new_event_loop, id="uvloop")
    return pytest.param(None, id="uvloop", marks=pytest.mark.skip(reason="uvloop is not installed, see pyproject.toml"))


@pytest.hookimpl(trylast=True)  # the name of the loop comes last in the id of a test
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs tests with tasks on both loops: those that say `async`, or that are of a class or have a fixture that does."""
    if is_second_run() or "LIMITKEEPER_SAMPLE" in os.environ or not matches(Path(metafunc.module.__file__), ON_BOTH_LOOPS):
        return
    has_tasks = "make" in metafunc.fixturenames or "Async" in str(metafunc.cls) or "async" in inspect.getsource(metafunc.function)
    if has_tasks and not any(mark.name == "asyncio_only" for mark in metafunc.definition.iter_markers()):
        is_quick = matches(Path(metafunc.module.__file__), QUICK_ON_UVLOOP)
        on_uvloop = uvloop_factory()
        if not is_quick:
            on_uvloop = on_uvloop._replace(marks=[*on_uvloop.marks, pytest.mark.slow])
        metafunc.parametrize("new_loop", [pytest.param(None, id="asyncio"), on_uvloop], indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks `slow` and `server`, and deselects the tests that this run leaves out."""
    for item in items:
        if SLOW_TESTS.match(item.nodeid) or is_beyond_the_sample(item) or item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.slow)
        if SERVER_FIXTURES & set(getattr(item, "fixturenames", ())) or "_behind_" in item.name:
            item.add_marker(pytest.mark.server)
    left_out = [item for item in items if is_left_out(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def pytest_collection() -> None:
    gc.disable()  # collecting the tests only makes objects that stay


def pytest_collection_finish() -> None:
    """Excludes existing objects from later garbage collections: with all tests collected, one would take 0.3 s."""
    gc.freeze()
    gc.enable()


def pytest_report_header() -> str:
    return f"limitkeeper: {'compiled' if limitkeeper.compiled else 'plain'}, from {limitkeeper.__path__[0]}"


@pytest.fixture(autouse=True)
def new_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `asyncio.run` and `asyncio.new_event_loop` create in a test."""
    factory = getattr(request, "param", None)
    if factory is not None:
        if "valkey" in request.fixturenames:  # which has the keys of the same test on the other loop
            with request.getfixturevalue("valkey").client() as client:
                client.flushall()
        monkeypatch.setattr(asyncio, "new_event_loop", factory)
        monkeypatch.setattr(asyncio.events, "new_event_loop", factory)


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
    """A third-party store around the manual one: near (it never waits) and far."""
    return WrappedStore(store, local=request.param)


@pytest.fixture(params=["sync", "async"])
def make(request: pytest.FixtureRequest, store: MemoryStore) -> Callable[..., Any]:
    """Makes a limiter on the manual store; an async one is driven, so that one test speaks for sync and async."""

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
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    return run


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Waits for a condition that other threads fulfil; a minute is enough for anything on any machine."""

    def wait_for(condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not condition():
            if time.monotonic() > end:
                raise AssertionError("it did not come true within a minute")
            time.sleep(0.001)

    return wait_for


@pytest.fixture
def watch() -> Iterator[Watch]:
    """Measures how late this process is during a test: `took < watch.allows(0.3)`."""
    with Watch() as watching:
        yield watching


@pytest.fixture(scope="session")
def valkey() -> Iterator[Valkey]:
    """One empty server for the whole run of this worker; tests use key prefixes of their own, or flush it."""
    with Valkey() as server:
        yield server


@pytest.fixture
def needs_faketime() -> None:
    if faketime_library() is None or os.environ.get("LIMITKEEPER_TEST_REDIS_SERVER"):
        pytest.skip("clocks are stepped with libfaketime (pip install libfaketime), and with the wheel's Valkey only")
