"""A shared file at its edges: logs without room, changes as large as the journal, a creator that dies, a close in the middle."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import threading
import time
from contextlib import suppress
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shared_file import Picture

from effort import effort
from interrupts import interrupted_at
from limitkeeper import Limiter, SlidingWindowLog, StoreError, TokenBucket, compiled
from limitkeeper.algorithms.claim import Claim, NamedLimit
from limitkeeper.stores.memory import MemoryStore
from limitkeeper.stores.shared import SharedStore, journal, layout, limit_directory, mapped_file
from limitkeeper.stores.shared import store as shared_store
from limitkeeper.testing import ManualClock
from operations import operations


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "limits")


def named(limiter: Limiter) -> NamedLimit:
    return limiter.claims("a")[0].limit


# Logs


def test_debt_on_a_log_without_a_place_is_kept_and_stays_in_its_log(path):
    """Settled above their estimates, calls owe more than a full log has room for; it is all counted, for no other key."""
    clock = ManualClock()
    with SharedStore(path, max_keys=8, log_entries=4, clock=clock) as store:
        limiter = Limiter(SlidingWindowLog("100/h"), store=store)
        limiter.hit("neighbour before", cost=7)
        reservations = []
        for _ in range(4):
            clock.advance(1)
            reservations.append(limiter.reserve("full"))
        limiter.hit("neighbour behind", cost=9)
        for reservation in reservations:
            clock.advance(1)
            assert reservation.settle(6)
        assert [limiter.peek(key).remaining for key in ("neighbour before", "full", "neighbour behind")] == [93, 76, 91]
        entries = dict(store.items(named(limiter)))["full"][0]
        assert len(entries) == 4
        assert sum(cost for _, cost in entries) == 24
        clock.advance(3590)
        assert limiter.peek("full").remaining < 100, "debt was forgotten too early"
        clock.advance(20)
        assert limiter.peek("full").remaining == 100
    assert Picture(path).problems == []


def test_a_log_longer_than_its_places_is_taken_over_whole(path):
    """Handed over from a store whose logs grow, every cost still counts at least as long as it did."""
    clock = ManualClock()
    memory = Limiter(SlidingWindowLog("100/h"), store=MemoryStore(clock=clock), name="n")
    for _ in range(20):
        clock.advance(1)
        memory.hit("a", cost=2)
    with SharedStore(path, max_keys=8, log_entries=4, clock=clock) as store:
        limiter = Limiter(SlidingWindowLog("100/h"), store=store, name="n")
        store.load(named(limiter), memory.store.items(named(memory)))
        limiter.hit("b", cost=5)
        store.load(named(limiter), memory.store.items(named(memory)))
        assert limiter.peek("a").remaining == memory.peek("a").remaining == 60
        assert limiter.peek("b").remaining == 95
        for _ in range(25):
            clock.advance(3580 / 20)
            assert limiter.peek("a").remaining <= memory.peek("a").remaining
    assert Picture(path).problems == []


@pytest.mark.untraced
def test_a_peek_at_a_full_file_does_not_look_at_a_log_that_was_forgotten_meanwhile(path):
    """Keys that are as new are looked up before a log is read, never between reading it and answering."""
    clock = ManualClock()
    with SharedStore(path, max_keys=40, log_entries=4, clock=clock) as store:
        limiter = Limiter(SlidingWindowLog("4/s"), store=store)
        draw = random.Random(1)
        for _ in range(300):
            for i in range(40):
                limiter.hit(f"k{i}", cost=3)
            clock.advance(0.6)
            idle = draw.sample(range(40), 3)
            for i in range(40):
                if i not in idle:
                    limiter.reset(f"k{i}")
                    limiter.hit(f"k{i}", cost=3)
            clock.advance(0.6)
            for i in idle:
                seen = limiter.peek(f"k{i}")
                assert (seen.allowed, seen.remaining, seen.reset_after) == (True, 4, 0)
    assert Picture(path).problems == []


@pytest.mark.parametrize("long", [False, True])
def test_long_logs_come_over_a_restart_of_the_machine(path, monkeypatch, long):
    """A log with thousands of entries is taken over like any other, and the change is whole."""
    clock = ManualClock()
    store = SharedStore(path, max_keys=8, log_entries=4096, clock=clock)
    limiter = Limiter(SlidingWindowLog("5000/d"), store=store, name="n")
    for _ in range(4000 if long else 10):
        clock.advance(0.001)
        limiter.hit("a")
    before = limiter.peek("a").remaining
    limiter.hit("b")
    store.close()
    monkeypatch.setattr(mapped_file, "boot_id", lambda: (1, 2))
    with SharedStore(path, max_keys=8, log_entries=4096, clock=clock) as store:
        limiter = Limiter(SlidingWindowLog("5000/d"), store=store, name="n")
        assert Picture(path).header["JOURNAL"] == 0
        assert limiter.peek("a").remaining == before
        assert limiter.peek("b").remaining == 4999
    assert Picture(path).problems == []


# The journal


@pytest.mark.parametrize("blocks", range(145, 165))
def test_a_change_that_just_does_not_fit_into_the_journal_is_taken_back(path, blocks):
    """Whatever room is left in the journal, a decision is recorded whole or refused with nothing changed."""
    with SharedStore(path, max_keys=20_000) as store:
        limits = [named(Limiter(TokenBucket("50/h"), store=store, name=f"n{i}")) for i in range(18)]
        short = [Claim(limit, "short", 1) for limit in limits[-3:]]
        store.decide(short)
        long = [Claim(limit, "\U0001f600" * 14 * 1150, 1) for limit in limits[:14]]  # 56 bytes and one record a block
        last = Claim(limits[14], "\U0001f600" * 14 * blocks, 1)
        try:
            fits = store.decide([*long, last, *short]).allowed
        except StoreError as error:
            fits = "journal" not in str(error)
        remaining = [store.decide([claim], commit=False).remaining for claim in short]
        assert remaining == ([48] * 3 if fits else [49] * 3)
        assert len(store) == (18 if fits else 3)
        assert fits == (blocks <= 155)
    assert Picture(path).problems == []


def test_a_log_of_many_places_is_changed_twice_in_one_change(path):
    """A change of a log records its entries, not its places: with the most places, a call that is settled above its estimate is
    charged on two logs at once."""
    clock = ManualClock(1000)
    limits = {"a": SlidingWindowLog("5/s"), "b": SlidingWindowLog("50/min")}
    with SharedStore(path, max_keys=8, log_entries=4096, clock=clock) as store, MemoryStore(clock=clock) as exact:
        left = []
        for limiter in (Limiter(limits, store=store), Limiter(limits, store=exact)):
            assert limiter.hit("k", cost=2)
            assert limiter.reserve("k", cost=4).settle(12)
            left.append([part.remaining for part in limiter.peek("k").decisions])
        assert left == [[0, 36], [0, 36]]


def test_a_log_full_of_what_counts_for_a_longer_window_alone_admits(path):
    """After 100/d a key has 10/s: a day of its calls does not fit into the log, and each of them is admitted. The old rate is
    used up for as long as it would be."""
    clock = ManualClock(1_700_000_000)
    with SharedStore(path, max_keys=8, clock=clock) as store:
        old, new = [Limiter({"plan": SlidingWindowLog(rate)}, store=store, name="api") for rate in ("100/d", "10/s")]
        assert old.hit("key")
        for _ in range(1000):
            clock.advance(10)
            assert new.hit("key", cost=3).remaining == 7
        assert not old.hit("key")
        clock.advance(86_399)
        assert old.peek("key").remaining == 97
        clock.advance(1)
        assert old.peek("key").remaining == 100
        assert store.stats()["log_full"] == 0


@pytest.mark.parametrize("max_wait", [0, 0.5])
def test_a_call_that_is_refused_knows_that_a_log_is_full_at_its_retry_time(path, max_wait):
    """Law 1: of two logs one refuses by its count, and the other has no place until later: the retry time is the later one."""
    clock = ManualClock(1000)
    with SharedStore(path, max_keys=8, log_entries=2, clock=clock) as store:
        limiter = Limiter({"second": SlidingWindowLog("3/s"), "hour": SlidingWindowLog("100/h")}, store=store)
        assert limiter.hit("u")
        clock.advance(0.1)
        assert limiter.hit("u", cost=2)
        refused = limiter.reserve("u", cost=2, max_wait=max_wait)
        assert refused.decision.retry_after == 3599.9
        assert refused.decision.name == "hour"
        clock.advance(3599.899999)
        assert not limiter.reserve("u", cost=2, max_wait=max_wait)
        clock.advance(0.000001)
        assert limiter.reserve("u", cost=2, max_wait=max_wait)


def test_a_call_that_could_wait_for_too_short_a_time_is_refused_until_the_log_has_a_place(path):
    """Law 1, for a call with a wait: half a second before its start the log is still full; it is accepted when it is not."""
    clock = ManualClock(1000)
    with SharedStore(path, max_keys=8, log_entries=2, clock=clock) as store:
        limiter = Limiter(SlidingWindowLog("3/s"), store=store)
        assert limiter.hit("u", cost=2)
        clock.advance(0.1)
        assert limiter.hit("u")
        assert limiter.reserve("u", max_wait=0.5).decision.retry_after == 0.9
        assert limiter.hit("u").retry_after == 0.9
        assert store.stats()["log_full"] == 1  # the reservation; the hit has to wait for the count as long
        clock.advance(0.899999)
        assert not limiter.reserve("u", max_wait=0.5)
        clock.advance(0.000001)
        assert limiter.reserve("u", max_wait=0.5)


@effort(60)
@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.sampled_from("sssl"), st.integers(1, 4), st.sampled_from([0] * 9 + [2])), min_size=20
    )
)
def test_a_full_log_is_exact_for_the_shortest_window_and_strict_for_longer_ones(calls):
    """4/10s and 6/min on one key, in a log of six entries: whatever the calls, 4/10s admits what its own window has room for, and
    6/min no more than its own."""
    clock, admitted = ManualClock(1_700_000_000), []
    with TemporaryDirectory() as folder, SharedStore(f"{folder}/limits", max_keys=8, log_entries=6, clock=clock) as store:
        rates = {"s": SlidingWindowLog("4/10s"), "l": SlidingWindowLog("6/min")}
        limiters = {name: Limiter({"plan": rate}, store=store, name="api") for name, rate in rates.items()}
        for seconds, name, cost, wait in [(0, "l", 1, 0), *calls]:
            clock.advance(seconds)
            now_us, rate = clock.now_us(), rates[name]
            reservation = limiters[name].reserve("key", cost, wait)
            start_us = reservation.decision.start_us if reservation else now_us + wait * 1_000_000
            used = sum(units for moment, units in admitted if moment > start_us - rate.window)
            if reservation:
                assert used + cost <= rate.count
                admitted.append((start_us, cost))
            elif name == "s" and not any(moment > now_us for moment, _ in admitted):
                assert used + cost > rate.count


@pytest.mark.skipif(compiled, reason="compiled methods can't be replaced; processes are killed there")
@pytest.mark.parametrize("ahead", [0, 1], ids=["the latest", "before a start to come"])
def test_a_call_that_joins_entries_of_a_full_log_is_undone_when_interrupted_anywhere(path, ahead):
    """Between any two records of the journal, and before it ends: the log is as it was, to the last entry."""
    clock = ManualClock()
    with SharedStore(path, max_keys=8, log_entries=4, clock=clock) as store:
        long, short = [Limiter({"plan": SlidingWindowLog(rate)}, store=store, name="api") for rate in ("100/h", "20/s")]
        for _ in range(4 - ahead):
            clock.advance(2)
            long.hit("key", 5)
        clock.advance(2)
        if ahead:
            assert store.decide([Claim(named(long), "key", 7)], None, not_before_us=store.now_us() + 500_000)
        before = dict(store.items(named(long)))
        real, commit = store.table.journal_words, store.table.commit
        for survived in range(100):
            left = iter(range(survived))

            def note(at=0, count=0, left=left):
                if next(left, None) is None:
                    raise KeyboardInterrupt
                return real(at, count) if count else commit()

            store.table.journal_words = store.table.commit = note
            try:
                assert short.hit("key")
            except KeyboardInterrupt:
                assert dict(store.items(named(long))) == before
            else:
                break
            finally:
                store.table.journal_words, store.table.commit = real, commit
        assert survived > 3
        after = dict(store.items(named(long)))["key"][0]
        assert len(after) == 4
        assert sum(cost for _, cost in after) == (23 if ahead else 21)
    assert Picture(path).problems == []


# Making, opening, closing


@pytest.mark.parametrize("step", ["pwrite", "ftruncate"])
def test_a_maker_that_dies_leaves_a_file_that_can_be_made(path, monkeypatch, step):
    """Whatever step of creating a file its creator did not survive, the next process creates it."""

    def dies(real, survived):
        left = iter(range(survived))

        def call(*args):
            if next(left, None) is None:
                raise SystemExit
            return real(*args)

        return call

    for survived in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(mapped_file.os, step, dies(getattr(os, step), survived))
            with suppress(SystemExit):
                SharedStore(path).close()
        with SharedStore(path) as store:
            assert Limiter("5/s", store=store).hit("a")
        os.unlink(path)


@pytest.mark.parametrize("kills", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_makers_killed_while_they_make_a_file_leave_one_that_opens(path, kills):
    """Processes that open, use and close one file are killed -9 at any instant; it can always be opened."""
    for i in range(kills):
        pid = os.fork()
        if pid == 0:
            try:
                while True:
                    with SharedStore(path, max_keys=10) as store:
                        Limiter("5/s", store=store, name=f"n{i % 7}").hit("a")
                    os.unlink(path)
            finally:
                os._exit(1)
        time.sleep(0.001 * (i % 9))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        with SharedStore(path, max_keys=10) as store:
            assert Limiter("5/h", store=store, name=f"after{i}").hit("a")
        assert Picture(path).problems == []


def test_a_store_that_fails_to_open_lets_go_of_its_file(path, monkeypatch):
    """No process waits for a file whose opener failed."""
    with monkeypatch.context() as patch:
        patch.setattr(*((journal, "owner_word") if compiled else (shared_store, "SharedCellTable")), lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            SharedStore(path)
    taken = threading.Thread(target=lambda: SharedStore(path).close(), daemon=True)
    taken.start()
    taken.join(60)
    assert not taken.is_alive(), "the file is still locked"


def test_a_close_in_the_middle_of_a_call_comes_right_behind_it(path):
    """A signal's handler may close the store while its own thread is inside a call: the call ends well, the next is refused."""

    class Closing(ManualClock):
        armed = False

        def now_us(self):
            if self.armed:
                store.close()
            return super().now_us()

    clock = Closing()
    store = SharedStore(path, clock=clock)
    limiter = Limiter({"a": "5/h", "b": "7/h"}, store=store)
    limiter.hit("a")
    clock.armed = True
    assert limiter.hit("a").remaining == 3
    clock.armed = False
    with pytest.raises(StoreError, match="closed"):
        limiter.hit("a")
    with pytest.raises(StoreError, match="closed"):
        store.stats()
    with pytest.raises(StoreError, match="closed"):
        Limiter(SlidingWindowLog("1000/h"), store=store)
    assert Picture(path).header["LOCK"] == 0


