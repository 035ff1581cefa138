"""A service on a remote store: everything is awaited, pipelines are one call, and each rule has its own `on_failure`."""

from __future__ import annotations

import time

import httpx
import pytest
from running import Running

from servers.valkey import Valkey

POLICY = """
name: remote
budget: 30s
identify: {user: {header: X-User}}
limits:
  - {name: checkout, match: POST /checkout, key: user, limit: fixed window 3/h align first, on_failure: closed}
  - {name: open, match: GET /open, key: user, limit: fixed window 3/h align first, on_failure: open}
  - {name: local, match: GET /local, key: user, limit: fixed window 4/h align first, on_failure: local 1/2}
  - {name: tokens, match: POST /llm, key: user, limit: token bucket 1/h burst 1000}
"""


@pytest.fixture
def server():
    valkey = Valkey()
    yield valkey
    valkey.close()


@pytest.fixture
def policy(tmp_path):
    path = tmp_path / "limitkeeper.yaml"
    path.write_text(POLICY)
    return path


def test_every_operation_over_redis(server, policy):
    """Hits, batches, matched requests, reservations that another service settles, over both protocols."""
    with (
        Running(
            "--store", f"{server.url}?timeout=30s", policy=policy, environment={"LIMITKEEPER_SECRET": "0123456789abcdef"}
        ) as service,
        Running(
            "--store", f"{server.url}?timeout=30s", policy=policy, environment={"LIMITKEEPER_SECRET": "0123456789abcdef"}
        ) as other,
    ):
        statuses = [one.post("/v1/check", limit="checkout", key="a").status_code for one in (service, other, service, other)]
        assert statuses == [200, 200, 200, 429]
        many = service.post("/v1/check", checks=[{"limit": "checkout", "key": "b", "cost": cost} for cost in (2, 2, 1)])
        assert [one["allowed"] for one in many.json()["decisions"]] == [True, False, True]
        request = {"method": "POST", "path": "/checkout", "headers": {"X-User": "a"}}
        assert other.post("/v1/check", request=request).status_code == 429
        token = service.post("/v1/reserve", limit="tokens", key="a", cost=600).json()["token"]
        assert other.redis.execute_command("LK.SETTLE", token, 100) == 1
        assert service.redis.execute_command("LK.SETTLE", token, 100) == 0
        assert service.redis.execute_command("LK.PEEK", "tokens", "a")[2] == 900
        assert service.redis.execute_command("CL.THROTTLE", "a", 1, 1, 60)[:3] == [0, 2, 1]
        assert service.post("/v1/reset", limit="checkout", key="a").json() == {"reset": True}
        assert service.client.get("/v1/limits/checkout/a").json()["limits"][0]["remaining"] == 3


@pytest.mark.parametrize("transaction", [False, True])
def test_a_pipeline_is_one_call_of_the_store(server, policy, transaction):
    """300 hits, errors among them, are answered in order by a handful of commands to Redis."""
    with Running("--store", f"{server.url}?timeout=30s", policy=policy) as service:
        service.hit("tokens", "first")  # scripts are loaded
        calls = server.client().info("commandstats")
        before = sum(one["calls"] for name, one in calls.items() if "evalsha" in name)
        pipe = service.redis.pipeline(transaction=transaction)
        for place in range(300):
            pipe.execute_command("LK.HIT", "nope" if place == 7 else "tokens", "a")
        replies = pipe.execute(raise_on_error=False)
        assert isinstance(replies[7], Exception)
        assert [one[2] for one in replies if isinstance(one, list)] == list(range(999, 700, -1))
        calls = server.client().info("commandstats")
        assert sum(one["calls"] for name, one in calls.items() if "evalsha" in name) - before <= 30


