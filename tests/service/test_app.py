"""The application without a transport: named limits, reservations that any worker settles once, failures of the store."""

from __future__ import annotations

import asyncio
import hmac
import json
import math
from base64 import urlsafe_b64encode
from types import SimpleNamespace

import pytest

from limitkeeper.errors import ConfigurationError
from limitkeeper.policy import Gate, Policy
from limitkeeper.policy.compiled_rule import escape_part
from limitkeeper.service.app import MAX_CHECKS, MAX_RATES, Application, RequestError, decision_of, request_context
from limitkeeper.service.http_routes import Request, Router, shown
from limitkeeper.service.resp import encoded
from limitkeeper.stores import MemoryStore
from limitkeeper.stores.sans_io import arun, run
from limitkeeper.stores.shared import SharedStore
from limitkeeper.testing import ManualClock
from stand_ins import WrappedStore

SECRET = b"0123456789abcdef"
LIMITS = [
    {"name": "checkout", "match": "POST /checkout", "key": "user", "limit": "token bucket 1/s burst 3"},
    {"name": "plans", "match": "GET /plans", "key": "user", "limit": {"by": "plan", "pro": "10/min", "default": "2/min"}},
    {"name": "tokens", "match": "POST /llm", "key": "user", "limit": "token bucket 100/s burst 1000"},
    {"name": "dark", "match": "GET /dark", "key": "user", "limit": "1/min", "on_refusal": "shadow"},
    {"name": "paced", "match": "GET /paced", "key": "user", "limit": "leaky bucket queue 1/s capacity 5"},
    {"name": "both", "match": "GET /both", "key": "user", "limit": "token bucket 5/s burst 5; fixed window 7/h"},
    {"name": "counter", "match": "GET /counter", "key": "user", "limit": "sliding window counter 5/min"},
    {"name": "waits", "match": "GET /waits", "key": "user", "limit": "1/min", "on_refusal": "wait up to 10s"},
    {"name": "slow", "match": "GET /slow", "key": "user", "limit": "1/5s", "on_refusal": "wait up to 10s"},
]
POLICY = Policy.of(name="test", identify={"user": {"header": "X-User"}, "plan": {"header": "X-Plan"}}, limits=LIMITS)


@pytest.fixture
def clock():
    return ManualClock(start=1_000_000.0)


@pytest.fixture
def app(clock):
    return application(MemoryStore(clock=clock), clock)


def application(store, clock, policy=POLICY, secret=SECRET):
    return Application(Gate(policy, store=store, clock=clock), secret=secret, ttl_us=60_000_000, now_us=clock.now_us)


def hit(app, limit, key="42", cost=1, tier=None):
    return decision_of(app.hit_nowait(limit, key, cost, tier))


def test_a_described_request_is_no_message(clock):
    """A rule without methods limits requests of every method; one of a client that calls its method MESSAGE too."""
    policy = Policy.of(name="test", limits=[{"name": "all", "key": "ip", "limit": "fixed window 2/h"}])
    app = application(MemoryStore(clock=clock), clock, policy)
    requests = [
        request_context({"path": "/", "method": method, "client": "192.0.2.1"}) for method in ("MESSAGE", "message", "Message")
    ]
    assert [bool(app.match_nowait(one)) for one in requests] == [True, True, False]


