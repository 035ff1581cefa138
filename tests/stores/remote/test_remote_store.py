"""RemoteStore on `limitkeeper serve` in a process of its own: exact with several clients, with clear errors when it fails."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import httpx
import pytest
from running import Running

from limitkeeper import (
    AsyncLimiter,
    ConfigurationError,
    FixedWindow,
    Limiter,
    RemoteStore,
    SlidingWindowLog,
    StoreTimeout,
    StoreUnavailable,
    TokenBucket,
    store_from_url,
)
from limitkeeper.algorithms.claim import Claim
from limitkeeper.policy import Policy
from limitkeeper.policy.gate import Gate
from limitkeeper.stores import LeasedStore
from limitkeeper.stores.contract import Booking
from limitkeeper.stores.guarded import GuardedStore
from limitkeeper.stores.sharded import ShardedStore

pytestmark = pytest.mark.server
POLICY = "name: nodes\nlimits: []\n"


#: The service is one for all tests: limits of one name would share their state.
NUMBERS = count()


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("remote") / "limitkeeper.yaml"
    path.write_text(POLICY)
    return str(path)


@pytest.fixture(scope="module")
def service(policy: str) -> Iterator[Running]:
    with Running(policy=policy) as running:
        yield running


def url_of(service: Running, login: str = "", **options: object) -> str:
    more = "&".join(f"{name}={value}" for name, value in {"timeout": "60s", **options}.items())
    return f"limitkeeper://{login}127.0.0.1:{service.resp}?{more}"


def test_two_clients_on_one_key_are_admitted_exactly(service: Running) -> None:
    """Law 7: threads of two stores, and tasks of a third, together get exactly the limit."""
    limit, name = {"log": SlidingWindowLog("300/h"), "window": FixedWindow("400/h", align="first")}, f"exact {next(NUMBERS)}"
    with RemoteStore(url_of(service)) as one, RemoteStore(url_of(service)) as two, RemoteStore(url_of(service)) as three:
        limiters = [Limiter(limit, one, name=name), Limiter(limit, two, name=name)]

        async def tasks() -> int:
            limiter = AsyncLimiter(limit, three, name=name)
            return sum(map(bool, await asyncio.gather(*[limiter.hit("k") for _ in range(120)])))

        with ThreadPoolExecutor(9) as pool:
            work = [pool.submit(lambda i=i: sum(bool(limiters[i % 2].hit("k")) for _ in range(60))) for i in range(8)]
            admitted = asyncio.run(tasks()) + sum(one.result() for one in work)
        assert admitted == 300


def test_tasks_of_one_turn_are_pipelined_in_order(service: Running) -> None:
    """Tasks that call in one iteration of the loop are decided in that order, over one connection."""

    async def tasks() -> list[bool]:
        async with RemoteStore(url_of(service)) as store:
            limiter = AsyncLimiter(FixedWindow("50/h", align="first"), store, name=f"pipelined {next(NUMBERS)}")
            return [bool(one) for one in await asyncio.gather(*[limiter.hit("k") for _ in range(80)])]

    assert asyncio.run(tasks()) == [True] * 50 + [False] * 30


def test_waiters_are_served_in_order_and_move_up(service: Running) -> None:
    """Law 8: a cancelled reservation lets those behind it move up, in the service."""
    with RemoteStore(url_of(service)) as store:
        limiter = Limiter(TokenBucket("1/h", burst=1), store, name="waiters")
        some = [limiter.reserve("k") for _ in range(3)]
        before = [one.wait for one in some]
        assert before[0] == 0.0
        assert some[1].cancel()
        assert some[2].wait < before[1] + 60


def test_a_long_queue_moves_up_in_one_call(service: Running) -> None:
    """Of 3000 waiters of two costs the first leaves: all behind it move up, however large the request is."""
    with RemoteStore(url_of(service)) as store:
        limiter = Limiter(TokenBucket("1/h", burst=4), store, name="long queue" * 10)
        (named,) = limiter.named
        waiters = []
        for number in range(3000):
            claims = [Claim(named, "k", 1 + number % 2)]
            waiters.append((claims, store.decide(claims, None, remember=True)))
        bookings = [Booking(claims, made.start_us, None, at > 0, made.source) for at, (claims, made) in enumerate(waiters)]
        moved = store.rebook(bookings)
        assert moved[0] is None
        assert all(one and one.start_us < made.start_us for one, (_, made) in zip(moved[5:], waiters[5:], strict=True))


@pytest.mark.parametrize("key", ["\u00fc" * 200, "\U0001f600" * 100, "k" * 1000], ids=["two bytes", "four bytes", "long"])
def test_many_keys_of_any_text_are_decided_and_given_back(service: Running, key: str) -> None:
    """Requests are not too large for the service, whatever their keys."""
    with RemoteStore(url_of(service)) as store:
        limiter = Limiter(FixedWindow("5/h", align="first"), store, name=f"texts of a long name {'n' * 1000}")
        keys = [f"{key}{number}" for number in range(1000)]
        assert all(limiter.hit_many(keys))
        assert store.give_back([Claim(limiter.named[0], one, 1) for one in keys])
        assert limiter.peek(keys[-1]).remaining == 5


def test_the_time_is_that_of_the_service(service: Running) -> None:
    """`now_us` is read from the service before the first decision, and estimated afterwards."""
    with RemoteStore(url_of(service)) as store:
        read = store.now_us()
        assert abs(read - time.time_ns() // 1000) < 60_000_000
        assert store.now_us() >= read


@pytest.mark.slow
def test_a_large_store_is_read_and_loaded_in_parts(service: Running) -> None:
    """Keys beyond the largest command and the largest reply are split, and none is lost."""
    keys = [f"{i:05}" + "k" * 1000 for i in range(9_000)]  # 9 MB of keys: more than one reply of ITEMS holds
    with RemoteStore(url_of(service)) as store:
        limiter = Limiter(FixedWindow("5/h", align="first"), store, name="large")
        assert all(limiter.hit_many(keys))
        found = dict(store.items(limiter.named[0]))
        assert found.keys() == set(keys)
        other = Limiter(FixedWindow("5/h", align="first"), store, name="loaded")
        store.load(other.named[0], list(found.items())[:500])
        assert other.peek(next(iter(found))).remaining == 4


def test_python_callers_lease_from_the_service(service: Running) -> None:
    """LeasedStore over RemoteStore answers from RAM, and unused tokens return to the service."""
    rule = FixedWindow("100/h", align="first")
    with LeasedStore(RemoteStore(url_of(service)), lease=20) as leased:
        limiter = Limiter(rule, leased, name="leases")
        decisions = [limiter.hit("k") for _ in range(50)]
        assert any(one.source == "lease" for one in decisions)
    with RemoteStore(url_of(service)) as direct:
        limiter = Limiter(rule, direct, name="leases")
        assert sum(map(bool, decisions)) + sum(bool(limiter.hit("k")) for _ in range(110)) == 100


@pytest.mark.slow
def test_a_guard_answers_while_the_service_is_away(policy: str) -> None:
    """GuardedStore over RemoteStore follows its failure policy when the service is killed."""
    with Running(policy=policy) as running, RemoteStore(url_of(running)) as remote:
        limiter = Limiter(FixedWindow("5/h"), GuardedStore(remote, on_failure="closed", budget="20s"), name="guarded")
        assert limiter.hit("k").source == "store"
        running.process.kill()
        running.process.wait(60)
        assert limiter.hit("k").source == "closed"


@pytest.mark.slow
def test_a_killed_service_is_unavailable_and_returns(policy: str) -> None:
    """After kill -9 calls raise StoreUnavailable within the budget, sync and async; after a restart the same store works
    again."""
    with Running(policy=policy) as running:
        store = RemoteStore(url_of(running, timeout="20s"))
        limiter, tasks = Limiter(TokenBucket("5/h"), store, name="killed"), AsyncLimiter(TokenBucket("5/h"), store, name="killed")
        assert limiter.hit("k").remaining == 4
        running.process.send_signal(signal.SIGKILL)
        running.process.wait(60)
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{running.resp}"):
            limiter.hit("k")
        with pytest.raises(StoreUnavailable):
            asyncio.run(tasks.hit("k"))
        assert time.monotonic() - began < 50
        again = ["--http", "127.0.0.1:0", "--resp", f"127.0.0.1:{running.resp}"]
        with Running(*again, policy=policy):
            assert limiter.hit("k").remaining == 4
            assert asyncio.run(tasks.hit("k")).remaining == 3
        store.close()


def test_a_service_that_does_not_answer_is_a_timeout() -> None:
    """Law 14: a server that accepts and stays silent costs the budget, sync and async."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = RemoteStore(f"limitkeeper://127.0.0.1:{silent.getsockname()[1]}", timeout="100ms")
        assert store.answers_within(50_000)
        began = time.monotonic()
        with pytest.raises(StoreTimeout):
            Limiter("5/s", store).hit("k")
        with pytest.raises(StoreTimeout):
            asyncio.run(AsyncLimiter("5/s", store).hit("k"))
        assert time.monotonic() - began < 10
        store.close()


