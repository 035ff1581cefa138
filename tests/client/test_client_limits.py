"""Waiting for a server's quota on a virtual clock: order, spread, cancellation, closing; nothing is lost or sent twice."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from bisect import bisect_right

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_server import Lost, Reply, SimulatedServer, turns

from effort import scaled
from limitkeeper import (
    AsyncLimiter,
    ConfigurationError,
    FixedWindow,
    Limiter,
    MemoryStore,
    RateLimited,
    SlidingWindowLog,
    TokenBucket,
)
from limitkeeper.client import ClientClosed, ClientLimits, RetriesExhausted, Retry
from limitkeeper.client.adaptive_throttle import AdaptiveThrottle
from limitkeeper.client.learned_quota import LearnedQuota
from limitkeeper.client.response_fields import Quota, ServerHints
from limitkeeper.stores.sans_io import run
from virtual_time import VirtualClock

S = 1_000_000


def most_in(starts, window_us):
    """The most starts in any half-open window."""
    starts = sorted(starts)
    return max(bisect_right(starts, start + window_us - 1) - i for i, start in enumerate(starts))


def on_virtual_time(main):
    """Runs a test of tasks with a clock that moves when all of them wait."""

    async def body():
        clock = VirtualClock()
        await main(clock, clock.now_us())

    asyncio.run(body())


# The spread of retries


@pytest.mark.parametrize(
    ("fields", "seed"), [({"retry-after": "1"}, 1), ({}, 2), ({"ratelimit": '"a";r=0;t=1'}, 3)], ids=["asked", "backoff", "reset"]
)
def test_a_thousand_refused_clients_return_spread(fields, seed):
    """Of 1000 clients that are refused at once at most 10 % return in any twentieth of the spread."""

    async def main(clock, begun):
        refused = []

        def answer(request):
            if request in refused:
                return Reply()
            refused.append(request)
            return Reply(503, fields)

        server = SimulatedServer(clock, answer)
        draws = random.Random(seed)
        each = [ClientLimits(clock=clock, random=random.Random(draws.random()).random) for _ in range(1000)]
        tasks = [asyncio.create_task(server.call(limits, str(i))) for i, limits in enumerate(each)]
        await clock.run_until(begun + 10 * S, turns)
        await asyncio.gather(*tasks)
        returns = [at for at, _ in server.arrivals[1000:]]
        spread = Retry().spread_us(1)
        assert len(returns) == 1000
        assert begun + S * bool(fields) <= min(returns)
        assert max(returns) <= begun + S * bool(fields) + spread
        assert most_in(returns, spread // 20) <= 100

    on_virtual_time(main)


def test_waiters_of_one_client_return_spread_and_in_order():
    """Calls that waited for a blocked host start in order of arrival, evenly over the spread: at most 10 % in a twentieth."""

    async def main(clock, begun):
        server = SimulatedServer(clock, lambda request: Reply(503, {"retry-after": "2"}) if request == "first" else Reply())
        limits = ClientLimits(clock=clock, retry=Retry(attempts=1), random=random.Random(3).random)
        assert (await server.call(limits, "first")).status == 503
        tasks = [asyncio.create_task(server.call(limits, str(i))) for i in range(200)]
        await turns()
        assert limits.waiting() == 200
        await clock.run_until(begun + 5 * S, turns)
        await asyncio.gather(*tasks)
        assert [request for _, request in server.arrivals[1:]] == [str(i) for i in range(200)]
        starts = [at for at, _ in server.arrivals[1:]]
        assert begun + 2 * S <= starts[0]
        assert starts[-1] <= begun + 2 * S + Retry().spread_us(1)
        assert most_in(starts, Retry().spread_us(1) // 20) <= 20
        assert limits.waiting() == 0

    on_virtual_time(main)


# A learned quota


class WindowServer:
    """A server with a fixed window of `limit` calls a second that announces the remaining quota."""

    def __init__(self, clock, limit):
        self.clock, self.limit, self.refused = clock, limit, 0
        self.window, self.used = -1, 0

    def __call__(self, request):
        window = self.clock.now_us() // S
        if window != self.window:
            self.window, self.used = window, 0
        reset = S - self.clock.now_us() % S
        policy = {"ratelimit-policy": f'"a";q={self.limit};w=1'}
        if self.used >= self.limit:
            self.refused += 1
            return Reply(429, {**policy, "ratelimit": '"a";r=0;t=1'})
        self.used += 1
        return Reply(200, {**policy, "ratelimit": f'"a";r={self.limit - self.used};t={-(-reset // S)}'})


@pytest.mark.parametrize("tasks", [1, 7])
def test_a_learned_quota_is_kept(tasks):
    """A client without a limit of its own learns the server's quota, and is not refused again."""

    async def main(clock, begun):
        windows = WindowServer(clock, 10)
        server = SimulatedServer(clock, windows, latency=0.01)
        limits = ClientLimits(clock=clock, random=random.Random(1).random)

        async def work():
            for _ in range(60):
                await server.call(limits)

        working = [asyncio.create_task(work()) for _ in range(tasks)]
        await clock.run_until(begun + 200 * S, turns)
        await asyncio.gather(*working)
        assert windows.refused == 0
        assert most_in([at for at, _ in server.arrivals], S) <= 20  # a fixed window on the server
        assert len(server.arrivals) == 60 * tasks

    on_virtual_time(main)


