"""A gate over any store: remote ones in one round trip, failing ones by each rule's `on_failure`, and reloads meanwhile."""

from __future__ import annotations

import asyncio
import threading

import pytest
from gates import asked, gate, key, passes, policy, request, rule

from limitkeeper import GuardedStore, LeasedStore, MemoryStore, RedisStore, SharedStore
from limitkeeper.policy import Gate, Policy
from limitkeeper.policy.model import CLOSED, DEGRADE, LOCAL, SHADOW, WAIT, Charge, Once, OnFailure, OnRefusal
from limitkeeper.testing import ManualClock
from stand_ins import WrappedStore

FAR = ("ask", "aask")


def far_gate(*rules, **said):
    """A gate whose store is remote, and can be made to fail. Its budget is real time, which a slow machine may exceed."""
    clock = ManualClock(1000)
    store = WrappedStore(MemoryStore(clock=clock))
    return Gate(policy(*rules, budget_us=10_000_000, **said), store=store, clock=clock), store


@pytest.mark.parametrize("mode", FAR)
def test_one_question_for_all_rules(mode):
    """However many rules apply, a remote store is called once."""
    g, store = far_gate(*[rule(f"r{i}", "9/s", key=key("user")) for i in range(5)])
    asked(g, request(user="a"), mode)
    assert store.calls == ["decide"]
    assert g.ask_nowait(request(user="a")) is None


@pytest.mark.parametrize("mode", FAR)
def test_a_failing_store_is_answered_by_each_rules_on_failure(mode):
    """Open admits, closed refuses with 503, local decides on its share; one closed rule is enough to refuse."""
    open_rule = rule("open", "1/s")
    local_rule = rule("local", "token bucket 4/s burst 4", on_failure=OnFailure(LOCAL, "1/2"))
    closed_rule = rule("closed", "9/s", key=key("user"), on_failure=OnFailure(CLOSED))
    g, store = far_gate(open_rule, local_rule, closed_rule)
    heard = []
    g.events.on("store failed", heard.append)
    store.failing = {"decide"}
    assert passes(g, 3, mode=mode) == [True, True, False]
    assert asked(g, request(), mode).refusal.status == 429
    answer = asked(g, request(user="a"), mode)
    assert (answer.allowed, answer.refusal.reason, answer.refusal.status) == (False, "store", 503)
    assert answer.refusal.retry_after >= 1
    tallies = {t.name: t for t in g.snapshot().rules}
    assert (tallies["open"].failed_open, tallies["local"].failed_local, tallies["closed"].failed_closed) == (4, 4, 1)
    assert g.snapshot().store.failures > 0
    assert heard


def test_a_rule_with_two_limits_fails_once():
    """One request that the store did not decide is one failure of each rule, however many limits it has."""
    two = "token bucket 5/s; fixed window 9/min"
    g, store = far_gate(rule("open", two), rule("local", two, on_failure=OnFailure(LOCAL, "1")))
    store.failing = {"decide"}
    assert asked(g, request())
    assert [(tally.failed_open, tally.failed_local) for tally in g.snapshot().rules] == [(1, 0), (0, 1)]


@pytest.mark.parametrize("mode", FAR)
def test_shares_that_refuse_promise_the_longest_wait(mode):
    """Where several local rules refuse, Retry-After is true for all of them, and a refusal charges none."""
    half, quarter = OnFailure(LOCAL, "1/2"), OnFailure(LOCAL, "1/4")
    quick = rule("quick", "token bucket 2/s burst 2", on_failure=half)
    slow = rule("slow", "fixed window 4/min", on_failure=quarter)
    wide = rule("wide", "token bucket 1/h burst 20", on_failure=half)
    g, store = far_gate(wide, quick, slow)
    store.failing = {"decide"}
    assert passes(g, 4, mode=mode) == [True] + [False] * 3
    refused = asked(g, request(), mode)
    assert refused.refusal.violated == ("quick", "slow")
    assert refused.refusal.retry_after == 20  # 1000 s after the epoch: the minute ends in 20 s
    assert refused.decision.decisions[0].remaining == 9
    g.clock.advance(19)
    assert not asked(g, request(), mode).allowed
    g.clock.advance(1)
    assert asked(g, request(), mode).allowed


@pytest.mark.parametrize("mode", FAR)
def test_a_closed_rule_that_degrades_is_counted(mode):
    """Where its handler answers while the store fails, the request counts as degraded."""
    degrading = rule("cached", "1/s", on_failure=OnFailure(CLOSED), on_refusal=OnRefusal(DEGRADE, handler=print))
    g, store = far_gate(degrading)
    store.failing = {"decide"}
    assert asked(g, request(), mode).degrade is print
    assert g.snapshot().rules[0].degraded == 1


class RunningClock(ManualClock):
    """A clock that advances by a tenth of a millisecond with each reading."""

    def now_us(self) -> int:
        self.advance(0.000_1)
        return super().now_us()


