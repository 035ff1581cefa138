"""Charging once does not evade a limit: a mark stands for a charge that was made, and for nothing else."""

from __future__ import annotations

import asyncio
import threading

import pytest
from gates import MODES, asked, gate, key, passes, policy, request, rule

from limitkeeper import MemoryStore, RedisStore
from limitkeeper.algorithms.claim import Claim
from limitkeeper.policy import Gate, Policy, WrittenRequest
from limitkeeper.policy.model import WAIT, Charge, Cost, Once, OnFailure, OnRefusal
from limitkeeper.testing import ManualClock
from stand_ins import HeldClock, WrappedStore
from virtual_time import VirtualClock


@pytest.fixture
def redis(valkey):
    with RedisStore(valkey.url, timeout="60s") as store:
        yield store


ONCE = Once("idempotency-key")
SAID = {"idempotency-key": "k", "user": "a"}


def test_a_waiting_request_leaves_no_mark():
    """Repetitions of a request that is still waiting wait too, and one whose client disconnected leaves no mark."""
    waits = OnRefusal(WAIT, wait_us=1_000_000, queue=100)
    g = gate(rule("pay", "1/s burst 1", key=key("user"), once=ONCE, on_refusal=waits), clock=HeldClock(1000))

    async def main():
        assert await g.aask(request(user="a"))
        first = asyncio.ensure_future(g.aask(request(**SAID)))
        await asyncio.sleep(0)
        assert g.snapshot().rules[0].waiting == 1
        assert not await g.aask(request(**SAID))
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert g.ask_nowait(request(**SAID)) is None
        assert (g.snapshot().rules[0].replayed, g.snapshot().rules[0].waiting) == (0, 0)

    asyncio.run(main())


@pytest.mark.parametrize("used", [0, 1])
def test_many_at_the_same_moment_are_charged_once(redis, used):
    """Of many requests with one key in one instant at least one is charged, none passes beyond the limit, and all but one charge
    go back."""
    g = Gate(
        policy(rule("pay", "fixed window 1/h", key=key("user"), once=ONCE), name=f"once-{used}", budget_us=60_000_000),
        store=redis,
    )

    async def main():
        for _ in range(used):
            assert await g.aask(request(user="a"))
        answers = await asyncio.gather(*[g.aask(request(**SAID)) for _ in range(20)])
        assert sum(map(bool, answers)) <= (0 if used else 11)
        assert used or any(answers)
        assert not await g.aask(request(user="a"))
        await redis.aclose()

    asyncio.run(main())
    g.close()


def test_twins_get_their_charge_back(redis):
    """Ten first requests at once, with room for all of them: nine charges go back."""
    g = Gate(
        policy(rule("pay", "fixed window 20/h", key=key("user"), once=ONCE), name="twins", budget_us=60_000_000), store=redis
    )

    async def main():
        assert all(await asyncio.gather(*[g.aask(request(**SAID)) for _ in range(10)]))
        assert (await g.aask(request(user="a"))).decision.remaining == 18
        await redis.aclose()

    asyncio.run(main())
    g.close()


@pytest.mark.parametrize("mode", ["ask", "quick"])
def test_an_outcome_that_does_not_count_leaves_no_mark(mode):
    """A client that logs in to its own account first can't guess ten passwords free of charge behind it."""
    g = gate(rule("login", "fixed window 2/h", key=key("user"), once=ONCE, charge=Charge(((401, 401),))))
    asked(g, request(**SAID), mode).settle(200)
    guesses = []
    for _ in range(3):
        guesses.append(asked(g, request(**SAID), mode))
        guesses[-1].settle(401)
    assert g.snapshot().rules[0].replayed == 2
    assert passes(g, 2, user="a") == [True, False]


@pytest.mark.parametrize("mode", MODES)
def test_a_refused_request_spends_no_repetition(mode):
    """When another rule refuses a repetition, it may be repeated as often as before."""
    g = gate(
        rule("pay", "fixed window 1/h", key=key("user"), once=Once("idempotency-key", replays=1)),
        rule("all", "fixed window 1/min"),
    )
    assert passes(g, 5, mode=mode, **SAID) == [True, False, False, False, False]
    g.clock.advance(60)
    assert passes(g, 1, mode=mode, **SAID) == [True]


