"""A process is killed at any instant: no lock stays held, no state is torn, and what is counted is what was admitted."""

from __future__ import annotations

import mmap
import os
import random
import signal
import time

import pytest
from shared_file import Picture

from headgate import FixedWindow, Limiter, SlidingWindowLog, StoreTimeout, TokenBucket, compiled
from headgate.stores.shared import SharedStore

PLENTY = 10**9


@pytest.fixture
def path(tmp_path):
    """A file in memory where there is such a place, so that tests do not wait for a disk."""
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else str(tmp_path)
    found = os.path.join(folder, f"headgate-test-{os.getpid()}-{random.getrandbits(40):x}")
    yield found
    for name in (found, found + ".lock"):
        if os.path.exists(name):
            os.unlink(name)


class Tally:
    """Numbers that survive whoever counts: each writer has its own place in shared memory."""

    def __init__(self, places: int) -> None:
        self.words = memoryview(mmap.mmap(-1, 16 * places)).cast("q")  # a word is written whole; struct.pack_into is not

    def totals(self) -> tuple[int, int]:
        return sum(self.words[::2].tolist()), sum(self.words[1::2].tolist())


def writer(store: SharedStore, tally: Tally, place: int, seed: int) -> None:
    """Hits until it is killed; counts a hit when it has been answered."""
    one = Limiter(FixedWindow(f"{PLENTY}/400d"), store=store, name="one")
    pair = Limiter({"bucket": FixedWindow(f"{PLENTY}/400d"), "log": SlidingWindowLog(f"{PLENTY}/h")}, store=store, name="pair")
    churn = Limiter(TokenBucket("1000/ms burst 1"), store=store, name="churn")
    draw = random.Random(seed)
    hits = pairs = 0
    while True:
        for _ in range(40):
            hits += bool(one.hit("key", cost=1))
            tally.words[2 * place] = hits
        key = draw.choice(("short", "a key that does not fit into its cell" * draw.randrange(1, 6)))
        churn.hit(f"{key}{draw.randrange(500)}")  # keys come and go: cells, blocks and chains change all the time
        if pairs < 50:
            pairs += bool(pair.hit("key"))
            tally.words[2 * place + 1] = pairs


def fork(work) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(1)
    return pid


@pytest.mark.parametrize("kills", [int(os.environ.get("HEADGATE_KILLS", "1000" if compiled else "150"))])
def test_a_thousand_killed_writers_leave_an_exact_count(path, kills):
    """Writers are killed -9 at random instants; what the survivors find is what was admitted, up to the calls in flight."""
    store = SharedStore(path, max_keys=400, log_entries=4096)
    tally = Tally(kills + 2)
    draw = random.Random(20260110)
    alive: list[int] = []
    begun = 0
    try:
        while begun < kills:
            while len(alive) < 2:
                place = begun
                alive.append(fork(lambda place=place: writer(store, tally, place, place)))
                begun += 1
            time.sleep(draw.random() * 0.004)
            victim = alive.pop(draw.randrange(len(alive)))
            os.kill(victim, signal.SIGKILL)
            os.waitpid(victim, 0)
    finally:
        for pid in alive:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    one = Limiter(FixedWindow(f"{PLENTY}/400d"), store=store, name="one")
    used = PLENTY - one.peek("key").remaining
    picture = Picture(path)
    log = Limiter({"bucket": FixedWindow(f"{PLENTY}/400d"), "log": SlidingWindowLog(f"{PLENTY}/h")}, store=store, name="pair")
    parts = [PLENTY - part.remaining for part in log.peek("key").decisions]
    hits, pairs = tally.totals()
    store.close()
    assert picture.problems == []
    assert hits > 0
    assert hits <= used <= hits + begun
    assert parts[0] == parts[1], "of two limits one was charged and the other was not"
    assert pairs <= parts[0] <= pairs + begun


def test_the_lock_of_a_dead_process_is_taken_over(path):
    """Whoever dies holding the lock delays others by a moment, and its unfinished change is taken back."""
    store = SharedStore(path)
    limiter = Limiter("5/h burst 10", store=store)
    limiter.hit("a", cost=4)
    before = time.monotonic()
    rounds = 0
    while rounds < 20 or (compiled and store.stats()["takeovers"] == 0 and time.monotonic() - before < 30):
        rounds += 1
        pid = fork(lambda: [limiter.peek("a") for _ in iter(int, 1)])
        time.sleep(0.003)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        asked = time.monotonic()
        assert limiter.peek("a").remaining == 6
        assert time.monotonic() - asked < 1
    assert store.stats()["takeovers"] > 0 or not compiled  # a lock file is let go of by the kernel
    store.close()


def test_a_stopped_process_that_holds_the_lock_is_waited_for_until_the_timeout(path):
    """A holder that is alive but stopped is not robbed: others fail with StoreTimeout, which names it, and go on when it does."""
    store = SharedStore(path, timeout=0.2)
    limiter = Limiter("1000000/h", store=store)
    limiter.hit("a")
    caught = None
    for _ in range(300):
        pid = fork(lambda: [limiter.hit("a") for _ in iter(int, 1)])
        time.sleep(0.002)
        os.kill(pid, signal.SIGSTOP)
        try:
            limiter.hit("a")
        except StoreTimeout as error:
            caught = str(error)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        if caught:
            break
    assert caught is not None
    assert "stopped" in caught
    assert limiter.hit("a"), "the next call works again"
    store.close()
    assert Picture(path).problems == []