@settings(max_examples=scaled(200))
@given(st.integers(0, 8), st.integers(1, 8), st.lists(st.integers(0, S - 2), max_size=20))
def test_never_more_than_what_remains(remaining, in_flight, moments):
    """Until the reset exactly as many calls start as remained, less those in flight when the server reported it."""
    quota = LearnedQuota("api")
    numbers = [quota.take(0) for _ in range(in_flight)]
    quota.ended(numbers[0])
    quota.learn(ServerHints(None, (Quota("a", remaining, None, S, None),)), numbers[0], 0)
    started = [quota.take(moment) > 0 for moment in sorted(moments)]
    assert sum(started) == min(len(moments), max(0, remaining - (in_flight - 1)))
    assert quota.take(S) > 0


def test_an_older_response_does_not_replace_a_newer_one():
    """Of two responses that come in the wrong order the one to the later call counts."""
    quota = LearnedQuota("api")
    older, newer = quota.take(0), quota.take(0)
    quota.ended(newer)
    quota.learn(ServerHints(None, (Quota("a", 0, 5, S, S),)), newer, 1)
    quota.ended(older)
    quota.learn(ServerHints(None, (Quota("a", 4, 5, S, S),)), older, 2)
    assert quota.take(3) == -(S - 2)
    assert quota.take(1 + S) > 0  # the next window, with all of the limit
    assert quota.quotas(1 + S)[0].remaining == 4


def test_calls_in_flight_count():
    """What remains is reduced by the calls that are on their way, since the server may not have counted them."""
    quota = LearnedQuota("api")
    numbers = [quota.take(0) for _ in range(4)]
    quota.ended(numbers[0])
    quota.learn(ServerHints(None, (Quota("a", 5, None, S, None),)), numbers[0], 0)
    assert [quota.take(1) > 0 for _ in range(3)] == [True, True, False]


def test_a_wait_without_end():
    """Whatever the server's fields say, a refusal or an exhausted quota holds calls for an hour at most."""
    for said in (Quota("a", 0, 5, 400 * 86400 * S, S), Quota("a", 0, None, 10**15, None)):
        quota = LearnedQuota("api")
        quota.learn(ServerHints(None, (said,)), 1, 0)
        quota.block(0, 10**15)
        assert quota.take(3600 * S - 1) == -1
        assert quota.take(3600 * S) > 0


def test_units_that_are_not_requests():
    """A quota of tokens is charged with a call's tokens where they are known, and blocks only when nothing is left otherwise."""
    quota = LearnedQuota("api")
    said = ServerHints(None, (Quota("tokens", 100, 1000, S, S, "tokens"),))
    quota.learn(said, 1, 0)
    assert quota.wait_us(0, {"requests": 1, "tokens": 101}) == S
    assert quota.wait_us(0, {"requests": 1, "tokens": 100}) == 0
    assert quota.take(0) > 0
    assert quota.wait_us(S, {"requests": 1, "tokens": 5000}) == 0  # more than the limit: with all of it


