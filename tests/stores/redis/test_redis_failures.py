"""A server that dies, hangs, comes back or forgets: an answer or a StoreError within the budget, and recovery."""

from __future__ import annotations

import math
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fault_lab.scheduling_delay import Watch
from limitkeeper import AsyncLimiter, Limiter, StoreError, StoreTimeout, StoreUnavailable, TokenBucket
from limitkeeper.clock import SYSTEM
from limitkeeper.stores.redis import RedisStore
from servers.proxy import Proxy
from servers.valkey import Valkey, free_port
from stand_ins import Loop, driven

HUNDRED = TokenBucket("1/h", burst=100)
BUDGET = 0.3
#: A budget that no busy machine uses up, where it is not the point: a missing server, or one with an error, answers at once.
AMPLE = 60.0
#: What scheduling of threads and loops may take on top of a budget; how late the machine is comes on top of that.
NOISE = 0.5
Both = list[Callable[[], Any]]


@pytest.fixture
def server() -> Iterator[Valkey]:
    with Valkey() as started:
        yield started


@pytest.fixture
def store(server: Valkey) -> Iterator[RedisStore]:
    with RedisStore(server.url, timeout=AMPLE) as made:
        yield made


@pytest.fixture(params=["sync", "async"])
def hit(request: pytest.FixtureRequest, store: RedisStore) -> Iterator[Callable[..., Any]]:
    """`hit(key)`, sync or async, on connections that stay."""
    if request.param == "sync":
        yield Limiter(HUNDRED, store=store).hit
        return
    with Loop() as loop:
        limiter = AsyncLimiter(HUNDRED, store=store)
        yield lambda *arguments: loop.call(limiter.hit(*arguments))


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """The answer or exception of a call, and its duration."""
    begun = time.monotonic()
    try:
        return call(), time.monotonic() - begun
    except StoreError as error:
        return error, time.monotonic() - begun


def test_a_limiter_can_be_made_while_the_server_is_away() -> None:
    """The server is needed by the first decision, which fails at once without it; once it has started, it is called."""
    port = free_port()
    with RedisStore(f"redis://127.0.0.1:{port}", timeout=AMPLE) as store:
        limiter, tasks = Limiter(TokenBucket("1/h", burst=2, initial=0), store=store), AsyncLimiter(HUNDRED, store=store)
        for call in (lambda: limiter.hit("k"), lambda: driven(tasks.hit("k"))):
            outcome, took = timed(call)
            assert isinstance(outcome, StoreUnavailable)
            assert f"127.0.0.1:{port}" in str(outcome)
            assert took < AMPLE / 2
        with Valkey(port=port):
            assert not limiter.hit("k")
            assert driven(tasks.hit("k"))


def test_a_killed_server_is_reported_at_once_and_found_again(hit: Callable[..., Any], server: Valkey) -> None:
    """Killed: StoreUnavailable well within the budget. Back, and empty: the next call works, scripts included."""
    assert hit("k").remaining == 99
    server.kill()
    for _ in range(3):
        outcome, took = timed(lambda: hit("k"))
        assert isinstance(outcome, StoreUnavailable)
        assert took < AMPLE / 2
    server.start()
    assert hit("k").remaining == 99


def test_a_restart_between_two_calls_is_not_even_noticed(hit: Callable[..., Any], server: Valkey) -> None:
    """A connection that the server had closed is detected before anything is sent, and made anew."""
    for _ in range(3):
        assert hit("k").remaining == 99
        server.kill()
        server.start()
    assert hit("k").remaining == 99


def test_a_frozen_server_costs_the_budget_and_no_more(
    hit: Callable[..., Any], store: RedisStore, server: Valkey, watch: Watch
) -> None:
    """Hung, not dead: StoreTimeout after the budget, each time; then it continues."""
    hit("k")
    store.timeout_us = round(BUDGET * 1e6)
    server.freeze()
    try:
        for _ in range(2):
            outcome, took = timed(lambda: hit("k"))
            assert isinstance(outcome, StoreTimeout)
            assert BUDGET * 0.9 < took < watch.allows(BUDGET + NOISE)
    finally:
        server.thaw()
    store.timeout_us = round(AMPLE * 1e6)
    assert hit("other").remaining == 99
    time.sleep(0.05)
    assert 94 <= hit("k").remaining <= 98  # what was sent before was decided after all, at most once each