@pytest.mark.parametrize("asked_by", ["gateway", "caller"])
@pytest.mark.parametrize("kind", ["application/json", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
def test_an_identity_of_a_body_that_the_service_does_not_have_is_absent(clock, asked_by, kind):
    """Requests that announce a body are counted by the next identity of the key, each client on its own."""
    limits = [{"name": "login", "match": "POST /login", "key": "account | ip", "limit": "fixed window 2/h"}]
    policy = Policy.of(name="test", identify={"account": {"body": "email"}}, limits=limits)
    router = Router(application(MemoryStore(clock=clock), clock, policy))

    def status(client: str) -> int:
        headers = {"content-type": kind, "content-length": "20"}
        if asked_by == "gateway":
            named = {"x-forwarded-uri": "/login", "x-forwarded-method": "POST", **headers}
            lines = [(name.encode(), value.encode()) for name, value in named.items()]
            return router.respond(Request(b"GET", b"/auth", lines, b"", True, False, (client, 1)))[0]
        described = {"request": {"method": "POST", "path": "/login", "headers": headers, "client": client}}
        return router.respond(Request(b"POST", b"/v1/check", [], json.dumps(described).encode(), True, False, None))[0]

    assert [status("192.0.2.1") for _ in range(3)] == [200, 200, 429]
    assert status("192.0.2.2") == 200


def test_a_retry_includes_penalty_and_spread(clock):
    """Over HTTP and the Redis protocol, as in the responses of a middleware."""
    limit = "fixed window 1/s align first"
    spread = {"name": "spread", "match": "GET /spread", "key": "ip", "limit": limit, "retry_after": "spread 1h"}
    boxed = {"name": "boxed", "match": "GET /boxed", "key": "ip", "limit": "fixed window 1/s align first"}
    box = {"key": "ip", "after": "fixed window 1/min", "for": "10min"}
    policy = Policy.of(name="test", limits=[spread, boxed], penalty_box=box)
    app = application(MemoryStore(clock=clock), clock, policy)
    shown_retries, sent = [], []
    for path in ("/spread", "/spread", "/boxed", "/boxed"):
        evaluation = app.match_nowait(request_context({"method": "GET", "path": path, "client": "192.0.2.1"}))
        if not evaluation:
            _, body, fields = shown(evaluation)
            sent.append((int(dict(fields)[b"retry-after"]), evaluation.refusal.retry_after))
            shown_retries.append((json.loads(body)["retry_after"], int(encoded(evaluation).split(b"\r\n")[4][1:]) / 1000))
    assert all(field == refused for field, refused in sent)
    assert shown_retries[-1] == (600, 600)
    assert all(http == pytest.approx(resp, abs=0.001) and http > 1 for http, resp in shown_retries)


# Hits


def test_a_named_limit_is_hit_under_a_given_key(app):
    """Three of a burst of three pass, the fourth is refused with its time to retry; another key has its own state."""
    assert [hit(app, "checkout").remaining for _ in range(3)] == [2, 1, 0]
    refused = hit(app, "checkout")
    assert (refused.allowed, refused.retry_after) == (False, 1.0)
    assert hit(app, "checkout", "43")


def test_named_hits_and_matched_requests_share_one_state(app):
    """A hit of the rule under the key that the policy makes is the same as a request of that user."""
    hit(app, "checkout", "ada")
    evaluation = app.match_nowait(request_context({"method": "POST", "path": "/checkout?x=1", "headers": {"x-user": "ada"}}))
    assert evaluation.decision.remaining == 1


def test_a_tier_chooses_the_limits(app):
    """Without a tier the default holds, with one its limits."""
    assert hit(app, "plans").limit == 2
    assert hit(app, "plans", "44", tier="pro").limit == 10


@pytest.mark.parametrize(
    ("key", "override", "named", "user", "limit"),
    [
        ("user | ip", "evil", "user:evil", "evil", 1),
        ("user | ip", "free", "user:bob", "bob", 100),  # the value of a request without a user
        ("user | ip", "127.0.0.1", "user:127.0.0.1", "127.0.0.1", 100),  # a name, not that address
        ("user | ip", "user:127.0.0.1", "user:127.0.0.1", "127.0.0.1", 1),
        ("user | ip, plan", ["a|b%", "pro"], "user:a%7Cb%25|pro", "a|b%", 1),
        ("user | ip, plan", ["-", "pro"], "user:-|pro", "-", 1),
    ],
)
def test_overrides_hold_for_named_hits_as_for_requests(clock, key, override, named, user, limit):
    """An override may write the value alone; it is found from the key that the hit names, not from an empty request."""
    rule = {"name": "a", "key": key.split(", "), "limit": "100/h", "override": [{"key": override, "limit": "1/h"}]}
    identify = {"user": {"header": "X-User", "default": "free"}, "plan": {"header": "X-Plan"}}
    app = application(MemoryStore(clock=clock), clock, Policy.of(name="test", identify=identify, limits=[rule]))
    request = request_context({"method": "GET", "path": "/", "headers": {"X-User": user, "X-Plan": "pro"}})
    matched = app.match_nowait(request)
    assert (matched.keys, matched.decision.limit) == ([named], limit)
    assert hit(app, "a", named).limit == limit


def test_functions_of_overrides_get_the_same_key(clock):
    """For a named hit as for a request: the key as the rule builds it, then the value alone."""
    asked = []
    rule = {"name": "a", "key": "user | ip", "limit": "100/h", "overrides": {"call": asked.append, "keep": "1s"}}
    policy = Policy.of(name="test", identify={"user": {"header": "X-User"}}, limits=[rule])
    app = application(MemoryStore(clock=clock), clock, policy)
    hit(app, "a", "user:evil")
    assert asked == ["user:evil", "evil"]
    app.match_nowait(request_context({"method": "GET", "path": "/", "headers": {"X-User": "bob"}}))
    assert asked[2:] == ["user:bob", "bob"]


def test_several_limits_of_one_rule_are_charged_together(app):
    """The fixed window refuses the eighth of an hour, and the bucket keeps what it has."""
    decisions = [hit(app, "both", cost=5), *(hit(app, "both") for _ in range(1))]
    assert [one.allowed for one in decisions] == [True, False]
    assert len(decisions[0].decisions) == 2


def test_shadow_rules_allow_and_count(app):
    """A rule in shadow mode refuses nothing, and its counter shows what it would have refused."""
    shown = [hit(app, "dark") for _ in range(3)]
    assert [(one.allowed, one.limit, one.remaining) for one in shown] == [(True, 1, 0)] * 3
    assert next(rule for rule in app.gate.snapshot().rules if rule.name == "dark").shadow_refused == 2


def test_a_named_hit_never_waits_in_a_queue(app):
    """Where requests would wait, a hit is refused."""
    assert [hit(app, "waits").allowed for _ in range(2)] == [True, False]


def test_many_hits_are_decided_in_order(app):
    """A batch sees its own earlier hits, and unlike a decision on several limits each is decided on its own."""
    hits = [app.checked_hit("checkout", key) for key in ("a", "a", "b", "a", "a")] + [app.checked_hit("dark", "a")]
    allowed = [decision_of(one).allowed for one in run(app.hit_many(hits))]
    assert allowed == [True, True, True, True, False, True]


def test_hits_are_counted_by_the_gate(app):
    """The counters of the policy's rules include named hits, so that dashboards and metrics show them."""
    for _ in range(4):
        hit(app, "checkout")
    snapshot = app.gate.snapshot()
    rule = next(rule for rule in snapshot.rules if rule.name == "checkout")
    assert (rule.passed, rule.refused, snapshot.requests) == (3, 1, 4)


def test_peek_and_inspect_charge_nothing(app):
    """Both show the state as it is."""
    hit(app, "checkout")
    for _ in range(5):
        assert run(app.peek(app.checked_hit("checkout", "42", 2))).allowed
        ((claim, state),) = run(app.inspect(app.checked_hit("checkout", "42")))
        assert (claim.limit.name, state.remaining, state.reset_after) == ("checkout", 2, 1.0)


def test_reset_and_refund(app):
    """A refund gives units back; a reset forgets the key under every tier."""
    hit(app, "plans", cost=2)
    run(app.refund(app.checked_hit("plans", "42", 1)))
    assert hit(app, "plans").allowed
    assert hit(app, "plans", tier="pro").allowed
    run(app.reset("plans", "42"))
    assert run(app.peek(app.checked_hit("plans", "42"))).remaining == 2
    assert run(app.peek(app.checked_hit("plans", "42", tier="pro"))).remaining == 10


@pytest.mark.parametrize("limit", ["fixed window 2/d align first", "100/s; token bucket 2/d", "sliding window log 2/d"])
def test_a_reset_includes_an_override_that_only_another_worker_has_used(tmp_path, clock, limit):
    """A reset deletes the state of a key's override at run time, whatever its algorithm, in a worker that has not used it."""
    first, second = (application(SharedStore(tmp_path / "cells", clock=clock), clock) for _ in range(2))
    first.gate.operator_overrides.put("checkout", "42", limit)
    second.gate.operator_overrides.refresh()
    assert [hit(first, "checkout").allowed for _ in range(3)] == [True, True, False]
    run(second.reset("checkout", "42"))
    assert hit(first, "checkout").allowed


def test_a_reset_includes_the_override_of_the_application(tmp_path, clock):
    """So it is for overrides that the application's function returns, also where an operator's override precedes them."""
    limits = [{"name": "api", "key": "user | ip", "limit": "100/s", "overrides": {"call": lambda key: "fixed window 1/d"}}]
    policy = Policy.of(name="test", identify={"user": {"header": "X-User"}}, limits=limits)
    first, second = (application(SharedStore(tmp_path / "cells", clock=clock), clock, policy) for _ in range(2))
    assert [hit(first, "api", "user:42").allowed for _ in range(2)] == [True, False]
    second.gate.operator_overrides.put("api", "42", "5/s")
    run(second.reset("api", "user:42"))
    second.gate.operator_overrides.remove("api", "42")
    first.gate.operator_overrides.refresh()
    assert hit(first, "api", "user:42").allowed


@pytest.mark.parametrize("shared", [False, True])
def test_nothing_is_given_back_under_a_blocked_limit(tmp_path, clock, shared):
    """A refund to a rule or tier that is blocked gives nothing back, on every store."""
    limit = {"by": "plan", "bad": "blocked", "default": "5/s"}
    rules = [{"name": "shut", "key": "user", "limit": "blocked"}, {"name": "tiers", "key": "user", "limit": limit}]
    policy = Policy.of(identify={"user": {"header": "X-User"}, "plan": {"header": "X-Plan"}}, limits=rules)
    store = SharedStore(tmp_path / "cells", clock=clock) if shared else MemoryStore(clock=clock)
    with store:
        app = application(store, clock, policy)
        assert run(app.refund(app.checked_hit("shut", "42"))) is False
        assert run(app.refund(app.checked_hit("tiers", "42", 1, "bad"))) is False
        assert run(app.refund(app.checked_hit("tiers", "42"))) is True


def test_a_capacity_in_shadow_mode_refuses_nothing(clock):
    """A hit that a capacity in shadow mode would refuse is answered as allowed, in every protocol."""
    policy = Policy.of(limits=[{"name": "cap", "key": "ip", "capacity": "4/s", "on_refusal": "shadow"}])
    app = application(MemoryStore(clock=clock), clock, policy)
    found = [app.hit_nowait("cap", "a") for _ in range(4)]
    assert [one.shadows for one in found] == [(), (), ("cap",), ("cap",)]
    for one in found:
        assert b'"allowed":true' in shown(one)[1]
        assert encoded(one).startswith(b"*5\r\n:1\r\n")


def test_a_cost_that_no_capacity_holds_never_passes(clock):
    """A hit of any size under a capacity is answered, as under other limits: it never passes."""
    policy = Policy.of(limits=[{"name": "cap", "key": "ip", "capacity": "50/s"}])
    app = application(MemoryStore(clock=clock), clock, policy)
    for cost in (10**9 + 1, 10**30):
        evaluations = run(app.hit_many([app.checked_hit("cap", "a", cost)]))
        assert [(one.allowed, one.refusal.retry_after) for one in evaluations] == [(False, None)]
        assert run(app.peek(app.checked_hit("cap", "a", cost))).retry_after == math.inf
        assert run(app.refund(app.checked_hit("cap", "a", cost)))


def test_a_queue_takes_no_refund(app):
    """The error names the remedy."""
    with pytest.raises(RequestError, match="cancel the reservation"):
        run(app.refund(app.checked_hit("paced", "42")))


# Errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nope", "42"), "unknown limit 'nope'; the policy 'test' has: checkout, plans"),
        ((7, "42"), "unknown limit 7"),
        (("checkout", 42), "key: expected a string, got 42"),
        (("checkout", "42", -1), "cost: expected a whole number ≥ 0, got -1"),
        (("checkout", "42", True), "cost: expected a whole number"),
        (("checkout", "42", 1.5), "cost: expected a whole number"),
        (("checkout", "42", 1, 3), "tier: expected a string"),
        (("checkout", "42", 1, "pro"), "limit 'checkout' has no tiers; leave tier out"),
        (("plans", "42", 1, "gold"), "limit 'plans' has no tier 'gold', only .*pro.*; without a tier its default holds"),
    ],
)
def test_a_bad_hit_is_an_error_that_names_the_field(app, arguments, message):
    """Nothing is charged for it."""
    with pytest.raises(RequestError, match=message):
        app.checked_hit(*arguments)