def test_a_failed_store_follows_each_rule(server, policy):
    """Closed refuses with 503, open allows, local admits its share; a hit without a rule is an error. Readiness shows it."""
    with Running("--store", f"{server.url}?timeout=30s", policy=policy) as service:
        assert service.post("/v1/check", limit="checkout", key="a").status_code == 200
        assert service.client.get("/readyz").json()["store"] == "ok"
        token = service.post("/v1/reserve", limit="tokens", key="a", cost=600).json()["token"]
        server.process.kill()
        server.process.wait()
        closed = service.post("/v1/check", limit="checkout", key="a")
        assert (closed.status_code, closed.json()["allowed"]) == (503, False)
        assert int(closed.headers["retry-after"]) >= 1
        assert [service.post("/v1/check", limit="open", key="a").status_code for _ in range(5)] == [200] * 5
        assert [service.post("/v1/check", limit="local", key="a").status_code for _ in range(3)] == [200, 200, 429]
        assert [service.hit(name, "b")[0] for name in ("checkout", "open", "local")] == [0, 1, 1]
        for path, body in (("/v1/settle", {"token": token, "used": 1}), ("/v1/reset", {"limit": "open", "key": "a"})):
            failed = service.post(path, **body)
            assert (failed.status_code, failed.json()["error"]["code"]) == (503, "store_unavailable")
        with pytest.raises(Exception, match="UNAVAILABLE"):
            service.redis.execute_command("CL.THROTTLE", "a", 1, 1, 60)
        assert service.client.get("/readyz").json()["store"] in ("failing", "probing")
        assert service.client.get("/healthz").status_code == 200


def test_a_store_that_can_not_be_reached_at_the_start(policy):
    """A warning names the store, without its password, and the effects; no command is shown that would give other results."""
    with Running("--store", "redis://user:hidden@127.0.0.1:1", policy=policy) as service:
        assert service.post("/v1/check", limit="open", key="a").status_code == 200
        printed = service.printed + service.end()[1]
    assert "WARNING the store 'redis://" in printed
    assert "can't be reached; until it can, on_failure of each rule decides" in printed
    assert "hidden" not in printed
    assert "Try it" not in printed


def test_replicas_follow_an_override_and_show_a_failed_store(server, policy):
    """An operator of one replica blocks a key on both; when the store is gone, both report it, and the known overrides stay."""
    with (
        Running("--store", f"{server.url}?timeout=30s", policy=policy) as service,
        Running("--store", f"{server.url}?timeout=30s", policy=policy) as other,
    ):
        put = httpx.put(f"{service.admin}/v1/overrides/open/bot_*", json={"limit": "blocked", "reason": "abuse"}, timeout=60)
        assert put.status_code == 200
        assert service.post("/v1/check", limit="open", key="bot_1").status_code == 429
        end = time.monotonic() + 30
        while other.post("/v1/check", limit="open", key="bot_1").json()["limit"]:  # 0: blocked
            assert time.monotonic() < end
        assert other.hit("open", "bot_2")[0] == 0
        assert [one["key"] for one in httpx.get(f"{other.admin}/v1/overrides", timeout=60).json()["overrides"]] == ["bot_*"]
        assert httpx.get(f"{other.admin}/v1/audit", timeout=60).json()["entries"][0]["action"] == "override"
        assert httpx.get(f"{other.admin}/v1/status", timeout=60).json()["store"][0]["state"] == "closed"
        server.process.kill()
        server.process.wait()
        for _ in range(30):
            assert other.post("/v1/check", limit="open", key="a").status_code == 200
        store = httpx.get(f"{other.admin}/v1/status", timeout=60).json()["store"][0]
        assert (store["state"] in ("open", "half open"), store["failures"] > 0) == (True, True)
        assert other.post("/v1/check", limit="open", key="bot_1").status_code == 429
        failed = httpx.put(f"{other.admin}/v1/overrides/open/x", json={"limit": "blocked"}, timeout=60)
        assert (failed.status_code, failed.json()["error"]["code"]) == (503, "store_unavailable")
