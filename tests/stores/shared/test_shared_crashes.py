"""A process is killed at any instant: no lock stays held, no state is torn, and the count equals the admissions."""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import resource
import signal
import time
from contextlib import contextmanager

import pytest
from shared_file import Picture

from limitkeeper import FixedWindow, Limiter, SlidingWindowLog, StoreError, StoreTimeout, TokenBucket, compiled
from limitkeeper.stores.shared import SharedStore, layout
from limitkeeper.stores.shared.journal import owner_word

PLENTY = 10**9


@pytest.fixture
def path(tmp_path):
    """A file in memory where there is such a place, so that tests do not wait for a disk."""
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else str(tmp_path)
    found = os.path.join(folder, f"limitkeeper-test-{os.getpid()}-{random.getrandbits(40):x}")
    yield found
    for name in (found, found + ".lock"):
        if os.path.exists(name):
            os.unlink(name)


class Tally:
    """Counters that survive their writers: each writer has its own place in shared memory."""

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


def until_it_counts(tally: Tally, place: int) -> None:
    """Waits for the first hit of a writer: on a busy machine a forked process may need longer than its time to live."""
    end = time.monotonic() + 60
    while not tally.words[2 * place]:
        assert time.monotonic() < end, "a writer made no hit within a minute"
        time.sleep(0.0002)


def fork(work) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(1)
    return pid


@pytest.mark.untraced
@pytest.mark.parametrize(
    "kills", [20 if compiled else 10, pytest.param(150, marks=pytest.mark.slow), pytest.param(1000, marks=pytest.mark.soak)]
)
def test_killed_writers_leave_an_exact_count(path, kills):
    """Writers are killed -9 at random instants; the state that survivors read is the admissions, up to the calls in flight."""
    store = SharedStore(path, max_keys=400, log_entries=4096, timeout=60)
    tally = Tally(kills + 2)
    draw = random.Random(20260110)
    alive: list[tuple[int, int]] = []
    begun = 0
    try:
        while begun < kills:
            while len(alive) < 2:
                alive.append((fork(lambda place=begun: writer(store, tally, place, place)), begun))
                begun += 1
            chosen = draw.randrange(len(alive))
            victim, place = alive[chosen]
            if begun % 4:  # every fourth is killed while it starts, the others in their calls
                until_it_counts(tally, place)
            time.sleep(draw.random() * 0.004)
            os.kill(victim, signal.SIGKILL)
            os.waitpid(victim, 0)
            del alive[chosen]
    finally:
        for pid, _ in alive:
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


@contextmanager
def holder(path):
    """A process that holds the lock and does nothing: its word is in the file, or (plain) it has the lock file."""
    ready, gate = os.pipe()

    def hold():
        file = os.open(path + ".lock", os.O_RDWR | os.O_CREAT)
        fcntl.flock(file, fcntl.LOCK_EX)
        os.write(gate, b"!")
        time.sleep(60)

    pid = fork((lambda: (os.write(gate, b"!"), time.sleep(60))) if compiled else hold)
    os.read(ready, 1)
    if compiled:
        write_word(path, layout.LOCK, owner_word(pid))
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(gate)


def write_word(path, at, value):
    with open(path, "r+b") as file:
        file.seek(8 * at)
        file.write(value.to_bytes(8, "little", signed=True))


def test_the_lock_of_a_dead_process_is_taken_over(path, watch):
    """A process that dies holding the lock delays others by a moment, and its unfinished change is undone."""
    store = SharedStore(path, timeout=30)
    limiter = Limiter("5/h burst 10", store=store)
    limiter.hit("a", cost=4)
    plan = layout.regions(100_000, 256)
    state = plan.cells + layout.STATE + 1
    with open(path, "rb") as file:
        file.seek(8 * state)
        taken = int.from_bytes(file.read(8), "little")
    with holder(path):
        write_word(path, plan.journal, state)  # the dead process had recorded the old values, and then begun to change them
        write_word(path, plan.journal + 1, taken)
        write_word(path, layout.JOURNAL, 1)
        write_word(path, state, 7)
    before = time.monotonic()
    assert limiter.peek("a").remaining == 6
    assert time.monotonic() - before < watch.allows(1)
    assert store.stats()["takeovers"] == 1
    store.close()
    assert Picture(path).problems == []