@pytest.mark.parametrize(
    "fields",
    [None, [], {"path": 1}, {"method": None}, {"headers": {"a": 1}}, {"headers": []}, {"client": 1}, {"paht": "/"}],
    ids=str,
)
def test_a_bad_request_description_is_an_error(fields):
    """The message names the field."""
    with pytest.raises(RequestError, match="request"):
        request_context({"method": "GET", "path": "/", **fields} if isinstance(fields, dict) else fields)


def test_batches_and_rates_are_bounded(app):
    """A caller can neither send endless batches nor have endless rates remembered; a rate that comes again is not forgiven."""
    with pytest.raises(RequestError, match="at most 1000 checks"):
        run(app.hit_many([app.checked_hit("checkout", "42")] * (MAX_CHECKS + 1)))
    assert run(app.throttle("exhausted", 0, 1, 3600))
    for count in range(1, MAX_RATES + 10):
        assert run(app.throttle(f"key {count}", 0, count, 60))
    assert len(app.rates) == MAX_RATES
    assert not run(app.throttle("exhausted", 0, 1, 3600))


def test_a_shared_file_has_a_bounded_number_of_rates(clock, tmp_path):
    """It keeps each for good, so callers can't fill it."""
    with SharedStore(tmp_path / "limits", clock=clock) as store:
        app = application(store, clock)
        for count in range(1, MAX_RATES + 1):
            run(app.throttle("key", 0, count, 60))
        with pytest.raises(RequestError, match="different rates"):
            run(app.throttle("key", 0, MAX_RATES + 1, 60))


