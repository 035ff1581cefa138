"""Rules with `capacity`: one rate for all keys together, with guarantees and shares, on every kind of store."""

from __future__ import annotations

import asyncio
import json

import pytest
from gates import MODES, asked, request

from limitkeeper import MemoryStore, SharedStore
from limitkeeper.policy import Gate, Policy
from limitkeeper.policy.reading.diagnostics import PolicyError
from limitkeeper.service.app import Application
from limitkeeper.stores.guarded import GuardedStore
from limitkeeper.stores.redis import RedisStore
from limitkeeper.testing import ManualClock
from limitkeeper.web.asgi import RateLimitMiddleware
from limitkeeper.web.headers import fields
from stand_ins import NOON

SHARED = {"name": "all", "key": "user", "capacity": "100/s", "guarantee": {"acme": "40/s"}, "share": {"gold": 3}}
IDENTIFY = {"user": {"header": "user"}, "partner": {"header": "partner"}}


def policy(*rules, **options) -> Policy:
    return Policy.of(identify=IDENTIFY, limits=list(rules) or [SHARED], **options)


def gate(*rules, clock=None, store=None, **options) -> Gate:
    store = MemoryStore(clock=clock or ManualClock(NOON)) if store is None else store
    return Gate(policy(*rules, **options), store=store, clock=clock)


def failed_store() -> GuardedStore:
    """A store whose server can't be reached."""
    inner = RedisStore("redis://127.0.0.1:1", timeout="50ms")
    return GuardedStore(inner, budget="1s", on_failure="closed", clock=ManualClock(NOON))


def admitted(gate: Gate, user: str, times: int, mode: str = "ask") -> int:
    return sum(asked(gate, request(user=user), mode).allowed for _ in range(times))


@pytest.mark.parametrize("mode", MODES)
def test_a_flood_leaves_a_guarantee_untouched(mode):
    """One key alone may hold half of the window, and a guaranteed key still gets its 40 at once."""
    one = gate()
    assert admitted(one, "noisy", 200, mode) == 50
    assert admitted(one, "acme", 40, mode) == 40


