"""The admin port: what it shows, what operators change, and access control."""

from __future__ import annotations

import json
import os
import signal
import ssl
import time
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from running import POLICY, Running

from limitkeeper.cli import main
from limitkeeper.observe.snapshot import Histogram, Offender, RuleSnapshot, Snapshot, total
from limitkeeper.service.access import Token
from limitkeeper.service.admin import MAX_STREAMS, AdminConnection
from limitkeeper.service.admin_routes import is_own_name
from limitkeeper.service.audit_log import MAX_ENTRIES, AuditLog
from limitkeeper.service.http_routes import Request
from limitkeeper.service.worker_peers import decode, encode
from limitkeeper.stores.guarded.store import GuardStats
from limitkeeper.stores.store_hash import MemoryHash

#: Made once: httpx would read the certificates of all authorities for every client.
TLS = ssl.create_default_context()


@pytest.fixture(scope="module")
def admin(service):
    with httpx.Client(base_url=service.admin, timeout=30) as client:
        yield client


def until(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


def send(method, url, **options):
    """A request on a connection of its own, which any worker may accept."""
    return httpx.request(method, url, timeout=60, verify=TLS, **options)


def full_status(service):
    """The status, once both workers have answered in time."""

    def ask():
        found = send("GET", f"{service.admin}/v1/status").json()
        return found if found["workers"] == {"answered": 2, "running": 2} else None

    return until(ask)


def rule_of(status, name):
    return next(one for one in status["rules"] if one["name"] == name)


# Reading


def test_the_page_and_its_scripts_come_from_this_host(admin):
    """Nothing is loaded from elsewhere, and a policy header enforces that; no token is needed for the page itself."""
    page = admin.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "://" not in page.text
    for name in ("dashboard.js", "dashboard.css", "d3.js", "rickshaw.js", "rickshaw.css"):
        assert f"/assets/{name}" in page.text
        assert admin.get(f"/assets/{name}").status_code == 200
    for name in ("/assets/no.js", "/assets/../admin.py", "/assets/%2e%2e/admin.py", "/assets/__init__.py", "/v1/nothing", "/x"):
        assert admin.get(name).status_code == 404, name
    assert admin.get("/healthz").json() == {"status": "ok"}
    assert admin.get("/readyz").json()["status"] == "ready"
    assert admin.request("PATCH", "/v1/reset").status_code == 405


def test_status_counts_what_was_decided(service, admin):
    """By rule and outcome, with the policy's version, the store and the histogram of decisions."""
    before = admin.get("/v1/status").json()
    for _ in range(5):
        service.post("/v1/check", limit="checkout", key="counted")
    service.hit("dark", "counted")
    service.hit("dark", "counted")
    now = admin.get("/v1/status").json()
    counted = [rule_of(now, "checkout")[name] - rule_of(before, "checkout")[name] for name in ("passed", "refused")]
    assert counted == [3, 2]
    assert rule_of(now, "dark")["shadow_refused"] - rule_of(before, "dark")["shadow_refused"] == 1
    assert now["requests"] - before["requests"] == 7
    assert sum(now["latency"]["counts"]) - sum(before["latency"]["counts"]) == 5
    assert now["store"][0]["kind"] == "MemoryStore"
    assert now["workers"] == {"answered": 1, "running": 1}
    assert (now["policy"]["name"], len(now["policy"]["version"])) == ("served", 12)
    assert admin.get("/v1/policy").json()["version"] == now["policy"]["version"]


def test_keys_are_hashed_by_default(service, admin):
    """The same hash in every worker, and for every refusal."""
    for _ in range(9):
        service.post("/v1/check", limit="checkout", key="someone@example.com")
    hidden, shown = (admin.get(f"/v1/status{query}").text for query in ("", "?keys=shown"))
    assert "someone@example.com" not in hidden
    assert "someone@example.com" in shown
    assert "someone@example.com" not in admin.get("/metrics").text


def test_metrics_are_prometheus_text(admin):
    """Those of the observe package."""
    found = admin.get("/metrics")
    assert found.headers["content-type"].startswith("text/plain")
    assert 'limitkeeper_rule_decisions_total{outcome="refused",policy="served",rule="checkout"}' in found.text


def test_events_follow_the_counters(service, admin):
    """A refusal is in one of the next events."""
    with admin.stream("GET", "/v1/events") as stream:
        assert stream.headers["content-type"] == "text/event-stream"
        lines = stream.iter_lines()
        before = rule_of(json.loads(next(lines).removeprefix("data: ")), "checkout")["refused"]
        for _ in range(4):
            service.post("/v1/check", limit="checkout", key="streamed")
        for line in lines:
            if line.startswith("data: ") and rule_of(json.loads(line[6:]), "checkout")["refused"] > before:
                break
        else:
            pytest.fail("the stream ended")


def test_event_streams_that_come_together_are_bounded():
    """A stream counts when it is asked for, not when its first event is sent."""
    connection: Any = AdminConnection.__new__(AdminConnection)
    connection.router = SimpleNamespace(streams=0, refuse=lambda *_: (None, Token("ops", b"")))
    connection._encode = lambda request, response: response
    asked = Request(b"GET", b"/v1/events", [], b"", True, False, None)
    answers = [connection.answer(asked) for _ in range(MAX_STREAMS + 2)]
    for stream in answers[:MAX_STREAMS]:
        stream.close()
    assert [answer[0] for answer in answers[MAX_STREAMS:]] == [503, 503]


def test_a_request_is_explained_without_being_charged_and_tried_with(admin):
    """The reason of a refusal."""
    line = {"line": "POST /checkout user=explained"}
    for _ in range(5):
        found = admin.post("/v1/explain", json=line).json()
    assert (found["allowed"], found["rules"][0]["limits"][0]["remaining"]) == (True, 3)
    assert [admin.post("/v1/try", json=line).json()["status"] for _ in range(4)] == [200, 200, 200, 429]
    assert "→ refused by checkout with 429" in admin.post("/v1/explain", json=line).json()["text"]
    wrong = admin.post("/v1/explain", json={"line": "POST /checkout usr=1"})
    assert (wrong.status_code, "no identity 'usr'" in wrong.json()["error"]["message"]) == (400, True)
    assert admin.post("/v1/explain", json={"line": 1}).status_code == 400
    assert admin.post("/v1/explain", content=b"[").status_code == 400


# Changing


def test_a_key_is_reset_and_the_log_has_the_operator(service, admin):
    """The newest entry first."""
    spend = [service.post("/v1/check", limit="checkout", key="again").status_code for _ in range(4)]
    assert spend == [200, 200, 200, 429]
    assert admin.post("/v1/reset", json={"limit": "checkout", "key": "again"}).json() == {"reset": True}
    assert service.post("/v1/check", limit="checkout", key="again").status_code == 200
    entry = admin.get("/v1/audit").json()["entries"][0]
    assert (entry["by"], entry["action"], entry["limit"], entry["key"]) == ("loopback", "reset", "checkout", "again")
    assert admin.post("/v1/reset", json={"limit": "nothing", "key": "a"}).status_code == 404
    assert admin.post("/v1/reset", json={"limit": "checkout"}).status_code == 400


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Host": "evil.example"},  # a name that resolves to loopback by now
        {"Host": "evil.example", "Origin": "http://evil.example"},
        {"Host": "127.0.0.1.evil.example"},
    ],
)
def test_a_page_of_another_site_changes_and_reads_nothing(service, admin, headers):
    """Whatever the page sends; browsers set these fields, scripts can't."""
    for _ in range(4):
        service.post("/v1/check", limit="checkout", key="kept")
    calls = [("POST", "/v1/reset", {"limit": "checkout", "key": "kept"}), ("POST", "/v1/reload", {}), ("GET", "/v1/status", None)]
    calls += [("PUT", "/v1/overrides/checkout/kept", {"limit": "unlimited"}), ("DELETE", "/v1/overrides/checkout/kept", None)]
    calls += [("GET", "/v1/events", None), ("POST", "/v1/load", {"limit": "plenty"})]
    for method, path, fields in calls:
        found = admin.request(method, path, json=fields, headers=headers)
        assert (found.status_code, found.json()["error"]["code"]) == (403, "cross_origin"), path
    assert service.post("/v1/check", limit="checkout", key="kept").status_code == 429