def test_a_store_without_room_for_another_rate_is_an_error(app, monkeypatch):
    """The caller gets an error, and other rates hold."""
    assert run(app.throttle("a", 0, 1, 60))

    def full(named):
        raise ConfigurationError("the directory of limits is full")

    monkeypatch.setattr(Application, "store", SimpleNamespace(register=full))
    with pytest.raises(RequestError, match="directory of limits is full"):
        run(app.throttle("a", 0, 2, 60))
    monkeypatch.undo()
    assert not run(app.throttle("a", 0, 1, 60))


def test_long_keys_are_hashed(app):
    """A key of a megabyte costs the store 71 characters."""
    assert hit(app, "checkout", "x" * 1_000_000)
    ((claim, _),) = run(app.inspect(app.checked_hit("checkout", "x" * 1_000_000)))
    assert len(claim.key) == 71


# Throttle


@pytest.mark.parametrize("parts", [("a" * 130, "b" * 130), ("a" * 256, None), ("%" * 128, "|" * 128), ("a", "b")])
def test_keys_of_several_parts_have_one_state_whatever_their_length(clock, parts):
    """The text of a long key, as the policy joins it, names the state of its requests: a reset reaches it, and an override."""
    limits = """
identify: {tenant: {header: X-Tenant}, user: {header: X-User}}
limits:
  - {name: pair, key: [tenant, user], limit: fixed window 3/h align first}
  - {name: either, match: /either, key: user | tenant, limit: fixed window 3/h align first}
"""
    app = application(MemoryStore(clock=clock), clock, Policy.read(limits))
    sent = {name: value for name, value in zip(("X-Tenant", "X-User"), parts, strict=True) if value is not None}
    request = request_context({"method": "GET", "path": "/either", "headers": sent})
    joined = "|".join([escape_part(part) for part in parts])
    for name, key in (("pair", joined), ("either", f"user:{parts[1]}" if parts[1] else f"tenant:{parts[0]}")):
        for _ in range(3):
            app.match_nowait(request)
        assert not hit(app, name, key)
        assert len(app.match_nowait(request).keys[0]) <= 256
        run(app.reset(name, key))
        assert hit(app, name, key).remaining == 2
        run(app.reset("pair", joined))