@pytest.mark.parametrize("mode", MODES)
def test_a_refusal_is_a_503_with_an_exact_retry(mode):
    """A full service answers 503; with no other traffic the same request passes at the retry, and not a microsecond before."""
    clock = ManualClock(NOON)
    one = gate(clock=clock)
    admitted(one, "noisy", 50)
    refused = asked(one, request(user="noisy"), mode)
    assert (refused.refusal.status, refused.refusal.reason, refused.refusal.violated) == (503, "capacity", ("all",))
    assert refused.refusal.message == "The service is at its capacity. Retry after 1s."
    clock.advance((refused.refusal.retry_us - 2) / 1e6)
    assert not asked(one, request(user="noisy"), mode)
    clock.advance(2 / 1e6)
    assert asked(one, request(user="noisy"), mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_refusal_by_the_capacity_charges_no_limit(mode):
    """A request that the capacity refuses gives its charges back, and one that a limit refuses takes nothing of the capacity."""
    limit = {"name": "own", "key": "user", "limit": "token bucket 60/h burst 60"}
    one = gate(limit, SHARED)
    found = [asked(one, request(user="noisy"), mode) for _ in range(80)]
    assert [each.allowed for each in found] == [True] * 50 + [False] * 30
    assert {each.refusal.status for each in found[50:]} == {503}
    assert one.store.decide_one(one.compiled.rules[0].default_entries[0].named, "noisy", 0, 0, False).remaining == 10
    both = gate({**limit, "limit": "token bucket 10/h burst 10"}, SHARED)
    assert {each.refusal.status for each in [asked(both, request(user="noisy"), mode) for _ in range(80)][10:]} == {429}
    assert both.compiled.rules[1].capacity.share.peek("noisy").remaining == 40


def test_the_fields_of_a_response_name_quotas_only():
    """A capacity is no quota: an allowed response names the limits, a refusal by the capacity only when to retry."""
    one = gate({"name": "own", "key": "user", "limit": "200/s"}, SHARED)
    passed = dict(fields(asked(one, request(user="noisy"))))
    assert passed[b"ratelimit-policy"] == b'"own";q=200;w=1'
    admitted(one, "noisy", 50)
    refused = dict(fields(asked(one, request(user="noisy"))))
    assert refused[b"retry-after"] == b"1"
    assert not [name for name in refused if b"ratelimit" in name]


def test_refusals_by_the_capacity_do_not_count_for_the_penalty_box():
    """A client that finds the service full is not put into the penalty box."""
    one = gate(penalty_box={"after": "5/min", "for": "60s", "key": "user"})
    admitted(one, "noisy", 200)
    assert one.snapshot().penalty_box_clients == 0


def test_shares_are_weights():
    """Under a flood of both, a key with a share of 3 gets three times as much as one without."""
    clock = ManualClock(NOON)
    one = gate(clock=clock)
    found = {"gold": 0, "other": 0}
    for step in range(4000):
        clock.advance(0.0025)
        for user in found:
            found[user] += admitted(one, user, 1) if step >= 800 else admitted(one, user, 1) * 0
    assert found["gold"] / found["other"] == pytest.approx(3.0, rel=0.05)


def test_a_rule_in_shadow_mode_counts_and_lets_pass():
    """In shadow mode nothing is refused, and what would be is counted."""
    one = gate({**SHARED, "on_refusal": "shadow"})
    assert admitted(one, "noisy", 80) == 80
    assert one.snapshot().rules[0].shadow_refused == 30


def test_a_reload_keeps_the_state_unless_the_capacity_changes():
    """What was admitted still counts after a reload; under another rate the division starts afresh."""
    one = gate()
    assert admitted(one, "noisy", 60) == 50
    one.reload(policy({**SHARED, "message": "Later."}))
    assert admitted(one, "noisy", 60) == 0
    one.reload(policy({**SHARED, "capacity": "200/s"}))
    assert admitted(one, "noisy", 200) == 100


def test_the_answer_of_a_middleware():
    """Over ASGI a full service answers 503 with Retry-After; others are served."""
    one = gate({**SHARED, "message": "Full, retry in {retry_after}s."})
    admitted(one, "noisy", 50)

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def call(user: str) -> tuple[int, dict[bytes, bytes], bytes]:
        sent = []
        scope = {"type": "http", "method": "GET", "path": "/", "raw_path": b"/", "headers": [(b"user", user.encode())]}
        scope |= {"query_string": b"", "client": ("192.0.2.1", 1), "scheme": "http", "http_version": "1.1"}

        async def send(message):
            sent.append(message)

        await RateLimitMiddleware(app, policy=one)(scope, None, send)
        return sent[0]["status"], dict(sent[0]["headers"]), sent[1]["body"]

    status, fields, body = asyncio.run(call("noisy"))
    assert (status, fields[b"retry-after"]) == (503, b"1")
    assert json.loads(body)["message"] == "Full, retry in 1s."
    assert asyncio.run(call("acme"))[0] == 200


def test_every_reason_of_a_refusal_has_a_grpc_reason():
    """A refusal for any reason, a full service among them, can be sent over gRPC."""
    from limitkeeper.policy.refusal import MESSAGES
    from limitkeeper.web.grpc.status_mapping import REASONS

    assert set(REASONS) == set(MESSAGES)


def test_a_hit_by_the_name_of_the_rule():
    """The service decides hits, peeks and refunds of a capacity by name; a reservation is an error, since it can't be made."""
    from limitkeeper.policy.calls_by_rule_name import hit_rules, peek_rule, reserve_rule
    from limitkeeper.stores.sans_io import run

    one = gate()
    rule = one.compiled.rules_by_name["all"]
    assert one.hit_rule_nowait(rule, "noisy", 30).decision.remaining == 20
    many = run(hit_rules(one, [(rule, "noisy", 20, None), (rule, "noisy", 1, None)]))
    assert [each.allowed for each in many] == [True, False]
    assert many[1].decision.retry_us > 0
    assert run(Application(one, secret=b"0" * 16).refund((rule, "noisy", 20, None)))
    assert run(peek_rule(one, (rule, "noisy", 1, None))).remaining == 20
    with pytest.raises(Exception, match="a capacity can't be reserved"):
        run(reserve_rule(one, (rule, "noisy", 1, None), 0))


def test_processes_of_a_host_share_a_capacity(tmp_path):
    """Two gates on one shared file admit together what one does."""
    clock, path = ManualClock(NOON), tmp_path / "limits"
    gates = [gate(store=SharedStore(path, clock=clock)) for _ in range(2)]
    assert sum(admitted(one, "noisy", 1) for _ in range(60) for one in gates) == 50
    assert sum(admitted(one, "acme", 1) for _ in range(20) for one in gates) == 40


@pytest.mark.server
@pytest.mark.parametrize("mode", ["ask", "aask"])
def test_machines_share_a_capacity_on_redis(valkey, mode):
    """Two gates on one server admit together what one does, and a refusal gives the limits' charges back."""
    limit = {"name": "own", "key": "user", "limit": "token bucket 60/h burst 60"}
    made = policy(limit, {**SHARED, "capacity": {"rate": "100/h", "window": "1h"}, "guarantee": {"acme": "40/h"}},
                  name=f"capacity-{mode}", store=f"{valkey.url}?timeout=30s", budget="30s")  # fmt: skip

    async def main() -> list[bool]:
        async with Gate(made) as first, Gate(made) as second:
            found = []
            for _ in range(35):
                for one in (first, second):
                    asking = request(user="noisy")
                    found.append((await one.aask(asking) if mode == "aask" else one.ask(asking)).allowed)
            entry = first.compiled.rules[0].default_entries[0]
            left = await first.store.adecide_one(entry.named, "noisy", 0, 0, False)
            assert left.remaining == 10
            return found

    assert asyncio.run(main()) == [True] * 50 + [False] * 20


@pytest.mark.parametrize(("action", "passed", "status"), [("open", 9, None), ("closed", 0, 503), ("local 1/10", 5, 503)])
def test_while_the_store_fails_the_rule_decides(action, passed, status):
    """A failed store: open lets pass, closed refuses, local divides its part of the capacity in this process."""
    store = failed_store()
    one = gate({**SHARED, "on_failure": action}, store=store, budget="1s")
    found = [asked(one, request(user="noisy")) for _ in range(9)]
    assert sum(each.allowed for each in found) == passed
    assert [each.refusal.status for each in found if not each.allowed] == [status] * (9 - passed)
    rule = one.snapshot().rules[0]
    assert (rule.failed_open, rule.failed_closed, rule.failed_local > 0) == {
        "open": (9, 0, False), "closed": (0, 9, False), "local 1/10": (0, 0, True)}[action]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"guarantee": {"a": "60/s", "b": "50/s"}}, "add up to 110/s, more than the capacity of 100/s"),
        ({"key": "everyone"}, "a capacity is divided among keys"),
        ({"limit": "5/s"}, "'limit' is about the limit of one key"),
        ({"on_refusal": "wait up to 1s"}, "'on_refusal' is about"),
        ({"key": "partner | user"}, "'acme' does not say of which identity"),
        ({"share": {"acme": 0}}, "weight"),
        ({"capacity": "much"}, "expected a rate"),
    ],
)
def test_what_can_not_be_divided_is_an_error(options, message):
    """Guarantees above the capacity, and options for one key, are errors that name the mistake."""
    with pytest.raises(PolicyError, match=message):
        policy({**SHARED, **options})