# Own limits


def test_own_limits_wait_in_order():
    """Tasks wait in order of arrival, and no window of a second has more starts than the rate."""

    async def main(clock, begun):
        server = SimulatedServer(clock, lambda request: Reply(), latency=0.05)
        limits = ClientLimits("10/s", MemoryStore(clock=clock))
        tasks = [asyncio.create_task(server.call(limits, str(i))) for i in range(35)]
        await clock.run_until(begun + 10 * S, turns)
        await asyncio.gather(*tasks)
        assert [request for _, request in server.arrivals] == [str(i) for i in range(35)]
        starts = [at for at, _ in server.arrivals]
        assert most_in(starts, S) == 10
        assert starts[-1] == begun + 3 * S

    on_virtual_time(main)


def test_limits_are_shared_through_their_store():
    """Two clients on one store and name keep one rate together, however their limits are given."""

    async def main(clock, begun):
        store = MemoryStore(clock=clock)
        given = AsyncLimiter(SlidingWindowLog("10/s"), store, "sliding window log 10/s")
        for pair in ((ClientLimits("10/s", store), ClientLimits(given)), (ClientLimits(given), ClientLimits("10/s", store))):
            server = SimulatedServer(clock, lambda request: Reply())
            tasks = [asyncio.create_task(server.call(pair[i % 2])) for i in range(25)]
            await clock.run_until(clock.now_us() + 5 * S, turns)
            await asyncio.gather(*tasks)
            assert most_in([at for at, _ in server.arrivals], S) == 10

    on_virtual_time(main)


def test_a_key_for_each_request():
    """`key` gives each request its own share, here one for each customer of an API."""

    async def main(clock, begun):
        server = SimulatedServer(clock, lambda request: Reply())
        limits = ClientLimits("1/s", MemoryStore(clock=clock), key=lambda request: request)
        await asyncio.gather(*[server.call(limits, name) for name in ("a", "b", "c")])
        assert [at for at, _ in server.arrivals] == [begun] * 3

    on_virtual_time(main)


# Cancelling and closing


@pytest.mark.parametrize("waiting_for", ["own limit", "quota", "retry"])
def test_a_cancelled_call_leaves_nothing_behind(waiting_for):
    """A task that is cancelled while it waits is not sent; those behind it move up, and nothing stays counted."""

    async def main(clock, begun):
        refused = Reply(503, {"retry-after": "2"})
        server = SimulatedServer(clock, lambda request: refused if request == "first" else Reply())
        rate = "1/s" if waiting_for == "own limit" else None
        store = MemoryStore(clock=clock) if rate else None
        limits = ClientLimits(
            rate, store, clock=clock, retry=Retry(attempts=1 if waiting_for == "quota" else 4), random=lambda: 0.5
        )
        if waiting_for != "retry":
            await server.call(limits, "ready" if waiting_for == "own limit" else "first")
        cancelled = asyncio.create_task(server.call(limits, "first" if waiting_for == "retry" else "cancelled"))
        await turns()
        behind = asyncio.create_task(server.call(limits, "behind"))
        await turns()
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await clock.run_until(begun + 5 * S, turns)
        await behind
        assert [request for _, request in server.arrivals][1:] == ["behind"]
        assert server.arrivals[-1][0] <= begun + 2.5 * S
        assert limits.waiting() == 0
        assert limits._hosts["api"][0].in_flight() == 0

    on_virtual_time(main)


def test_a_call_that_is_cancelled_while_it_is_sent():
    """A task that is cancelled while the server answers is no longer in flight."""

    async def main(clock, begun):
        server = SimulatedServer(clock, lambda request: Reply(), latency=5)
        limits = ClientLimits(clock=clock)
        task = asyncio.create_task(server.call(limits))
        await turns()
        assert limits._hosts["api"][0].in_flight() == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert limits._hosts["api"][0].in_flight() == 0

    on_virtual_time(main)


