"""RedisStore in asyncio: batches, cancelled and waiting tasks, and the end of a loop."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
import warnings
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import cycle, product
from typing import Any

import pytest

from fault_lab.scheduling_delay import Watch
from limitkeeper import (
    AsyncLimiter,
    Decision,
    FixedWindow,
    Limiter,
    RateLimited,
    SlidingWindowLog,
    StoreTimeout,
    StoreUnavailable,
    TokenBucket,
)
from limitkeeper.clock import SystemClock
from limitkeeper.stores.redis import RedisStore, async_connection
from limitkeeper.stores.redis.address import Endpoint, Login
from limitkeeper.stores.redis.async_connection import LATE, AsyncConnection, resolve
from limitkeeper.stores.redis.resp import Outcome, Unsent, pack
from servers.faketime import FaketimeValkey
from servers.proxy import Proxy
from servers.valkey import Valkey
from stand_ins import driven
from virtual_time import VirtualClock

HUNDRED = TokenBucket("1/h", burst=100)
#: What iterations of a loop may take on top of a budget; how late the machine is comes on top of that.
NOISE = 0.5


def calls(server: Valkey) -> dict[str, int]:
    """How often each command was called so far; those that scripts call are counted too, so only scripts are looked at."""
    with server.client() as client:
        result: Any = client.info("commandstats")
    return {name.removeprefix("cmdstat_"): int(stat["calls"]) for name, stat in result.items()}


def scripts(server: Valkey) -> int:
    counted = calls(server)
    return counted.get("evalsha", 0) + counted.get("eval", 0)


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        return await work()

    return asyncio.run(main())


async def turns() -> None:
    """Some iterations of the loop, however late the first of them comes: the request is on its way."""
    for _ in range(10):
        await asyncio.sleep(0.005)


async def warm(limiter: AsyncLimiter) -> AsyncLimiter:
    """The limit is known, the script loaded, the connection open."""
    await limiter.hit("warm")
    return limiter


def test_decisions_of_one_turn_travel_as_one_script_call(valkey: Valkey) -> None:
    """Thirty tasks, one call: and each gets its own answer, in the order of their calls."""

    async def work() -> None:
        async with RedisStore(valkey.url, prefix="turn", timeout="60s") as store:
            limiter = await warm(AsyncLimiter(TokenBucket("1/h", burst=20), store=store))
            before = scripts(valkey)
            found = await asyncio.gather(*[limiter.hit("k") for _ in range(30)])
            assert scripts(valkey) - before == 1
            assert [bool(one) for one in found] == [True] * 20 + [False] * 10
            assert [one.remaining for one in found[:20]] == list(range(19, -1, -1))

    run(work)


def test_a_large_turn_is_several_calls(valkey: Valkey) -> None:
    """200 tasks are seven calls of at most 32, so that the server works while the next is prepared."""

    async def work() -> None:
        async with RedisStore(valkey.url, prefix="large", timeout="60s") as store:
            limiter = await warm(AsyncLimiter(HUNDRED, store=store))
            before = scripts(valkey)
            found = await asyncio.gather(*[limiter.hit(f"k{i % 2}") for i in range(200)])
            assert scripts(valkey) - before == 7
            assert sum(map(bool, found)) == 200

    run(work)


def test_the_first_use_of_a_limit_is_shared(valkey: Valkey) -> None:
    """Sixty tasks that use a limit for the first time register it once, and are decided together."""

    async def work() -> None:
        async with RedisStore(valkey.url, prefix="first", timeout="60s") as store:
            limiter, before = AsyncLimiter(HUNDRED, store=store), scripts(valkey)
            assert sum(map(bool, await asyncio.gather(*[limiter.hit("k") for _ in range(60)]))) == 60
            assert scripts(valkey) - before <= 4  # two calls, each perhaps with its script

    run(work)


def test_many_keys_at_one_moment_are_one_call(valkey: Valkey) -> None:
    """`hit_many` of a thousand keys is one script call: they are decided at one moment."""
    with RedisStore(valkey.url, prefix="thousand", timeout="60s") as store:
        limiter = Limiter(HUNDRED, store=store)
        limiter.hit_many(["w", "x"])
        before = scripts(valkey)
        assert len({one.start_us for one in limiter.hit_many([f"k{number}" for number in range(1000)])}) == 1
        assert scripts(valkey) - before == 1


@pytest.mark.parametrize("limits", [1, 5])
def test_a_decision_is_one_round_trip_whatever_the_number_of_limits(valkey: Valkey, limits: int) -> None:
    """One limit or five, hit or reservation or many keys, sync and async: one script call."""
    some = {f"limit {size}": TokenBucket("1/h", burst=size) for size in range(100, 100 + limits)}

    async def work() -> None:
        async with RedisStore(valkey.url, prefix=f"trips {limits}", timeout="60s") as store:
            tasks, sync = await warm(AsyncLimiter(some, store=store)), Limiter(some, store=store)
            await tasks.reserve("warm"), await tasks.peek("warm")
            verbs: list[Callable[[], Any]] = [
                lambda: sync.hit("k"),
                lambda: sync.hit_many(["a", "b", "a"]),
                lambda: sync.reserve("k", max_wait=1),
                lambda: sync.peek("k"),
            ]
            for verb in verbs:
                verb()
                before = scripts(valkey)
                verb()
                assert scripts(valkey) - before == 1
            for request in (tasks.hit("k"), tasks.hit_many(["a", "b"]), tasks.reserve("k"), tasks.peek("k")):
                before = scripts(valkey)
                await request
                assert scripts(valkey) - before == 1

    run(work)


def test_different_rules_and_verbs_travel_together(valkey: Valkey) -> None:
    """A batch of hits, peeks and reservations on several rules is still one call."""

    async def work() -> None:
        async with RedisStore(valkey.url, prefix="mixed", timeout="60s") as store:
            bucket, window = AsyncLimiter(HUNDRED, store=store), AsyncLimiter(FixedWindow("5/h"), store=store)
            for warming in ("w", "x"):
                await asyncio.gather(*[one.hit(warming) for one in (bucket, window)], bucket.acquire(warming, timeout=1))
            before = scripts(valkey)
            found = await asyncio.gather(bucket.hit("b"), window.hit("b"), bucket.peek("b"), bucket.acquire("b", timeout=1))
            assert scripts(valkey) - before <= 2  # the second where this combination is new to the server
            assert [one.remaining for one in found] == [99, 4, 99, 98]

    run(work)


# Cancelling


def test_a_task_cancelled_before_the_batch_is_sent_has_requested_nothing(valkey: Valkey) -> None:
    """A task cancelled in the iteration of its call takes nothing; the others are answered."""

    async def work() -> None:
        async with RedisStore(valkey.url, prefix="early", timeout="60s") as store:
            limiter = await warm(AsyncLimiter(HUNDRED, store=store))
            tasks = [asyncio.ensure_future(limiter.hit("k")) for _ in range(10)]
            await asyncio.sleep(0)
            for task in tasks[::2]:
                task.cancel()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert [isinstance(one, asyncio.CancelledError) for one in found] == [True, False] * 5
            assert (await limiter.peek("k")).remaining == 95

    run(work)


def test_a_task_cancelled_on_the_way_disturbs_no_other(valkey: Valkey) -> None:
    """Replies go to the remaining tasks; the charges of the cancelled ones stay."""

    async def work() -> None:
        async with RedisStore(valkey.url, prefix="late", timeout="60s") as store:
            limiter = await warm(AsyncLimiter(HUNDRED, store=store))
            valkey.freeze()
            try:
                tasks = [asyncio.ensure_future(limiter.hit("k")) for _ in range(10)]
                await turns()
                for task in tasks[::2]:
                    task.cancel()
                await turns()
            finally:
                valkey.thaw()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert [one.remaining for one in found[1::2]] == [98, 96, 94, 92, 90]  # type: ignore[union-attr]
            assert (await limiter.hit("k")).remaining == 89

    run(work)


@pytest.mark.parametrize("limit", ["token bucket 1/day burst 100", "sliding window counter 100/day"])
@pytest.mark.parametrize("method", ["acquire", "reserve"])
def test_a_task_cancelled_without_a_wait_gives_back(valkey: Valkey, limit: str, method: str) -> None:
    """An acquire or reserve that is decided without a wait is given back as well, when its task is cancelled on the way."""

    async def asked(limiter: AsyncLimiter, longest: int) -> None:
        await getattr(limiter, method)("k", 3, longest)

    async def work() -> None:
        async with RedisStore(valkey.url, prefix=f"no wait {method}", timeout="60s") as store:
            for longest in (0, 60):
                limiter = await warm(AsyncLimiter({"a": limit, "b": limit}, store=store, name=str(longest)))
                given_up = 0
                for some in range(1, 8):
                    task = asyncio.ensure_future(asked(limiter, longest))
                    for _ in range(some):
                        await asyncio.sleep(0)
                    task.cancel()
                    given_up += isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)
                assert given_up
                assert (await limiter.peek("k")).remaining == 100 - 3 * (7 - given_up)

    run(work)


def test_those_behind_a_cancelled_waiter_move_up(valkey: Valkey) -> None:
    """Law 8 on a remote store: five tasks wait in a queue, the third leaves, and those behind it start one place earlier."""

    async def work() -> None:
        async with RedisStore(valkey.url, prefix="line", timeout="60s") as store:
            limiter, loop = await warm(AsyncLimiter(TokenBucket("2/s", burst=1), store=store)), asyncio.get_running_loop()
            begun = loop.time()
            await limiter.hit("k")
            tasks = [asyncio.ensure_future(limiter.acquire("k")) for _ in range(5)]
            await turns()
            tasks[2].cancel()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert isinstance(found.pop(2), asyncio.CancelledError)
            assert loop.time() - begun > 1.95  # 0.5 s each for four of them
            last_us = max(one.start_us for one in found)
            assert last_us - min(one.start_us for one in found) <= 1_500_100  # and not for five
            result = await limiter.peek("k")
            assert result.retry_after * 1e6 >= last_us + 450_000 - store.clock.now_us()

    run(work)


@pytest.mark.parametrize("costs", [(1,), (1, 2, 3)], ids=["one cost", "several costs"])
@pytest.mark.parametrize("rates", [["1/min burst 3"], ["1/min burst 3", "2/min burst 4"], ["fixed window 3/min"]], ids=str)
def test_waiters_that_leave_in_one_turn_leave_in_one_call(valkey: Valkey, rates: list[str], costs: tuple[int, ...]) -> None:
    """Whatever they cost, under which rate and for which key they wait: one script call gives all of it back."""

    async def work() -> None:
        async with RedisStore(valkey.url, prefix=f"leave {rates} {costs}", timeout="60s", clock=VirtualClock()) as store:
            limiters = [AsyncLimiter({"limit": rate}, store=store, name="name") for rate in rates]
            for limiter, key in product(limiters, "kl"):
                while await limiter.hit(key):
                    pass
            before = [await limiter.peek(key) for limiter, key in product(limiters, "kl")]
            mixed = zip(cycle(product(limiters, "kl")), cycle(costs), range(60))
            tasks = [asyncio.ensure_future(limiter.acquire(key, cost)) for (limiter, key), cost, _ in mixed]
            while sum(limiters[0].waiting(key) for key in "kl") < 60:
                await turns()
            counted = scripts(valkey)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            assert scripts(valkey) - counted <= 2  # the second where the server does not know this script
            assert [await limiter.peek(key) for limiter, key in product(limiters, "kl")] == before

    run(work)


# Budgets


def test_a_late_answer_is_no_longer_waited_for_and_spoils_nothing(valkey: Valkey, watch: Watch) -> None:
    """The budget ends the wait; when the server continues, the next call is answered by its own reply."""

    async def work() -> None:
        async with RedisStore(valkey.url, prefix="slow", timeout="60s") as store:
            limiter, loop = await warm(AsyncLimiter(HUNDRED, store=store)), asyncio.get_running_loop()
            store.timeout_us = 150_000
            valkey.freeze()
            try:
                begun = loop.time()
                result = await asyncio.gather(*[limiter.hit("k") for _ in range(70)], return_exceptions=True)
                took = loop.time() - begun
            finally:
                valkey.thaw()
            assert {type(one) for one in result} == {StoreTimeout}
            assert 0.14 < took < watch.allows(0.15 + NOISE)
            store.timeout_us = 60_000_000
            assert len({id(one) for one in result}) == 70  # each raises its own
            assert (await limiter.hit("other")).remaining == 99
            assert (await limiter.peek("k")).remaining <= 100

    run(work)


def test_a_silent_connection_is_left(valkey: Valkey) -> None:
    """After a second without a reply new calls get another connection."""

    async def work() -> None:
        async with RedisStore(valkey.url, prefix="silent", timeout="60s") as store:
            limiter = await warm(AsyncLimiter(HUNDRED, store=store))
            (stream,) = store.batchers.current().connections._open.values()
            store.timeout_us = 1_000_000
            valkey.freeze()
            try:
                with pytest.raises(StoreTimeout):
                    await limiter.hit("k")
            finally:
                valkey.thaw()
            store.timeout_us = 60_000_000
            assert await limiter.hit("k")
            (other,) = store.batchers.current().connections._open.values()
            assert stream is not other

    run(work)


# A busy event loop


def echo(connection: AsyncConnection, word: str, seconds: float = 60.0) -> asyncio.Future[Outcome]:
    """The reply to ECHO, due within so many seconds."""
    outcome: asyncio.Future[Outcome] = connection.loop.create_future()
    connection.write(pack([["ECHO", word]]), 1, connection.loop.time() + seconds, resolve(outcome))
    return outcome


def test_each_command_gets_its_own_reply_whatever_the_deadlines(valkey: Valkey) -> None:
    """A deadline less than half a millisecond away, for which uvloop makes no TimerHandle, shifts no replies."""

    async def work() -> None:
        connection = AsyncConnection(Endpoint("127.0.0.1", valkey.port), Login(), asyncio.get_running_loop(), 60.0)
        try:
            assert await echo(connection, "ready") == [b"ready"]
            near = echo(connection, "near", 0.0001)
            outcomes = await asyncio.gather(*[echo(connection, word) for word in ("one", "two", "three")])
            assert outcomes == [[b"one"], [b"two"], [b"three"]]
            assert await near == [b"near"] or isinstance(near.result(), StoreTimeout)
        finally:
            connection.close()

    asyncio.run(work())


def test_a_late_loop_takes_what_has_arrived() -> None:
    """A reply that arrives while a callback of the loop works counts, although the deadline is over when the loop reads it."""
    listener, (busy, other), works = socket.create_server(("127.0.0.1", 0)), socket.socketpair(), threading.Event()

    def serve() -> None:
        with listener, listener.accept()[0] as server:
            server.recv(1000)
            server.sendall(b"+PONG\r\n")
            server.recv(1000)
            other.send(b"x")
            works.wait()
            server.sendall(b"$4\r\nlate\r\n")
            with suppress(OSError):
                server.recv(1000)

    async def work() -> None:
        connection = AsyncConnection(Endpoint(*listener.getsockname()), Login(), asyncio.get_running_loop(), 60.0)

        def work_until_it_is_due() -> None:
            connection.loop.remove_reader(busy)
            works.set()
            assert connection._poll is not None
            assert connection._poll(60_000)
            time.sleep(0.2 + 2 * LATE)  # uvloop's time stands still meanwhile

        connection.loop.add_reader(busy, work_until_it_is_due)
        try:
            assert await echo(connection, "late", 0.2) == [b"late"]
        finally:
            connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    with busy, other:
        asyncio.run(work())
    thread.join()


def test_each_reply_to_a_loop_that_is_always_late_counts() -> None:
    """A call whose timer is late counts its reply although the timer of the call before it was late, too."""
    listener, works = socket.create_server(("127.0.0.1", 0)), threading.Event()

    def serve() -> None:
        with listener, listener.accept()[0] as server:
            server.recv(1000)
            server.sendall(b"+PONG\r\n")
            while server.recv(1000):
                works.wait()
                works.clear()
                server.sendall(b"$4\r\nlate\r\n")

    async def work() -> None:
        connection = AsyncConnection(Endpoint(*listener.getsockname()), Login(), asyncio.get_running_loop(), 60.0)

        def work_until_it_is_due() -> None:
            works.set()
            assert connection._poll is not None
            assert connection._poll(60_000)
            time.sleep(0.02 + 2 * LATE)

        try:
            await connection._connecting
            for _ in range(3):
                time.sleep(2 * LATE)  # a timer that was set again is due in the next iteration
                outcome = echo(connection, "late", 0.02)
                connection.loop.call_soon(work_until_it_is_due)
                assert await outcome == [b"late"]
        finally:
            connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    asyncio.run(work())
    thread.join()


def test_a_busy_loop_opens_a_connection_within_the_budget_of_a_call(valkey: Valkey) -> None:
    """Each iteration of the loop takes longer than the budget, and opening takes several: the first call is answered."""

    async def work() -> Decision:
        async with RedisStore(valkey.url, prefix="busy", timeout="16ms") as store:
            hit = asyncio.create_task(AsyncLimiter("5/s", store=store).hit("a"))
            while not hit.done():
                time.sleep(0.02)
                await asyncio.sleep(0)
            return hit.result()

    assert asyncio.run(work()).source == "store"


def test_a_connection_that_takes_longer_than_a_call_may_is_there_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that ends while its connection is being opened is never sent, and the connection is kept."""
    received, accepted = [], []
    monkeypatch.setattr(async_connection, "SILENCE", 60.0)

    async def work() -> None:
        opened = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted.append(writer)
            while data := await reader.read(1000):
                await opened.wait()
                received.append(data)
                writer.write(b"+OK\r\n")

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        endpoint = Endpoint("127.0.0.1", server.sockets[0].getsockname()[1])
        connection = AsyncConnection(endpoint, Login(), asyncio.get_running_loop(), 0.001)
        first = await echo(connection, "first", 0.001)
        assert isinstance(first, Unsent)
        assert isinstance(first.error, StoreTimeout)
        opened.set()
        assert await echo(connection, "second") == [b"OK"]
        connection.close()
        accepted[0].close()
        await accepted[0].wait_closed()
        server.close()

    run(work)
    assert len(accepted) == 1
    assert received == [pack([["PING"]]), pack([["ECHO", "second"]])]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_first_use_sends_the_source_of_its_scripts(mode: str) -> None:
    """The first use of a limit spends no round trip on learning that its scripts are unknown; sync, the hit itself does."""
    with Valkey() as server, RedisStore(server.url, timeout="60s") as store:
        if mode == "sync":
            assert Limiter(HUNDRED, store=store).hit("k")
        else:
            assert driven(AsyncLimiter(HUNDRED, store=store).hit("k"))
        with server.client() as client:
            errors: Any = client.info("errorstats")
        assert errors.get("errorstat_NOSCRIPT", {"count": 0})["count"] == (mode == "sync")