def test_a_frozen_server_takes_no_new_callers_either(server: Valkey, watch: Watch) -> None:
    """Connecting counts against the same budget."""
    with RedisStore(f"redis://:x@127.0.0.1:{server.port}", timeout=BUDGET) as store:
        server.freeze()
        try:
            for call in (
                lambda: Limiter(HUNDRED, store=store).hit("k"),
                lambda: driven(AsyncLimiter(HUNDRED, store=store).hit("k")),
            ):
                outcome, took = timed(call)
                assert isinstance(outcome, StoreTimeout)
                assert took < watch.allows(BUDGET + NOISE)
        finally:
            server.thaw()


def test_flushed_scripts_are_sent_again(hit: Callable[..., Any], server: Valkey) -> None:
    """SCRIPT FLUSH: the script is sent once more, and the decision is made once."""
    hit("k")
    with server.client() as client:
        for left in (98, 97):
            client.script_flush()
            assert hit("k").remaining == left


def test_a_server_that_lost_everything_gets_its_limits_registered_again(
    hit: Callable[..., Any], store: RedisStore, server: Valkey
) -> None:
    """After a restart the registry of a limit is written anew, so that a later change of its rate is recognised."""
    hit("k"), hit("k")
    (place,) = store.names.entries.values()
    server.kill()
    server.start()
    hit("k"), hit("k")
    with server.client() as client:
        assert client.exists(place.registry)


def test_connections_that_the_server_ends_are_made_anew(hit: Callable[..., Any], server: Valkey) -> None:
    """CLIENT KILL of all clients: the next call works, and is decided once."""
    hit("k")
    with server.client() as client:
        for left in (98, 97, 96):
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            assert hit("k").remaining == left


def test_an_idle_timeout_of_the_server_is_not_noticed(store: RedisStore, server: Valkey) -> None:
    """`timeout 1` in the server's configuration closes idle connections; no caller notices."""
    limiter, tasks = Limiter(HUNDRED, store=store), AsyncLimiter(HUNDRED, store=store)
    with server.client() as client:
        client.config_set("timeout", 1)
    with Loop() as loop:
        assert (limiter.hit("k").remaining, loop.call(tasks.hit("k")).remaining) == (99, 98)
        time.sleep(2.2)
        assert (limiter.hit("k").remaining, loop.call(tasks.hit("k")).remaining) == (97, 96)


def test_a_server_that_loads_is_called_again_within_the_budget(
    hit: Callable[..., Any], store: RedisStore, server: Valkey, watch: Watch
) -> None:
    """LOADING is StoreUnavailable when the budget is over, and no error when the server has loaded before that."""
    hit("k")
    with server.client() as client:
        client.execute_command("DEBUG", "POPULATE", 20_000, "x", 100)
        client.config_set("key-load-delay", 2000)  # 40 s, if it stays so
        client.config_set("loading-process-events-interval-bytes", 1024)
        client.save()

        def reload() -> None:
            with server.client(socket_timeout=200) as other:
                other.execute_command("DEBUG", "RELOAD", "NOSAVE")

        reloading = threading.Thread(target=reload)
        reloading.start()
        store.timeout_us = round(BUDGET * 1e6)
        outcome: object = None
        while "still loading" not in str(outcome) and reloading.is_alive():  # it may be slow to reply while it loads
            outcome, took = timed(lambda: hit("k"))
            assert took < watch.allows(BUDGET + NOISE)
        assert isinstance(outcome, StoreUnavailable)
        store.timeout_us = round(AMPLE * 1e6)
        threading.Timer(0.1, client.config_set, ("key-load-delay", 0)).start()
        assert hit("other").remaining == 99
        reloading.join()


def test_a_replica_is_an_error_with_the_remedy(server: Valkey) -> None:
    """READONLY on a single server is StoreUnavailable, with the remedy."""
    with Valkey("--replicaof", "127.0.0.1", str(server.port)) as replica, RedisStore(replica.url, timeout=AMPLE) as store:
        outcome, _ = timed(lambda: Limiter(HUNDRED, store=store).hit("k"))
        assert isinstance(outcome, StoreUnavailable)
        assert "sentinel" in str(outcome) or "loading" in str(outcome).lower()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_demoted_server_is_left_for_the_one_at_its_address(server: Valkey, mode: str) -> None:
    """A name or a proxy leads to the new primary, while connections to the old one, now a replica, stay open: no call fails."""
    with Valkey() as primary, Proxy(server.port) as network, RedisStore(network.url, timeout=AMPLE) as store, Loop() as loop:
        limiter, tasks = Limiter(HUNDRED, store=store), AsyncLimiter(HUNDRED, store=store)
        assert limiter.hit("k") if mode == "sync" else loop.call(tasks.hit("k"))
        network.target = primary.port
        with server.client() as client:
            client.replicaof("127.0.0.1", primary.port)
        for left in (99, 98):
            assert (limiter.hit("k") if mode == "sync" else loop.call(tasks.hit("k"))).remaining == left
        assert network.accepted == 2