def test_closing_with_waiting_tasks():
    """`aclose` ends calls that wait for a quota or a retry at once, for an own limit at their start; none is sent."""

    async def main(clock, begun):
        server = SimulatedServer(clock, lambda request: Reply(503, {"retry-after": "9"}))
        quota = ClientLimits(clock=clock, random=lambda: 0.5)
        own = ClientLimits("1/s", MemoryStore(clock=clock))
        calls = [asyncio.create_task(server.call(quota, f"quota {i}")) for i in range(3)]
        await turns()
        calls += [asyncio.create_task(server.call(quota, "behind"))]
        ready = SimulatedServer(clock, lambda request: Reply())
        calls += [asyncio.create_task(ready.call(own, f"own {i}")) for i in range(2)]
        await turns()
        sent = len(server.arrivals) + len(ready.arrivals)
        await quota.aclose()
        await own.aclose()
        await turns()
        assert [task.done() for task in calls] == [True, True, True, True, True, False]
        await clock.run_until(begun + S, turns)
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(end) for end in ends] == [ClientClosed] * 4 + [Reply] + [ClientClosed]
        assert len(server.arrivals) + len(ready.arrivals) == sent

    on_virtual_time(main)


def test_closing_with_waiting_threads(held, eventually):
    """`close` wakes threads that wait for a blocked host."""
    limits = ClientLimits(clock=held, retry=Retry(attempts=1))
    ends = []

    class Server(SimulatedServer):
        def send(self, request, left):
            return Reply(503, {"retry-after": "5"})

    def call():
        try:
            ends.append(run(limits.send("", Server(held, lambda request: Reply()))))
        except ClientClosed as error:
            ends.append(error)

    call()
    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    eventually(lambda: limits.waiting() == 3)
    limits.close()
    for thread in threads:
        thread.join(30)
    assert [type(end) for end in ends] == [Reply, ClientClosed, ClientClosed, ClientClosed]


# Failures and retries


def test_backoff_doubles_up_to_its_cap():
    """The spread of attempt n is base · 2^(n − 1), and never more than the cap."""
    retry = Retry(base="100ms", cap="1s")
    assert [retry.spread_us(n) for n in (1, 2, 3, 4, 5, 500)] == [100_000, 200_000, 400_000, 800_000, S, S]


def test_total_time_bounds_waits_and_attempts():
    """No attempt starts after the total time, whatever the number of attempts that are left."""

    async def main(clock, begun):
        server = SimulatedServer(clock, lambda request: Reply(503), latency=1)
        limits = ClientLimits(
            clock=clock, total="10s", retry=Retry(attempts=1000, budget="1000/s"), random=random.Random(5).random
        )
        task = asyncio.create_task(server.call(limits))
        await clock.run_until(begun + 60 * S, turns)
        with pytest.raises(RetriesExhausted) as caught:
            await task
        assert caught.value.reason == "time"
        assert server.arrivals[-1][0] < begun + 10 * S

    on_virtual_time(main)


def test_other_exceptions_are_not_retried():
    """An exception that is no failure of the network goes to the caller at once, without a note."""

    async def main(clock, begun):
        def answer(request):
            raise KeyError("a fault of the program")

        server = SimulatedServer(clock, answer)
        with pytest.raises(KeyError) as caught:
            await server.call(ClientLimits(clock=clock))
        assert len(server.arrivals) == 1
        assert not hasattr(caught.value, "__notes__")

    on_virtual_time(main)


def test_failures_of_the_network_are_retried():
    """A failure of the network is repeated after the backoff alone, and blocks no other call."""

    async def main(clock, begun):
        failed = []

        def answer(request):
            if request == "lost" and not failed:
                failed.append(request)
                raise Lost
            return Reply()

        server = SimulatedServer(clock, answer)
        limits = ClientLimits(clock=clock, random=lambda: 0.5)
        task = asyncio.create_task(server.call(limits, "lost"))
        await turns()
        await server.call(limits, "other")
        await clock.run_until(begun + S, turns)
        await task
        assert server.arrivals == [(begun, "lost"), (begun, "other"), (begun + 250_000, "lost")]

    on_virtual_time(main)


