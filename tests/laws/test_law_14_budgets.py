"""Law 14: every call with a declared budget ends within it, whatever hangs: a lock, DNS, a server, a pool, other threads."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import random
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import hiredis
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shards import FarShard

from fault_lab.scheduling_delay import WAKES, Watch
from limitkeeper import AsyncLimiter, Limiter, LimitkeeperError, StoreTimeout, StoreUnavailable, compiled
from limitkeeper.clock import SYSTEM
from limitkeeper.policy import Gate, Policy, WrittenRequest
from limitkeeper.stores import GuardedStore, LeasedStore, RedisStore, ShardedStore, SharedStore, Store
from limitkeeper.stores.contract import Booking
from limitkeeper.stores.redis import resolver
from limitkeeper.stores.redis.address import Endpoint, Login
from limitkeeper.stores.redis.async_connection import PART, AsyncConnection, AsyncConnections
from limitkeeper.stores.redis.batcher import MAX_BATCH, Batcher
from limitkeeper.stores.redis.resp import Parser, ProtocolError, Unsent
from limitkeeper.stores.redis.script_request import RegisterRequest
from limitkeeper.testing import ManualClock
from stand_ins import NOON, WrappedStore

BUDGET = 0.4
#: Callers at the same moment; one after the other they would take longer than is allowed.
CALLERS = 10
LONGEST = 7 * BUDGET
LIMITS = {"a": "1000/h", "b": "token bucket 1000/min burst 500"}
KEYS = {"a": "key", "b": "key"}
#: It can't reserve: callers wait in line in their process, and the first one asks.
COUNTER = "sliding window counter 1000/h"
Calls = dict[str, Callable[[Any], Any]]
CALLS: Calls = {
    "hit": lambda limiter: limiter.hit(KEYS),
    "peek": lambda limiter: limiter.peek(KEYS),
    "hit_many": lambda limiter: limiter.hit_many([KEYS, KEYS]),
    "acquire": lambda limiter: limiter.acquire(KEYS, timeout=BUDGET),
    "acquire in line": lambda limiter: type(limiter)(COUNTER, store=limiter.store).acquire("key", timeout=BUDGET),
    "reserve": lambda limiter: limiter.reserve(KEYS, max_wait=BUDGET),
    "refund": lambda limiter: limiter.refund(KEYS),
    "reset": lambda limiter: limiter.reset(KEYS),
}


# Things that hang ----------------------------------------------------------------------------------------------------------


class StoppingClock:
    """A clock on which a store reads the time once, under its lock, before its process is stopped."""

    armed = False

    def now_us(self) -> int:
        if self.armed:
            os.kill(os.getpid(), signal.SIGSTOP)
        return SYSTEM.now_us()


@contextlib.contextmanager
def stopped_holder(path: str) -> Iterator[int]:
    """A process that was stopped (SIGSTOP) in the middle of a decision on a shared file."""
    pid = os.fork()
    if pid == 0:
        try:
            clock = StoppingClock()
            limiter = Limiter(LIMITS, store=SharedStore(path, clock=clock), name="holder")  # type: ignore[arg-type]
            limiter.hit(KEYS)
            clock.armed = True
            limiter.hit(KEYS)
        finally:
            os._exit(1)
    assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


class Server:
    """A server that accepts connections and answers each with some bytes, then with `more` again and again; b"": never."""

    def __init__(self, first: bytes = b"", more: bytes = b"", pause: float = 0.0) -> None:
        self.first, self.more, self.pause = first, more, pause
        self.ended = threading.Event()
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = int(self.socket.getsockname()[1])
        if first:
            threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._answer, args=(self.socket.accept()[0],), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.recv(65536)
            connection.sendall(self.first)
            while self.more and not self.ended.is_set():
                connection.sendall(self.more)
                time.sleep(self.pause)
            self.ended.wait(60)

    def __enter__(self) -> str:
        return f"127.0.0.1:{self.port}"

    def __exit__(self, *exc: object) -> None:
        self.ended.set()
        self.socket.close()


@contextlib.contextmanager
def full_backlog() -> Iterator[str]:
    """An address that takes no connection: the queue of its listener is full, so what is sent to it is dropped."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, contextlib.ExitStack() as stack:
        for _ in range(4):
            filling = stack.enter_context(socket.socket())
            filling.setblocking(False)
            filling.connect_ex(listener.getsockname())
        time.sleep(0.01)
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@contextlib.contextmanager
def slow_dns() -> Iterator[str]:
    """A host name whose lookup hangs."""
    ended, real = threading.Event(), socket.getaddrinfo

    def look_up(host: Any, *args: Any, **options: Any) -> Any:
        if "limitkeeper-test" in str(host):
            ended.wait(60)
            raise socket.gaierror("no such host")
        return real(host, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", look_up)
        try:
            yield "redis.limitkeeper-test:6379"
        finally:
            ended.set()
            while resolver.RESOLVER._lookups:
                time.sleep(0.001)


HANGS: dict[str, Callable[[], contextlib.AbstractContextManager[str]]] = {
    "silent": Server,
    "blackhole": full_backlog,
    "dns": slow_dns,
    "byte by byte": lambda: Server(b"$60\r\n", b".", 0.03),
    "array": lambda: Server(b"*1000000000\r\n" * 8),
    "endless array": lambda: Server(b"*200000\r\n", b":1\r\n" * 1000, 0.001),
    "endless string": lambda: Server(b"$1000000000\r\n", b"." * 65536, 0.001),
    "endless line": lambda: Server(b"+", b"." * 65536, 0.001),
}


@pytest.fixture
def path(tmp_path: Any) -> Iterator[str]:
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else str(tmp_path)
    found = os.path.join(folder, f"limitkeeper-test-{os.getpid()}-{random.getrandbits(40):x}")
    yield found
    for name in (found, found + ".lock"):
        if os.path.exists(name):
            os.unlink(name)


# What is measured ----------------------------------------------------------------------------------------------------------


def attempt(call: Callable[[], Any]) -> None:
    with contextlib.suppress(LimitkeeperError):
        call()


def longest_of_threads(limiter: Any, call: Callable[[Any], Any]) -> float:
    """The longest of the calls that some threads make at the same moment, in seconds."""
    took, ready = list[float](), threading.Barrier(CALLERS)

    def work() -> None:
        ready.wait()
        begun = time.monotonic()
        attempt(lambda: call(limiter))
        took.append(time.monotonic() - begun)

    threads = [threading.Thread(target=work) for _ in range(CALLERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(took) == CALLERS
    return max(took)


def longest_of_tasks(limiter: Any, call: Callable[[Any], Any]) -> float:
    """The same of tasks, with the end of their loop."""

    async def main() -> None:
        async def one() -> None:
            with contextlib.suppress(LimitkeeperError):
                await call(limiter)

        await asyncio.gather(*[one() for _ in range(CALLERS)])

    begun = time.monotonic()
    asyncio.run(main())
    return time.monotonic() - begun


class Mode:
    """Callers of a store in threads or in tasks; their limiter is made while nothing hangs."""

    def __init__(self, mode: str, store: Store) -> None:
        self.limiter = (Limiter if mode == "threads" else AsyncLimiter)(LIMITS, store=store, name="law 14")
        self.measure = longest_of_threads if mode == "threads" else longest_of_tasks

    def longest(self, call: str) -> float:
        """Seconds, less those for which the machine kept this process from running; its own computation counts."""
        used = time.process_time()
        with Watch() as watching:
            took = self.measure(self.limiter, CALLS[call])
        return took - WAKES * max(0.0, watching.late - (time.process_time() - used))


MODES = ("threads", "tasks")
WRAPPERS: dict[str, Callable[[Callable[[], Store]], Store]] = {
    "bare": lambda make: make(),
    "guarded": lambda make: guarded(make()),
    "leased": lambda make: LeasedStore(make()),
    "guarded leased": lambda make: guarded(LeasedStore(make())),
    "guarded sharded": lambda make: guarded(ShardedStore([make()])),
    "guarded pool": lambda make: guarded(WithoutPromise(make())),
}


def guarded(store: Store) -> Store:
    """A guard whose breaker stays closed, so that every call reaches the store."""
    return GuardedStore(store, budget=BUDGET, failures=10**6, ratio=1.0, background=False)


class WithoutPromise(WrappedStore):
    """A third-party store, which promises no budget."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)

    def answers_within(self, budget_us: int) -> bool:
        return False


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", CALLS)
def test_every_call_to_a_server_that_never_answers_ends_within_its_budget(call, mode):
    """Ten at the same moment, each within its own budget: none waits for the budgets of the others."""
    with Server() as address, RedisStore(f"redis://{address}", timeout=BUDGET) as store:
        assert Mode(mode, store).longest(call) <= LONGEST


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", CALLS)
def test_every_call_while_the_owner_of_a_shared_file_is_stopped_ends_within_its_budget(path, call, mode):
    """The wait for other threads of this process counts too. Tasks block their loop once: later ones fail at once."""
    if mode == "tasks" and not compiled:
        pytest.skip("without compare-and-swap the owner is unknown, so every task waits for its timeout")
    with SharedStore(path, timeout=BUDGET) as store:
        callers = Mode(mode, store)
        with stopped_holder(path):
            assert callers.longest(call) <= LONGEST
        assert Limiter(LIMITS, store=store, name="law 14").hit(KEYS)


def seconds_of_a_collection() -> float:
    begun = time.process_time()
    gc.collect()
    return time.process_time() - begun


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hang", HANGS)
def test_whatever_hangs_between_us_and_a_server_costs_at_most_the_budget(hang, mode):
    """A corrupt reply costs no more than the budget either, and no memory for what its header declares."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    usual = seconds_of_a_collection()  # of all objects that earlier tests have left behind
    with HANGS[hang]() as address, RedisStore(f"redis://{address}", timeout=BUDGET) as store:
        assert Mode(mode, store).longest("hit") <= LONGEST
    assert seconds_of_a_collection() <= LONGEST + 5 * usual
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1_000_000  # KiB: 1 GB


@pytest.mark.parametrize("mode", MODES)
def test_a_tls_handshake_that_hangs_costs_at_most_the_budget(mode):
    """Certificates are read when the store is made, and the handshake ends with the budget."""
    with Server() as address, RedisStore(f"rediss://{address}", timeout=BUDGET) as store:
        assert Mode(mode, store).longest("hit") <= LONGEST


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_every_wrapper_keeps_the_budget_of_a_server_that_never_answers(wrapper, mode):
    """Whether the store promises a budget itself, shares it out among steps, or is called in a pool."""
    with Server() as address, WRAPPERS[wrapper](lambda: RedisStore(f"redis://{address}", timeout=BUDGET)) as store:
        assert Mode(mode, store).longest("hit") <= LONGEST


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_every_wrapper_keeps_the_budget_of_a_shared_file_with_a_stopped_owner(path, wrapper):
    """The same for a lock: hits, calls that may wait for a start, and refunds."""
    with WRAPPERS[wrapper](lambda: SharedStore(path, timeout=BUDGET)) as store:
        callers = Mode("threads", store)
        with stopped_holder(path):
            for call in ("hit", "acquire", "refund"):
                assert callers.longest(call) <= LONGEST


def test_a_stopped_owner_is_waited_for_again_after_it_ran(path):
    """After one timeout calls fail at once while it is stopped; once it runs, they wait for it, and it releases the lock."""
    with SharedStore(path, timeout=BUDGET) as store:
        limiter = Limiter(LIMITS, store=store, name="law 14")
        limiter.hit(KEYS)
        with stopped_holder(path) as pid:
            for _ in range(3):
                with pytest.raises(StoreTimeout, match=str(pid) if compiled else "stopped"):
                    limiter.hit(KEYS)
            os.kill(pid, signal.SIGCONT)  # it finishes its decision and ends
            while not attempt_hit(limiter):
                time.sleep(0.001)


def attempt_hit(limiter: Limiter) -> bool:
    try:
        return bool(limiter.hit(KEYS))
    except StoreTimeout:
        return False


def test_opening_a_file_that_a_stopped_process_creates_ends_within_the_timeout(path):
    """The creator holds the file alone until it is ready."""
    import fcntl

    with open(path, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        begun = time.monotonic()
        with pytest.raises(StoreTimeout, match="stopped"):
            SharedStore(path, timeout=BUDGET)
        assert time.monotonic() - begun <= LONGEST


# DNS -----------------------------------------------------------------------------------------------------------------------


def hit_error(url: str) -> str:
    """The error of a hit through a separate store."""
    with RedisStore(url, timeout=BUDGET) as store, pytest.raises((StoreTimeout, StoreUnavailable)) as failed:
        Limiter("5/s", store=store).hit("a")
    return str(failed.value)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_every_wrapper_keeps_the_budget_of_a_name_that_resolves_slowly(wrapper, mode):
    """Each call of ten at the same moment, and each of ten one after the other: the lookup continues without them."""
    with slow_dns() as address, WRAPPERS[wrapper](lambda: RedisStore(f"redis://{address}", timeout=BUDGET)) as store:
        callers = Mode(mode, store)
        assert callers.longest("hit") <= LONGEST
        assert callers.longest("acquire") <= LONGEST


def test_a_policy_with_a_budget_of_20_ms_answers_while_its_store_is_looked_up():
    """A hundred requests take far less than one lookup, which takes a minute here: each ends within its budget."""
    with slow_dns() as address:
        text = f"store: redis://{address}\nbudget: 20ms\non_failure: open\nlimits: [{{name: all, key: ip, limit: 5/s}}]"
        with Gate(Policy.read(text)) as gate:
            begun = time.monotonic()
            for _ in range(100):
                assert gate.ask(WrittenRequest(peer="192.0.2.1"))
            assert time.monotonic() - begun <= 5 * 100 * 0.02


def test_when_all_lookups_hang_another_name_fails_at_once(eventually):
    """One lookup per name, at most eight in all; a ninth name does not wait for its budget."""
    with slow_dns():
        names = [f"{i}.limitkeeper-test" for i in range(resolver.MAX_LOOKUPS)]

        def lookups() -> int:
            for name in names:
                attempt(lambda name=name: Limiter("5/s", store=RedisStore(f"redis://{name}", timeout=0.005)).hit("a"))
            return sum(thread.name == "limitkeeper DNS" for thread in threading.enumerate())

        eventually(lambda: lookups() >= resolver.MAX_LOOKUPS)
        assert lookups() == resolver.MAX_LOOKUPS  # later calls of a name wait for its first lookup
        assert "8 DNS lookups hang" in hit_error("redis://ninth.limitkeeper-test")


def test_addresses_are_used_again_and_kept_while_a_lookup_fails(monkeypatch):
    """A name is looked up once for many connections, again when none of its addresses can be reached, and a failure of DNS leaves
    the last known addresses in use."""
    found: list[Any] = [[(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]] * 2 + [socket.gaierror("gone")]
    lookups = list[str]()

    def look_up(host: str, *args: Any, **options: Any) -> Any:
        lookups.append(host)
        answer = found[len(lookups) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    made = resolver.Resolver(SYSTEM.now_us)

    def addresses() -> list[str]:
        from limitkeeper.stores.sans_io import run

        return run(made.plan("cache.limitkeeper-test", 60))

    assert [addresses() for _ in range(3)] == [["127.0.0.1"]] * 3
    assert len(lookups) == 1
    for _ in range(2):
        made.expire("cache.limitkeeper-test")
        assert addresses() == ["127.0.0.1"]
    assert len(lookups) == 3


def test_a_name_that_does_not_exist_is_unavailable_not_a_crash(monkeypatch):
    """An exception of a lookup becomes a StoreError."""

    def look_up(*args: Any, **options: Any) -> Any:
        raise UnicodeError("label too long")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert "can't be looked up: label too long" in hit_error("redis://nowhere.limitkeeper-test")


# Replies -------------------------------------------------------------------------------------------------------------------

REPLIES = st.recursive(
    st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1), st.binary(max_size=200), st.just(ValueError("NOSCRIPT x"))),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=20,
)


def encoded(reply: Any) -> bytes:
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, bytes):
        return b"$%d\r\n%s\r\n" % (len(reply), reply)
    if isinstance(reply, list):
        return b"*%d\r\n" % len(reply) + b"".join(map(encoded, reply))
    return b"-%s\r\n" % str(reply).encode()


def comparable(reply: Any) -> Any:
    return list(map(comparable, reply)) if isinstance(reply, list) else repr(reply) if isinstance(reply, Exception) else reply


def parsed(parser: Any, data: bytes, cuts: list[int]) -> list[Any]:
    """The replies in some bytes, fed in parts."""
    found = list[Any]()
    for start, end in itertools.pairwise([0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]):
        parser.feed(data[start:end])
        while (reply := parser.gets()) is not False:
            found.append(comparable(reply))
    return found


@given(st.lists(REPLIES, max_size=5), st.lists(st.integers(0, 10_000), max_size=8))
def test_replies_are_parsed_as_hiredis_does_however_they_arrive(replies, cuts):
    """The parser and hiredis agree on every reply, in whatever parts it comes."""
    data = b"".join(map(encoded, replies))
    parser = Parser()
    assert parsed(parser, data, cuts) == parsed(hiredis.Reader(), data, [])
    assert not parser.data


@given(st.lists(st.one_of(st.binary(max_size=40), st.from_regex(rb"\A[*$:+-]-?[0-9]{0,12}\r\n\Z")), max_size=30))
def test_any_bytes_are_replies_or_a_protocol_error_in_proportion_to_their_number(parts):
    """Whatever a header declares, at most the received bytes are kept."""
    parser = Parser()
    with contextlib.suppress(ProtocolError):
        parsed(parser, b"".join(parts), [])
    assert len(parser.arrays) <= 9
    assert sum(len(items) for items, _ in parser.arrays) + len(parser.data) <= sum(map(len, parts))


CORRUPT = {
    "array": b"*1000000000\r\n",
    "string": b"$999999999999\r\n",
    "nested": b"*1\r\n" * 50,
    "number": b"*1x\r\n",
    "kind": b"?5\r\n",
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("corrupt", CORRUPT)
def test_a_corrupt_reply_is_a_store_error_at_once_and_closes_the_connection(corrupt, mode):
    """Not when the budget is over, and not for the callers after it: a length that no reply has ends the connection."""
    server = Server(CORRUPT[corrupt])
    with server as address, RedisStore(f"redis://{address}", timeout=60) as store:
        begun = time.monotonic()
        if mode == "threads":
            with pytest.raises(StoreUnavailable):
                Limiter("5/s", store=store).hit("a")
            assert not any(server.open for server in store.pool._servers.values())
        else:

            async def main() -> None:
                with pytest.raises(StoreUnavailable):
                    await AsyncLimiter("5/s", store=store).hit("a")
                assert not any(one.usable for one in store.batchers.current().connections._open.values())

            asyncio.run(main())
        assert time.monotonic() - begun < 30


@pytest.mark.parametrize("ready", [True, False])
def test_an_array_that_goes_on_is_parsed_no_longer_than_the_budget(ready):
    """The loop has 256 KiB of it at a time, and calls no timer before they are parsed: what follows once no call waits any more,
    or instead of the replies to a login, is left."""
    outcomes = []

    async def main() -> tuple[int, bool]:
        loop = asyncio.get_running_loop()
        connection = AsyncConnection(Endpoint(*address), Login(), loop, 60)
        while connection._transport is None or connection._ready != ready:
            await asyncio.sleep(0)
        connection.write(b"", 1, loop.time() - 1, outcomes.append)
        connection.data_received(b"*200000\r\n" + b":1\r\n" * 60_000)
        return len(connection._parser.arrays[0][0]), connection.usable

    with Server(b"+PONG\r\n" if ready else b"") as found:
        host, _, port = found.partition(":")
        address = (host, int(port))
        assert asyncio.run(main()) == ((2 * PART if ready else PART) // 4 - 3, False)
    assert isinstance(outcomes[0], StoreTimeout if ready else Unsent)


# Batches -------------------------------------------------------------------------------------------------------------------


class RecordingBatcher(Batcher):
    """Records the batches that it would send."""

    def __init__(self, store: RedisStore) -> None:
        super().__init__(store, AsyncConnections(asyncio.get_running_loop()))
        self.sent: list[tuple[Any, float]] = []

    def _execute(self, endpoint: Any, batch: Any) -> None:
        self.sent.append(batch[1:])


@given(st.lists(st.tuples(st.sampled_from((0.0, 0.0, 0.05, 0.15)), st.integers(1, 70)), min_size=1, max_size=6))
def test_every_request_of_a_batch_has_its_own_budget(groups):
    """The time that others used to register a limit neither shortens nor lengthens it; batches keep the order of the requests."""

    async def main() -> None:
        store = RedisStore("redis://127.0.0.1:1", timeout=BUDGET)
        batcher = RecordingBatcher(store)
        batcher.loop.time = lambda: 1000.0  # type: ignore[method-assign]
        named = Limiter("5/s", store=store).named[0]
        asked: list[Any] = []
        for used, size in groups:
            for _ in range(size):
                asked.append(RegisterRequest(store.names, named, 0))
                batcher.submit(asked[-1], used)
        waited = [one for one in asked if one.used] + [one for one in asked if not one.used]
        for _ in range(len(asked)):  # each request may need an iteration of its own
            await asyncio.sleep(0)
        assert [one for requests, _ in batcher.sent for one in requests] == waited
        for requests, deadline in batcher.sent:
            assert [1000.0 + BUDGET - one.used for one in requests] == [deadline] * len(requests)
            assert len(requests) <= MAX_BATCH
        del batcher.loop.time

    asyncio.run(main())


# Several calls of one plan, on a clock that the calls move ------------------------------------------------------------------


class Slow(FarShard):
    """A remote store whose calls take up to the promised time."""

    def __init__(self, clock: ManualClock, durations: Iterator[float]) -> None:
        super().__init__(clock)
        self.promised_us, self.moving, self.durations = 0, clock, durations
        self.meanwhile = self.pass_time

    def answers_within(self, budget_us: int) -> bool:
        self.promised_us = budget_us
        return True

    def decide_one(self, named: Any, key: str, cost: int, max_wait_us: int, commit: bool) -> Any:
        self.record("decide")
        return super().decide_one(named, key, cost, max_wait_us, commit)

    def rebook(self, bookings: Any) -> Any:
        self.record("rebook")
        return super().rebook(bookings)

    def pass_time(self, verb: str) -> None:
        self.moving.advance(next(self.durations) * self.promised_us / 1e6)


SLOW_STORES = {
    "leased": lambda clock, shard: LeasedStore(shard()),
    "leased batches": lambda clock, shard: LeasedStore(shard(), lease=7),
    "sharded": lambda clock, shard: ShardedStore([shard() for _ in range(4)], hot=False, clock=clock),
    "hot keys": lambda clock, shard: ShardedStore([shard() for _ in range(4)], hot=1, clock=clock),
    "rehashed": lambda clock, shard: ShardedStore([shard() for _ in range(4)], hot=False, on_loss="rehash", clock=clock),
}


@pytest.mark.parametrize("kind", SLOW_STORES)
@given(st.data())
def test_calls_that_take_several_steps_end_within_the_budget(kind, data):
    """However long each step takes within its part of the budget, and whichever of them fail."""
    clock, budget_us = ManualClock(NOON), 100_000
    draw = random.Random(data.draw(st.integers(0, 10**6)))
    durations = iter(lambda: draw.choice((0.0, 0.3, 0.9, 1.0)), None)
    made: list[Slow] = []

    def shard() -> Slow:
        made.append(Slow(clock, durations))
        return made[-1]

    store = SLOW_STORES[kind](clock, shard)
    assert store.answers_within(budget_us)
    limiter = Limiter({"a": "5/s burst 10", "b": "3/s burst 4"}, store=store)
    for step in data.draw(
        st.lists(st.tuples(st.sampled_from(["hit", "peek", "hit_many", "refund", "reset"]), st.integers(0, 9)))
    ):
        call, number = step
        for one in made:
            one.failing = {"decide"} if draw.random() < 0.1 else set()
        keys: Any = {"a": f"a{number}", "b": f"b{number % 3}"}
        begun_us = clock.now_us()
        attempt(lambda call=call, keys=keys: getattr(limiter, call)([keys, keys] if call == "hit_many" else keys))
        assert clock.now_us() - begun_us <= budget_us + 2


@pytest.mark.parametrize("state", ["closed", "half open"])
def test_a_guard_rebooks_within_one_budget(state):
    """Waiters of the store and of the local share leave together: the store is called once, however slow it is."""
    clock, budget_us = ManualClock(NOON), 100_000
    slow = Slow(clock, iter(lambda: 1.0, None))
    guard = GuardedStore(
        slow, budget=0.1, on_failure="local", share=1, failures=1, backoff=1, ramp=0, clock=clock, background=False
    )
    limiter = Limiter("1/s burst 1", store=guard)
    by_store = [limiter.reserve("k", max_wait=600) for _ in range(5)]
    slow.down = True
    by_share = [limiter.reserve("k", max_wait=600) for _ in range(3)]
    assert {one.decision.source for one in by_share} == {"local_share"}
    slow.down = False
    clock.advance(2)
    if state == "closed":
        assert guard.probe()
    bookings = [
        Booking(one._claims, one.decision.start_us, None, False, one.decision.source) for one in (*by_store[2:], *by_share[1:])
    ]
    slow.calls.clear()
    begun_us = clock.now_us()
    assert guard.rebook(bookings) == [None] * 5
    assert clock.now_us() - begun_us <= budget_us
    assert len(slow.calls) <= 1
