"""A signal handler may raise in the middle of a RedisStore call: the call ends with that exception, and the process lives."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from limitkeeper import AsyncLimiter, FixedWindow, Limiter, TokenBucket
from limitkeeper.stores.redis import RedisStore, batcher, resp
from limitkeeper.stores.redis import store as store_module
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
    """Thousands of calls are interrupted at any point; the store goes on working afterwards."""
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

    for module in (resp, store_module, batcher):
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
