"""What a reload leaves behind in a store, and of a store: nothing, once the requests of the old version have ended."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest
from gates import request, until

from limitkeeper import ConfigurationError, MemoryStore
from limitkeeper.algorithms.claim import Claim
from limitkeeper.policy import Policy
from limitkeeper.policy.gate import Gate
from limitkeeper.stores import RedisStore
from limitkeeper.stores.guarded import GuardedStore
from limitkeeper.testing import ManualClock
from limitkeeper.web.handler_limit import HandlerGates, HandlerLimit
from virtual_time import VirtualClock


def policy_of(*names: str, limit: str = "fixed window 5/min", **more: str) -> Policy:
    return Policy.of(limits=[{"name": name, "key": "ip", "limit": limit} for name in names], **more)


#: The limit of the gate's own queue.
QUEUE = "limitkeeper queue"


def tables(store: MemoryStore) -> set[str]:
    return {name for _, name, _ in store._tables} - {QUEUE}


def test_a_reload_is_logged(caplog):
    """A new version of a policy is one line of the log."""
    gate = Gate(policy_of("a", name="shop"), store=MemoryStore(clock=ManualClock()))
    with caplog.at_level(logging.INFO, "limitkeeper"):
        gate.reload(policy_of("a", "b", name="shop"))
    assert [one.getMessage() for one in caplog.records] == ["the policy 'shop' was reloaded; number of rules: 2"]


def test_a_store_that_the_program_chose_stays_and_that_is_logged(caplog):
    """A new version may name another; its password is not logged."""
    gate = Gate(policy_of("a", name="shop"), store=MemoryStore(clock=ManualClock()))
    gate.reload(policy_of("a", name="shop", store="redis://:hidden@127.0.0.1:1"))
    (warning,) = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert "this program chose its own, which stays" in warning
    assert "hidden" not in warning


# Limits


def test_limits_that_a_reload_removed_leave_the_store():
    """A table goes with its rule, as soon as its keys are as new; a rule that stays keeps table and state."""
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    gate = Gate(policy_of("stays", "r0"), store=store)
    gate.ask(request())
    for n in range(1, 50):
        clock.advance(3600)
        gate.reload(policy_of("stays", f"r{n}"))
        gate.ask(request())
    assert tables(store) <= {"stays", "r48", "r49"}
    assert gate.ask(request()).decision.remaining == 3  # two of the last hour


def test_limits_for_repetitions_leave_the_store_with_their_rule():
    """The tables of a rule with `once` go too: its limit, its marks, and its limit for repetitions."""
    clock = ManualClock()
    store = MemoryStore(clock=clock)

    def policy(n: int) -> Policy:
        return Policy.of(limits=[{"name": f"r{n}", "key": "ip", "limit": "fixed window 5/min", "once": "Idempotency-Key"}])

    gate = Gate(policy(0), store=store)
    for n in range(1, 20):
        for _ in range(2):
            gate.ask(request(**{"Idempotency-Key": "k"}))
        clock.advance(48 * 3600)
        gate.reload(policy(n))
    assert {name.partition(" ")[0] for name in tables(store)} <= {"r18", "r19"}


def test_a_removed_limit_that_is_in_use_is_not_forgiven():
    """A rule that a reload removed and the next one brought back keeps its state."""
    store = MemoryStore(clock=ManualClock())
    gate = Gate(policy_of("a", "b"), store=store)
    for _ in range(5):
        assert gate.ask(request())
    gate.reload(policy_of("a", limit="fixed window 100/min"))
    gate.reload(policy_of("b"))
    assert not gate.ask(request())


def test_limits_of_several_gates_stay_while_one_uses_them():
    """A table is dropped with the last gate's rule."""
    store = MemoryStore(clock=ManualClock())
    one, two = (Gate(policy_of("a"), store=store) for _ in range(2))
    one.reload(policy_of("b"))
    assert tables(store) == {"a", "b"}
    two.ask(request())
    one.reload(policy_of("a"))
    assert one.ask(request()).decision.remaining == 3


def test_a_request_of_the_old_version_settles_after_the_reload():
    """A charge under a removed rule is given back where it was made."""
    store = MemoryStore(clock=ManualClock())
    rule = {"name": "login", "key": "ip", "limit": "fixed window 5/min", "charge": {"status": [401]}}
    gate = Gate(Policy.of(limits=[rule]), store=store)
    running = gate.ask(request())
    gate.reload(policy_of("other"))
    running.settle(200)
    del running
    gate.reload(Policy.of(limits=[rule]))
    assert gate.ask(request()).decision.remaining == 4


def test_limits_leave_a_redis_store_too():
    """The limit's data in this process goes with its last user; equal limits of a new version keep it."""
    store = RedisStore("redis://127.0.0.1:1")
    gate = Gate(policy_of("stays", "r0"), store=store)
    for n in range(1, 20):
        gate.reload(policy_of("stays", f"r{n}"))
    assert {named.name for named in store.names.entries} == {"stays", "r19", QUEUE}