def test_a_guarantee_without_a_capacity_is_an_error():
    """A guarantee is a part of a capacity."""
    with pytest.raises(PolicyError, match="'guarantee' is a part of a capacity, and this rule has none"):
        policy({"name": "x", "key": "user", "limit": "5/s", "guarantee": {"acme": "1/s"}})


def test_explained(tmp_path, capsys):
    """`limitkeeper policy explain` shows the guarantee of the capacity for the key of a request."""
    from limitkeeper.cli import main

    path = tmp_path / "policy.yaml"
    path.write_text(
        "identify: {user: {header: X-User}}\n"
        "limits: [{name: all, key: user, capacity: 100/s, guarantee: {acme: 40/s}, share: {acme: 3}}]\n"
    )
    assert main(["policy", "explain", str(path), "--request", "GET / user=acme"]) == 0
    shown = capsys.readouterr().out
    assert "capacity 100/s (40/s guaranteed, and a share of 3)" in shown
    assert "50 of 50 left" in shown


@pytest.mark.parametrize(("action", "passed"), [("closed", 0), ("local 1/2", 1)])
@pytest.mark.parametrize("mode", ["ask", "aask"])
def test_an_open_limit_does_not_open_the_capacity(action, passed, mode):
    """While the store fails, a request that the capacity refuses is refused, and counted once, also where others fail open."""
    capacity = {"name": "shared", "key": "user", "capacity": "2/min", "on_failure": action}
    store = failed_store()
    one = gate(capacity, {"name": "open", "limit": "100/s", "on_failure": "open"}, store=store, budget="1s")
    assert admitted(one, "ann", 5, mode) == passed
    counted = one.snapshot()
    assert (counted.requests, counted.allowed, counted.refused) == (5, passed, 5 - passed)


