"""Waiting at a gate: bounded, in order, given back when the client disconnects."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest
from gates import asked, gate, key, policy, request, rule, until
from hypothesis import given
from hypothesis import strategies as st

from effort import effort
from limitkeeper import MemoryStore, SlidingWindowLog
from limitkeeper.policy.explain import RequestExplanation
from limitkeeper.policy.model import WAIT, Capacity, Charge, OnRefusal
from limitkeeper.rate import Rate
from limitkeeper.testing import ManualClock
from stand_ins import NOON, HeldClock, WrappedStore

RULES = [
    "token bucket 10/s burst 1",
    "leaky bucket queue 10/s capacity 50",
    "sliding window log 1 per 100 ms",
    "sliding window counter 1 per 100 ms",
]


def waiting(wait_ms, queue=100):
    """All places may be taken by one client: most tests have only one."""
    return OnRefusal(WAIT, wait_us=wait_ms * 1000, queue=queue, per_client=queue)


@pytest.mark.parametrize("text", ["fixed window 2/min", "sliding window log 2/min", "sliding window counter 2/min"])
def test_a_refusal_is_explained_with_the_retry_that_is_sent(text):
    """A wait is a part of the retry only where the limits can be charged at a later start."""
    g = gate(rule("all", text, on_refusal=waiting(5000)), clock=ManualClock(NOON))
    for _ in range(2):
        g.ask(request())
    explained = RequestExplanation(g.policy, request(), g.explain(request()))
    refused = g.ask(request())
    assert refused.refusal is not None
    assert explained.text().endswith(f"→ refused by all with 429: retry in {refused.refusal.retry_after} s")


def test_a_full_bucket_is_explained_as_it_is_answered():
    """A request that finds a leaky bucket queue full is explained as refused with 503, not as one that waits."""
    clock = HeldClock(1000)
    g = gate(rule("all", "leaky bucket queue 10/s capacity 3", on_refusal=waiting(10_000)), clock=clock)

    async def main():
        waiters = [asyncio.ensure_future(g.aask(request())) for _ in range(3)]
        await until(lambda: g.snapshot().rules[0].waiting == 2)
        explained = RequestExplanation(g.policy, request(), g.explain(request()))
        refusal = (await g.aask(request())).refusal
        assert refusal.status == 503
        assert explained.text().endswith(f"→ refused by all with 503: queue full, retry in {refusal.retry_after} s")
        clock.advance(1)
        await asyncio.gather(*waiters)

    asyncio.run(main())


LIMITS_THAT_WAIT = [*RULES[:3], "token bucket 10/s burst 3", "fixed window 3/s", "leaky bucket 5/s capacity 3"]


@effort(examples=200)
@given(
    st.lists(st.tuples(st.sampled_from(LIMITS_THAT_WAIT), st.sampled_from([50, 300, 2000])), min_size=1, max_size=3),
    st.lists(st.sampled_from([0, 0, 0.05, 0.2, 1]), min_size=1, max_size=12),
)
def test_waits_are_explained_as_they_happen(rules, pauses):
    """Before each of any requests under any waiting rules: the verdict is what the request gets, with its wait or its retry."""
    clock = ManualClock(NOON)
    g = gate(*(rule(f"r{i}", text, on_refusal=waiting(wait)) for i, (text, wait) in enumerate(rules)), clock=clock)
    for pause in pauses:
        clock.advance(pause)
        verdict = RequestExplanation(g.policy, request(), g.explain(request())).text().splitlines()[-1]
        answer = g.ask(request())
        if answer.refusal is not None:
            assert verdict.startswith("→ refused by ")
            assert verdict.endswith(f" with {answer.refusal.status}: retry in {answer.refusal.retry_after} s")
        elif answer.wait_us:
            assert verdict.startswith(f"→ waits {answer.wait_us / 1e6:.3g} s for ")
        else:
            assert verdict == "→ allowed"


@pytest.mark.parametrize("text", RULES)
@pytest.mark.parametrize("mode", ["ask", "aask"])
def test_a_request_waits_for_its_turn(text, mode):
    """A rule that waits lets a request pass later rather than refuse it, up to its time."""
    clock = ManualClock(1000)
    g = gate(rule("all", text, on_refusal=waiting(250)), clock=clock)
    assert asked(g, request(), mode).wait_us == 0
    begun = clock.now_us()
    second = asked(g, request(), mode)
    assert second.allowed
    assert second.wait_us == clock.now_us() - begun > 0
    tally = g.snapshot().rules[0]
    assert (tally.passed, tally.waited, tally.refused, tally.waiting) == (2, 1, 0, 0)


def test_no_request_waits_longer_than_the_shortest_wait_of_its_rules():
    """Beyond its time a request is refused at once, without sleeping."""
    clock = ManualClock(1000)
    g = gate(rule("all", "1/s", on_refusal=waiting(200)), clock=clock)
    asked(g, request())
    begun = clock.now_us()
    answer = asked(g, request())
    assert not answer.allowed
    assert answer.refusal.status == 429
    assert clock.now_us() == begun


@pytest.mark.parametrize("mode", ["ask", "aask"])
def test_of_two_rules_the_shortest_wait_decides(mode):
    """Where two rules make a request wait, neither lets it wait longer than its own maximum."""
    clock = ManualClock(1000)
    g = gate(rule("calm", "1/s", on_refusal=waiting(10_000)), rule("hasty", "1/s", on_refusal=waiting(999)), clock=clock)
    asked(g, request(), mode)
    assert not asked(g, request(), mode)
    assert clock.now_us() == 1000_000_000
    assert [one.waiting for one in g.snapshot().rules] == [0, 0]
    g.reload(policy(rule("calm", "1/s", on_refusal=waiting(10_000)), rule("hasty", "1/s", on_refusal=waiting(1_000))))
    assert asked(g, request(), mode).wait_us == 1_000_000


COUNTER = "sliding window counter 1/s"


@pytest.mark.parametrize(
    "texts", [(COUNTER,), (COUNTER, "token bucket 1/s burst 1"), ("fixed window 1/s",)], ids=["one", "two", "window"]
)
def test_limits_that_can_not_be_reserved_are_waited_for_in_order(texts):
    """Where no future start can be charged, waiters ask again; first come first served, as everywhere."""
    clock = HeldClock(1000)
    g = gate(*[rule(text, text, on_refusal=waiting(10_000)) for text in texts], clock=clock)

    async def main():
        order = []

        async def one(i):
            order.append((i, (await g.aask(request())).allowed))

        tasks = []
        for i in range(4):
            tasks.append(asyncio.ensure_future(one(i)))
            await asyncio.sleep(0.01)
        assert order == [(0, True)]
        for _ in range(60):
            clock.advance(0.25)
            for _ in range(5):
                await asyncio.sleep(0.001)
        await asyncio.wait_for(asyncio.gather(*tasks), 5)
        assert order == [(i, True) for i in range(4)]

    asyncio.run(main())
    assert [(one.waited, one.waiting) for one in g.snapshot().rules] == [(3, 0)] * len(texts)


class HoldingStore(WrappedStore):
    """A remote store whose decisions, but no peeks, wait for `hold`."""

    hold: asyncio.Event | None = None

    async def adecide(self, claims, max_wait_us=0, commit=True, **options):
        if commit and self.hold is not None:
            await self.hold.wait()
        return self.decide(claims, max_wait_us, commit=commit, **options)


def test_a_request_whose_time_is_over_before_it_is_first_is_refused():
    """What the limit has left then is for the request ahead, whose decision is on its way: nothing passes uncharged."""
    clock = HeldClock(1000)
    store = HoldingStore(MemoryStore(clock=clock))
    g = gate(rule("all", COUNTER, on_refusal=waiting(2500)), store=store)

    async def main():
        assert await g.aask(request())
        tasks = []
        for sleeping in (1, 2):
            tasks.append(asyncio.ensure_future(g.aask(request())))
            await until(lambda sleeping=sleeping: len(clock.sleeps) == sleeping)
        store.hold = asyncio.Event()
        clock.advance(2.1)
        await asyncio.sleep(0.01)
        clock.advance(0.5)
        behind = await tasks[1]
        store.hold.set()
        assert (behind.allowed, (await tasks[0]).allowed) == (False, True)
        assert behind.refusal.status == 429

    asyncio.run(main())
    tally = g.snapshot().rules[0]
    assert (tally.passed, tally.waited, tally.refused, tally.waiting) == (2, 1, 1, 0)


def test_a_rule_that_rejects_is_not_waited_for():
    """When one of the refusing rules rejects, no request waits."""
    g = gate(rule("slow", "10/s burst 1", on_refusal=waiting(500)), rule("hard", "10/s burst 1"))
    asked(g, request())
    assert not asked(g, request()).allowed
    assert g.snapshot().rules[0].waited == 0


def test_quick_leaves_waiting_to_others():
    """`quick` never waits: it returns None and changes nothing."""
    g = gate(rule("all", "10/s burst 1", on_refusal=waiting(500)))
    assert g.ask_nowait(request()) is not None
    assert g.ask_nowait(request()) is None
    assert g.snapshot().requests == 1


def test_tasks_pass_in_order_and_a_full_queue_is_503():
    """So many wait, first come first served; a request that finds the queue full is refused at once."""
    clock = HeldClock(1000)
    g = gate(rule("all", "10/s burst 1", on_refusal=waiting(10_000, queue=3)), clock=clock)

    async def main():
        order = []

        async def one(i):
            answer = await g.aask(request())
            order.append((i, answer.allowed, answer.refusal and answer.refusal.status))

        tasks = []
        for i in range(6):
            tasks.append(asyncio.ensure_future(one(i)))
            await until(lambda i=i: len(order) + g.snapshot().rules[0].waiting == i + 1)
        assert order == [(0, True, None), (4, False, 503), (5, False, 503)]
        assert g.snapshot().rules[0].waiting == 3
        for turn in range(3):
            clock.advance(0.1)
            await until(lambda turn=turn: len(order) == 4 + turn)
        await asyncio.gather(*tasks)
        return order

    order = asyncio.run(main())
    assert order[3:] == [(1, True, None), (2, True, None), (3, True, None)]
    tally = g.snapshot().rules[0]
    assert (tally.queue_full, tally.waited, tally.waiting) == (2, 3, 0)


def test_a_client_that_goes_gives_its_place_back():
    """A cancelled request takes nothing: the one behind it moves up."""
    clock = HeldClock(1000)
    g = gate(rule("all", "1/s burst 1", on_refusal=waiting(10_000)), clock=clock)

    async def main():
        await g.aask(request())
        gone = asyncio.ensure_future(g.aask(request()))
        await until(lambda: g.snapshot().rules[0].waiting == 1)
        behind = asyncio.ensure_future(g.aask(request()))
        await until(lambda: g.snapshot().rules[0].waiting == 2)
        gone.cancel()
        await until(gone.done)
        clock.advance(1)
        answer = await asyncio.wait_for(behind, 30)
        assert answer.allowed
        assert gone.cancelled()

    asyncio.run(main())
    assert g.snapshot().rules[0].waiting == 0


def test_threads_wait_too():
    """In threads the same: each sleeps once, all pass."""
    clock = HeldClock(1000)
    g = gate(rule("all", "10/s burst 1", on_refusal=waiting(10_000)), clock=clock, waiting_threads=4)
    done = []
    threads = [threading.Thread(target=lambda: done.append(g.ask(request()).allowed)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for _ in range(3000):
        if len(done) == 5:
            break
        clock.advance(0.05)
        threading.Event().wait(0.01)
    for thread in threads:
        thread.join(30)
    assert done == [True] * 5


@pytest.mark.skipif(not hasattr(os, "fork"), reason="about forks")
def test_no_request_waits_in_a_forked_child():
    """A worker that was forked while others waited has all places of its queue."""
    clock = HeldClock(1000)
    g = gate(rule("all", "10/s burst 1", on_refusal=waiting(10_000, queue=1)), clock=clock)
    asked(g, request())

    async def main():
        waiter = asyncio.ensure_future(g.aask(request()))
        await asyncio.sleep(0)
        assert g.snapshot().rules[0].waiting == 1
        child = os.fork()
        if child == 0:
            os._exit(g.snapshot().rules[0].waiting)
        assert os.waitpid(child, 0)[1] == 0
        assert g.snapshot().rules[0].waiting == 1
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)

    asyncio.run(main())
    assert g.snapshot().rules[0].waiting == 0


def test_a_reload_does_not_make_a_queue_longer():
    """Waiting requests count for the next version too: its queue is bounded as configured."""
    clock = HeldClock(1000)
    one = rule("all", "1/s burst 1", on_refusal=waiting(10_000, queue=1))
    g = gate(one, clock=clock)

    async def main():
        await g.aask(request())
        first = asyncio.ensure_future(g.aask(request()))
        await until(lambda: g.snapshot().rules[0].waiting == 1)
        g.reload(policy(one))
        assert g.snapshot().rules[0].waiting == 1
        assert (await g.aask(request())).refusal.status == 503
        clock.advance(1)
        assert (await asyncio.wait_for(first, 30)).allowed
        assert g.snapshot().rules[0].waiting == 0

    asyncio.run(main())


CLOSING = [
    *("fixed window 100/min", "fixed window 100/min align first", "leaky bucket queue 100/s capacity 200"),
    *("token bucket 1/s burst 3", "leaky bucket 1/s capacity 3", "sliding window log 3/s"),
]


@pytest.mark.parametrize("text", CLOSING)
def test_a_waiting_request_blocks_no_other_client(text):
    """A client that waits for its own bucket delays no other client in a shared limit."""
    clock = HeldClock(60 * 1000 + 55)
    mine = rule("mine", "1/s burst 1", key=key("user"), on_refusal=waiting(10_000))
    g = gate(mine, rule("all", text), clock=clock)

    async def main():
        await g.aask(request(user="patient"))
        clock.advance(0.01)
        waiters = [asyncio.ensure_future(g.aask(request(user="patient"))) for _ in range(8)]
        await asyncio.sleep(0.01)
        assert g.snapshot().rules[0].waiting == 8
        assert (await g.aask(request(user="other"))).allowed
        for _ in range(8):
            clock.advance(1)
            await asyncio.sleep(0.01)
        assert all(answer.allowed and len(answer.decision.decisions) == 2 for answer in await asyncio.gather(*waiters))

    asyncio.run(main())
    assert [(t.passed, t.refused, t.waiting) for t in g.snapshot().rules] == [(10, 0, 0), (10, 0, 0)]


def test_a_waiting_request_is_not_a_running_one():
    """A request that waits takes no place of `concurrent` before it runs, and gives it back when it has ended."""
    clock = HeldClock(1000)
    mine = rule("mine", "1/s burst 1", key=key("user"), on_refusal=waiting(10_000))
    g = gate(mine, rule("running", (), concurrent=SlidingWindowLog(1, per=60)), clock=clock)

    async def main():
        await (await g.aask(request(user="patient"))).asettle(200)
        waiter = asyncio.ensure_future(g.aask(request(user="patient")))
        await until(lambda: g.snapshot().rules[0].waiting == 1)
        other = await g.aask(request(user="other"))
        assert other.allowed
        await other.asettle(200)
        clock.advance(1)
        waited = await asyncio.wait_for(waiter, 30)
        assert waited.allowed
        assert (await g.aask(request(user="third"))).refusal.status == 503
        await waited.asettle(200)
        assert (await g.aask(request(user="third"))).allowed

    asyncio.run(main())


class LateClock(ManualClock):
    """A clock whose sleepers wake up a millisecond late, as threads do."""

    def sleep(self, seconds: float, wake: threading.Event | None = None) -> None:
        super().sleep(seconds + 0.001, wake)


def test_a_capacity_that_refuses_after_a_wait_takes_no_place():
    """What was charged at the end of a wait is given back where a capacity refuses the request."""
    clock = LateClock(1000)
    mine = rule("mine", "1/s burst 1", key=key("user"), on_refusal=waiting(10_000))
    running = rule("running", (), concurrent=SlidingWindowLog(1, per=60))
    g = gate(mine, running, rule("full", (), capacity=Capacity(Rate(1, 60_000_000))), clock=clock)
    asked(g, request(user="a")).settle(200)
    refused = asked(g, request(user="a"))
    assert (refused.wait_us, refused.refusal.violated) == (1_001_000, ("full",))
    assert asked(g, request(user="b")).refusal.violated == ("full",)


@pytest.mark.parametrize("shared", ["sliding window log 2/min", "fixed window 2/min", "token bucket 2/min"])
def test_a_refund_after_a_wait_finds_each_charge(shared):
    """What was charged at the end of a wait, and what was reserved before, is given back where the outcome does not count."""
    clock = LateClock(60 * 1000)
    failures = Charge(statuses=((500, 599),))
    mine = rule("mine", "sliding window log 1/s", key=key("user"), on_refusal=waiting(2_000), charge=failures)
    g = gate(mine, rule("all", shared, charge=failures), clock=clock)
    asked(g, request(user="a")).settle(500)
    clock.advance(0.25)
    waited = asked(g, request(user="a"))
    assert waited.wait_us == 751_000
    waited.settle(200)
    assert asked(g, request(user="a"), "quick").allowed


@pytest.mark.parametrize("mode", ["ask", "aask"])
def test_a_turn_that_another_limit_refuses_goes_back(mode):
    """A request that has waited, and finds a full window that it had not reserved, is refused by it and is charged nothing."""
    clock = ManualClock(60 * 1000)
    mine = rule("mine", "1/s burst 1", key=key("user"), on_refusal=waiting(2_000))
    g = gate(mine, rule("all", "fixed window 2/min"), clock=clock)
    asleep = clock.asleep if mode == "aask" else clock.sleep
    assert asked(g, request(user="a"), mode).allowed

    def overtaken():
        assert asked(g, request(user="b"), "quick").allowed

    async def later(seconds, wake=None):
        overtaken()
        await asleep(seconds, wake)

    def sooner(seconds, wake=None):
        overtaken()
        asleep(seconds, wake)

    clock.asleep, clock.sleep = later, sooner
    answer = asked(g, request(user="a"), mode)
    assert (answer.allowed, answer.refusal.violated, answer.refusal.retry_after) == (False, ("all",), 59)
    clock.advance(59)
    assert asked(g, request(user="a"), "quick").allowed
    assert [(t.passed, t.refused, t.waiting) for t in g.snapshot().rules] == [(3, 0, 0), (3, 1, 0)]


def test_a_request_delayed_by_two_rules_waits_for_both():
    """A start of one bucket does not replace that of another one: the request waits for both, within both maximum waits."""
    clock = ManualClock(1000)
    mine = rule("mine", "1/s burst 1", key=key("user"), on_refusal=waiting(5_000))
    g = gate(mine, rule("paced", "leaky bucket queue 10/s capacity 50", on_refusal=waiting(5_000)), clock=clock)
    assert asked(g, request(user="a")).allowed
    clock.advance(0.5)
    sleep = clock.sleep

    def overtaken(seconds, wake=None):
        clock.sleep = sleep
        sleep(seconds, wake)
        assert asked(g, request(user="b"), "quick").allowed

    clock.sleep = overtaken
    answer = asked(g, request(user="a"))
    assert (answer.allowed, answer.wait_us) == (True, 600_000)


def test_a_request_cancelled_while_it_waits_for_the_second_gives_the_first_back():
    """A client that disconnects after its first wait is charged nothing."""
    clock = HeldClock(1000)
    mine = rule("mine", "1/s burst 1", key=key("user"), on_refusal=waiting(5_000))
    g = gate(mine, rule("paced", "leaky bucket queue 2/s capacity 50", on_refusal=waiting(5_000)), clock=clock)

    async def main():
        await g.aask(request(user="a"))
        clock.advance(0.5)
        gone = asyncio.ensure_future(g.aask(request(user="a")))
        await asyncio.sleep(0.01)
        clock.advance(0.5)
        assert g.ask_nowait(request(user="b")).allowed
        await asyncio.sleep(0.01)
        assert not g.explain(request(user="a"))[0].decision.allowed
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        await asyncio.sleep(0.01)
        assert g.explain(request(user="a"))[0].decision.allowed

    asyncio.run(main())
    assert [tally.waiting for tally in g.snapshot().rules] == [0, 0]


# Places ------------------------------------------------------------------------------------------------------------------


def all_at_once(g, requests):
    """Begins all requests, and returns their tasks when each of them waits or is over."""

    async def begin():
        before = g.snapshot().rules[0].waiting
        tasks = [asyncio.ensure_future(g.aask(one)) for one in requests]
        await until(lambda: sum(task.done() for task in tasks) + g.snapshot().rules[0].waiting - before == len(tasks))
        return tasks

    return begin()


async def statuses_of(tasks, clock):
    """The statuses of all requests; the clock runs until they are over."""
    while not all(task.done() for task in tasks):
        clock.advance(0.25)
        await asyncio.sleep(0.001)
    return [task.result().refusal.status if task.result().refusal else 200 for task in tasks]


@pytest.mark.parametrize("keyed", [True, False], ids=["by key", "by address"])
@pytest.mark.parametrize(("queue", "per_client", "places"), [(20, 0, 5), (20, 3, 3), (20, 20, 20), (3, 0, 1)])
def test_one_client_has_a_part_of_the_queue(keyed, queue, per_client, places):
    """A client beyond its part, by default a quarter, is refused by its limit; the other places are left to the others. Where a
    rule has no key of one client, a client is an address."""
    clock = HeldClock(1000)
    waits = OnRefusal(WAIT, wait_us=60_000_000, queue=queue, per_client=per_client)
    g = gate(rule("all", "1/s burst 1", key=key("user") if keyed else (), on_refusal=waits), clock=clock)
    mine = {"user": "greedy"} if keyed else {"peer": "192.0.2.66"}

    async def main():
        greedy = await all_at_once(g, [request(**mine) for _ in range(queue + 1)])
        assert g.snapshot().rules[0].waiting == min(places, queue)
        if places < queue:
            other = {"user": "other"} if keyed else {"peer": "192.0.2.7"}
            patient = await all_at_once(g, [request(**other) for _ in range(2)])
            assert g.snapshot().rules[0].waiting > places
            assert 200 in await statuses_of(patient, clock)
        statuses = await statuses_of(greedy, clock)
        assert (statuses.count(200), statuses.count(429)) == (1 + places, queue - places)

    asyncio.run(main())
    waiting = g.compiled.rules[0].waiting
    assert (waiting.requests, waiting.clients) == (set(), {})


def test_clients_without_a_key_share_no_part():
    """Under `unidentified: share` all unidentified clients have one key, so a client is an address there too."""
    clock = HeldClock(1000)
    waits = OnRefusal(WAIT, wait_us=60_000_000, queue=8)
    g = gate(rule("all", "1/s burst 1", key=key("user"), unidentified="share", on_refusal=waits), clock=clock)

    async def main():
        tasks = await all_at_once(g, [request(peer=f"192.0.2.{i % 2}") for i in range(12)])
        assert g.snapshot().rules[0].waiting == 4
        await statuses_of(tasks, clock)

    asyncio.run(main())


@pytest.mark.parametrize("keyed", [True, False])
def test_a_full_bucket_is_a_full_queue(keyed):
    """Beyond the capacity of a leaky bucket queue a request that would wait is refused with 503, and counted as such; what would
    wait too long is refused with 429."""
    clock = HeldClock(1000)
    text = "leaky bucket queue 50/s capacity 10"
    g = gate(rule("all", text, key=key("user") if keyed else (), on_refusal=waiting(10_000)), clock=clock)

    async def main():
        tasks = await all_at_once(g, [request(user="a") for _ in range(20)])
        assert await statuses_of(tasks, clock) == [200] * 10 + [503] * 10
        refusals = [task.result().refusal for task in tasks[10:]]
        assert {(one.reason, one.message) for one in refusals} == {
            ("queue full", "Too many requests are waiting. Retry after 1s.")
        }

    asyncio.run(main())
    tally = g.snapshot().rules[0]
    assert (tally.passed, tally.queue_full, tally.refused, tally.waited) == (10, 10, 10, 9)
    g.reload(policy(rule("all", text, on_refusal=waiting(100))))

    async def hasty():
        tasks = await all_at_once(g, [request(user="b") for _ in range(20)])
        assert await statuses_of(tasks, clock) == [200] * 6 + [429] * 14

    asyncio.run(hasty())


@pytest.mark.parametrize("threads", [1, 3])
def test_waiting_requests_hold_few_threads(threads):
    """A waiting thread serves no other request: beyond `waiting_threads`, for all gates of the process together, a request in a
    thread is refused with 503; tasks hold no thread and are not counted."""
    clock = HeldClock(1000)
    one = rule("all", "1/s burst 1", on_refusal=waiting(60_000))
    gates = [gate(one, clock=clock, waiting_threads=threads) for _ in range(2)]
    for g in gates:
        asked(g, request(), "quick")
    done = []
    held = [threading.Thread(target=lambda g=g: done.append(g.ask(request()))) for g in (gates * threads)[:threads]]
    for thread in held:
        thread.start()

    async def main():
        await until(lambda: sum(g.snapshot().rules[0].waiting for g in gates) == threads)
        for g in gates:
            refusal = (await asyncio.to_thread(g.ask, request())).refusal
            assert (refusal.reason, refusal.status) == ("queue full", 503)
        tasks = await all_at_once(gates[0], [request()])
        while not (tasks[0].done() and len(done) == threads):
            clock.advance(0.25)
            await asyncio.sleep(0.001)
        assert tasks[0].result().allowed

    asyncio.run(main())
    for thread in held:
        thread.join(30)
    assert [evaluation.allowed for evaluation in done] == [True] * threads
    assert sum(g.snapshot().rules[0].queue_full for g in gates) == 2


@pytest.mark.parametrize(("threads", "per_client", "places"), [(8, 0, 2), (8, 5, 5), (3, 0, 1)])
def test_one_client_has_a_part_of_the_threads(threads, per_client, places):
    """Where threads are fewer than places, one client can't hold all of them: beyond its part it is refused with 429, and another
    one waits."""
    clock = HeldClock(1000)
    waits = OnRefusal(WAIT, wait_us=60_000_000, queue=100, per_client=per_client)
    g = gate(rule("all", "1/s burst 1", key=key("ip"), on_refusal=waits), clock=clock, waiting_threads=threads)
    for peer in ("192.0.2.1", "192.0.2.2"):
        asked(g, request(peer=peer), "quick")
    done = []
    held = [
        threading.Thread(target=lambda peer=peer: done.append(g.ask(request(peer=peer)).allowed))
        for peer in ["192.0.2.1"] * places + ["192.0.2.2"]
    ]

    async def main():
        for number, thread in enumerate(held, 1):
            if number > places:
                refusal = (await asyncio.to_thread(g.ask, request(peer="192.0.2.1"))).refusal
                assert (refusal.reason, refusal.status) == ("quota", 429)
            thread.start()
            await until(lambda n=number: g.snapshot().rules[0].waiting == n)
        while len(done) < len(held):
            clock.advance(0.25)
            await asyncio.sleep(0.001)

    asyncio.run(main())
    for thread in held:
        thread.join(30)
    assert done == [True] * (places + 1)


@pytest.mark.parametrize("mode", ["ask", "aask"])
@pytest.mark.parametrize("slow", ["token bucket 100/day burst 100", "leaky bucket 100/day capacity 100"])
def test_refunds_of_requests_that_waited_reach_a_slow_bucket(slow, mode):
    """Requests that another rule delayed are refunded whole where their outcome does not count, also in a bucket that refills in
    hours."""
    failures = rule("failures", slow, key=key("user"), charge=Charge(((401, 401),)))
    g = gate(rule("smooth", "5/s burst 1", key=key("user"), on_refusal=waiting(2000)), failures)
    passed = [asked(g, request(user="a"), mode) for _ in range(10)]
    assert [one.wait_us > 0 for one in passed] == [False] + [True] * 9
    for one in passed:
        one.settle(200)
    assert asked(g, request(user="a"), mode).decision.decisions[1].remaining == 99