@pytest.mark.parametrize("mode", MODES)
def test_a_repetition_that_can_not_be_given_back_does_not_change_the_refusal(mode):
    """A request that a rule refused stays refused when the local store fails after that."""
    store = WrappedStore(MemoryStore(clock=ManualClock(1000)), local=True)
    g = gate(rule("pay", "1/h", key=key("user"), once=ONCE), rule("all", "fixed window 1/min"), store=store)
    assert passes(g, 1, mode=mode, **SAID) == [True]
    store.failing = {"give_back"}
    answer = asked(g, request(**SAID), mode)
    assert (answer.allowed, answer.refusal.reason) == (False, "quota")


@pytest.mark.parametrize("mode", ["ask", "aask"])
@pytest.mark.parametrize("action", ["open", "closed"])
def test_a_store_that_fails_is_not_called_a_second_time(mode, action):
    """Where the store can't look up a mark, the rule's `on_failure` decides at once."""
    clock = ManualClock(1000)
    store = WrappedStore(MemoryStore(clock=clock))
    pay = rule("pay", "1/h", key=key("user"), once=ONCE, on_failure=OnFailure(action))
    g = Gate(policy(pay, budget_us=10_000_000), store=store, clock=clock)
    store.failing = {"decide", "decide_many"}
    assert asked(g, request(**SAID), mode).allowed == (action == "open")
    assert store.calls == ["decide"]
    tally = g.snapshot().rules[0]
    assert (tally.failed_open, tally.failed_closed) == ((1, 0) if action == "open" else (0, 1))


@pytest.mark.parametrize("mode", ["ask", "aask"])
def test_a_repetition_calls_the_store_as_rarely_as_possible(mode):
    """A first request looks up its mark, is charged and makes it; a repetition looks it up and uses it; without the header there
    is one call."""
    clock = ManualClock(1000)
    store = WrappedStore(MemoryStore(clock=clock))
    g = Gate(policy(rule("pay", "9/h", key=key("user"), once=ONCE), budget_us=10_000_000), store=store, clock=clock)
    for said, calls in (
        (SAID, ["decide", "decide", "decide_many"]),
        (SAID, ["decide", "decide_many"]),
        ({"user": "a"}, ["decide"]),
    ):
        del store.calls[:]
        assert asked(g, request(**said), mode)
        assert store.calls == calls


def test_a_reload_changes_how_often_a_request_may_be_repeated():
    """Another number of replays, or another time, holds from the next request on."""
    g = gate(rule("pay", "fixed window 1/day", key=key("user"), once=Once("idempotency-key", replays=1)))
    assert passes(g, 3, **SAID) == [True, True, False]
    g.reload(policy(rule("pay", "fixed window 1/day", key=key("user"), once=Once("idempotency-key", replays=3))))
    assert passes(g, 3, **SAID) == [True, True, False]
    g.reload(policy(rule("pay", "fixed window 2/day", key=key("user"), once=Once("idempotency-key", 1_000_000, replays=3))))
    assert passes(g, 1, user="a", **{"idempotency-key": "new"}) == [True]
    g.clock.advance(1)
    assert passes(g, 1, user="a", **{"idempotency-key": "new"}) == [False]


def one_inside_another(g, store, mode):
    """Two requests with one key, the second begun and ended while the first is being charged."""
    inner = store.inner.decide
    twins = []

    def decide(claims, max_wait_us=0, **options):
        if options.get("commit", True) and not twins:
            twins.append(None)
            twins[0] = evaluated_within(g, mode)
        return inner(claims, max_wait_us, **options)

    store.decide = decide
    return asked(g, request(**SAID), mode), twins[0]


def evaluated_within(g, mode):
    """A request in the middle of another one, in a thread of its own (a loop does not run inside a loop)."""
    found = []
    thread = threading.Thread(target=lambda: found.append(asked(g, request(**SAID), mode)))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("local", [True, False], ids=["near", "far"])