def test_throttle_is_the_rate_of_redis_cell(app, clock):
    """15 and one more at once, then 30 per 60 seconds; a quantity of 0 changes nothing."""
    decisions = [run(app.throttle("user", 15, 30, 60)) for _ in range(17)]
    assert [one.allowed for one in decisions] == [True] * 16 + [False]
    assert (decisions[0].limit, decisions[0].remaining, decisions[16].retry_after) == (16, 15, 2.0)
    clock.advance(2.0)
    assert run(app.throttle("user", 15, 30, 60, 0)).remaining == 1
    assert run(app.throttle("user", 15, 30, 60, 17)).retry_after == math.inf


@pytest.mark.parametrize(
    ("rate", "message"),
    [
        ((0, 0, 60), "count_per_period: expected a whole number ≥ 1, got 0"),
        ((0, -1, 60), "count_per_period: expected a whole number ≥ 1, got -1"),
        ((0, 1, 0), "period: expected a whole number ≥ 1, got 0"),
        ((0, 1, -60), "period: expected a whole number ≥ 1, got -60"),
        ((-1, 1, 60), "max_burst: expected a whole number ≥ 0, got -1"),
        ((10**30, 1, 60), "max_burst 1000"),
    ],
)
def test_an_impossible_rate_is_an_error(app, rate, message):
    """It names the number."""
    with pytest.raises(RequestError, match=message):
        run(app.throttle("user", *rate))