def test_hosts_are_bounded(monkeypatch):
    """The quotas of MAX_HOSTS hosts are kept; an idle host is evicted, a blocked one stays."""
    monkeypatch.setattr("limitkeeper.client.client_limits.MAX_HOSTS", 3)
    limits = ClientLimits()
    limits._host("blocked")[0].block(0, 1)
    for i in range(10):
        limits._host(str(i))
    assert list(limits._hosts) == ["blocked", "8", "9"]


def test_a_fork_inherits_no_locks_and_no_calls():
    """A child process starts with free locks and nothing in flight, whatever its parent was doing; what was learned stays."""
    quota, throttle = LearnedQuota("api"), AdaptiveThrottle()
    quota.take(0)
    quota.learn(ServerHints(None, (Quota("a", 9, None, S, None),)), 1, 0)
    with quota._lock, throttle._lock:
        child = os.fork()
        if child == 0:
            throttle.count(0, accepted=True)
            os._exit(0 if quota.take(1) > 0 and quota.in_flight() == 1 and quota.allowances else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# Adaptive throttling


def test_the_formula_of_adaptive_throttling():
    """The share is (requests − K · accepts) / (requests + 1), of the last two minutes."""
    throttle = AdaptiveThrottle(2)
    for i in range(100):
        throttle.count(i * 100_000, accepted=i < 20)
    assert throttle.probability(10 * S) == (100 - 2 * 20) / 101
    assert throttle.probability(119 * S) == (100 - 2 * 20) / 101
    assert throttle.probability(120 * S) == 0.0


def test_throttling_lets_a_recovered_server_through():
    """A server that rejects everything sees few calls; once it accepts again, they double every two minutes."""
    throttle, draws, now, sent = AdaptiveThrottle(2), random.Random(1), 0, []
    for second in range(1500):
        for _ in range(10):
            now += 100_000
            if not throttle.refuses(now, draws.random()):
                healthy = second < 100 or second >= 400
                throttle.count(now, accepted=healthy)
                sent.append(second)
    during = sum(300 <= second < 400 for second in sent) / 1000
    after = sum(second >= 1400 for second in sent) / 1000
    assert during < 0.05
    assert after == 1.0


# Settings


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ClientLimits(store="memory://"), "give limits= too"),
        (lambda: ClientLimits(throttle=0.5), "a number of at least 1, got 0.5"),
        (lambda: ClientLimits(retry=Retry(attempts=0)), "at least 1, got 0"),
    ],
)
def test_bad_settings(make, message):
    """An invalid setting is an error with the remedy."""
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_a_late_waiter_is_refused_at_once():
    """A call that could not start within its total time is refused while others wait, without waiting itself."""

    async def main(clock, begun):
        server = SimulatedServer(clock, lambda request: Reply(503, {"retry-after": "30"}))
        limits = ClientLimits(Limiter("1000/s", MemoryStore(clock=clock)), total="10s", retry=None)
        await server.call(limits)
        with pytest.raises(RateLimited) as caught:
            await server.call(limits)
        assert (caught.value.retry_after, clock.now_us()) == (30, begun)

    on_virtual_time(main)


@pytest.mark.parametrize("total", ["600s", "60s"], ids=["cancelled", "refused"])
def test_a_call_that_is_never_sent_costs_no_own_limit(total):
    """A call cancelled or refused while it waits for the server's quota gives back its start of the own limits."""

    async def main(clock, begun):
        sent = []

        def answer(request):
            sent.append(request)
            return Reply(200, {"ratelimit-policy": '"b";q=3;w=300', "ratelimit": f'"b";r={max(0, 3 - len(sent))};t=300'})

        store = MemoryStore(clock=clock)
        rates = {"calls": TokenBucket("20/s", burst=1), "day": FixedWindow("100/d")}
        limits = ClientLimits(rates, store=store, name="own", key=lambda request: "k", clock=clock, total=total)
        server = SimulatedServer(clock, answer)
        await server.call(limits, "first")
        tasks = [asyncio.create_task(server.call(limits, str(i))) for i in range(12)]
        await clock.run_until(begun + 2 * S, turns)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        own = Limiter(rates, store=store, name="own").peek("k")
        assert 100 - own.decisions[1].remaining == len(sent) == 3

    on_virtual_time(main)