@pytest.mark.parametrize("mode", ["ask", "aask"])
def test_a_twin_gets_back_what_was_charged_once(mode, local):
    """Of two requests at once, the one whose mark comes second gets its charge back, of the rule that charges once only."""
    clock = ManualClock(1000)
    store = WrappedStore(MemoryStore(clock=clock), local=local)
    rules = [rule("all", "fixed window 9/h"), rule("pay", "fixed window 9/h", key=key("user"), once=ONCE)]
    g = Gate(policy(*rules, budget_us=5_000_000), store=store, clock=clock)
    outer, twin = one_inside_another(g, store, mode)
    assert (outer.allowed, twin.allowed) == (True, True)
    assert [one.remaining for one in asked(g, request(user="a")).decision.decisions] == [6, 7]


@pytest.mark.parametrize("status", [200, 401])
def test_a_twin_that_owes_is_settled_by_its_outcome(status):
    """Of simultaneous requests whose outcomes decide, each is charged until its outcome is known: two wrong guesses are two."""
    clock = ManualClock(1000)
    store = WrappedStore(MemoryStore(clock=clock), local=True)
    g = Gate(policy(rule("login", "fixed window 9/h", key=key("user"), once=ONCE, charge=Charge(((401, 401),)))), store=store)
    for evaluation in one_inside_another(g, store, "ask"):
        evaluation.settle(status)
    assert asked(g, request(user="a")).decision.remaining == (8 if status == 200 else 6)


@pytest.mark.parametrize("mode", MODES)
def test_a_repetition_for_one_rule_may_be_the_first_for_another(mode):
    """A request uses one repetition where it was charged before, and is charged where it was not."""
    once = Once("idempotency-key", replays=2)
    g = gate(rule("user", "fixed window 1/h", key=key("user"), once=once), rule("tenant", "9/h", key=key("tenant"), once=once))
    assert [asked(g, request(**SAID, tenant=tenant), mode).allowed for tenant in "abcd"] == [True, True, True, False]
    assert [one.replayed for one in g.snapshot().rules] == [2, 0]


@pytest.mark.parametrize("mode", MODES)
def test_a_mark_that_can_not_be_made_fails_no_request(mode, caplog):
    """A request that was charged passes though its mark could not be made; that is logged, and its repetition is charged."""
    clock = ManualClock(1000)
    store = WrappedStore(MemoryStore(clock=clock), local=True)
    g = Gate(policy(rule("pay", "fixed window 2/h", key=key("user"), once=ONCE, charge=Charge(((401, 401),)))), store=store)
    store.failing = {"decide_many"}
    evaluation = asked(g, request(**SAID), mode)
    evaluation.settle(401)
    assert "marking an idempotency key in the store of 'limitkeeper' failed: decide_many: nobody answers" in caplog.text
    asked(g, request(**SAID), mode).settle(200)
    store.failing = set()
    assert asked(g, request(user="a")).decision.remaining == 0


# What a key is bound to, and how much its repetitions may add -----------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("text", "replays", "cost", "most"),
    [
        ("fixed window 10/day", 10, 1, 20),
        ("sliding window log 10/day", 10, 1, 20),
        ("token bucket 10/day burst 10", 10, 1, 20),
        ("fixed window 10/day; fixed window 4/h", 3, 1, 8),
        ("fixed window 100/day", 10, 10, 20),
        ("fixed window 1/day", 3, 1, 4),
        ("fixed window 1/day", 10, 1, 11),
    ],
)
def test_repetitions_pass_no_more_than_the_limit_again(mode, text, replays, cost, most):
    """Whatever keys a client makes up, a rule admits at most twice its limit, or its limit and the repetitions of one key."""
    pay = rule("pay", text, key=key("user"), cost=Cost(units=cost), once=Once("idempotency-key", replays=replays))
    g = gate(pay)
    keys = [f"k{i % keys}" for keys in (50, 10, 3, 1) for i in range(60)]
    assert sum(asked(g, request(user="a", **{"idempotency-key": one}), mode).allowed for one in keys) == most
    assert passes(g, 2, mode=mode, user="b", **{"idempotency-key": "k1"}) == [True, True]