# Stores


def connections(valkey) -> int:
    return sum(client["lib-name"] != "redis-py" for client in valkey.client().client_list())


def becomes(valkey, number: int, readers: int = 0) -> bool:
    """Whether the server soon has so many connections: it notices the end of one a moment later. `readers`: as many more may be
    open, of the thread that reads the overrides of each store."""
    end = time.monotonic() + 30
    while not number <= (found := connections(valkey)) <= number + readers and time.monotonic() < end:
        time.sleep(0.01)
    return number <= found <= number + readers


@pytest.mark.parametrize("changed", ["budget", "url"])
def test_a_changed_budget_or_url_closes_the_old_connections(valkey, changed):
    """Twenty reloads leave the connection of the last version."""
    before = connections(valkey)

    def version(n: int) -> Policy:
        if changed == "budget":
            return policy_of("a", limit="100/s", store=f"{valkey.url}?timeout=60s", budget=f"{30_000 + n}ms")
        return policy_of("a", limit="100/s", store=f"{valkey.url}?timeout=60s&prefix=p{n}", budget="60s")

    with Gate(version(0)) as gate:
        for n in range(1, 20):
            assert gate.ask(request())
            gate.reload(version(n))
        assert gate.ask(request()).decision.source == "store"
        assert becomes(valkey, before + 1, readers=1)
    assert becomes(valkey, before)


def test_the_old_store_stays_open_for_its_last_request(valkey):
    """A request that began before the reload settles on the store that charged it, which is closed after that."""
    rule = {"name": "a", "key": "ip", "limit": "fixed window 5/h", "charge": {"status": [401]}}
    versions = [Policy.of(limits=[rule], store=f"{valkey.url}?timeout=60s&prefix=last{n}", budget="60s") for n in range(2)]
    before = connections(valkey)
    with Gate(versions[0]) as gate:
        running = gate.ask(request())
        gate.reload(versions[1])
        assert gate.ask(request()).decision.source == "store"
        assert becomes(valkey, before + 2, readers=2)
        running.settle(200)
        del running
        assert becomes(valkey, before + 1, readers=1)
        gate.reload(versions[0])
        assert gate.ask(request()).decision.remaining == 4


def test_gates_of_handlers_follow_the_store_of_the_policy(valkey):
    """Limits of single handlers on the policy's store keep it after a reload has changed it."""
    versions = [policy_of("a", store=f"{valkey.url}?timeout=60s&prefix=h{n}", budget="60s") for n in range(2)]
    with Gate(versions[0]) as gate:
        gates = HandlerGates(gate)
        limit = HandlerLimit("handler", "fixed window 5/h", "ip", {})
        assert gates.gate_for(limit, "handler").ask(request()).decision.remaining == 4
        gate.reload(versions[1])
        found = gates.gate_for(limit, "handler")
        assert found.store is gate.store
        assert found.ask(request()).decision.source == "store"


def test_a_rule_of_its_own_keeps_the_store_that_it_uses(valkey):
    """A gate of one rule, made before a reload, still has an open store."""
    with Gate(policy_of("a", store=f"{valkey.url}?timeout=60s&prefix=r0", budget="60s")) as gate:
        own = gate.for_rule("a")
        gate.reload(policy_of("a", store=f"{valkey.url}?timeout=60s&prefix=r1", budget="60s"))
        assert own.ask(request()).decision.source == "store"


def test_memory_is_found_again():
    """A policy that switches to another store and back forgives no client."""
    gate = Gate(policy_of("a"))
    for _ in range(5):
        gate.ask(request())
    gate.reload(policy_of("a", store="redis://127.0.0.1:1"))
    assert isinstance(gate.store, GuardedStore)
    gate.reload(policy_of("a"))
    assert not gate.ask(request())
    gate.close()


@pytest.mark.parametrize("path", ["/shadow", "/full"])
def test_a_request_that_waits_stays_with_its_store(path):
    """A request waits while a reload changes the store: a rule in shadow mode charges the old one, and what a capacity refuses is
    given back there."""
    rules = [
        {"name": "api", "key": "ip", "limit": "20/s burst 1", "on_refusal": "wait up to 30s"},
        {"name": "running", "key": "ip", "concurrent": 5},
        {"name": "shadow", "match": "/shadow", "key": "ip", "limit": "fixed window 9/day", "on_refusal": "shadow"},
        {"name": "capacity", "match": "/full", "key": "ip", "capacity": "1/s", "cost": 100},
    ]

    def left(gate: Gate) -> list[int]:
        claims = [Claim(rule.default_entries[0].named, "192.0.2.7", 0) for rule in gate.compiled.rules[1:3]]
        return [part.remaining for part in gate.store.decide(claims, 0, commit=False).decisions]

    async def main() -> None:
        gate = Gate(Policy.of(limits=rules))
        (await gate.aask(request("GET /"))).settle(200)
        waiting = asyncio.ensure_future(gate.aask(request(f"GET {path}")))
        await until(lambda: gate.compiled.rules[0].waiting.requests)
        gate.reload(Policy.of(limits=rules, store="memory://?max_keys=50"))
        evaluation = await waiting
        assert evaluation.allowed == (path == "/shadow")
        evaluation.settle(200)
        assert left(gate) == [5, 9]
        gate.reload(Policy.of(limits=rules))
        assert left(gate) == [5, 8 if evaluation.allowed else 9]

    asyncio.run(main())