def test_only_the_admin_token_opens_the_store(policy: str) -> None:
    """With `admin_token`, neither no token nor that of ordinary clients reaches the LK.STORE commands."""
    tokens = {"LIMITKEEPER_TOKEN": "ordinary-ordinary", "LIMITKEEPER_ADMIN_TOKEN": "admin-admin-admin"}
    with Running(policy=policy, environment=tokens) as running:
        for login, words in (("", "admin_token"), (":ordinary-ordinary@", "admin_token"), (":wrong@", "rejects")):
            with RemoteStore(url_of(running, login)) as store, pytest.raises(StoreUnavailable, match=words):
                Limiter("5/s", store).hit("k")
        with socket.create_connection(("127.0.0.1", running.resp)) as ordinary:
            ordinary.sendall(b"AUTH ordinary-ordinary\r\n*2\r\n$15\r\nLK.STORE.DECIDE\r\n$300000\r\n")
            assert b"invalid bulk length" in b"".join(iter(lambda: ordinary.recv(1000), b""))
        with RemoteStore(url_of(running, ":admin-admin-admin@")) as store:
            assert Limiter("5/s", store).hit("k")


def test_another_version_and_another_server_are_named() -> None:
    """A service of another version, or another kind of server, is an error that names the cause."""
    for reply, words in ((b"-PROTOCOL version 1", "same version"), (b"-ERR unknown command 'LK.STORE.HIT'", "or none")):
        with socket.create_server(("127.0.0.1", 0)) as server, threaded_answers(server, reply):
            store = RemoteStore(f"limitkeeper://127.0.0.1:{server.getsockname()[1]}", timeout="30s")
            with pytest.raises(StoreUnavailable, match=words):
                Limiter("5/s", store).hit("k")
            store.close()