def test_threads_that_use_a_store_while_it_is_closed_get_an_error(path):
    """Never a crash: a hit is answered, or raises that the store is closed."""
    for _ in range(20):
        store = SharedStore(path, timeout=60)
        limiter, pair = Limiter("1000000/s", store=store), Limiter({"a": "500000/s", "b": "7000000/h"}, store=store)
        found = []

        def work(limiter=limiter, pair=pair, found=found):
            try:
                while True:
                    limiter.hit("a")
                    pair.hit("b")
            except StoreError as error:
                found.append(str(error))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.005)
        store.close()
        for thread in threads:
            thread.join()
        assert len(found) == 4
        assert [text for text in found if "closed" not in text] == []
    assert Picture(path).problems == []


# Interruptions


@pytest.mark.skipif(not compiled, reason="the kernel frees a dead process's lock file, nobody is told")
@pytest.mark.parametrize("wants", ["to stop", "the lock"])
def test_a_listener_of_a_takeover_may_raise_or_use_the_store(path, caplog, wants):
    """The event for the lock of a dead process is published after the lock is released: a listener may raise, or hit."""
    store = SharedStore(path, timeout=30)
    limiter = Limiter("100/h", store=store)
    limiter.hit("a")
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    word = journal.owner_word(pid)
    os.waitpid(pid, 0)
    with open(path, "r+b") as file:
        file.seek(8 * layout.LOCK)
        file.write(word.to_bytes(8, "little"))

    class Listener(logging.Handler):
        def emit(self, record):
            if wants == "to stop":
                raise KeyboardInterrupt
            assert limiter.hit("a")

    listener = Listener()
    caplog.set_level(logging.INFO, "limitkeeper")
    logging.getLogger("limitkeeper").addHandler(listener)
    try:
        limiter.hit("a")
    except KeyboardInterrupt:
        pass
    finally:
        logging.getLogger("limitkeeper").removeHandler(listener)
    assert store.stats()["takeovers"] == 1
    assert limiter.hit("a").remaining == (97 if wants == "to stop" else 96)
    store.close()