def test_a_server_without_memory_is_an_error_with_the_remedy(server: Valkey, store: RedisStore) -> None:
    """OOM is StoreUnavailable with the remedy, and over when there is room."""
    limiter = Limiter(HUNDRED, store=store)
    limiter.hit("k")
    with server.client() as client:
        client.config_set("maxmemory", 1)
        outcome, _ = timed(lambda: limiter.hit("k"))
        assert isinstance(outcome, StoreUnavailable)
        assert "raise maxmemory; leave maxmemory-policy at noeviction" in str(outcome)
        client.config_set("maxmemory", 0)
    assert limiter.hit("k").remaining == 98


def test_a_budget_that_is_over_is_no_reason_to_wait_for_ever(store: RedisStore, server: Valkey) -> None:
    """A caller that was kept from running until its budget was over requests a wait of zero, rather than of all of it."""
    Limiter(HUNDRED, store=store).hit("k")
    (connection,) = store.pool.idle(store.route.direct, store.route.login)  # type: ignore[arg-type]
    server.freeze()
    try:
        connection.send(b"*1\r\n$4\r\nPING\r\n", SYSTEM.now_us() - 1000)
        with pytest.raises(StoreTimeout):
            connection.receive(SYSTEM.now_us() - 1000)
    finally:
        server.thaw()


class Impostor:
    """A listener that is no Redis: it sends `answer` a byte at a time, with pauses, and nothing else."""

    def __init__(self, answer: bytes, pause: float = 0.02) -> None:
        self.answer, self.pause = answer, pause
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.ended = False
        self.threads = [threading.Thread(target=self._listen)]
        self.threads[0].start()

    def _listen(self) -> None:
        self.listener.settimeout(0.05)
        while not self.ended:
            try:
                caller, _ = self.listener.accept()
            except TimeoutError:
                continue
            self.threads.append(threading.Thread(target=self._talk, args=(caller,)))
            self.threads[-1].start()

    def _talk(self, caller: socket.socket) -> None:
        with caller:
            caller.settimeout(AMPLE)
            try:
                if not caller.recv(65536):
                    return
                for at in range(len(self.answer)):
                    caller.sendall(self.answer[at : at + 1])
                    time.sleep(self.pause)
                    if self.ended:
                        return
            except OSError:
                return

    def close(self) -> None:
        self.ended = True
        for thread in self.threads:
            thread.join()
        self.listener.close()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"$100000\r\n" + b"x" * 100000, StoreTimeout),
        (b"HTTP/1.1 400 Bad Request\r\n", StoreUnavailable),
        (b"$5\r\nab", StoreError),
        (b"+OK\r\n", StoreUnavailable),
        (b"$3\r\nabc\r\n", StoreUnavailable),
    ],
    ids=["trickles", "is no Redis", "hangs up", "says yes to everything", "talks nonsense"],
)
def test_no_answer_is_worth_more_than_the_budget(answer: bytes, error: type[StoreError], watch: Watch) -> None:
    """A server that trickles, speaks another language or hangs up in the middle: an error of ours, in time, sync and async."""
    impostor = Impostor(answer)
    try:
        budget = BUDGET if error is StoreTimeout else AMPLE / 2
        with RedisStore(f"redis://127.0.0.1:{impostor.port}", timeout=budget) as store:
            for call in (
                lambda: Limiter(HUNDRED, store=store).hit("k"),
                lambda: driven(AsyncLimiter(HUNDRED, store=store).hit("k")),
            ):
                outcome, took = timed(call)
                assert isinstance(outcome, error)
                assert ("the server speaks HTTP" in str(outcome)) == answer.startswith(b"HTTP")
                assert took < watch.allows(budget + NOISE)
    finally:
        impostor.close()


class WrongTopology(Impostor):
    """Answers every command with `answer`, but PING as Redis does."""

    def _talk(self, caller: socket.socket) -> None:
        with caller:
            caller.settimeout(0.05)
            while not self.ended:
                try:
                    asked = caller.recv(65536)
                    if not asked:
                        return
                    caller.sendall(b"+PONG\r\n" if b"PING" in asked else self.answer)
                except TimeoutError:
                    continue
                except OSError:
                    return