def test_its_own_page_may(service, admin):
    """Same host and port."""
    fields = {"Origin": service.admin, "Sec-Fetch-Site": "same-origin"}
    assert admin.post("/v1/reset", json={"limit": "checkout", "key": "x"}, headers=fields).status_code == 200


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("127.0.0.1:7073", True),
        ("localhost:1", True),
        ("[::1]:7073", True),
        ("10.1.2.3", True),
        ("a.example", False),
        ("", False),
    ],
)
def test_own_names_are_addresses_and_localhost(host, own):
    """Names may come from outside."""
    assert is_own_name(host) == own


def test_load_is_bounded(service, admin):
    """In rate, time and keys; its hits are counted as others are."""
    for fields in ({"rate": 2001}, {"seconds": 31}, {"keys": 1001}, {"rate": True}, {"rate": -1}, {"limit": "nothing"}):
        assert admin.post("/v1/load", json={"limit": "plenty", **fields}).status_code in (400, 404), fields
    before = rule_of(admin.get("/v1/status").json(), "plenty")["passed"]
    assert admin.post("/v1/load", json={"limit": "plenty", "rate": 100, "seconds": 1, "keys": 5}).status_code == 200
    until(lambda: rule_of(admin.get("/v1/status").json(), "plenty")["passed"] - before == 100)