@pytest.mark.parametrize(("action", "status"), [("closed", 503), ("local 1/2", 429)])
@pytest.mark.parametrize("mode", ["ask", "aask"])
def test_a_limit_that_refuses_without_the_store_leaves_the_capacity(action, status, mode):
    """While the store fails, a request that a limit refuses takes nothing of the capacity either."""
    quota = {"name": "quota", "key": "user", "when": {"absent": "partner"}, "limit": "fixed window 2/min", "on_failure": action}
    capacity = {"name": "shared", "key": "user", "capacity": "10/min", "on_failure": "local 1/2"}
    one = gate(quota, capacity, clock=ManualClock(NOON), store=failed_store())
    noisy = [asked(one, request(user="noisy"), mode) for _ in range(30)]
    passed = sum(each.allowed for each in noisy)
    assert [each.refusal.status for each in noisy if not each.allowed] == [status] * (30 - passed)
    others = [asked(one, request(user="noisy", partner="p"), mode) for _ in range(30)]
    alone = gate(capacity, clock=ManualClock(NOON), store=failed_store())
    assert passed + sum(each.allowed for each in others) == admitted(alone, "noisy", 30, mode)
    assert one.snapshot().rules[1].passed == passed + sum(each.allowed for each in others)


@pytest.mark.parametrize("mode", ["ask", "aask"])
def test_what_a_capacity_refuses_without_the_store_is_given_back(mode):
    """While the store fails, a request that a capacity refuses gives back what its limits and other capacities have charged."""
    rules = [
        {"name": "quota", "key": "user", "limit": "fixed window 100/h", "on_failure": "local 1/1"},
        {"name": "wide", "key": "user", "capacity": "60/s", "on_failure": "local 1/1"},
        {"name": "narrow", "key": "user", "capacity": "2/s", "when": {"present": "partner"}, "on_failure": "local 1/1"},
    ]
    one = gate(*rules, clock=ManualClock(NOON), store=failed_store())
    passed = sum(asked(one, request(user="ann", partner="p"), mode).allowed for _ in range(50))
    assert 0 < passed < 10
    then = asked(one, request(user="ann"), mode)
    assert then.allowed
    assert then.decision.remaining == 100 - passed - 1
    rest, alone = admitted(one, "ann", 100, mode), gate(rules[1], clock=ManualClock(NOON), store=failed_store())
    assert passed + 1 + rest == admitted(alone, "ann", 200, mode)


def test_a_refusal_is_counted_once():
    """A request that only a capacity limits is counted once, and no rule in shadow mode is evaluated for a refused one."""
    one = gate(SHARED, {"name": "tried", "limit": "1000/h", "on_refusal": "shadow"})
    passed = admitted(one, "ann", 500)
    counted = one.snapshot()
    assert 0 < passed < 500
    assert (counted.requests, counted.allowed, counted.refused) == (500, passed, 500 - passed)
    assert counted.rules[1].passed == passed
