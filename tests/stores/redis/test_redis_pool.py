"""The pool of blocking connections: a cap, callers that wait for a connection in order, and servers without room for a client."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from effort import effort
from fault_lab.scheduling_delay import Watch
from limitkeeper import AsyncLimiter, ConfigurationError, Limiter, StoreError, StoreTimeout, StoreUnavailable, TokenBucket
from limitkeeper.stores.redis import RedisStore, sync_opening
from limitkeeper.stores.redis.address import Address, Endpoint
from limitkeeper.stores.redis.cluster import Cluster as Nodes
from limitkeeper.stores.redis.command_routing import Route, RoutedCommand
from limitkeeper.stores.redis.resp import ReplyError, TooManyConnections, Unsent, timed_out
from limitkeeper.stores.redis.sentinel import Sentinels
from limitkeeper.stores.redis.sync_connection import ServerConnections, SyncConnection
from limitkeeper.stores.sans_io import Pause
from limitkeeper.testing import ManualClock
from servers.cluster import Cluster
from servers.proxy import Proxy
from servers.valkey import Valkey
from stand_ins import Loop

MANY = TokenBucket("1/h", burst=1_000_000)
BUDGET = 0.3
#: What scheduling of threads and loops may take on top of a budget; how late the machine is comes on top of that.
NOISE = 0.5


def hit_in_threads(limiter: Limiter, threads: int, each: int, key: Any = "k") -> list[Exception]:
    """The exceptions of so many threads with so many hits each; all hits without one were admitted."""
    raised: list[Exception] = []

    def work() -> None:
        for _ in range(each):
            try:
                assert limiter.hit(key)
            except Exception as error:
                raised.append(error)

    started = [threading.Thread(target=work) for _ in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    return raised


@pytest.fixture
def small() -> Iterator[Valkey]:
    """A server with room for five clients."""
    with Valkey("--maxclients", "5") as server:
        yield server


def test_more_threads_than_the_server_has_room_for(small: Valkey) -> None:
    """Thirty threads against `maxclients 5`: those without a connection wait for one, and all are answered."""
    with RedisStore(small.url, timeout="60s") as store:
        assert hit_in_threads(Limiter(MANY, store=store), 30, 20) == []


def test_calls_of_threads_are_on_the_network_at_the_same_time(
    valkey: Valkey, eventually: Callable[[Callable[[], bool]], None]
) -> None:
    """Eight threads and a network that holds everything back: each has a connection of its own, and none waits for another."""
    with Proxy(valkey.port) as network, RedisStore(network.url, timeout="60s") as store:
        limiter = Limiter(MANY, store=store, name="together")
        assert limiter.hit("k")
        network.silent = True
        raised: list[Exception] = []
        calling = threading.Thread(target=lambda: raised.extend(hit_in_threads(limiter, 8, 1)))
        calling.start()
        eventually(lambda: network.open == 8)
        network.silent = False
        calling.join()
        assert raised == []


@pytest.mark.parametrize("most", [1, 3])
def test_no_more_connections_than_allowed_are_open(valkey: Valkey, most: int) -> None:
    """`max_connections`: twelve threads share as many connections, all are answered, and the server had no more."""
    url = f"{valkey.url}?max_connections={most}"
    with RedisStore(url, prefix=f"most {most}", timeout="60s") as store, valkey.client() as client:
        before = client.info("stats")["total_connections_received"]
        assert hit_in_threads(Limiter(MANY, store=store), 12, 20) == []
        assert client.info("stats")["total_connections_received"] - before <= most


def test_waiting_for_a_connection_counts_against_the_budget(watch: Watch) -> None:
    """The only connection is in use by a call that hangs: the next caller gets an error within its budget that nothing was
    sent."""
    with Valkey() as server, RedisStore(server.url, timeout="60s", max_connections=1) as store:
        limiter = Limiter(MANY, store=store)
        limiter.hit("k")
        store.timeout_us = round(BUDGET * 1e6)
        server.freeze()
        try:
            hanging = store.pool.idle(store.route.direct, store.route.login).pop()  # type: ignore[arg-type]
            begun = time.monotonic()
            with pytest.raises(StoreUnavailable, match="no connection came free within the budget, 1 are in use"):
                limiter.hit("k")
            assert time.monotonic() - begun < watch.allows(BUDGET + NOISE)
            del hanging
            with pytest.raises(StoreTimeout):  # its place is free again
                limiter.hit("k")
        finally:
            server.thaw()


# A thread that runs again later than it asked for


@pytest.mark.parametrize("call", ["hit", "reserve"])
def test_a_reply_counts_that_arrives_while_the_thread_waits_to_run_again(valkey: Valkey, call: str) -> None:
    """A poll that came back empty is repeated: on a busy machine the reply may have arrived before the thread runs."""
    with RedisStore(valkey.url, prefix="late", timeout="60s") as store:
        limiter = Limiter(MANY, store=store)
        assert limiter.hit("k")
        (connection,) = store.pool.idle(store.route.direct, store.route.login)  # type: ignore[arg-type]
        poll = connection.poll
        connection.poll = lambda ms: () if ms and poll(60_000) else poll(0)
        assert getattr(limiter, call)("k")


def test_the_budget_of_a_call_begins_when_it_is_sent(valkey: Valkey) -> None:
    """A thread that waits to run before it writes leaves the server its whole budget."""
    clock = ManualClock()
    with RedisStore(valkey.url, prefix="sent", timeout="60s", budget_clock=clock) as store:
        limiter = Limiter(MANY, store=store)
        assert limiter.hit("k")
        (connection,) = store.pool.idle(store.route.direct, store.route.login)  # type: ignore[arg-type]
        poll, waits = connection.poll, list[float]()

        def late(ms: float) -> Any:
            clock.advance(0 if waits else 100)
            waits.append(ms)
            return poll(ms)

        connection.poll = late
        assert limiter.hit("k")
        assert waits == [0, 60_000]


@pytest.mark.parametrize("call", ["hit", "acquire"])
def test_the_first_use_of_a_limit_has_one_budget(valkey: Valkey, call: str) -> None:
    """What its registration has taken is not there for the decision behind it."""
    clock = ManualClock()
    with RedisStore(valkey.url, prefix=f"first {call}", timeout="60s", budget_clock=clock) as store:
        getattr(Limiter(MANY, store=store), call)("k")
        (connection,) = store.pool.idle(store.route.direct, store.route.login)  # type: ignore[arg-type]
        poll, waits = connection.poll, list[float]()

        def slow(ms: float) -> Any:
            if ms:
                clock.advance(40)
                waits.append(ms)
            return poll(60_000 if ms else 0)

        connection.poll = slow
        assert getattr(Limiter(MANY, store=store, name="another"), call)("k")
        assert waits == [60_000, 20_000]


def test_a_connection_opened_too_late_is_kept_for_the_next_call(valkey: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call whose budget is over when its connection is open is not sent, so nothing is charged; the next one finds it open."""
    clock, opened = ManualClock(), list[SyncConnection]()
    open_connection = SyncConnection.open

    def open_late(connection: SyncConnection, *arguments: Any) -> int:
        login_us = open_connection(connection, *arguments)
        opened.append(connection)
        clock.advance(100)
        return login_us

    with RedisStore(valkey.url, prefix="opened late", timeout="60s", budget_clock=clock) as store:
        limiter = Limiter(TokenBucket("1/h", burst=10), store=store)
        monkeypatch.setattr(SyncConnection, "open", open_late)
        with pytest.raises(StoreTimeout, match="the budget was over"):
            limiter.hit("k")
        assert limiter.hit("k").remaining == 9
        assert len(opened) == 1