@pytest.mark.parametrize("scheme", ["redis+sentinel", "redis+cluster"])
@pytest.mark.parametrize(
    "answer",
    [
        b":5\r\n",
        b"$-1\r\n",
        b"*0\r\n",
        b"*1\r\n*2\r\n:0\r\n:1\r\n",
        b"*2\r\n$1\r\na\r\n$3\r\nxyz\r\n",
        b"*2\r\n$9\r\n127.0.0.1\r\n$6\r\n999999\r\n",
        b"*2\r\n$1\r\n\xff\r\n$2\r\n99\r\n",
        b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:999999\r\n",
        b"*1\r\n*3\r\n:0\r\n:99999\r\n*2\r\n$9\r\n127.0.0.1\r\n:7\r\n",
        b"-MOVED 12\r\n",
        b"-ASK x y\r\n",
    ],
)
def test_a_topology_that_makes_no_sense_is_an_error_of_the_store(scheme: str, answer: bytes) -> None:
    """A Sentinel or a node whose reply has another shape: StoreError, sync and async, which a guard takes for a failure."""
    impostor = WrongTopology(answer)
    try:
        path = "/main" if scheme == "redis+sentinel" else ""
        with RedisStore(f"{scheme}://127.0.0.1:{impostor.port}{path}", timeout=BUDGET) as store:
            with pytest.raises(StoreError):
                Limiter(HUNDRED, store=store).hit("k")
            with pytest.raises(StoreError):
                driven(AsyncLimiter(HUNDRED, store=store).hit("k"))
    finally:
        impostor.close()


SLOTS = b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n"


@pytest.mark.parametrize("error", [b"MOVED", b"MOVED 12", b"MOVED 99999 h:1", b"MOVED 12 h:x", b"ASK 12 foo", b"ASK 12 h:999999"])
def test_a_redirection_that_makes_no_sense_is_an_error_of_the_store(error: bytes) -> None:
    """A node that redirects callers to no node: StoreError."""

    class Redirecting(WrongTopology):
        def __init__(self) -> None:
            super().__init__(b"-%s\r\n" % error)

        def _talk(self, caller: socket.socket) -> None:
            caller.settimeout(AMPLE)
            asked = caller.recv(65536)
            caller.sendall(b"+PONG\r\n")
            with caller:
                while asked := caller.recv(65536):
                    caller.sendall(SLOTS % self.port if b"SLOTS" in asked else self.answer)

    impostor = Redirecting()
    try:
        with RedisStore(f"redis+cluster://127.0.0.1:{impostor.port}", timeout=BUDGET) as store, pytest.raises(StoreError):
            Limiter(HUNDRED, store=store).hit("k")
    finally:
        impostor.close()


@pytest.mark.parametrize(
    "state", [b"\xff" * 40, struct.pack("<d", math.inf) * 5, b"abc", b""], ids=["nan", "inf", "short", "empty"]
)
def test_a_value_that_something_else_wrote_is_an_error_of_the_store(
    hit: Callable[..., Any], store: RedisStore, server: Valkey, state: bytes
) -> None:
    """The key of a state has other bytes: calls on it fail as those of a store do, calls on other keys don't."""
    (named,) = Limiter(HUNDRED, store=store).named
    assert hit("a")
    with server.client() as client:
        client.set(store.names.key(named, "a"), state)
    with pytest.raises(StoreUnavailable):
        hit("a")
    with pytest.raises(StoreUnavailable):
        store.items(named)
    assert hit("b")


def test_an_unknown_host_name_is_unavailable() -> None:
    """A host that can't be found is StoreUnavailable."""
    with RedisStore("redis://no-such-host.invalid", timeout="5s") as store:
        for call in (lambda: Limiter(HUNDRED, store=store).hit("k"), lambda: driven(AsyncLimiter(HUNDRED, store=store).hit("k"))):
            outcome, _ = timed(call)
            assert isinstance(outcome, StoreUnavailable | StoreTimeout)


def test_ctrl_c_in_the_middle_of_a_call_spoils_nothing(store: RedisStore, server: Valkey, python: Any) -> None:
    """An interrupted caller drops its connection: the reply that it did not wait for goes to no other caller."""
    done = python(f"""
        import signal, threading
        from limitkeeper import Limiter, TokenBucket
        from limitkeeper.stores.redis import RedisStore
        signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
        with RedisStore({server.url!r}, timeout=60) as store:
            limiter = Limiter(TokenBucket("1/h", burst=100), store=store)
            limiter.hit("k")
            import os
            os.kill({server.process.pid if server.process else 0}, signal.SIGSTOP)
            try:
                threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
                limiter.hit("k")
            except KeyboardInterrupt:
                print("interrupted")
            os.kill({server.process.pid if server.process else 0}, signal.SIGCONT)
            print(limiter.hit("other").remaining)
    """)
    assert (done.stdout.split(), done.stderr) == (["interrupted", "99"], "")