def test_a_live_process_that_holds_the_lock_is_waited_for_until_the_timeout(path, watch):
    """The lock of a live holder (a stopped one, say) is not taken over: others fail with StoreTimeout, and continue when it is
    gone.
    """
    store = SharedStore(path, timeout=0.1)
    one, several = Limiter("1000000/h", store=store), Limiter({"a": "100/h", "b": "5/h"}, store=store)
    one.hit("a")
    with holder(path) as pid:
        for call in (one.hit, one.peek, several.hit, one.refund, one.reset):
            before = time.monotonic()
            with pytest.raises(StoreTimeout, match=str(pid) if compiled else "stopped"):
                call("a")
            assert time.monotonic() - before < watch.allows(0.1 + 0.5)
    assert one.hit("a")
    assert several.hit("a")
    store.close()
    assert Picture(path).problems == []


def test_a_zombie_is_dead(path):
    """A killed process that is not reaped yet holds nothing."""
    store = SharedStore(path)
    limiter = Limiter("1000/h", store=store)
    limiter.hit("a")
    with holder(path) as pid:
        os.kill(pid, signal.SIGKILL)
        assert limiter.hit("a")
    store.close()


def test_a_number_that_was_used_again_is_another_process(path):
    """A lock whose process number belongs to a younger process now is the lock of a dead one."""
    store = SharedStore(path)
    limiter = Limiter("1000/h", store=store)
    limiter.hit("a")
    if compiled:
        write_word(path, layout.LOCK, owner_word(os.getppid()) ^ 1)
    assert limiter.hit("a")
    store.close()


def test_a_handler_may_close_the_store_while_a_call_waits_for_the_lock(path):
    """The store is closed behind the call, which fails as it would without that; it neither crashes nor stays open."""
    for call in (lambda limiter: limiter.hit("a"), lambda limiter: limiter.store.items(limiter.named[0])):
        store = SharedStore(path, timeout=0.3)
        limiter = Limiter("1000/h", store=store)
        limiter.hit("a")
        before = signal.signal(signal.SIGALRM, lambda *_, store=store: store.close())
        try:
            with holder(path):
                signal.setitimer(signal.ITIMER_REAL, 0.1)
                with pytest.raises(StoreTimeout):
                    call(limiter)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        with pytest.raises(StoreError, match="closed"):
            limiter.hit("a")


@contextmanager
def without_descriptors():
    """This process, and what it forks, can't open a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_without_descriptors_takes_no_live_lock_over(path):
    """Whoever can't find out whether the owner of the lock is alive waits for it, and takes it over when it can find out."""
    store = SharedStore(path, timeout=0.1)
    limiter = Limiter("1000/h", store=store)
    limiter.hit("a")
    with holder(path) as pid:
        os.kill(pid, signal.SIGSTOP)
        with without_descriptors(), pytest.raises(StoreTimeout):
            limiter.hit("a")
    assert limiter.hit("a").remaining == 998
    store.close()


def test_a_child_forked_without_descriptors_has_a_lock_of_its_own(path, python):
    """A child that could not read its start time when it was forked is not mistaken for its parent: its lock is taken over. (An
    interpreter of its own runs it: gRPC, which other tests import, aborts in such a child.)"""
    done = python(
        f"""
        import os, resource, signal
        from limitkeeper import Limiter, SharedStore
        from limitkeeper.testing import ManualClock

        class Deadly(ManualClock):
            armed = False

            def now_us(self):
                if self.armed:  # read under the lock
                    os.kill(os.getpid(), signal.SIGKILL)
                return super().now_us()

        clock = Deadly()
        store = SharedStore({path!r}, timeout=5, clock=clock)
        limiter = Limiter({{"a": "1000/h", "b": "500/h"}}, store=store)
        limiter.hit("a")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        pid = os.fork()
        if pid == 0:
            clock.armed = True
            limiter.hit("a")
            os._exit(1)
        _, status = os.waitpid(pid, 0)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        print(os.WTERMSIG(status), limiter.hit("a").decisions[1].remaining)
        """
    )
    killed = "9" if compiled else "0"  # without compare-and-swap a child needs a descriptor of its own, and its call fails
    assert done.stdout.split() == [killed, "498"], done.stderr