def test_an_interrupted_reading_of_the_directory_goes_on_where_it_was(path, monkeypatch):
    """Ctrl-C while a process reads others' limits does not give them other numbers."""
    with SharedStore(path) as one, SharedStore(path) as two:
        for i in range(5):
            Limiter("5/h", store=one, name=f"n{i}").hit("a", cost=i)
        real, calls = limit_directory.parse_limit, [0]

        def interrupted(text):
            calls[0] += 1
            if calls[0] == 3:
                raise KeyboardInterrupt
            return real(text)

        monkeypatch.setattr(limit_directory, "parse_limit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Limiter("5/h", store=two, name="n0")
        for i in range(5):
            assert Limiter("5/h", store=two, name=f"n{i}").peek("a").remaining == 5 - i
        late = Limiter("9/h", store=two, name="late")
        late.hit("a", cost=4)
        assert Limiter("9/h", store=one, name="late").peek("a").remaining == 5


def test_an_interrupt_at_any_moment_of_a_registration_keeps_the_numbers_of_limits(path):
    """A handler that raises at any moment while a limit is registered leaves limits the numbers that other processes use."""
    with SharedStore(path) as other, SharedStore(path) as store:
        number, interrupted = 0, True
        while interrupted:
            number += 1
            Limiter("5/h", store=other, name=f"others {number}")
            interrupted = interrupted_at(number, lambda: Limiter("9/s", store=store, name=f"own {number}"))  # noqa: B023
            late = f"late {number}"
            Limiter("9/h", store=store, name=late).hit("a", cost=4)
            assert Limiter("9/h", store=other, name=late).peek("a").remaining == 5, number
        assert number > 20


def test_a_hand_over_that_fails_leaves_a_key_what_it_had(path):
    """An invalid state is refused; the key keeps its own."""
    with SharedStore(path) as store:
        for limit in (TokenBucket("5/h"), SlidingWindowLog("5/h")):
            limiter = Limiter(limit, store=store)
            limiter.hit("a", cost=2)
            for state in (("x", 0, 0), (((1, "x"),), 0, 0), ()):
                with pytest.raises((TypeError, ValueError, IndexError, StoreError)):
                    store.load(named(limiter), [("a", state)])
                assert limiter.peek("a").remaining == 3
    assert Picture(path).problems == []


def test_a_child_forked_in_the_middle_of_a_decision_counts(path, monkeypatch):
    """Whatever another thread was doing at the fork, the child's own hits are kept."""
    gate, go = threading.Event(), threading.Event()
    with SharedStore(path, timeout=60) as store:
        quick = Limiter("100/h", store=store, name="quick")
        quick.hit("a")
        other = MemoryStore()
        pair = Limiter({"a": SlidingWindowLog("1000/h"), "b": "7/h"}, store=other)

        class Slow(logging.Handler):
            def emit(self, record):
                gate.set()
                go.wait(60)

        slow = Slow()
        logging.getLogger("limitkeeper").addHandler(slow)
        thread = threading.Thread(target=store.decide, args=([Claim(c.limit, "a", 1) for c in pair.claims("a")],))
        thread.start()
        gate.wait(60)
        ready, answer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.write(answer, json.dumps([quick.hit("a").remaining for _ in range(3)]).encode())
            finally:
                os._exit(0)
        time.sleep(0.05)
        go.set()
        thread.join()
        logging.getLogger("limitkeeper").removeHandler(slow)
        os.waitpid(pid, 0)
        assert json.loads(os.read(ready, 100)) == [98, 97, 96]
        os.close(ready)
        os.close(answer)


def test_items_are_read_a_part_at_a_time(path, monkeypatch):
    """All keys are found, however many parts it takes."""
    if not compiled:
        monkeypatch.setattr(shared_store, "AT_A_TIME", 7)
    with SharedStore(path, max_keys=6000) as store:
        limiter = Limiter("5/h", store=store)
        count = 5000 if compiled else 100
        for i in range(count):
            limiter.hit(f"k{i}")
        found = dict(store.items(named(limiter)))
        assert len(found) == count
        store.load(named(limiter), found.items())
        assert dict(store.items(named(limiter))) == found


def test_a_sweep_lets_other_processes_in_between(path):
    """`sweep` checks a part of the keys at a time, at most 2048, and all of them in the end."""
    found: list[int] = []

    class Watched(ManualClock):
        def now_us(self):
            found.append(len(store))
            return super().now_us()

    clock = Watched(1000.0)
    with SharedStore(path, max_keys=6000, clock=clock) as store:
        limiter = Limiter("5/s", store=store)
        for i in range(5000):
            limiter.hit(f"k{i}")
        clock.advance(10)
        found.clear()
        store.sweep()
        assert len(store) == 0
        assert found == [5000, 5000 - 2048, 5000 - 4096]


@pytest.mark.skipif(compiled, reason="compiled methods can't be replaced")
def test_keys_with_long_logs_are_listed_fewer_at_a_time(path, monkeypatch):
    """What is listed under the lock at a time has a bounded size, and the free places of a log are not read."""
    parts: list[int] = []
    real = SharedStore._items_before

    def items_before(store, handle, end):
        items, begin = real(store, handle, end)
        parts.append(len(items))
        return items, begin

    monkeypatch.setattr(SharedStore, "_items_before", items_before)
    steps = []
    for entries in (256, 4096):
        with SharedStore(f"{path}{entries}", max_keys=6000, log_entries=entries) as store:
            limiter = Limiter(SlidingWindowLog("5/h"), store=store)
            for i in range(50):
                limiter.hit(f"k{i}")
            parts.clear()
            assert len(dict(store.items(named(limiter)))) == 50
            assert max(parts) * entries <= 8192
            steps.append(operations(store.table.log_of, store.own_cell(named(limiter).handle, "k1")))
    assert steps[0] == steps[1]


@pytest.mark.skipif(compiled, reason="compiled methods can't be replaced; processes are killed there")
@pytest.mark.parametrize("what", ["reset", "sweep"])
def test_a_removal_that_is_interrupted_anywhere_leaves_the_file_as_it_was(path, what):
    """Removing a key moves the last cell into its slot; interrupted between any two records of the journal, it is undone."""
    clock = ManualClock()
    with SharedStore(path, max_keys=20, log_entries=4, clock=clock) as store:
        short, log = Limiter("1/s", store=store), Limiter(SlidingWindowLog("4/h"), store=store)
        for i in range(6):
            short.hit(f"a key longer than sixteen bytes {i}")
            log.hit(f"{i}", cost=2)
        clock.advance(60)
        before = dict(store.items(named(short))), dict(store.items(named(log)))
        real, interrupted = store.table.journal_words, 0
        for survived in range(100):
            left = iter(range(survived))

            def note(at, count, left=left):
                if next(left, None) is None:
                    raise KeyboardInterrupt
                real(at, count)

            store.table.journal_words = note
            try:
                log.reset("1") if what == "reset" else store.sweep(3)
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                store.table.journal_words = real
            assert Picture(path).problems == []
            after = dict(store.items(named(short))), dict(store.items(named(log)))
            if after != before:
                assert interrupted > 5
                break
            assert interrupted == survived + 1
    assert dict(after[0]).items() <= before[0].items()
    assert dict(after[1]).items() <= before[1].items()
