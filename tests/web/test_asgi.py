"""Every ASGI framework passes the table of cases, in process and behind real servers."""

from __future__ import annotations

import threading
import uuid

import pytest
from app_under_test import play, play_real
from asgi_apps import BUILDERS, AsgiApp
from cases import CASES, REAL
from servers_asgi import Hypercorn, Uvicorn

from limitkeeper.policy import Policy
from limitkeeper.policy.gate import Gate
from limitkeeper.stores import RedisStore
from servers.valkey import Valkey


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("framework", BUILDERS)
def test_in_process(framework, case):
    """The case holds in this framework."""
    play(AsgiApp(framework), case)


@pytest.mark.parametrize("case", REAL, ids=str)
@pytest.mark.parametrize("framework", BUILDERS)
def test_behind_uvicorn(framework, case, valkey):
    """The case holds over the wire: uvicorn (uvloop, httptools), a real Valkey, real time."""
    play_real(AsgiApp(framework, Uvicorn), case, valkey.url)


@pytest.mark.parametrize("case", REAL, ids=str)
@pytest.mark.parametrize("framework", ["starlette", "quart"])
def test_behind_hypercorn(framework, case, valkey):
    """The case holds behind hypercorn."""
    play_real(AsgiApp(framework, Hypercorn), case, valkey.url)


def test_exact_under_concurrency(valkey):
    """Eight clients of a real server on one key of a real store: together they pass exactly the limit."""
    policy = Policy.read(
        f"name: web-{uuid.uuid4().hex}\nbudget: 60s\nlimits: [{{name: api, key: ip, limit: token bucket 1/30d burst 50}}]"
    )
    with RedisStore(valkey.url, timeout="60s") as store, Gate(policy, store=store) as gate:
        running = AsgiApp("plain", Uvicorn).make(gate)
        statuses: list[int] = []

        def client() -> None:
            statuses.extend(running.request("GET", "/a", [], b"", "").status for _ in range(20))

        threads = [threading.Thread(target=client) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        running.close()
    assert (statuses.count(200), statuses.count(429)) == (50, 110)
    assert len(running.calls) == 50


@pytest.mark.parametrize(("on_failure", "status"), [("open", 200), ("closed", 503), ("local 1/5", 200)])
def test_a_store_that_dies(on_failure, status):
    """When the real store is killed under a real server, the rule's on_failure answers, at once and without a 500."""
    policy = Policy.read(
        f"budget: 60s\nlimits: [{{name: api, key: ip, limit: token bucket 1/h burst 10, on_failure: {on_failure}}}]"
    )
    with Valkey() as server, RedisStore(server.url, timeout="60s") as store, Gate(policy, store=store) as gate:
        running = AsgiApp("starlette", Uvicorn).make(gate)
        assert running.request("GET", "/a", [], b"", "").status == 200
        server.kill()
        answers = [running.request("GET", "/a", [], b"", "").status for _ in range(4)]
        running.close()
    assert answers[:2] == [status] * 2
    assert answers[2:] == [429 if on_failure.startswith("local") else status] * 2