# Reservations


def test_a_reservation_is_settled_once(app):
    """The rest of the estimate comes back; a second settlement does nothing."""
    reserved = run(app.reserve(app.checked_hit("tokens", "42", 500)))
    assert decision_of(reserved.evaluation).remaining == 500
    assert run(app.settle(reserved.token, 425)) is True
    assert run(app.peek(app.checked_hit("tokens", "42"))).remaining == 575
    assert run(app.settle(reserved.token, 0)) is False
    assert run(app.cancel(reserved.token)) is False
    assert run(app.peek(app.checked_hit("tokens", "42"))).remaining == 575


@pytest.mark.parametrize("kind", ["memory", "shared"])
def test_settlements_in_a_full_store_are_made_once(clock, tmp_path, kind):
    """Ids of settled tokens fill the store: every further token is settled all the same, and a second time by no call."""
    shared = SharedStore(tmp_path / "limits", max_keys=50, clock=clock) if kind == "shared" else None
    app = application(shared or MemoryStore(max_keys=50, clock=clock), clock)
    for _ in range(3000):
        reserved = run(app.reserve(app.checked_hit("tokens", "42", 100)))
        assert run(app.settle(reserved.token, 0)) is True
        assert run(app.settle(reserved.token, 0)) is False
    assert run(app.peek(app.checked_hit("tokens", "42"))).remaining == 1000


def test_a_reservation_of_a_rule_in_shadow_mode_is_settled_too(clock):
    """Otherwise shadow mode would count the estimates, and show refusals that the real rule will not make."""
    llm = {"name": "llm", "key": "ip", "limit": "token bucket 1/h burst 1000", "on_refusal": "shadow"}
    app = application(MemoryStore(clock=clock), clock, Policy.of(limits=[llm]))
    first, second = (run(app.reserve(app.checked_hit("llm", "42", 600))) for _ in range(2))
    assert [one.evaluation.shadows for one in (first, second)] == [(), ("llm",)]
    assert run(app.settle(first.token, 100)) is run(app.settle(second.token, 100)) is True
    assert run(app.peek(app.checked_hit("llm", "42"))).remaining == 900


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("action", [{"on_failure": "open"}, {"on_failure": "local 1/2"}, {"on_refusal": "shadow"}])
def test_a_reservation_that_the_store_did_not_charge_gives_it_nothing_back(clock, local, action):
    """Settling what was admitted while the store failed is no refund of what it charged before, and no charge."""
    rule = {"name": "tokens", "key": "ip", "limit": "fixed window 10/h", **action}
    app = application(store := WrappedStore(MemoryStore(clock=clock), local), clock, Policy.of(limits=[rule]))
    assert run(app.reserve(app.checked_hit("tokens", "42", 6))).token
    store.failing = {"decide", "decide_many"}
    tokens = [run(app.reserve(app.checked_hit("tokens", "42", 2))).token for _ in range(2)]
    store.failing.clear()
    clock.advance(30)  # the guard asks again
    for token, used in zip(tokens, (0, 4), strict=True):
        assert run(app.settle(token, used)) is True
        assert run(app.peek(app.checked_hit("tokens", "42"))).remaining == 4