PATHS = [
    "/",
    "/assets/x",
    "/metrics",
    "/v1/status?keys=%ff",
    "/v1/audit",
    "/v1/limits",
    "/v1/limits/checkout/a%ff%00",
    "/v1",
    "//",
]
PATHS += [
    "/v1/overrides/checkout/%00",
    "/v1/overrides/checkout/a/b",
    "/v1/explain",
    "/v1/try",
    "/v1/reset",
    "/v1/load",
    "/v1/events/x",
]
VALUES = [None, 0, -1, 1.5, True, "", "checkout", "plenty", "blocked", "5/s", "1h", "-1h", [], {}, "a" * 5000, "\0", "\ud800"]
VALUES += ["POST /checkout user=1", "GET", "GET /x query:a", "'", "POST /checkout ip=999", "POST /checkout user=\ud800"]


def test_whatever_is_sent_is_answered(admin):
    """With a status that shows whether it is the caller's mistake: never 500."""
    rng = Random(7)
    for _ in range(400):
        names = [
            rng.choice(("limit", "key", "for", "reason", "line", "rate", "seconds", "keys", "x")) for _ in range(rng.randrange(4))
        ]
        body = rng.choice([b"", b"{", b"[]", b"\xff", *[json.dumps({name: rng.choice(VALUES) for name in names}).encode()] * 4])
        headers = {"Host": rng.choice(("[", "a:b:c", "127.0.0.1:x"))} if rng.random() < 0.1 else {}
        asked = rng.choice(("GET", "POST", "PUT", "DELETE", "HEAD", "PATCH")), rng.choice(PATHS)
        assert admin.request(*asked, content=body, headers=headers).status_code < 500, (asked, body, headers)
    for one in admin.get("/v1/overrides").json()["overrides"]:
        admin.delete(f"/v1/overrides/{one['rule']}/{quote(one['key'], safe='')}")


# Overrides


def test_an_override_is_put_shown_and_removed(service, admin):
    """And holds for HTTP and the Redis protocol at once."""
    url = "/v1/overrides/checkout/vip%2Fone"
    assert admin.get(url).status_code == 404
    made = admin.put(url, json={"limit": "fixed window 5/h align first", "for": "1h", "reason": "campaign"}).json()
    assert (made["rule"], made["key"], made["by"], round(made["until"] - made["made"])) == (
        "checkout",
        "vip/one",
        "loopback",
        3600,
    )
    assert admin.get(url).json() == made
    assert made in admin.get("/v1/overrides").json()["overrides"]
    assert [service.hit("checkout", "vip/one")[0] for _ in range(6)] == [1, 1, 1, 1, 1, 0]
    assert admin.get("/v1/limits/checkout/vip%2Fone").json()["override"] == made
    assert admin.delete(url).json() == {"removed": True}
    assert admin.delete(url).json() == {"removed": False}
    assert [one["action"] for one in admin.get("/v1/audit").json()["entries"][:2]] == ["remove override", "override"]