def test_answers_within_lowers_the_budget(valkey: Valkey, watch: Watch) -> None:
    """A store with a budget of 30 ms answers within it, or raises an error."""

    async def work() -> None:
        async with RedisStore(valkey.url, prefix="within", timeout="60s") as store:
            limiter, loop = await warm(AsyncLimiter(HUNDRED, store=store)), asyncio.get_running_loop()
            sync = Limiter(HUNDRED, store=store)
            sync.hit("warm")
            assert store.answers_within(30_000)
            valkey.freeze()
            try:
                for call in (lambda: limiter.hit("k"), lambda: asyncio.to_thread(sync.hit, "k")):
                    begun = loop.time()
                    with pytest.raises(StoreTimeout):
                        await call()
                    assert loop.time() - begun < watch.allows(0.03 + NOISE)
            finally:
                valkey.thaw()

    run(work)


# Loops


def test_two_successive_runs_work_and_leave_nothing_open(valkey: Valkey) -> None:
    """Connections end with their loop: the next asyncio.run has its own, and there is no warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with RedisStore(valkey.url, prefix="runs", timeout="60s") as store, valkey.client() as client:
            limiter = AsyncLimiter(HUNDRED, store=store)
            before = client.info("clients")["connected_clients"]
            for turn in range(3):
                assert run(lambda: limiter.hit("k")).remaining == 99 - turn
            gc.collect()
            assert client.info("clients")["connected_clients"] <= before  # others of earlier tests may have gone meanwhile
        gc.collect()
    assert [str(one.message) for one in caught] == []


@pytest.mark.asyncio_only(reason="uvloop warns when it is closed with a connection")
def test_a_store_is_closed_although_a_loop_ended_while_it_connected() -> None:
    """The task that waited is never run again; closing the store raises nothing."""
    loop = asyncio.new_event_loop()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with RedisStore(f"redis://127.0.0.1:{silent.getsockname()[1]}", timeout="60s") as store:
            task = loop.create_task(AsyncLimiter(HUNDRED, store=store).hit("k"))
            opened: list[Any] = []
            while not (opened and opened[0]._pending):
                loop.run_until_complete(asyncio.sleep(0.001))
                connections = store.batchers._batchers[loop].connections
                opened = list(connections._open.values())
            left = asyncio.all_tasks(loop)
            loop.close()
        assert task in left
        for one in left:
            one._log_destroy_pending = False  # type: ignore[attr-defined]


@pytest.mark.asyncio_only(reason="uvloop warns when it is closed with a connection")
def test_a_loop_that_is_closed_before_its_store_costs_nothing(valkey: Valkey) -> None:
    """`loop.close()` alone: the connection is closed at the store's next check."""
    gc.collect()  # left open by other tests
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with RedisStore(valkey.url, prefix="closed loop", timeout="60s") as store:
            limiter = AsyncLimiter(HUNDRED, store=store)
            for turn in range(2):
                loop = asyncio.new_event_loop()
                assert loop.run_until_complete(limiter.hit("k")).remaining == 99 - turn
                loop.close()
        del loop
        gc.collect()
    assert [str(one.message) for one in caught] == []