def test_a_settled_reservation_leaves_its_place_among_requests_at_a_time(clock):
    """Its request has ended, whatever it cost."""
    uploads = {"name": "uploads", "key": "ip", "limit": "fixed window 10/h", "concurrent": {"max": 1, "hold": "10min"}}
    app = application(MemoryStore(clock=clock), clock, Policy.of(limits=[uploads]))
    for left in (9, 8):
        reserved = run(app.reserve(app.checked_hit("uploads", "42")))
        assert not run(app.reserve(app.checked_hit("uploads", "42"))).token
        assert run(app.settle(reserved.token, 1)) is True
        assert [one.remaining for _, one in run(app.inspect(app.checked_hit("uploads", "42")))] == [left, 1]


def test_the_token_of_many_limits_under_a_long_key_can_be_settled(clock):
    """The longest key, of characters outside the basic plane."""
    limit = "; ".join(f"fixed window {count}/h" for count in range(1, 13))
    app = application(MemoryStore(clock=clock), clock, Policy.of(limits=[{"name": "many", "key": "ip", "limit": limit}]))
    assert run(app.settle(run(app.reserve(app.checked_hit("many", "\U0001f600" * 256))).token, 0)) is True


def test_settling_above_the_estimate_charges_the_difference(app):
    """The bucket goes into debt."""
    reserved = run(app.reserve(app.checked_hit("tokens", "42", 900)))
    assert run(app.settle(reserved.token, 1200)) is True
    assert run(app.peek(app.checked_hit("tokens", "42"))).retry_after == 2.01


def test_a_refused_reservation_has_no_token(app):
    """Nothing was charged."""
    reserved = run(app.reserve(app.checked_hit("tokens", "42", 1001)))
    assert (reserved.evaluation.allowed, reserved.token) == (False, "")
    assert run(app.peek(app.checked_hit("tokens", "42"))).remaining == 1000


def test_a_reservation_may_start_later(app):
    """Within max_wait the charge is dated ahead; a rule without reservations is an error that names the field to omit."""
    for wait in (0, 1_000_000, 2_000_000):
        reserved = run(app.reserve(app.checked_hit("checkout", "42", 3 if not wait else 1), 2_000_000))
        assert decision_of(reserved.evaluation).wait_us == wait
    assert not run(app.reserve(app.checked_hit("checkout", "42"), 2_000_000)).token
    with pytest.raises(RequestError, match="leave max_wait out"):
        run(app.reserve(app.checked_hit("counter", "42"), 2_000_000))
    assert run(app.reserve(app.checked_hit("counter", "42"))).token


def test_a_waiting_request_moves_up_when_a_reservation_is_settled(app, clock):
    """The refund of a settled reservation is the start of a request that waits in the rule's queue."""
    token = run(app.reserve(app.checked_hit("slow", "42"))).token

    async def main():
        waits = asyncio.ensure_future(app.match(request_context({"method": "GET", "path": "/slow", "headers": {"X-User": "42"}})))
        await asyncio.sleep(0)
        assert run(app.settle(token, 0))
        return await waits

    async def asleep(seconds, wake=None):
        if seconds:
            await wake.wait()

    clock.asleep = asleep
    evaluation = asyncio.run(asyncio.wait_for(main(), 30))
    assert (evaluation.allowed, evaluation.wait_us) == (True, 0)


def test_settlement_after_a_reset_does_nothing(app):
    """As in the library: False."""
    reserved = run(app.reserve(app.checked_hit("tokens", "42", 500)))
    run(app.reset("tokens", "42"))
    assert run(app.settle(reserved.token, 0)) is False