def test_a_pattern_is_blocked(service, admin):
    """In one call; others are unchanged."""
    assert admin.put("/v1/overrides/plenty/bot_*", json={"limit": "blocked", "reason": "abuse"}).status_code == 200
    blocked = service.post("/v1/check", limit="plenty", key="bot_7")
    assert (blocked.status_code, blocked.json()["limit"], blocked.json()["retry_after"]) == (429, 0, None)
    assert service.post("/v1/check", limit="plenty", key="human").status_code == 200
    admin.delete("/v1/overrides/plenty/bot_*")
    assert service.post("/v1/check", limit="plenty", key="bot_7").status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"limit": 5},
        {"limit": "no limit"},
        {"limit": "5/s", "for": "soon"},
        {"limit": "5/s", "for": 0},
        {"limit": "5/s", "x": 1},
    ],
)
def test_a_wrong_override_is_refused(admin, fields):
    """With the expected form."""
    assert admin.put("/v1/overrides/checkout/a", json=fields).status_code == 400
    assert admin.put("/v1/overrides/nothing/a", json={"limit": "5/s"}).status_code == 404
    assert admin.put("/v1/overrides/checkout", json={"limit": "5/s"}).status_code == 400


def test_the_command_line_does_the_same(service, capsys, monkeypatch, policy_file, tmp_path):
    """Over the admin port, or in a store that is shared."""
    monkeypatch.delenv("LIMITKEEPER_TOKEN", raising=False)

    def run(key, *more, place=("--admin", service.admin)):
        code = main(["keys", "override", "plenty", key, *more, *place])
        printed = capsys.readouterr().out
        return code, json.loads(printed) if printed else {}

    assert run("cli_*", "blocked", "--for", "1h", "--reason", "abuse")[0] == 0
    assert service.post("/v1/check", limit="plenty", key="cli_1").status_code == 429
    assert run("cli_*")[1]["reason"] == "abuse"
    assert run("cli_*", "--remove") == (0, {"removed": True})
    assert run("cli_*")[0] == 1
    place = ("--policy", str(policy_file), "--store", f"shared://{tmp_path}/limits")
    code, made = run("cli", "5/s", "--for", "1h", place=place)
    assert (code, made["limit"]) == (0, "5/s")
    assert run("cli", place=place) == (0, made)
    assert run("cli", "--remove", place=place) == (0, {"removed": True})
    assert run("cli", place=place)[0] == 1
    assert run("cli", "lots", place=place)[0] == 2
    assert run("cli", "5/s", place=place[:2])[0] == 2  # memory://
    assert run("cli", "5/s", place=("--admin", "http://127.0.0.1:1"))[0] == 2
    assert main(["keys", "override", "nothing", "cli", *place]) == 2


# Workers, reloads, tokens


def test_the_counters_of_all_workers_are_added(policy_file):
    """Whichever worker answers; a killed one is no longer called."""
    with Running("--workers", "2", policy=policy_file) as service:
        full_status(service)
        codes = [
            send("POST", f"http://127.0.0.1:{service.http}/v1/check", json={"limit": "checkout", "key": "a"}).status_code
            for _ in range(20)
        ]
        assert codes.count(200) == 3
        for _ in range(4):
            status = full_status(service)
            assert (rule_of(status, "checkout")["passed"], rule_of(status, "checkout")["refused"]) == (3, 17)
            assert sum(one["count"] for one in status["offenders"]) == 17
        counted = 'limitkeeper_requests_total{outcome="refused",policy="served"} 17.0'
        until(lambda: counted in send("GET", f"{service.admin}/metrics").text)
        send("PUT", f"{service.admin}/v1/overrides/plenty/x", json={"limit": "blocked"})

        def blocked_everywhere():
            found = [
                send("POST", f"http://127.0.0.1:{service.http}/v1/check", json={"limit": "plenty", "key": "x"}) for _ in range(10)
            ]
            return {one.status_code for one in found} == {429}

        until(blocked_everywhere)
        killed = Path(f"/proc/{service.process.pid}/task/{service.process.pid}/children").read_text().split()[0]
        os.kill(int(killed), signal.SIGKILL)
        until(lambda: not Path(f"/proc/{killed}").exists())
        assert full_status(service)["workers"] == {"answered": 2, "running": 2}
        until(blocked_everywhere)


