"""MemoryStore in threads, under finalisers and after a fork."""

from __future__ import annotations

import gc
import os
import sys
import threading
from textwrap import dedent
from typing import Any

import pytest

from limitkeeper import (
    FixedWindow,
    LeakyBucket,
    LeakyBucketQueue,
    Limiter,
    MemoryStore,
    SharedStore,
    SlidingWindowCounter,
    SlidingWindowLog,
    TokenBucket,
    compiled,
)
from limitkeeper.stores.cell_table import Table
from limitkeeper.stores.shared.cell_table import SharedCellTable

KINDS = [
    TokenBucket("10/h"),
    LeakyBucket("10/h", 10),
    LeakyBucketQueue("10/h"),
    LeakyBucketQueue("10/h", 10),
    FixedWindow("10/h"),
    FixedWindow("10/h", align="first"),
    SlidingWindowLog("10/h"),
    SlidingWindowCounter("10/h"),
]
each = pytest.mark.parametrize("limit", KINDS, ids=str)
#: The bucket and the log, whose cells differ most; `make test-all` tries the others too.
each_costly = pytest.mark.parametrize(
    "limit",
    [pytest.param(kind, marks=() if isinstance(kind, TokenBucket | SlidingWindowLog) else pytest.mark.slow) for kind in KINDS],
    ids=str,
)


@each
def test_a_hundred_threads_admit_exactly_the_limit(limit, clock):
    """100 threads on one key, switching every microsecond, are admitted exactly as often as one thread would be."""
    limiter = Limiter(limit, store=MemoryStore(clock=clock))
    alone = Limiter(limit, store=MemoryStore(clock=clock))
    expected = sum(bool(alone.hit("a")) for _ in range(300))
    admitted = []
    start = threading.Barrier(100)

    def run():
        start.wait()
        admitted.append(sum(bool(limiter.hit("a")) for _ in range(3)))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run) for _ in range(100)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert sum(admitted) == expected
    assert limiter.stats()[:2] == (expected, 300 - expected)


def test_threads_on_many_keys_do_not_lose_any(clock):
    """Threads that insert, hit and reset keys of their own leave exactly what they should."""
    store = MemoryStore(clock=clock)
    limiter = Limiter("5/h; sliding window log 5/h", store=store)

    def run(name):
        for number in range(200):
            limiter.hit(f"{name} {number}", cost=2)
            if number % 2:
                limiter.reset(f"{name} {number}")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run, args=(name,)) for name in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert sum(len(list(store.items(named))) for named in limiter.named) == 8 * 100 * 2
    assert {limiter.peek(f"{name} {number}").remaining for name in range(8) for number in range(0, 200, 2)} == {3}
    assert {limiter.peek(f"{name} {number}").remaining for name in range(8) for number in range(1, 200, 2)} == {5}


@each_costly
def test_finalisers_that_hit_during_a_decision_do_no_harm(limit, clock):
    """Objects whose finaliser hits the same key, collected at every allocation, do not break the bound."""
    limiter = Limiter(limit, store=MemoryStore(clock=clock))
    alone = Limiter(limit, store=MemoryStore(clock=clock))
    expected = sum(bool(alone.hit("a")) for _ in range(200))
    admitted = []

    class Knot:
        def __init__(self):
            self.me = self

        def __del__(self):
            admitted.append(bool(limiter.hit("a")))

    threshold = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        for _ in range(200):
            Knot()
            admitted.append(bool(limiter.hit("a")))
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert len(admitted) == 400
    assert sum(admitted) == expected


FORK = """
    import os, signal, sys, threading
    from limitkeeper import Limiter, MemoryStore, TokenBucket
    from limitkeeper.testing import ManualClock

    def in_child(work):
        sys.stdout.flush()
        child = os.fork()
        if not child:
            signal.alarm(100)
            print(*work())
            sys.stdout.flush()
            os._exit(0)
        return os.waitpid(child, 0)[1]
"""
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


@forks
def test_a_forked_child_goes_on_with_a_state_of_its_own(python):
    """A child starts with its parent's state; its later charges do not affect the parent."""
    done = python(
        dedent(FORK)
        + dedent(
            """
            limiter = Limiter("1/h burst 10")
            limiter.hit("a", cost=4)
            status = in_child(lambda: [limiter.hit("a", cost=5).remaining, limiter.acquire("b").remaining])
            print(limiter.peek("a").remaining, limiter.peek("b").remaining, status)
            """
        )
    )
    assert done.stdout.split() == ["1", "9", "6", "10", "0"], done.stderr