class threaded_answers:  # noqa: N801 - used as a function
    """A server that answers PING with PONG and everything else with one reply."""

    def __init__(self, server: socket.socket, reply: bytes) -> None:
        self.server, self.reply = server, reply
        self.thread = threading.Thread(target=self.serve)

    def serve(self) -> None:
        connection, _ = self.server.accept()
        with connection:
            while data := connection.recv(65536):
                connection.sendall(b"+PONG\r\n" if b"PING" in data else self.reply + b"\r\n")

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *exc: object) -> None:
        self.thread.join(60)


def test_urls_make_remote_stores() -> None:
    """`store_from_url` makes services, alone, sharded and wrapped; an invalid URL is refused without showing its token."""
    with store_from_url("limitkeeper://:secret@limits.internal?timeout=50ms") as store:
        assert repr(store) == "RemoteStore('limits.internal:7071')"
    with store_from_url("sharded+limitkeeper://a:1,b:2?guard=open") as store:
        assert isinstance(store, GuardedStore)
    for url in ("limitkeeper://:secret@a,b", "limitkeeper://:secret@host?prefix=x&colour=1", "limitkeeper://:secret@host:0"):
        with pytest.raises(ConfigurationError) as raised:
            store_from_url(url)
        assert "secret" not in str(raised.value)
    with pytest.raises(ConfigurationError, match="limitkeeper"):
        RemoteStore("redis://host")


@pytest.mark.slow
def test_a_hand_over_under_traffic_admits_no_more_than_the_rule(policy: str) -> None:
    """Threads of two stores call without a pause while nodes are added and removed: each key gets exactly its limit."""
    with Running(policy=policy) as a, Running(policy=policy) as b, Running(policy=policy) as c:
        stores = [ShardedStore({"a": RemoteStore(url_of(a)), "b": RemoteStore(url_of(b))}, hot=False, pause=60) for _ in range(2)]
        limiters = [Limiter(FixedWindow("30/h", align="first"), store, name="moving") for store in stores]
        keys, counts, done = [f"user:{i}" for i in range(12)], [dict[str, int](), dict[str, int]()], threading.Event()

        def work(number: int) -> None:
            rounds = 0
            while not done.is_set() or rounds < 40:
                rounds += 1
                for key in keys:
                    if limiters[number].hit(key):
                        counts[number][key] = counts[number].get(key, 0) + 1

        with ThreadPoolExecutor(2) as pool:
            running = [pool.submit(work, number) for number in range(2)]
            try:
                stores[0].add("c", RemoteStore(url_of(c)))
                assert "c" in {stores[0].home_of(key) for key in keys}
                stores[0].remove("a").close()
            finally:
                done.set()
            for one in running:
                one.result()
        assert {key: counts[0].get(key, 0) + counts[1].get(key, 0) for key in keys} == dict.fromkeys(keys, 30)
        assert sorted(stores[1].shards) == ["b", "c"]
        with RemoteStore(url_of(b)) as alone, pytest.raises(StoreUnavailable, match="use ShardedStore"):
            Limiter(FixedWindow("30/h", align="first"), alone, name="moving").hit("user:1")
        for store in stores:
            store.close()


