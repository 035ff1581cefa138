"""A shared file: creating, opening and refusing it, a full file, and a restart of the machine."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import re
import stat
import threading
import time

import pytest
from shared_file import Picture

import limitkeeper
from limitkeeper import (
    ConfigurationError,
    FixedWindow,
    Limiter,
    SlidingWindowCounter,
    SlidingWindowLog,
    StoreError,
    StoreTimeout,
    StoreUnavailable,
    TokenBucket,
)
from limitkeeper.stores.shared import SharedStore, layout, mapped_file
from limitkeeper.testing import ManualClock


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "limits")


# Making and opening


def test_a_file_is_private_and_takes_only_the_room_it_uses(path):
    """Mode 0600, and sparse: 100 000 keys are planned, and only the header and the first cells have disk space."""
    with SharedStore(path) as store:
        Limiter("5/s", store=store).hit("a")
        found = os.stat(path)
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_size > 100_000 * 64
    assert found.st_blocks * 512 < 3 * 2**20


def test_two_stores_on_one_file_are_one(path):
    """Charges of one of them count for the other; the file outlives both."""
    with SharedStore(path) as one, SharedStore(path) as two:
        assert Limiter("5/h", store=one).hit("a", cost=3).remaining == 2
        assert Limiter("5/h", store=two).hit("a", cost=1).remaining == 1
    with SharedStore(path) as later:
        assert Limiter("5/h", store=later).peek("a").remaining == 1


@pytest.mark.parametrize(("option", "value"), [("max_keys", 50), ("log_entries", 8)])
def test_other_parameters_are_refused_with_their_names(path, option, value):
    """A file is opened with the parameters it was created with, or not at all."""
    SharedStore(path, max_keys=100, log_entries=16).close()
    with pytest.raises(ConfigurationError, match=f"{option}=.*expects {value}.*delete the file"):
        SharedStore(path, **{"max_keys": 100, "log_entries": 16, option: value})


def test_the_other_protocol_is_refused(path, monkeypatch):
    """A file of the compiled build is not opened by the plain one, nor the other way round."""
    SharedStore(path).close()
    other = layout.LOCK_FILE if limitkeeper.compiled else layout.ATOMIC
    with open(path, "r+b") as file:
        file.seek(8 * layout.PROTOCOL)
        file.write(other.to_bytes(8, "little"))
    with pytest.raises(ConfigurationError, match="same build of limitkeeper"):
        SharedStore(path)


@pytest.mark.parametrize("content", [b"hello", b"\0" * 5000, b"limitkpr" + b"\xff" * 5000])
def test_a_foreign_file_is_left_alone(path, content):
    """A file of another kind is neither opened nor changed."""
    with open(path, "wb") as file:
        file.write(content)
    with pytest.raises(ConfigurationError):
        SharedStore(path)
    with open(path, "rb") as file:
        assert file.read() == content


def test_a_file_that_was_cut_short_is_refused(path):
    """A file whose size differs from its parameters is not mapped: reading beyond its end would kill the process."""
    SharedStore(path).close()
    os.truncate(path, 100_000)
    with pytest.raises(ConfigurationError, match="wrong size"):
        SharedStore(path)


def test_a_file_that_was_emptied_while_in_use_is_refused(path):
    """A process that opens a file which another one has open, and which has no content any more, gets an error in time."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # as the other process has it; its mapping would end this one (SIGBUS)
        with pytest.raises(ConfigurationError, match="was truncated"):
            SharedStore(path, timeout=0.05)
    with SharedStore(path) as store:
        assert Limiter("5/h", store=store).hit("a")


@pytest.mark.parametrize("bad", ["/no/such/folder/limits", "/"])
def test_a_path_that_can_not_be_written_to_is_an_error(bad):
    """The error names the path and the remedy."""
    with pytest.raises(StoreUnavailable, match="folder that can be written to"):
        SharedStore(bad)


@pytest.mark.parametrize(
    "options", [{"max_keys": 0}, {"max_keys": True}, {"max_keys": "9"}, {"log_entries": 0}, {"log_entries": 5000}]
)
def test_senseless_sizes_are_refused(path, options):
    """Wrong types and sizes are errors before any file is made."""
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        SharedStore(path, **options)
    assert not os.path.exists(path)