def test_any_worker_settles_once(clock, tmp_path):
    """Two workers on one file: one settles what the other reserved, and no third call gives anything back."""
    workers = [application(SharedStore(tmp_path / "limits", clock=clock), clock) for _ in range(2)]
    reserved = run(workers[0].reserve(workers[0].checked_hit("tokens", "42", 500)))
    assert run(workers[1].settle(reserved.token, 100)) is True
    assert run(workers[0].settle(reserved.token, 100)) is False
    assert run(workers[0].peek(workers[0].checked_hit("tokens", "42"))).remaining == 900
    for worker in workers:
        worker.gate.store.close()


def test_a_settlement_uses_the_limit_that_was_charged(app):
    """A reload between reservation and settlement does not matter."""
    reserved = run(app.reserve(app.checked_hit("tokens", "42", 500)))
    limits = [{**one, "limit": "token bucket 1/s burst 600"} if one["name"] == "tokens" else one for one in LIMITS]
    app.gate.reload(Policy.of(name="test", identify=dict(POLICY.identify), limits=limits))
    assert run(app.settle(reserved.token, 0)) is True
    assert run(app.peek(app.checked_hit("tokens", "42"))).remaining == 600


@pytest.mark.parametrize("change", ["", "A", "forged", "é" * 10, "x" * 100_000])
def test_a_forged_token_is_refused(app, change):
    """A token of another secret, a changed one, or no token at all settles nothing."""
    token = run(app.reserve(app.checked_hit("tokens", "42", 500))).token
    forged = change if change != "A" else ("B" if token[0] == "A" else "A") + token[1:]
    with pytest.raises(RequestError, match="token"):
        run(app.settle(forged, 0))
    assert run(app.settle(token, 0)) is True


def test_a_token_of_another_secret_is_refused(app, clock):
    """Each service accepts only its own tokens."""
    other = application(app.store, clock, secret=b"another secret..")
    with pytest.raises(RequestError, match="secret"):
        run(other.settle(run(app.reserve(app.checked_hit("tokens", "42"))).token, 0))


def test_a_reservation_that_starts_later_is_settled_once(app, clock):
    """Settled before its start, it stays settled until its token expires, which is a wait and a ttl after it was issued."""
    run(app.hit_many([app.checked_hit("tokens", "42", 1000)]))
    run(app.reserve(app.checked_hit("tokens", "42", 1000), 10_000_000))
    token = run(app.reserve(app.checked_hit("tokens", "42", 1000), 60_000_000)).token
    assert run(app.settle(token, 0)) is True
    for _ in range(79):
        clock.advance(1.0)
        assert run(app.settle(token, 0)) is False
    clock.advance(1.0)
    with pytest.raises(RequestError, match="expired"):
        run(app.settle(token, 0))


def test_no_other_use_of_the_secret_authenticates_a_token(app, clock):
    """The `pk` parameter of responses is an HMAC of a client's key with the same secret."""
    payload = json.dumps(["id", clock.now_us() + 1_000_000, -1, "store", []]).encode()
    forged = urlsafe_b64encode(payload + hmac.digest(SECRET, payload, "sha256")[:16]).decode().rstrip("=")
    with pytest.raises(RequestError, match="secret"):
        run(app.settle(forged, 0))


def test_a_token_expires(app, clock):
    """One hour by default, here a minute; settled ids are kept as long."""
    tokens = [run(app.reserve(app.checked_hit("tokens", "42", 100))).token for _ in range(2)]
    clock.advance(59.9)
    assert run(app.settle(tokens[0], 0)) is True
    assert run(app.settle(tokens[0], 0)) is False
    clock.advance(0.1)
    for token in tokens:
        with pytest.raises(RequestError, match="expired"):
            run(app.settle(token, 0))


# Async


async def some(app):
    reserved = await arun(app.reserve(app.checked_hit("tokens", "42", 500)))
    assert await arun(app.settle(reserved.token, 100))
    (one,) = await arun(app.hit_many([app.checked_hit("tokens", "42")]))
    return decision_of(one).remaining


def test_the_same_plans_run_async(app):
    """One definition for both kinds of store."""
    import asyncio

    assert asyncio.run(some(app)) == 899