@pytest.mark.slow
def test_a_hot_key_is_leased_from_its_node_and_moves_with_it(policy: str) -> None:
    """Two stores lease one key while its home changes twice: never more than the rule, whatever is held meanwhile."""
    rule = FixedWindow("800/h", align="first")
    with Running(policy=policy) as a, Running(policy=policy) as b, Running(policy=policy) as c:
        stores = [ShardedStore({"a": RemoteStore(url_of(a)), "b": RemoteStore(url_of(b))}, hot=1, lease=20) for _ in range(2)]
        limiters = [Limiter(rule, store, name="hot") for store in stores]
        decisions = [one.hit("viral") for _ in range(100) for one in limiters]
        stores[0].add("c", RemoteStore(url_of(c)))
        decisions += [one.hit("viral") for _ in range(100) for one in limiters]
        stores[1].remove(stores[0].home_of("viral")).close()
        decisions += [one.hit("viral") for _ in range(300) for one in limiters]
        assert any(one.source == "lease" for one in decisions)
        assert len({store.home_of("viral") for store in stores}) == 1
        for store in stores:
            store.close()
    assert 400 < sum(map(bool, decisions)) <= 800


OVERRIDDEN = "name: shop\nlimits:\n  - {name: api, key: ip, limit: fixed window 2/h align first}\n"


@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_library_users_follow_the_overrides_of_operators(tmp_path: Path, workers: str) -> None:
    """An override by an operator of the service holds in a process with a RemoteStore, leased or sharded too; and the other
    way."""
    path = tmp_path / "limitkeeper.yaml"
    path.write_text(OVERRIDDEN)
    policy = Policy.load(path)
    with Running("--workers", workers, policy=path) as service:
        url, place = url_of(service), f"{service.admin}/v1/overrides/api/bot_*"
        stores = [RemoteStore(url), LeasedStore(RemoteStore(url)), GuardedStore(ShardedStore([RemoteStore(url)]), budget=60)]
        gates = [Gate(policy, store=store) for store in stores]
        found = [gate.compiled.rules_by_name["api"].operator_limits for gate in gates]
        assert httpx.put(place, json={"limit": "fixed window 7/h", "for": "1h"}, timeout=60).status_code == 200
        wait_until(lambda: all(one("bot_1") == (FixedWindow("7/h"),) for one in found))
        assert httpx.delete(place, timeout=60).json() == {"removed": True}
        wait_until(lambda: all(one("bot_1") is None for one in found))
        gates[0].operator_overrides.put("api", "a", "blocked", by="a script")
        wait_until(lambda: service.hit("api", "a")[1] == 0)
        (listed,) = httpx.get(f"{service.admin}/v1/overrides", timeout=60).json()["overrides"]
        assert (listed["key"], listed["by"]) == ("a", "a script")
        for gate, store in zip(gates, stores, strict=True):
            gate.close()
            store.close()


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Waits for a background thread; a deadline for a busy machine, not a bound on it."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_null_in_the_place_of_an_answer_is_a_store_error() -> None:
    """A server that answers null is no limitkeeper service: every call raises an error that a guard understands."""

    def serve() -> None:
        with server.accept()[0] as connection:
            while connection.recv(65536):
                connection.sendall(b"$-1\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        with RemoteStore(f"limitkeeper://127.0.0.1:{server.getsockname()[1]}?timeout=60s") as store:
            limiter = Limiter("5/s", store=store)
            for call in (limiter.hit, limiter.acquire, limiter.reset):
                with pytest.raises(StoreUnavailable, match="unexpected reply"):
                    call("a")


@pytest.mark.parametrize("size", [300_000, 20_000_000], ids=["beyond max_body", "too large"])
def test_a_long_key_disturbs_no_other_call(service: Running, size: int) -> None:
    """A hit with a long key is decided as other calls are, or refused before it is sent: the calls beside it are answered."""

    async def main() -> None:
        async with RemoteStore(url_of(service)) as store:
            limiter = AsyncLimiter(TokenBucket("1/h", burst=100), store=store, name=f"long {next(NUMBERS)}")
            found = await asyncio.gather(*[limiter.hit(key) for key in ("a", "x" * size, "b")], return_exceptions=True)
            assert [bool(one) for one in found[::2]] == [True, True]
            assert found[1] if size < 1_000_000 else isinstance(found[1], StoreUnavailable)
            assert [(await limiter.peek(key)).remaining for key in "ab"] == [99, 99]

    asyncio.run(main())