def test_loops_in_several_threads_each_have_their_own(valkey: Valkey) -> None:
    """Four threads with a loop each admit exactly the limit, and the store may be closed from outside."""
    with RedisStore(valkey.url, prefix="loops", timeout="60s") as store:
        limiter = AsyncLimiter(HUNDRED, store=store)
        admitted: list[int] = []

        async def work() -> int:
            return sum(map(bool, await asyncio.gather(*[limiter.hit("k") for _ in range(60)])))

        threads = [threading.Thread(target=lambda: admitted.append(asyncio.run(work()))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(admitted) == 100


def test_closing_ends_the_calls_that_wait(valkey: Valkey) -> None:
    """A task that still waits when the store is closed gets an error, and does not hang."""

    async def work() -> None:
        store = RedisStore(valkey.url, prefix="closing", timeout="60s")
        limiter = await warm(AsyncLimiter(HUNDRED, store=store))
        valkey.freeze()
        try:
            waiting = asyncio.ensure_future(limiter.hit("k"))
            await turns()
            await store.aclose()
            with pytest.raises(StoreUnavailable, match="closed"):
                await waiting
        finally:
            valkey.thaw()

    run(work)


def test_sixty_four_tasks_share_one_connection(valkey: Valkey) -> None:
    """However many tasks there are, a loop has one connection, and many fewer calls than decisions."""

    async def work() -> None:
        async with RedisStore(valkey.url, prefix="tasks", timeout="60s") as store:
            limiter = await warm(AsyncLimiter(TokenBucket("1/h", burst=1000), store=store))
            with valkey.client() as client:
                before, connected = scripts(valkey), client.info("clients")["connected_clients"]

                async def caller() -> int:
                    return sum([bool(await limiter.hit("k")) for _ in range(20)])

                assert sum(await asyncio.gather(*[caller() for _ in range(64)])) == 1000
                assert scripts(valkey) - before <= 64
                assert client.info("clients")["connected_clients"] <= connected

    run(work)


@pytest.mark.parametrize("method", ["hit", "acquire", "hit_many", "refund"])
def test_a_first_use_by_many_tasks_registers_the_limit_once(valkey: Valkey, method: str) -> None:
    """The iteration of the loop in which they all start may last longer than the budget: that is not the server's time, and the
    limit is registered by one call for all of them."""
    budget = 0.5
    with RedisStore(valkey.url, prefix=f"first {method}", timeout=budget) as store, valkey.client() as client:
        limiter = AsyncLimiter(TokenBucket("1/h", burst=100_000), store=store)

        async def blocks() -> None:
            time.sleep(2 * budget)

        async def together() -> list[Any]:
            arguments = (["k"],) if method == "hit_many" else ("k",)
            calls = [getattr(limiter, method)(*arguments) for _ in range(300)]
            return await asyncio.gather(*calls[:150], blocks(), *calls[150:], return_exceptions=True)

        client.config_resetstat()
        assert [one for one in driven(together()) if isinstance(one, Exception)] == []
        assert client.info("commandstats")["cmdstat_hsetnx"]["calls"] == 3


class SlowClock(SystemClock):
    """A machine whose clock is an hour behind the server's."""

    def now_us(self) -> int:
        return super().now_us() - 3_600_000_000


@pytest.mark.parametrize("timeout", [60, 0.01])
def test_a_timeout_does_not_depend_on_the_servers_clock(valkey: Valkey, timeout: float) -> None:
    """A waiter on a limit that can't reserve is served when its timeout allows it, and refused when not, though the server's
    clock is an hour ahead."""

    async def work() -> bool:
        async with RedisStore(valkey.url, prefix=f"timeout {timeout}", timeout="60s", budget_clock=SlowClock()) as store:
            limiter = AsyncLimiter("sliding window counter 1 per 200ms", store=store)
            async with RedisStore(valkey.url, prefix=store.names.prefix, timeout="60s") as other:
                await AsyncLimiter("sliding window counter 1 per 200ms", store=other).acquire("k")
            try:
                return bool(await limiter.acquire("k", timeout=timeout))
            except RateLimited:
                return False

    assert run(work) == (timeout == 60)


@pytest.mark.usefixtures("needs_faketime")
def test_a_waiter_that_moves_up_does_not_wait_for_a_clock_that_went_back() -> None:
    """The server's clock goes back by an hour while two wait, and the first leaves: the second is served at its start."""

    async def work(server: FaketimeValkey) -> None:
        async with RedisStore(server.url, timeout="60s") as store:
            limiter = await warm(AsyncLimiter("1/s burst 1", store=store))
            await limiter.hit("k")
            first, second = [asyncio.ensure_future(limiter.acquire("k")) for _ in range(2)]
            await turns()
            server.step(-3600)
            await limiter.hit("another key")
            first.cancel()
            await asyncio.wait_for(second, 60)

    with FaketimeValkey() as server:
        run(lambda: work(server))


def test_decisions_in_flight_are_given_back_from_the_last_one_on(valkey: Valkey) -> None:
    """Two tasks are cancelled while their answers arrive, the later one first: nothing stays charged for them."""

    async def pairs() -> list[tuple[int, ...]]:
        limits = {"bucket": TokenBucket("1/h", burst=2), "log": SlidingWindowLog("2/12h")}
        left: list[tuple[int, ...]] = []
        async with RedisStore(valkey.url, timeout=60) as store:
            limiter = AsyncLimiter(limits, store=store)
            await limiter.hit("warm")
            for n in range(300):
                first = asyncio.create_task(limiter.acquire(f"k{n}", cost={"bucket": 2, "log": 2}))
                await asyncio.sleep(0)
                second = asyncio.create_task(limiter.acquire(f"k{n}"))
                end = time.perf_counter() + n % 30 * 2e-5
                while time.perf_counter() < end:
                    await asyncio.sleep(0)
                second.cancel()
                first.cancel()
                answers = await asyncio.gather(first, second, return_exceptions=True)
                used = 0 if isinstance(answers[0], asyncio.CancelledError) else 2
                left.append(tuple(one.remaining + used for one in (await limiter.peek(f"k{n}")).decisions))
        return left

    assert set(run(pairs)) == {(2, 2)}


def test_giving_back_does_not_wait_for_decisions_that_keep_coming(valkey: Valkey) -> None:
    """A round trip longer than a decision is held back, and a decision in progress at every moment: who gives back returns."""
    timeout = 0.5

    async def work(url: str) -> list[object]:
        async with RedisStore(url, timeout=timeout) as store:
            limiter = AsyncLimiter("1000/s burst 100000", store=store)
            reservation = await limiter.reserve("mine")
            tasks: set[asyncio.Task[object]] = set()

            async def decide_always() -> None:
                while True:
                    task: asyncio.Task[object] = asyncio.create_task(limiter.acquire("others"))
                    tasks.add(task)
                    await asyncio.sleep(0.005)

            traffic = asyncio.create_task(decide_always())
            await turns()
            try:
                async with asyncio.timeout(5 * 2 * timeout):
                    return [await reservation.cancel(), await limiter.refund("mine")]
            finally:
                traffic.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    with Proxy(valkey.port) as network:
        network.latency = 0.03
        assert run(lambda: work(network.url)) == [True, None]


def test_giving_back_does_not_wait_for_decisions_on_other_keys(valkey: Valkey) -> None:
    """A decision on another key, perhaps of a node that hangs, is in progress all the while."""
    timeout = 0.5

    async def work() -> bool:
        async with RedisStore(valkey.url, timeout=timeout) as store:
            limiter = AsyncLimiter("5/s", store=store)
            reservation = await limiter.reserve("mine")
            async with limiter._queue.departures().decision(limiter.claims("another's")), asyncio.timeout(5 * 2 * timeout):
                return await reservation.cancel()

    assert run(work)