def test_opening_a_connection_goes_on_in_the_next_call(valkey: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call whose budget ends while its connection is being opened charges nothing; the next one continues with that one."""
    monkeypatch.setattr(sync_opening, "CONNECT_US", 60_000_000)
    monkeypatch.setattr(sync_opening, "LOGIN_US", 60_000_000)
    with Proxy(valkey.port) as network, RedisStore(network.url, prefix="opening", timeout="50ms") as store:
        limiter = Limiter(TokenBucket("1/h", burst=10), store=store)
        network.silent = True
        for _ in range(3):
            with pytest.raises(StoreTimeout):
                limiter.hit("k")
        network.silent, store.timeout_us = False, 60_000_000
        assert limiter.hit("k").remaining == 9
        assert network.accepted == 1


def test_a_call_is_not_sent_when_less_than_a_round_trip_is_left(valkey: Valkey) -> None:
    """Opening a connection took more than half of the budget: the call charges nothing, and the next one has its whole budget."""
    clock = ManualClock()
    with Proxy(valkey.port) as network, RedisStore(network.url, prefix="left", timeout="60s", budget_clock=clock) as store:
        limiter = Limiter(TokenBucket("1/h", burst=10), store=store)
        ticking = threading.Timer(0.2, lambda: (clock.advance(40), setattr(network, "silent", False)))
        network.silent = True
        ticking.start()
        with pytest.raises(StoreTimeout, match="before the request was sent"):
            limiter.hit("k")
        assert network.asked == 1
        assert limiter.hit("k").remaining == 9
        assert network.accepted == 1


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_server_full_of_other_clients_is_called_again_within_the_budget(small: Valkey, mode: str, watch: Watch) -> None:
    """StoreUnavailable with the remedy when the budget is over; and no error when one of the others leaves before that."""
    others = [small.client() for _ in range(5)]
    for other in others:
        other.ping()
    budget = 4 * BUDGET  # enough for several attempts on a busy machine: only the server's reply shows that it is full
    with RedisStore(small.url, timeout=budget) as store, Loop() as loop:
        limiter, tasks = Limiter(MANY, store=store), AsyncLimiter(MANY, store=store)

        def hit() -> Any:
            return limiter.hit("k") if mode == "sync" else loop.call(tasks.hit("k"))

        said, end = "", time.monotonic() + 60
        while "raise its maxclients, or lower max_connections" not in said:  # the server may be late to report it
            assert time.monotonic() < end, said
            begun = time.monotonic()
            with pytest.raises(StoreError) as raised:
                hit()
            assert time.monotonic() - begun < watch.allows(budget + NOISE)
            said = str(raised.value) if isinstance(raised.value, StoreUnavailable) else ""
        store.timeout_us = 60_000_000
        leaving = threading.Timer(0.1, others[0].close)
        leaving.start()
        assert hit()
        leaving.join()
    for other in others:
        other.close()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_node_full_of_other_clients_is_asked_for_the_slots_within_the_budget(mode: str) -> None:
    """The only node of a cluster has no room for the connection that reads the map, until one of the others leaves."""
    with Cluster(1) as cluster, RedisStore(cluster.url, timeout="60s") as store, Loop() as loop, ExitStack() as others:
        with cluster.nodes[0].client() as client:
            client.config_set("maxclients", client.info("clients")["connected_clients"] + 5)
        with suppress(redis.RedisError):
            while True:
                first = others.enter_context(cluster.nodes[0].client())
                first.ping()
        threading.Timer(0.2, others.close).start()
        limiter, tasks = Limiter(MANY, store=store), AsyncLimiter(MANY, store=store)
        assert limiter.hit("k") if mode == "sync" else loop.call(tasks.hit("k"))


@pytest.mark.parametrize("answer", [[ReplyError("LOADING it")], Unsent(TooManyConnections("full"))], ids=["loading", "full"])
@pytest.mark.parametrize("route", [Nodes, Sentinels])
def test_servers_that_take_a_moment_are_asked_again_where_commands_go(route: type[Route], answer: Any) -> None:
    """A map of slots, or a primary, that is not known yet is asked for again after a pause."""
    plan = route(Address("one", (Endpoint("h"),), service="s")).send([RoutedCommand(["GET", "k"], b"k")])
    next(plan)
    assert isinstance(plan.send([answer]), Pause)


def test_a_task_takes_the_place_of_an_idle_connection_of_threads(small: Valkey) -> None:
    """Threads have all connections that the server accepts, and use none of them: a task of the same store is answered, and so
    are the threads after it."""
    with RedisStore(small.url, timeout="60s") as store, Loop() as loop:
        limiter, tasks = Limiter(MANY, store=store), AsyncLimiter(MANY, store=store)
        (endpoint,) = store.address.endpoints
        server = store.pool.idle(endpoint, store.address.login)
        while server.full_until_us == 0:  # the last one shares with the others
            assert hit_in_threads(limiter, 10, 20) == []
        store.timeout_us = 5_000_000
        assert loop.call(tasks.hit("k"))
        assert hit_in_threads(limiter, 10, 5) == []


def test_a_budget_that_ends_before_the_next_attempt_is_sent_keeps_what_the_server_said() -> None:
    """The server was full, and the budget ends while the next connection is opened: the error is that the server was full."""
    endpoint = Endpoint("h")
    route, command = Route(Address("single", (endpoint,))), RoutedCommand(["TIME"])
    plan = route.send([command])
    next(plan)
    assert isinstance(plan.send([Unsent(TooManyConnections("full"))]), Pause)
    plan.send(True)
    assert isinstance(plan.send([Unsent(timed_out(endpoint))]), Pause)
    with pytest.raises(StopIteration):
        plan.send(False)
    assert isinstance(command.error, TooManyConnections)


def test_callers_of_several_nodes_do_not_wait_for_one_another() -> None:
    """One connection to each node, eight threads, decisions over all nodes in different orders: no caller holds a connection for
    which another one waits while it waits for that one's."""
    with Cluster() as cluster, RedisStore(cluster.url, timeout="60s", max_connections=1) as store:
        limiter = Limiter({"a": MANY, "b": MANY, "c": MANY}, store=store)
        for keys in ({"a": "1", "b": "2", "c": "3"}, {"a": "3", "b": "1", "c": "2"}):
            assert hit_in_threads(limiter, 8, 10, keys) == []


def test_a_server_that_was_full_is_tried_again_while_callers_wait() -> None:
    """The only connection stays in use: a waiting caller opens another one as soon as the server may have room again."""
    clock = ManualClock()
    server = ServerConnections(Endpoint("h"), 5, clock)
    used = server.take(clock.now_us())
    server.full_until_us = clock.now_us() + 1_000_000
    assert server.take(clock.now_us() + 3_000_000) is not used
    assert clock.now_us() == 1_000_000


@pytest.mark.parametrize("wrong", [0, -1, "many", True])
def test_a_cap_is_a_number(wrong: Any) -> None:
    """At least one connection is needed."""
    with pytest.raises(ConfigurationError, match="max_connections: expected at least 1"):
        RedisStore("redis://localhost", max_connections=wrong)


@effort(60)
@given(st.integers(1, 3), st.lists(st.sampled_from(("take", "put", "close", "drop", "full")), max_size=25))
def test_no_place_is_lost_or_won(most: int, steps: list[str]) -> None:
    """Connections are returned, closed, dropped, or refused by a full server: as many as are allowed can still be taken."""
    clock = ManualClock()
    server = ServerConnections(Endpoint("h"), most, clock)
    used: list[SyncConnection] = []
    for step in steps:
        if step == "take":
            free = len(used) < most and (bool(server) or not used or clock.now_us() >= server.full_until_us)
            if free:
                used.append(server.take(clock.now_us()))
            else:
                with pytest.raises(TooManyConnections):
                    server.take(clock.now_us())
        elif step == "full":
            server.full_until_us = clock.now_us() + 1
        elif used:
            one = used.pop(0)
            if step == "put":
                server.put(one)
            elif step == "close":
                one.close()
            del one
        assert len(used) + len(server) == len(server.open) <= most
        assert not server.waiting
    clock.advance(1)
    used += [server.take(clock.now_us()) for _ in range(most - len(used))]
    with pytest.raises(TooManyConnections):
        server.take(clock.now_us())


@effort(10)
@given(st.integers(1, 3), st.integers(2, 8))
def test_connections_are_given_in_order_of_arrival(most: int, callers: int) -> None:
    """The caller that waits longest gets the returned connection, before any later one."""
    server = ServerConnections(Endpoint("h"), most, HoldingClock())  # at moment 0
    held = [server.take(1) for _ in range(most)]
    order: list[int] = []
    threads = []
    for number in range(callers):
        threads.append(threading.Thread(target=lambda number=number: (held.append(server.take(1)), order.append(number))))
        threads[-1].start()
        while len(server.waiting) <= number:
            time.sleep(0)
    for number in range(callers):
        server.put(held.pop(0))
        threads[number].join()
    assert order == list(range(callers))


class HoldingClock(ManualClock):
    """Sleepers sleep until they are woken."""

    def sleep(self, seconds: float, wake: threading.Event | None = None) -> None:
        assert wake is not None
        wake.wait(30)