def test_a_share_that_refills_at_once_still_refuses():
    """A request that a local rule has refused is refused, also where the rule would admit it a moment later."""
    half, quarter = OnFailure(LOCAL, "1/2"), OnFailure(LOCAL, "1/4")
    rules = rule("slow", "1/s burst 1000", on_failure=half), rule("quick", "4000/s burst 4", on_failure=quarter)
    store = WrappedStore(MemoryStore(clock=ManualClock(1000)))
    store.failing = {"decide"}
    g = Gate(policy(*rules, budget_us=10_000_000), store=store, clock=RunningClock(1000))
    refused = [one.refusal for one in (asked(g, request()) for _ in range(400)) if not one.allowed]
    assert 0 < len(refused) < 400
    assert {one.violated for one in refused} == {("quick",)}


def test_a_near_store_that_fails_is_answered_too():
    """A local store that fails (a deleted file) is answered by each rule's `on_failure`."""
    store = WrappedStore(MemoryStore(clock=ManualClock(0)), local=True)
    g = Gate(policy(rule("all", "1/s")), store=store)
    store.failing = {"decide"}
    assert asked(g, request(), "quick").allowed
    assert g.snapshot().rules[0].failed_open == 1
    assert g.snapshot().decisions.count == 1  # the time of the failed call is counted, too


def test_a_near_store_that_fails_is_logged_once_in_ten_seconds(caplog):
    """Requests that pass uncounted because a local store fails are seen in the log; a flood of them is one line."""
    store = WrappedStore(MemoryStore(clock=ManualClock(0)), local=True)
    g = Gate(policy(rule("all", "1/s")), store=store)
    store.failing = {"decide"}
    for _ in range(5):
        asked(g, request(), "quick")
    assert [line for line in caplog.messages if "the store fails, so `on_failure` decides" in line] == caplog.messages
    assert len(caplog.messages) == 1


def test_a_breaker_spares_a_dead_store():
    """After some failures a dead store is no longer called."""
    g, store = far_gate(rule("all", "1/s"))
    store.failing = {"decide"}
    passes(g, 50)
    assert len(store.calls) < 20


@pytest.mark.parametrize("mode", FAR)
def test_a_store_that_fails_before_the_wait_of_a_request_is_answered_by_its_on_failure(mode):
    """A rule that admits when the store fails does so too when the store fails after a refusal."""
    waits = OnRefusal(WAIT, wait_us=2_000_000)
    g, store = far_gate(rule("all", "1/s", on_refusal=waits), rule("local", "9/s", on_failure=OnFailure(LOCAL, "1")))
    assert asked(g, request(), mode)
    passed = store.decide

    def then_fails(*args, **options):
        answer = passed(*args, **options)
        store.failing = {"decide"}
        return answer

    store.decide = then_fails
    assert asked(g, request(), mode).allowed
    tally = g.snapshot().rules
    assert (tally[0].failed_open, tally[1].failed_local, tally[0].refused, tally[0].waiting) == (1, 1, 0, 0)


@pytest.fixture
def redis(valkey):
    store = RedisStore(valkey.url, timeout="60s")
    yield store
    store.close()


@pytest.mark.parametrize("mode", FAR)
def test_a_real_server_behind_a_gate(redis, valkey, mode):
    """Rules, shadow, once, outcomes and waiting have the same results over a real server as in memory."""
    name = f"gate-{mode}"
    rules = [
        rule("user", "token bucket 1/h burst 3", key=key("user")),
        rule("strict", "1/h", on_refusal=OnRefusal(SHADOW)),
        rule("pay", "fixed window 2/h", key=key("tenant"), once=Once("idempotency-key")),
        rule("login", "sliding window log 2/h", key=key("partner"), charge=Charge(((401, 401),))),
    ]

    async def all_of_it():
        async def ask(**said):
            return await g.aask(request(**said)) if mode == "aask" else g.ask(request(**said))

        async def done(evaluation, status):
            await evaluation.asettle(status) if mode == "aask" else evaluation.settle(status)

        answers = [await ask(user="a") for _ in range(4)]
        assert [a.allowed for a in answers] == [True] * 3 + [False]
        assert answers[2].shadows == ("strict",)
        pays = [await ask(tenant="t", **{"idempotency-key": k}) for k in "kkkx"]
        assert [a.allowed for a in pays] == [True] * 4
        assert not (await ask(tenant="t", **{"idempotency-key": "y"})).allowed
        for status in (200, 200, 200, 401, 401):
            answer = await ask(partner="p")
            assert answer.allowed
            await done(answer, status)
        assert not (await ask(partner="p")).allowed
        if mode == "aask":
            await redis.aclose()

    g = Gate(policy(*rules, name=name, budget_us=60_000_000), store=redis)
    asyncio.run(all_of_it())
    g.close()


def test_waiting_over_a_real_server(redis):
    """A request waits for the start that the server returned."""
    g = Gate(
        policy(
            rule("all", "token bucket 20/s burst 1", on_refusal=OnRefusal(WAIT, wait_us=2_000_000)),
            name="gate-wait",
            budget_us=60_000_000,
        ),
        store=redis,
    )
    answers = [g.ask(request()) for _ in range(3)]
    assert all(answers)
    assert g.snapshot().rules[0].waited >= 1
    g.close()