def test_a_reload_reaches_every_worker_or_none(tmp_path):
    """A file with errors changes nothing, and the answer shows them."""
    path = tmp_path / "limitkeeper.yaml"
    path.write_text(POLICY)
    with Running("--workers", "2", "--watch", "off", policy=path) as service:
        full_status(service)
        version = send("GET", f"{service.admin}/v1/policy").json()["version"]
        path.write_text(POLICY.replace("3/h", "three/h"))
        wrong = send("POST", f"{service.admin}/v1/reload", json={})
        assert (wrong.status_code, "three" in wrong.json()["error"]["message"]) == (400, True)
        path.write_text(POLICY.replace("100000/h", "7/h"))
        done = send("POST", f"{service.admin}/v1/reload", json={}).json()
        assert (done["reloaded"], done["errors"], done["version"] != version) == (True, [], True)
        for _ in range(6):
            found = send("GET", f"{service.admin}/v1/policy").json()
            assert (found["version"], found["limits"][2]["limits"]) == (done["version"], ["fixed window 7/h align first"])


def test_with_a_token_the_port_requires_it(policy_file):
    """Any Host then, and health without it."""
    token = "0123456789abcdef"
    with Running(policy=policy_file, environment={"LIMITKEEPER_TOKEN": token}) as service:
        assert send("GET", f"{service.admin}/v1/status").status_code == 401
        assert send("GET", f"{service.admin}/v1/status", headers={"Authorization": "Bearer wrong"}).status_code == 401
        headers = {"Authorization": f"Bearer {token}", "Host": "limits.example"}
        assert send("GET", f"{service.admin}/v1/status", headers=headers).status_code == 200
        assert send("GET", f"{service.admin}/").status_code == send("GET", f"{service.admin}/healthz").status_code == 200


def test_off_serves_no_admin_port(policy_file):
    """`--admin off`."""
    with Running("--admin", "off", policy=policy_file) as service:
        assert not service.admin
        assert service.client.get("/v1/status").status_code == 404


# Values


def test_a_snapshot_survives_the_way_between_workers():
    """As JSON, with and without a guard; sums are of all counters."""
    rule = RuleSnapshot("a", passed=3, refused=2, responses=Histogram((1, 2), (1, 0, 2), 4.5), statuses={"2xx": 3})
    guard = GuardStats("open", 1, 2, 3, 4, 5, 6, 7, 8)
    one = Snapshot(
        "p", (rule,), 5, 3, 2, decisions=Histogram((1, 2), (1, 2, 3), 9.0), offenders=(Offender("a", "k", 4, 1),), store=guard
    )
    assert decode(json.loads(json.dumps(encode(one)))) == one
    both = total([one, one])
    assert (both.requests, both.rules[0].passed, both.rules[0].name) == (10, 6, "a")
    assert both.decisions == Histogram((1, 2), (2, 4, 6), 18.0)
    assert (both.rules[0].responses, both.rules[0].statuses) == (Histogram((1, 2), (2, 0, 4), 9.0), {"2xx": 6})
    assert both.offenders == (Offender("a", "k", 8, 2),)


def test_the_audit_log_is_bounded():
    """The oldest entries go."""
    times = iter(range(1, 10_000))
    kept = MemoryHash()
    log = AuditLog(kept, lambda: next(times))
    for i in range(MAX_ENTRIES + 50):
        log.record("me", "reset", key=f"{i}", reason="x" * 1000)
    kept.write("of another program", "[" * 100_000)
    entries = log.entries()
    assert (len(entries), entries[0]["key"], entries[-1]["key"]) == (MAX_ENTRIES, f"{MAX_ENTRIES + 49}", "50")
    assert len(entries[0]["reason"]) == 300