@forks
@pytest.mark.parametrize("verb", ["hit", "acquire", "reserve", "hit_many", "give_back"])
def test_a_fork_during_a_decision_leaves_no_lock_behind(verb, python):
    """Forked while another thread is in the middle of a decision, a child can still use every verb."""
    done = python(
        dedent(FORK)
        + dedent(
            f"""
            inside, go_on = threading.Event(), threading.Event()

            class Slow(ManualClock):
                def now_us(self):
                    if threading.current_thread() is not threading.main_thread():
                        inside.set()
                        go_on.wait(60)
                    return super().now_us()

            limiter = Limiter(TokenBucket("5/s burst 10"), store=MemoryStore(clock=Slow(1000.0)))
            calls = {{
                "hit": lambda: limiter.hit("a"),
                "acquire": lambda: limiter.acquire("a"),
                "reserve": lambda: limiter.reserve("a").decision,
                "hit_many": lambda: limiter.hit_many(["a"])[0],
                "give_back": lambda: limiter.refund("a") or limiter.peek("a"),
            }}
            thread = threading.Thread(target=calls[{verb!r}])
            thread.start()
            inside.wait(60)
            status = in_child(lambda: [bool(call()) for call in calls.values()])
            go_on.set()
            thread.join(60)
            print(status)
            """
        )
    )
    assert done.stdout.split() == ["True"] * 5 + ["0"], done.stderr


@forks
def test_children_of_many_forks_under_load_all_live(python):
    """Twenty forks while threads hit, acquire and cancel: every child decides and ends."""
    done = python(
        dedent(FORK)
        + dedent(
            """
            limiter = Limiter("1000000/s")
            stop = threading.Event()

            def work():
                while not stop.is_set():
                    limiter.hit("a")
                    limiter.acquire("b")
                    limiter.reserve("c").cancel()
                    limiter.hit_many(["d", "e"])

            threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
            for thread in threads:
                thread.start()
            found = [in_child(lambda: [bool(limiter.acquire("b")), limiter.reserve("c").cancel()]) for _ in range(20)]
            stop.set()
            for thread in threads:
                thread.join()
            print(found.count(0))
            """
        )
    )
    assert done.stdout.split() == ["True", "True"] * 20 + ["20"], done.stderr


@pytest.mark.untraced
def test_a_finaliser_that_moves_a_log_between_read_and_decision_is_harmless(python):
    """Several limits, one a log, one of another rate: a finaliser that hits while a state is read moves the log, and
    nothing breaks."""
    done = python("""
        import gc
        from limitkeeper import Limiter, MemoryStore, SlidingWindowLog, TokenBucket
        store = MemoryStore()
        def make(rate):
            return Limiter({"log": SlidingWindowLog("100000/day"), "bucket": TokenBucket(rate)}, store=store, name="n")
        first, second = make("1/day burst 1000"), make("2/day burst 1000")
        class Hits:
            def __del__(self):
                first.hit("k")
        for i in range(400):
            gc.set_threshold(700)
            first.reset("k")
            for _ in range(64):  # the log is exactly full: the next hit moves it
                first.hit("k")
            gc.collect()
            waste = Hits()
            waste.itself = waste
            del waste
            filler = [[] for _ in range(i % 40)]  # moves the collector's run into the reading
            gc.set_threshold(20)
            second.hit("k")
        print("whole")
    """)
    assert (done.stdout.strip(), done.returncode) == ("whole", 0), done.stderr


@pytest.mark.parametrize(
    "limits", ["sliding window log 100000/day", "sliding window log 100000/day; token bucket 1/day burst 100000"]
)
def test_a_finaliser_that_hits_a_log_during_a_hit_is_counted(limits):
    """Hits of finalisers that run in the middle of a hit are all counted, on a log and on a log with another limit."""
    limiter = Limiter(limits, store=MemoryStore())
    admitted = [0]

    class Hits:
        def __del__(self) -> None:
            allowed = limiter.hit("k").allowed
            admitted[0] += allowed

    thresholds = gc.get_threshold()
    gc.set_threshold(12)
    try:
        for i in range(1500):
            waste: Any = Hits()
            waste.itself = waste
            del waste
            filler = [[] for _ in range(i % 11)]
            allowed = limiter.hit("k").allowed  # not in one statement with the sum, which a finaliser changes as well
            admitted[0] += allowed
            del filler
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert {part.limit - part.remaining for part in limiter.peek("k").decisions} == {admitted[0]}


@pytest.mark.skipif(compiled, reason="compiled, nothing is collected during a sweep")
@pytest.mark.parametrize("kind", ["memory", "shared"])
def test_no_finaliser_removes_keys_during_a_sweep(kind, clock, tmp_path, monkeypatch):
    """Where the garbage collector is enabled it may run, and a finaliser may sweep: never while a sweep looks at a key."""
    with MemoryStore(clock=clock) if kind == "memory" else SharedStore(tmp_path / "limits", clock=clock) as store:
        limiter, kept = Limiter("1/s", store=store), Limiter("fixed window 9/d", store=store)
        collected, checks = [], 0
        table = Table if kind == "memory" else SharedCellTable
        real = table.due_us

        def due_us(*args: Any) -> int:
            nonlocal checks
            checks += 1
            if gc.isenabled() and checks % 5 == 0 and not collected:
                collected.append(checks)
                clock.advance(0.4)
                store.sweep()
                collected.clear()
            return real(*args)

        monkeypatch.setattr(table, "due_us", due_us)
        for i in range(2000):
            clock.advance(0.1)
            limiter.hit(f"{i % 7}")
            kept.hit(f"{i % 3}", cost=i // 100 % 2)
        assert checks > 100
        assert [kept.peek(f"{i}").remaining for i in range(3)] == [0, 0, 0]
