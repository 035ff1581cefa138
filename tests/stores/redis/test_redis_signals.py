"""A signal handler may raise in the middle of a RedisStore call: the call ends with that exception, and the process survives."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable
from typing import Any, Never

import pytest

from limitkeeper import AsyncLimiter, FixedWindow, Limiter, TokenBucket
from limitkeeper.clock import SYSTEM
from limitkeeper.stores.redis import RedisStore, command_routing, resp
from limitkeeper.stores.redis.address import Endpoint, Login
from limitkeeper.stores.redis.sync_connection import CallRecord, SyncPool
from servers.valkey import Valkey

#: The alarm is moved in steps of 1 µs through the first 300 µs of a call: some of them ring while the command is packed.
RINGING = """
    import faulthandler, signal
    from limitkeeper import Limiter, TokenBucket
    from limitkeeper.errors import StoreError
    from limitkeeper.stores.redis import RedisStore

    faulthandler.enable()

    class Rung(Exception):
        pass

    def rung(*_):
        raise Rung

    limiter = Limiter(TokenBucket("1000000/s"), store=RedisStore({url!r}, prefix="signals", timeout="60s"))
    limiter.hit("k")
    signal.signal(signal.SIGALRM, rung)
    rings = 0
    for turn in range({turns}):
        try:
            signal.setitimer(signal.ITIMER_REAL, (turn % 300 + 1) / 1e6)
            limiter.hit("k")
            signal.setitimer(signal.ITIMER_REAL, 0)
        except (Rung, StoreError):
            rings += 1
    assert limiter.hit("k")
    print(rings)
"""


@pytest.mark.untraced
def test_a_handler_that_raises_during_a_call_ends_the_call_only(
    valkey: Valkey, python: Callable[[str], subprocess.CompletedProcess[str]]
) -> None:
    """Thousands of calls are interrupted at any point; the store works afterwards."""
    ended = python(RINGING.format(url=valkey.url, turns=4_000))
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 100


def test_everything_packed_is_bytes_or_text(valkey: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are written as bytes before they are packed: logins, single hits, batches, scripts, scans, sync and async."""
    packed: list[tuple[Any, ...]] = []
    pack_command = resp.pack_command

    def noted(command: tuple[Any, ...]) -> bytes:
        packed.append(command)
        return pack_command(command)

    for module in (resp, command_routing):
        monkeypatch.setattr(module, "pack_command", noted)
    with valkey.client() as client:
        client.script_flush()
    two = {"a": TokenBucket("5/s"), "b": FixedWindow("9/h")}
    with RedisStore(f"{valkey.url}/1", prefix="packed", timeout="60s") as store:
        limiter = Limiter(two, store=store)
        limiter.hit("k")
        limiter.hit_many(["k", "l", "m"])
        limiter.reserve("k").cancel()
        limiter.reset("k")
        Limiter(TokenBucket("5/s"), store=store).hit("k")

        async def tasks() -> None:
            limits = AsyncLimiter(two, store=store)
            await asyncio.gather(*(limits.hit(f"task {i}") for i in range(9)))
            await AsyncLimiter(TokenBucket("5/s"), store=store).hit("k")

        asyncio.run(tasks())
        list(store.items(limiter.named[0]))
    words = {word if isinstance(word := command[0], str) else word.decode() for command in packed}
    assert words >= {"SELECT", "EVAL", "EVALSHA", "SCAN"}
    assert {type(part) for command in packed for part in command} <= {bytes, str}