@pytest.mark.parametrize("bad", [None, "", 7])
def test_a_store_needs_a_path(bad):
    """Without a path there is no store."""
    with pytest.raises(ConfigurationError, match="path of a file"):
        SharedStore(bad)


def test_a_closed_store_raises_its_own_error(path):
    """A call on a closed store is an error of its own, whatever the verb."""
    store = SharedStore(path)
    limiter = Limiter({"a": "5/s", "b": "5/min"}, store=store)
    limiter.hit("a")
    store.close()
    store.close()
    for verb in (limiter.hit, limiter.peek, limiter.refund, limiter.reset):
        with pytest.raises(StoreError, match="closed"):
            verb("a")
    assert len(store) == 0


def test_a_container_does_not_share_a_file_that_another_one_uses(path, monkeypatch):
    """Process numbers of another namespace are not valid here; alone, the file is adopted."""
    with SharedStore(path):
        monkeypatch.setattr(mapped_file, "pid_namespace", lambda: 4711)
        with pytest.raises(ConfigurationError, match="another container"):
            SharedStore(path)
    SharedStore(path).close()


# Limits of one file


def test_names_and_limits_do_not_meet(path):
    """Equal keys of different limiters, limits and algorithms have states of their own."""
    with SharedStore(path) as store:
        limiters = [Limiter("2/h", store=store, name=name) for name in ("a", "b", "a|b", "ä", "\ud800")] + [
            Limiter(limit, store=store, name="a")
            for limit in (FixedWindow("2/h"), SlidingWindowLog("2/h"), SlidingWindowCounter("2/h"))
        ]
        for limiter in limiters:
            assert limiter.hit("k", cost=2)
            assert not limiter.hit("k")


def test_a_changed_rate_under_one_name_keeps_what_was_used(path):
    """Under the same name and another rate the state is read in new units, also by a process that has never used the old
    limit."""
    clock = ManualClock(1000)
    with SharedStore(path, clock=clock) as one, SharedStore(path, clock=clock) as two:
        old, new = Limiter("10/h", store=one, name="plan"), Limiter("100/h", store=two, name="plan")
        old.hit("a", cost=4)
        assert new.peek("a").remaining == 96
        new.hit("a", cost=90)
        assert old.peek("a").remaining == 0
        third = Limiter("7 per 3 hours", store=one, name="plan")
        third.hit("b", cost=2)
        assert new.peek("b").remaining == 98
        assert dict(two.items(new.named[0])).keys() == {"a", "b"}


@pytest.mark.parametrize(
    "key", ["", "\0", "a" * 16, "a" * 17, "é" * 16, "😀" * 30, "\ud83d\ude00", "😀", "k" * 16384, "k" * 40_000]
)
def test_any_text_is_a_key(path, key):
    """Short, long, wide, lone surrogates: each key is found again, and no other is."""
    with SharedStore(path) as store:
        limiter = Limiter("3/h", store=store)
        limiter.hit(key, cost=2)
        assert limiter.peek(key).remaining == 1
        assert limiter.peek(key + "x").remaining == 3
        if len(key) <= 16384:
            assert [found for found, _ in store.items(limiter.named[0])] == [key]
        limiter.reset(key)
        assert limiter.peek(key).remaining == 3
        assert list(store.items(limiter.named[0])) == []
    assert Picture(path).problems == []


# Full