@pytest.mark.parametrize("names", [("a",), ("a", "b")])
def test_a_request_is_decided_by_the_store_of_its_own_version(names):
    """A reload that changes the store while a request is evaluated leaves the request to the store of its version."""
    rules = [{"name": name, "key": "user", "limit": "fixed window 3/day"} for name in names]
    asked = []

    def user(context):
        asked.append(context)
        if len(asked) == 1:
            gate.reload(Policy.of(identify={"user": {"call": user}}, limits=rules, store="memory://?max_keys=50"))
        return "42"

    def left() -> list[int]:
        return [one.decision.remaining for one in gate.explain(request())]

    first = Policy.of(identify={"user": {"call": user}}, limits=rules)
    with Gate(first) as gate:
        evaluation = gate.ask(request())
        assert evaluation.policy is first
        assert left() == [3] * len(names)
        gate.reload(first)
        assert left() == [2] * len(names)


def test_a_given_store_gets_the_new_budget():
    """The store stays open, its guard is another one."""
    store = RedisStore("redis://127.0.0.1:1")
    gate = Gate(policy_of("a", budget="20ms"), store=store)
    gate.reload(policy_of("a", budget="10ms"))
    assert gate.store.inner is store
    assert gate.store.budget_us == 10_000
    gate.close()


def test_limits_that_the_store_has_no_room_for_refuse_the_reload():
    """The version in force stays, with its rules and counters."""

    class Full(MemoryStore):
        full = False

        def register(self, limit):
            if self.full:
                raise ConfigurationError("no room")
            super().register(limit)

    store = Full()
    gate = Gate(policy_of("a"), store=store)
    gate.ask(request())
    gate.reload(policy_of("a"))
    gate.ask(request())
    store.full = True
    with pytest.raises(ConfigurationError, match="no room"):
        gate.reload(policy_of("b"))
    assert [(rule.name, rule.passed) for rule in gate.snapshot().rules] == [("a", 2)]
    assert gate.ask(request())


def test_a_request_that_waits_during_a_reload_gives_back_to_the_store_that_charged_it(monkeypatch):
    """Another rule's capacity refuses the request at the end of its wait; the new store has charges of its own under its key."""
    clock = VirtualClock()
    monkeypatch.setattr("limitkeeper.policy.store_lifetime.store_from_url", lambda url: MemoryStore(clock=clock))
    rules = [
        {"name": "waits", "key": "ip", "limit": "token bucket 1/s burst 1", "on_refusal": "wait up to 5s"},
        {"name": "counts", "key": "ip", "limit": "fixed window 9/d"},
        {"name": "shares", "key": "ip", "capacity": "1/h"},
    ]

    async def main():
        gate = Gate(Policy.of(limits=rules), clock=clock)
        rule, old = gate.compiled.rules_by_name["counts"], gate.store
        assert (await gate.aask(request())).allowed
        waiting = asyncio.ensure_future(gate.aask(request()))
        await asyncio.sleep(0)
        gate.reload(Policy.of(limits=rules, store="memory://?max_keys=1000"))
        assert gate.hit_rule_nowait(gate.compiled.rules_by_name["counts"], "192.0.2.7", 3)
        await clock.run_until(clock.now_us() + 1_000_000, lambda: asyncio.sleep(0.001))
        assert (await waiting).refusal.reason == "capacity"
        named = rule.default_entries[0].named
        return [store.decide_one(named, "192.0.2.7", 0, 0, False).remaining for store in (old, gate.store)]

    assert asyncio.run(main()) == [8, 6]


def test_a_request_that_began_before_a_reload_still_awaits_its_remote_store():
    """The new version's store is local; the old one would block the event loop, and its failure would be taken for a refusal."""

    def user(context) -> str:
        if gate.policy.store != "memory://":
            gate.reload(Policy.of(identify=identify, limits=limits))
        return "ann"

    identify, limits = {"user": {"call": user}}, [{"name": "a", "key": "user", "limit": "fixed window 5/min"}]
    gate = Gate(Policy.of(identify=identify, limits=limits, store="redis://127.0.0.1:1"))
    assert gate.ask_nowait(request()) is None
    assert gate.ask_nowait(request())
    gate.close()