@pytest.mark.untraced
def test_a_handler_that_raises_loses_no_connection_and_no_caller(valkey: Valkey, python: Any) -> None:
    """Two connections, five threads, and a main thread that is interrupted hundreds of times while it takes, waits and returns:
    no caller waits for ever, and both connections can be used afterwards."""
    done = python(f"""
        import random, signal, threading, time
        from limitkeeper import Limiter, TokenBucket
        from limitkeeper.stores.redis import RedisStore
        class Interrupted(Exception): pass
        def handler(*_): raise Interrupted
        signal.signal(signal.SIGALRM, handler)
        with RedisStore({valkey.url!r}, prefix="storm", timeout="50s", max_connections=2) as store:
            limiter = Limiter(TokenBucket("1/h", burst=1_000_000), store=store)
            limiter.hit("k")
            over, raised, interrupts = threading.Event(), [], 0
            def work():
                try:
                    while not over.is_set():
                        limiter.hit("k")
                except Exception as error:
                    raised.append(error)
            threads = [threading.Thread(target=work) for _ in range(5)]
            for thread in threads: thread.start()
            rng, end = random.Random(1), time.monotonic() + 2
            while time.monotonic() < end or interrupts <= 50:
                try:  # an alarm that was lost in a finaliser rings again
                    signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.00005, 0.003), 1)
                    while True: limiter.hit("k")
                except Interrupted:
                    interrupts += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            over.set()
            for thread in threads: thread.join()
            server = store.pool.idle(store.route.direct, store.route.login)
            both = [server.take(store.clock.now_us() + 10_000_000) for _ in range(2)]
            print(interrupts > 50, raised, len(server.waiting), len(server.open))
    """)
    assert (done.stdout, done.stderr) == ("True [] 0 2\n", "")


def test_a_timeout_that_a_handler_raises_while_connecting_ends_the_call(python: Any) -> None:
    """The alarm of a caller is no timeout of the connection, which would be tried again until the budget ends."""
    done = python("""
        import signal, socket, threading
        from limitkeeper import Limiter
        from limitkeeper.stores.redis import RedisStore
        def ring(*_): raise TimeoutError("of the caller")
        signal.signal(signal.SIGUSR1, ring)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            def interrupt():
                connection, _ = silent.accept()
                connection.recv(1000)  # the client logs in
                signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
                connection.recv(1000)
            threading.Thread(target=interrupt).start()
            with RedisStore(f"redis://:secret@127.0.0.1:{silent.getsockname()[1]}", timeout="50s") as store:
                try:
                    Limiter("5/s", store=store).hit("k")
                except TimeoutError as error:
                    print(error)
    """)
    assert (done.stdout, done.stderr) == ("of the caller\n", "")


def test_bytes_of_a_reply_are_kept_though_a_handler_ends_the_read(valkey: Valkey) -> None:
    """A handler that raises between two parts of a read loses nothing of the reply: the read continues with the received
    bytes."""
    idle = SyncPool(SYSTEM).idle(Endpoint("127.0.0.1", valkey.port), Login())
    deadline_us = SYSTEM.now_us() + 30_000_000
    connection = idle.take(deadline_us)
    connection.open(Login(), deadline_us)
    connection.send(resp.pack([("ECHO", "hello")]), deadline_us)

    def interrupt() -> bytes:
        raise KeyboardInterrupt

    received, record = connection._recv, CallRecord()
    parts = iter([lambda: received(4), interrupt, lambda: received(64)])

    connection._recv = lambda size: next(parts)()
    with pytest.raises(KeyboardInterrupt):
        connection.receive_to_end(deadline_us, record)
    assert connection.receive_to_end(deadline_us, record) == b"hello"
    connection.close()


def test_a_handler_that_raises_between_sending_and_receiving_leaves_no_charge(
    valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A waiting call on a new connection, which the pool opens by a plan, gives back its charge."""

    def interrupted(*_: object) -> Never:
        raise KeyboardInterrupt

    with RedisStore(valkey.url, prefix="between", timeout="60s") as store:
        limiter = Limiter(FixedWindow("1/400d"), store=store)
        assert limiter.hit("k")
        before = limiter.peek("k").reset_after
        store.pool.close()
        reads, read = iter([interrupted]), store.pool._read
        monkeypatch.setattr(store.pool, "_read", lambda *args: next(reads, read)(*args))
        with pytest.raises(KeyboardInterrupt):
            limiter.reserve("k")
        assert limiter.peek("k").reset_after <= before