def test_a_lease_answers_at_once(redis):
    """Over a leased store `quick` answers without the server while there is a lease."""
    leased = LeasedStore(redis, lease=50, life="1min")
    g = Gate(
        policy(rule("all", "token bucket 1000/s burst 1000", key=key("user")), name="gate-lease", budget_us=60_000_000),
        store=leased,
    )
    g.ask(request(user="a"))
    answers = [g.ask_nowait(request(user="a")) for _ in range(20)]
    assert all(answer is not None and answer.allowed for answer in answers)
    g.close()
    leased.close()


def test_workers_of_one_host_share_a_file(tmp_path):
    """Two gates over one shared file count together."""
    stores = [SharedStore(tmp_path / "limits") for _ in range(2)]
    first, second = (Gate(policy(rule("all", "token bucket 1/h burst 3")), store=store) for store in stores)
    assert passes(first, 2, mode="quick") == [True, True]
    assert passes(second, 2, mode="quick") == [True, False]
    for store in stores:
        store.close()


def test_a_gate_closes_what_it_opened():
    """A store given to a gate stays open when the gate is closed; a guard that is given is left as it is."""
    store = GuardedStore(MemoryStore())
    g = Gate(policy(rule("all", "2/s")), store=store)
    assert g.store is store
    g.close()
    assert store.state == "closed"
    with Gate(policy(rule("all", "1/s"))) as own:
        assert passes(own, 2) == [True, False]


def test_exact_among_threads():
    """Fifty threads at one gate pass exactly as many requests as the limit has."""
    g = gate(rule("all", "token bucket 1/h burst 500"), rule("user", "fixed window 400/h", key=key("user")))
    passed = []

    def work(i):
        passed.extend(asked(g, request(user="ab"[i % 2])).allowed for _ in range(40))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(passed) == 500
    assert g.snapshot().requests == 2000


# Versions --------------------------------------------------------------------------------------------------------------


def test_a_new_version_keeps_states_and_counts():
    """Rules that keep their names keep their states and counters; a changed rate reads the state under the new rate."""
    g = gate(rule("user", "token bucket 1/s burst 4", key=key("user")), rule("old", "9/s"))
    assert passes(g, 3, user="a") == [True] * 3
    g.reload(policy(rule("user", "token bucket 1/s burst 10", key=key("user")), rule("new", "1/min")))
    answer = asked(g, request(user="a"))
    assert answer.decision.decisions[0].limit == 10
    assert answer.decision.decisions[0].remaining < 9
    assert not asked(g, request(user="b")).allowed
    assert [(t.name, t.passed) for t in g.snapshot().rules] == [("user", 4), ("new", 1)]
    assert g.snapshot().reloads == 1


def test_a_request_sees_one_version():
    """A request that began under one version ends under it."""
    g = gate(rule("login", "fixed window 1/min", charge=Charge(((401, 401),))))
    answer = asked(g, request())
    before = g.policy
    g.reload(policy(rule("login", "fixed window 5/min")))
    assert answer.policy is before
    answer.settle(200)  # given back, by the header fields of that version
    assert answer.decision.limit == 1
    assert asked(g, request()).decision.remaining == 4


def test_reloading_during_requests():
    """Reloads during requests lose no request and no count."""
    g = gate(rule("all", "token bucket 1/h burst 1000"))
    versions = [policy(rule("all", "token bucket 1/h burst 1000"), rule("more", "99999/s")), g.policy]
    stop = threading.Event()
    passed = []

    def work():
        while not stop.is_set():
            passed.append(asked(g, request(), "quick").allowed)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for i in range(200):
        g.reload(versions[i % 2])
    while sum(passed) < 1000:
        stop.wait(0.001)
    stop.set()
    for thread in threads:
        thread.join()
    assert sum(passed) == 1000
    assert g.snapshot().requests == len(passed)


def test_a_bad_new_version_is_refused_and_counted():
    """`reload_refused` changes nothing, and publishes an event."""
    g = gate(rule("all", "1/s"))
    heard = []
    g.events.on("reload refused", heard.append)
    g.reload_refused(ValueError("line 3"))
    assert g.snapshot().reloads_refused == 1
    assert str(heard[0].error) == "line 3"


def test_a_new_budget_holds_and_guards_do_not_pile_up():
    """A reload with another budget enforces it; one that changes neither URL nor budget keeps store and guard."""
    said = "store: redis://127.0.0.1:{}\nbudget: {}\nlimits: [{{name: all, key: ip, limit: 5/s}}]"
    with Gate(Policy.read(said.format(1, "20ms"))) as g:
        first = g.store
        g.reload(Policy.read(said.format(1, "50ms")))
        assert (g.store.budget_us, g.store.inner.timeout_us) == (50_000, 50_000)
        assert g.store is not first
        second = g.store
        g.reload(Policy.read(said.format(1, "50ms")))
        assert g.store is second
