"""Tests in real time: the length of sleeps, and Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from textwrap import dedent

import pytest

import limitkeeper
from limitkeeper import (
    AsyncLimiter,
    FixedWindow,
    LeakyBucketQueue,
    Limiter,
    MemoryStore,
    SlidingWindowCounter,
    SlidingWindowLog,
    TokenBucket,
)

HERE = os.path.dirname(next(iter(limitkeeper.__path__)))
#: A busy machine may wake a sleeper late, by as much as the watch measures; it never wakes it early.
LATE = 0.05

FAST = [
    TokenBucket("1/100ms"),
    LeakyBucketQueue("1/100ms"),
    FixedWindow("1/100ms", align="first"),
    SlidingWindowLog("1/100ms"),
]


@pytest.mark.parametrize("limit", FAST, ids=str)
def test_acquire_sleeps_as_long_as_promised(limit, watch):
    """On the system clock an acquire sleeps the promised 100 ms: not less, and hardly more."""
    limiter = Limiter(limit)
    first = time.monotonic()
    limiter.acquire("a")
    start = time.monotonic()
    promised = limiter.acquire("a").wait
    end = time.monotonic()
    assert 0.1 - watch.allows(0.01) < promised <= 0.1
    assert end - first >= 0.1 - 0.001
    assert promised - 0.001 <= end - start < watch.allows(promised + LATE)


@pytest.mark.parametrize("limit", FAST, ids=str)
def test_an_async_acquire_sleeps_as_long_as_promised(limit, watch):
    """The same in asyncio, while other tasks run."""

    async def main():
        limiter = AsyncLimiter(limit)
        await limiter.acquire("a")
        beats = 0

        async def beat():
            nonlocal beats
            while True:
                beats += 1
                await asyncio.sleep(0.005)

        beating = asyncio.create_task(beat())
        start = time.monotonic()
        promised = (await limiter.acquire("a")).wait
        spent = time.monotonic() - start
        beating.cancel()
        return promised, spent, beats

    promised, spent, beats = asyncio.run(main())
    assert 0.1 - watch.allows(0.02) < promised <= 0.1
    assert promised - 0.001 <= spent < watch.allows(promised + LATE)
    assert beats >= 1 or promised == 0


def test_a_counter_waits_in_real_time(watch):
    """An acquire on a sliding counter sleeps until the weight has faded, and is then admitted."""
    limiter = Limiter(SlidingWindowCounter("1/50ms"))
    limiter.acquire("a")
    start = time.monotonic()
    received = limiter.hit("a").retry_after
    assert limiter.acquire("a")
    assert received - 0.005 <= time.monotonic() - start < watch.allows(received + LATE)


def test_threads_leave_at_the_pace_of_the_queue():
    """Five threads on a queue of 20 ms leave no closer than 20 ms to each other's promised starts."""
    limiter = Limiter(LeakyBucketQueue("1/20ms"))
    ends = []

    def run():
        decision = limiter.acquire("a")
        ends.append((time.monotonic(), decision.wait))

    threads = [threading.Thread(target=run) for _ in range(5)]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ends) == 5
    assert all(end - start >= 0.02 * number - 0.001 for number, (end, _) in enumerate(sorted(ends)))


def test_a_waiter_that_moves_up_wakes_up_earlier(eventually):
    """When the waiter ahead leaves, a sleeping thread is woken and starts in half a second instead of half a minute."""
    limiter = Limiter(TokenBucket("2/s burst 60"))
    start = time.monotonic()
    limiter.acquire("a", 60)
    ahead = limiter.reserve("a", 60)
    assert ahead.wait > 20
    ends = []
    thread = threading.Thread(target=lambda: (limiter.acquire("a"), ends.append(time.monotonic())))
    thread.start()
    eventually(lambda: limiter.waiting() == 1)
    ahead.cancel()
    thread.join(60)
    assert 0.49 <= ends[0] - start < 20


def test_the_system_clock_is_utc_and_does_not_step_back():
    """A store's time is that of the wall clock, in microseconds, and never goes back."""
    store = MemoryStore()
    before, received = time.time(), store.clock.now_us() / 1e6
    assert before - 1 < received < time.time() + 1
    moments = [store.clock.now_us() for _ in range(10_000)]
    assert moments == sorted(moments)


#: A thread that prints when a caller waits: only then is Ctrl-C pressed.
SAYS = """
import threading, time
def say():
    while limiter.waiting() < 1:
        time.sleep(0.001)
    print("waiting")
threading.Thread(target=say, daemon=True).start()
"""


def interrupted(code: str) -> tuple[str, int]:
    """Runs code, presses Ctrl-C when it prints that it waits, and returns its output and how it ended."""
    environment = {**os.environ, "PYTHONPATH": HERE, "PYTHONUNBUFFERED": "1"}
    # A process started in the background inherits that Ctrl-C is ignored, and so would its child.
    heeding = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n" + dedent(code)
    child = subprocess.Popen([sys.executable, "-c", heeding], env=environment, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "waiting\n"
    time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    try:
        said, _ = child.communicate(timeout=60)
    finally:
        child.kill()
    return said.strip(), child.returncode


@pytest.mark.skipif(os.name == "nt", reason="a process can't be sent Ctrl-C by its id here")
@pytest.mark.parametrize(
    "limit", ["TokenBucket('1/h')", "LeakyBucketQueue('1/h')", "SlidingWindowLog('1/h')", "SlidingWindowCounter('1/h')"]
)
def test_ctrl_c_ends_an_acquire_and_gives_its_place_back(limit):
    """Ctrl-C during an acquire raises KeyboardInterrupt at once, and the next caller's wait is no longer than before."""
    said, code = interrupted(
        f"""
        from limitkeeper import *
        limiter = Limiter({limit})
        limiter.hit("a")
        before = limiter.peek("a").retry_after
        exec({SAYS!r})
        try:
            limiter.acquire("a")
        except KeyboardInterrupt:
            print(limiter.peek("a").retry_after <= before, limiter.waiting())
        """
    )
    assert (said, code) == ("True 0", 0)


@pytest.mark.skipif(os.name == "nt", reason="a process can't be sent Ctrl-C by its id here")
def test_ctrl_c_ends_an_async_acquire_and_gives_its_place_back():
    """Ctrl-C during asyncio.run cancels the waiting task, which gives its place back before the loop ends."""
    said, code = interrupted(
        f"""
        import asyncio
        from limitkeeper import *

        limiter = AsyncLimiter("1/h")

        async def main():
            global before
            await limiter.hit("a")
            before = (await limiter.peek("a")).retry_after
            exec({SAYS!r}, globals())
            await limiter.acquire("a")

        try:
            asyncio.run(main())
        except KeyboardInterrupt:
            print(asyncio.run(limiter.peek("a")).retry_after <= before, limiter.waiting())
        """
    )
    assert (said, code) == ("True 0", 0)


@pytest.mark.skipif(os.name == "nt", reason="a process can't be sent Ctrl-C by its id here")
def test_ctrl_c_in_a_reservation_gives_all_back():
    """Ctrl-C inside the block of a reservation gives its whole charge back."""
    said, code = interrupted(
        """
        import time
        from limitkeeper import *

        limiter = Limiter("1/h burst 10")
        try:
            with limiter.reserve("a", cost=7):
                print("waiting")
                time.sleep(20)
        except KeyboardInterrupt:
            print(limiter.peek("a").remaining)
        """
    )
    assert (said, code) == ("10", 0)