@pytest.mark.parametrize("mode", MODES)
def test_a_key_vouches_only_for_the_request_that_it_was_used_for(mode):
    """The same key with another method, another path or another value of a bound identity is another request, and charged."""
    once = Once("idempotency-key", bind=("tenant",))
    g = gate(rule("pay", "fixed window 9/h", key=key("user"), once=once))

    def left(line, **more):
        asked(g, request(line, **SAID, **more), mode)
        return g.explain(request(user="a"))[0].decision.remaining

    assert left("POST /orders", tenant="x") == 8
    assert left("POST /orders", tenant="x") == 8
    assert left("POST /orders/2", tenant="x") == 7
    assert left("PUT /orders", tenant="x") == 6
    assert left("POST /orders", tenant="y") == 5
    assert left("POST /orders") == 4
    assert left("POST /orders", tenant="x") == 4
    assert left("POST /orders", tenant="-") == 3
    assert left("POST /orders", tenant="x|POST") == 2


@pytest.mark.parametrize("mode", ["ask", "aask"])
def test_twins_get_back_no_more_than_repetitions_may_take(mode):
    """Requests of one key at the same moment are repetitions too: the charge of one beyond their limit stays."""
    clock = ManualClock(1000)
    store = WrappedStore(MemoryStore(clock=clock), local=True)
    g = Gate(policy(rule("pay", "fixed window 3/h", key=key("user"), once=Once("idempotency-key", replays=2))), store=store)
    store.inner.decide([Claim(g.compiled.rules[0].default_entries[0].replays, "a", 3)])  # all repetitions are taken
    one_inside_another(g, store, mode)
    assert g.explain(request(user="a"))[0].decision.remaining == 1


def test_explain_shows_repetitions():
    """`explain` shows that a repetition passes and costs nothing, however often it runs; beyond its replays it is refused."""
    g = gate(rule("pay", "fixed window 1/h", key=key("user"), once=Once("idempotency-key", replays=1)))
    assert g.explain(request(**SAID))[0].cost == 1
    assert passes(g, 1, **SAID) == [True]
    for _ in range(3):
        (explained,) = g.explain(request(**SAID))
        assert (explained.decision.allowed, explained.decision.remaining, explained.cost) == (True, 0, 0)
    assert not g.explain(request(user="a"))[0].decision.allowed
    assert passes(g, 1, **SAID) == [True]
    assert not g.explain(request(**SAID))[0].decision.allowed
    assert passes(g, 1, **SAID) == [False]


def test_repetitions_whose_clients_leave_the_queue_of_another_rule_use_no_replay():
    """Five retries with one key are cancelled while they wait: the next one is a repetition, and charges nothing again."""
    clock = VirtualClock()
    orders = {
        "name": "orders",
        "key": "user",
        "limit": "fixed window 10/day",
        "once": {"header": "Idempotency-Key", "replays": 3},
    }
    pace = {"name": "pace", "key": "everyone", "limit": "fixed window 1/min", "on_refusal": "wait up to 60s"}
    limits = Gate(Policy.of(identify={"user": {"header": "X-User"}}, limits=[orders, pace]), store=MemoryStore(clock=clock))

    def retry():
        return limits.aask(WrittenRequest("POST", "/orders", headers={"X-User": "u", "Idempotency-Key": "k"}))

    async def settle():
        for _ in range(50):
            await asyncio.sleep(0)

    async def main():
        assert {entry.label for entry in (await retry()).entries} == {"orders", "pace"}
        for _ in range(5):
            waiting = asyncio.ensure_future(retry())
            await settle()
            waiting.cancel()
            await settle()
            assert waiting.cancelled()
        await clock.run_until(clock.now_us() + 70_000_000, settle)
        assert [entry.label for entry in (await retry()).entries] == ["pace"]
        assert limits.snapshot().rules[0].replayed == 1

    asyncio.run(main())