def test_a_full_file_forgets_no_key_and_forgives_no_newcomer(path):
    """Keys that come when all places are taken share cells: known keys keep their state, new ones are limited."""
    clock = ManualClock(1000)
    with SharedStore(path, max_keys=10, clock=clock) as store:
        limiter = Limiter("2/h", store=store)
        for i in range(10):
            limiter.hit(f"known {i}", cost=2)
        admitted = sum(bool(limiter.hit(f"stranger {i}")) for i in range(10_000))
        assert admitted <= 2 * (10 // 4 + 1024)
        assert not any(limiter.hit(f"known {i}") for i in range(10))
        assert store.overflow > 0
        assert len(store) == 10
        clock.advance(10_000)
        store.sweep()  # of new keys, two might share a cell
        assert all(limiter.hit(f"later {i}", cost=2) for i in range(10))
    assert Picture(path).problems == []


def test_keys_that_are_as_new_make_room(path):
    """Idle keys are forgotten, long ones with their blocks, logs with their entries."""
    clock = ManualClock(1000)
    with SharedStore(path, max_keys=300, log_entries=8, clock=clock) as store:
        bucket, log = Limiter("5/s", store=store), Limiter(SlidingWindowLog("5/s"), store=store)
        for turn in range(30):
            for i in range(100):
                assert bucket.hit(f"{turn} {i} " + "long" * 50)
                assert log.hit(f"{turn} {i}")
            clock.advance(5)
        store.sweep()
        assert len(store) == 0
    picture = Picture(path)
    assert picture.problems == []


def test_a_sweep_checks_every_key(path):
    """`sweep` removes all idle keys, wherever the rotation of other calls is."""
    clock = ManualClock(1000)
    with SharedStore(path, max_keys=300, clock=clock) as store:
        short, long = Limiter("fixed window 1/s", store=store), Limiter("fixed window 1/h", store=store)
        for i in range(40):
            short.hit(f"{i}")
            long.hit(f"{i}")  # its cells fill the gaps that the others leave
        clock.advance(1)
        store.sweep()
        assert len(store) == 40


def test_keys_too_long_for_what_is_left_are_decided_on_shared_cells(path):
    """When the room for long keys is used up, further ones share cells: limited, and no key is forgotten."""
    with SharedStore(path, max_keys=10) as store:
        limiter = Limiter("1/h", store=store)
        answers = [bool(limiter.hit("x" * 16_000 + str(i))) for i in range(40)]
        assert not any(bool(limiter.hit("x" * 16_000 + str(i))) for i in range(40))
        assert sum(answers) <= 40
        assert Picture(path).problems == []


def test_a_log_without_a_place_refuses_until_the_oldest_entry_expires(path):
    """A sliding log keeps `log_entries` entries: a call without room is refused with its retry time, and counted."""
    clock = ManualClock(1000)
    with SharedStore(path, log_entries=4, clock=clock) as store:
        limiter = Limiter(SlidingWindowLog("100/min"), store=store)
        pair = Limiter({"log": SlidingWindowLog("100/min"), "bucket": TokenBucket("9/min")}, store=store)
        for _ in range(4):
            assert limiter.hit("a")
            assert pair.hit("b")
            clock.advance(1)
        assert limiter.peek("a").retry_after == 56
        refused = limiter.hit("a")
        assert (refused.allowed, refused.retry_after, refused.remaining) == (False, 56, 96)
        assert not limiter.reserve("a", max_wait=50)
        both = pair.hit("b")
        assert (both.allowed, both.name, both.retry_after) == (False, "log", 56)
        assert pair.peek("b").decisions[1].remaining == 5
        assert store.stats()["log_full"] > 0
        clock.advance(56)
        assert limiter.hit("a")
        assert pair.hit("b")


def test_a_log_longer_than_its_places_is_warned_of(path, caplog):
    """A limiter whose log can't be kept whole is an error when it is made."""
    with SharedStore(path, log_entries=4) as store:
        Limiter(SlidingWindowLog("100/min"), store=store)
    assert "keeps at most 4 entries" in caplog.text


# A restart of the machine


def test_state_survives_a_restart_of_the_machine(path, monkeypatch):
    """After a restart the cells are moved into a fresh file; a held lock and a half-made change are not."""
    with SharedStore(path, log_entries=16) as store:
        bucket = Limiter("10/h", store=store)
        log = Limiter(SlidingWindowLog("10/h"), store=store)
        for limiter in (bucket, log):
            limiter.hit("a", cost=4)
            limiter.hit("a much longer key than sixteen bytes", cost=5)
        inode = os.stat(path).st_ino
    with open(path, "r+b") as file:
        file.seek(8 * layout.LOCK)
        file.write((1 << 32 | 7).to_bytes(8, "little"))
    monkeypatch.setattr(mapped_file, "boot_id", lambda: (1, 2))
    with SharedStore(path, log_entries=16) as store:
        for kind in ("10/h", SlidingWindowLog("10/h")):
            limiter = Limiter(kind, store=store)
            assert limiter.peek("a").remaining == 6
            assert limiter.peek("a much longer key than sixteen bytes").remaining == 5
        assert os.stat(path).st_ino != inode
        assert len(store) == 4
        with SharedStore(path, log_entries=16) as other:
            assert Limiter("10/h", store=other).peek("a").remaining == 6
    assert Picture(path).problems == []
    assert os.listdir(os.path.dirname(path)) == (["limits"] if limitkeeper.compiled else sorted(["limits", "limits.lock"]))


def test_a_process_waits_for_another_that_takes_a_file_over(path):
    """After a restart of the machine, which of the processes comes first copies the keys; the others wait for longer than their
    timeout as long as it goes on.
    """
    SharedStore(path).close()
    with open(path, "r+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)

        def take_over():
            for number in range(60):
                file.seek(8 * layout.ADOPTED)
                file.write(number.to_bytes(8, "little"))
                time.sleep(0.02)
            fcntl.flock(file, fcntl.LOCK_UN)

        thread = threading.Thread(target=take_over)
        thread.start()
        SharedStore(path, timeout=0.5).close()
        assert not thread.is_alive() or thread.join() is None
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(StoreTimeout, match="is it stopped"):
            SharedStore(path, timeout=0.1)


def test_cells_that_do_not_check_out_after_a_restart_are_left_behind(path, monkeypatch):
    """Pages that never reached the disk cost the keys in them, and nothing else."""
    with SharedStore(path) as store:
        limiter = Limiter("10/h", store=store)
        for i in range(20):
            limiter.hit(f"key {i} " + "long" * 10, cost=3)
        plan = layout.regions(100_000, 256)
    with open(path, "r+b") as file:
        file.seek(8 * (plan.cells + 3 * layout.CELL + layout.KEY))
        file.write(b"\x7f" * 8)
        file.seek(8 * (plan.blocks + 7 * layout.BLOCK))
        file.write(b"\xff" * 64)
    monkeypatch.setattr(mapped_file, "boot_id", lambda: (1, 2))
    with SharedStore(path) as store:
        left = [Limiter("10/h", store=store).peek(f"key {i} " + "long" * 10).remaining for i in range(20)]
    assert sorted(left) == [7] * 18 + [10] * 2


@pytest.mark.parametrize("damage", ["zeros", "-1", "1", "another kind"])
def test_a_damaged_directory_after_a_restart_costs_the_limits_from_there_on(path, monkeypatch, damage):
    """The limits before a damaged entry keep their states, those behind it begin anew, whatever is damaged."""
    limits = ["10/h", "sliding window log 10/h", "fixed window 10/h", "token bucket 20/h"]
    with SharedStore(path, max_keys=8, log_entries=16) as store:
        for name, limit in enumerate(limits):
            Limiter(limit, store=store, name=f"name {name}").hit("a", cost=3)
    with open(path, "rb") as file:
        whole = file.read()
    begin = 8 * layout.regions(8, 16).directory
    end = begin + 8 * int.from_bytes(whole[8 * layout.DIRECTORY :][:8], "little")
    monkeypatch.setattr(mapped_file, "boot_id", lambda: (1, 2))
    for at in range(whole.index(b'["name 1"', begin) - 32, end, 8):
        value = {"zeros": 0, "-1": -1, "1": 1, "another kind": whole[at] ^ 3}[damage]
        with open(path, "wb") as file:
            file.write(whole[:at] + value.to_bytes(8, "little", signed=True) + whole[at + 8 :])
        with SharedStore(path, max_keys=8, log_entries=16) as store:
            left = [Limiter(one, store=store, name=f"name {n}").hit("a").remaining for n, one in enumerate(limits)]
        assert left[0] == 6
        assert all(found in (fresh - 4, fresh - 1) for found, fresh in zip(left, (10, 10, 10, 20), strict=True)), (at, left)


def test_a_limit_behind_a_damaged_entry_is_a_store_error(path):
    """While the file is in use, a process that opens it finds the limits before a damaged entry of the directory only."""
    with SharedStore(path, max_keys=8, log_entries=16) as store:
        for name in "ab":
            Limiter("10/h", store=store, name=name).hit("key")
        with open(path, "r+b") as file:
            at = file.read().index(b'["b"')
            file.seek(at - 32)
            file.write(bytes(8))
        with SharedStore(path, max_keys=8, log_entries=16) as other:
            assert Limiter("10/h", store=other, name="a").hit("key").remaining == 8
            with pytest.raises(StoreError, match="directory of limits is damaged"):
                Limiter("10/h", store=other, name="b")


def test_a_key_of_impossible_size_after_a_restart_is_left_behind(path, monkeypatch):
    """Neither a length that no key has nor a log of more entries than places keeps a store from opening."""
    plan = layout.regions(100, 16)
    with SharedStore(path, max_keys=100, log_entries=16) as store:
        Limiter("10/h", store=store).hit("a key of more than sixteen bytes")
        Limiter("sliding window log 10/h", store=store).hit("a")
        Limiter("20/h", store=store).hit("a", cost=3)
    with open(path, "r+b") as file:
        file.seek(8 * (plan.cells + layout.LINK))
        file.write((2**62).to_bytes(8, "little"))
        file.seek(8 * (plan.logs + 1))
        file.write((2**62).to_bytes(8, "little"))
    monkeypatch.setattr(mapped_file, "boot_id", lambda: (1, 2))
    with SharedStore(path, max_keys=100, log_entries=16) as store:
        assert [key for key, _ in store.items(Limiter("20/h", store=store).named[0])] == ["a"]
        assert len(store) == 1


def test_a_file_that_can_not_be_renewed_after_a_restart_is_let_go_of(path, monkeypatch):
    """Without space for the new file there is an error and no other trace: the next opening finds everything."""
    with SharedStore(path, max_keys=100) as store:
        Limiter("10/h", store=store).hit("a", cost=4)
    before = os.listdir(os.path.dirname(path))
    monkeypatch.setattr(mapped_file, "boot_id", lambda: (1, 2))
    for name, failing in (("allocate_space", lambda *_: errno.ENOSPC), ("boot_id", lambda: 1 / 0)):
        with monkeypatch.context() as now:
            now.setattr(mapped_file, name, failing)
            with pytest.raises((StoreUnavailable, ZeroDivisionError)):
                SharedStore(path, max_keys=100)
        assert os.listdir(os.path.dirname(path)) == before
    with SharedStore(path, max_keys=100, timeout=0) as store:
        assert Limiter("10/h", store=store).peek("a").remaining == 6


@pytest.mark.parametrize("header", ["none", "not ready"])
def test_a_file_whose_header_did_not_reach_the_disk_is_made_again(path, header):
    """The machine stops soon after a file was created: its size and some pages were written, its header not, or as it was before
    the file was ready. The next process starts with an empty file."""
    with SharedStore(path, max_keys=50) as store:
        Limiter("5/h", store=store).hit_many([f"user:{n}" for n in range(50)], cost=5)
    with open(path, "r+b") as file:
        if header == "none":
            file.write(bytes(layout.HEADER * 8))
        else:
            file.seek(layout.READY * 8)
            file.write(bytes(8))
    with SharedStore(path, max_keys=50) as store:
        assert len(store) == 0
        assert {one.remaining for one in Limiter("5/h", store=store).hit_many([f"user:{n}" for n in range(50)])} == {4}


def test_time_does_not_go_back_over_a_restart(path, monkeypatch):
    """When the wall clock is behind after a restart, the file's time continues from where it was."""
    with SharedStore(path) as store:
        limiter = Limiter("10/h", store=store)
        for _ in range(64):
            limiter.hit("a")
        seen = store.now_us()
    monkeypatch.setattr(mapped_file, "boot_id", lambda: (1, 2))
    monkeypatch.setattr(mapped_file, "utc_us", lambda: 10**15)
    with SharedStore(path) as store:
        assert store.now_us() >= seen - 1_000_000


def test_where_the_boot_is_unknown_time_does_not_go_back_over_a_restart(path, monkeypatch):
    """Without /proc nothing tells a restart of the machine, after which its monotonic clock begins anew: whoever opens the file
    alone renews it, and no key waits for as long as the machine had run."""
    monkeypatch.setattr(mapped_file, "boot_id", lambda: mapped_file.UNKNOWN_BOOT)
    with SharedStore(path, max_keys=100) as store:
        inode = os.stat(path).st_ino
        limiter = Limiter("fixed window 5/400d align first", store=store)
        limiter.hit("a", cost=3)
        seen = store.now_us()
    assert os.stat(path).st_ino == inode  # the one that created it
    with open(path, "r+b") as file:
        file.seek(8 * layout.OFFSET)
        offset = int.from_bytes(file.read(8), "little", signed=True)
        file.seek(8 * layout.OFFSET)
        file.write((offset - 30 * 86_400_000_000).to_bytes(8, "little", signed=True))
    with SharedStore(path, max_keys=100) as store:
        assert store.now_us() >= seen
        assert Limiter("fixed window 5/400d align first", store=store).hit("a").remaining == 1
    assert Picture(path).problems == []


def test_a_store_that_is_collected_leaves_nothing_open(path):
    """Without `close` too, its descriptors and its lock on the file go with it."""
    before = sorted(os.listdir("/dev/fd"))
    for _ in range(3):
        Limiter("10/h", store=SharedStore(path, max_keys=100)).hit("a")
        gc.collect()
    assert sorted(os.listdir("/dev/fd")) == before
    with SharedStore(path, max_keys=100) as store:
        assert Limiter("10/h", store=store).peek("a").remaining == 7


# Processes and threads


def test_a_child_goes_on_with_its_parents_store(path):
    """A store made before a fork works in parent and child, as one limit."""
    with SharedStore(path) as store:
        limiter = Limiter("100/h", store=store)
        limiter.hit("a")
        children = []
        for _ in range(4):
            pid = os.fork()
            if pid == 0:
                answers = [bool(limiter.hit("a")) for _ in range(20)]
                os._exit(0 if all(answers) else 1)
            children.append(pid)
        assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4
        assert limiter.peek("a").remaining == 19


@pytest.mark.parametrize(
    "limit", ["token bucket 500/400d", "fixed window 500/400d", "sliding window log 500/d", "sliding window counter 500/d"]
)
def test_processes_and_threads_on_one_key_are_admitted_exactly(path, limit):
    """4 processes of 8 threads request more than the limit: exactly the limit is admitted."""
    with SharedStore(path, log_entries=1000) as store:
        limiter = Limiter(limit, store=store)
        pipes = [counted_in_a_child(lambda: hits_of_threads(limiter, 8, 40)) for _ in range(4)]
        total = 0
        for pid, reader in pipes:
            with os.fdopen(reader) as answers:
                total += int(answers.read())
            assert os.waitpid(pid, 0)[1] == 0
    assert total == 500


def hits_of_threads(limiter, number, each):
    """The admitted hits of so many threads."""
    counts = []
    threads = [
        threading.Thread(target=lambda: counts.append(sum(bool(limiter.hit("a")) for _ in range(each)))) for _ in range(number)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts)


def counted_in_a_child(work):
    """A child process that runs this and writes its count."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, str(work()).encode())
        os._exit(0)
    os.close(writer)
    return pid, reader


@pytest.mark.parametrize("bad", ["/dev/null", "/dev/zero"])
def test_what_is_no_file_is_refused(bad):
    """A device is not taken for a file."""
    with pytest.raises(ConfigurationError, match="is not a regular file"):
        SharedStore(bad)


def test_a_path_with_a_nul_is_refused():
    """An invalid path is an error of the store's own."""
    with pytest.raises(StoreUnavailable, match="null"):
        SharedStore("/tmp/a\0b")


def test_c_and_python_agree_on_what_lies_where():
    """Every number of layout.pxd equals that of layout.py, and none is missing."""
    folder = os.path.dirname(limitkeeper.__file__).replace(os.path.join("build", "plain"), "src")
    with open(os.path.join(folder, "stores", "shared", "layout.pxd")) as file:
        received = dict(re.findall(r"^    (\w+) = (\d+)$", file.read(), re.M))
    ours = {name: str(value) for name, value in vars(layout).items() if isinstance(value, int) and name.isupper()}
    assert received == ours
