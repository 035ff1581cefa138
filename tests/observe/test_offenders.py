"""The most refused keys: bounds that hold against an exact count, for any traffic."""

from __future__ import annotations

import os
import sys
import threading
from base64 import b64decode
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limitkeeper import ConfigurationError
from limitkeeper.observe.key_hash import KeyHash
from limitkeeper.observe.offenders import MAX_KEY_LENGTH, MAX_PENDING, Offenders, Window
from limitkeeper.testing import ManualClock
from limitkeeper.web.headers import partition_key

KEYS = st.integers(0, 40).map(lambda n: ("rule", f"k{n * n % 23}"))


def shown(size: int = 64, **more: object) -> tuple[Offenders, ManualClock]:
    clock = ManualClock()
    return Offenders(size, clock=clock, show_keys=True, **more), clock  # type: ignore[arg-type]


@given(st.lists(KEYS, max_size=300), st.integers(1, 12))
def test_a_window_is_never_further_off_than_its_error(items, size):
    """count − error ≤ true ≤ count for every key, counted or not; errors stay below n / size; the counts add up to n."""
    window, true = Window(size), Counter(items)
    for item in items:
        window.add(item)
    for item in true:
        count, error = window.estimate(item)
        assert count - error <= true[item] <= count
        assert error * size <= len(items)
    assert sum(window.counts.values()) == window.total == len(items)
    assert {item for item in true if true[item] * size > len(items)} <= set(window.counts)


@given(st.lists(KEYS, max_size=300), st.integers(1, 12))
def test_the_lowest_level_of_a_window_is_the_smallest_count(items, size):
    """The levels hold exactly the counted keys, none is empty, and the lowest is the smallest count."""
    window = Window(size)
    for item in items:
        window.add(item)
        assert {each: count for count, level in window.levels.items() for each in level} == window.counts
        assert all(window.levels.values())
        assert window.least == min(window.counts.values())
        assert len(window.counts) <= size


@given(st.lists(st.tuples(KEYS, st.sampled_from([0, 0, 0, 20, 100, 250])), max_size=200), st.integers(1, 10))
def test_two_windows_together_keep_the_bounds(steps, size):
    """Over this window and the last, every bound holds against the offered keys, and the heavy ones are all included."""
    offenders, clock = shown(size, window=100)
    history: list[tuple[int, tuple[str, str]]] = []
    now = first = 0
    for item, pause in steps:
        clock.advance(pause)
        now += pause
        first = first if history else now
        offenders.offer(*item)
        history.append(((now - first) // 100, item))
    recent = [item for window, item in history if window >= (now - first) // 100 - 1]
    true = Counter(recent)
    total, found = offenders.look()
    assert total == offenders.offered == len(recent)
    assert len(found) <= 2 * size
    for one in found:
        assert one.count - one.error <= true[one.rule, one.key] <= one.count
    assert {item for item in true if true[item] * size > total} <= {(one.rule, one.key) for one in found}


def test_few_keys_are_counted_exactly():
    """With room for all, counts are exact, the heaviest comes first, and the same traffic gives the same result."""
    offenders, _ = shown()
    for n in range(60):
        for _ in range(n):
            offenders.offer("user", f"u{n}")
    top = offenders.top(3)
    assert [(one.rule, one.key, one.count, one.error) for one in top] == [("user", f"u{n}", n, 0) for n in (59, 58, 57)]
    assert len(offenders.top()) == 59


def test_a_flood_of_fresh_keys_does_not_hide_the_heavy_one():
    """One key with a tenth of all refusals is first, however many others come once each; memory stays what it was."""
    offenders, _ = shown(64)
    for n in range(20_000):
        offenders.offer("ip", "heavy" if n % 10 == 0 else f"stranger{n}")
    first = offenders.top(1)[0]
    assert first.key == "heavy"
    assert first.count - first.error <= 2000 <= first.count
    assert len(offenders._current.counts) == len(offenders._current.errors) == 64
    assert sum(len(level) for level in offenders._current.levels.values()) == 64


def test_a_key_without_refusals_is_forgotten_after_two_windows():
    """A key is listed for at least one window after its last refusal, and for no more than two."""
    offenders, clock = shown(window="5min")
    offenders.offer("user", "ann")
    clock.advance(299)
    offenders.offer("user", "bob")
    clock.advance(300)
    assert [one.key for one in offenders.top()] == ["ann", "bob"]
    clock.advance(1)
    assert offenders.top() == []
    assert offenders.offered == 0


def test_a_clock_that_goes_back_starts_the_window_there():
    """A clock set back by a day does not keep offenders for a day."""
    offenders, clock = shown(window=100)
    clock.advance(86_400)
    offenders.offer("user", "ann")
    clock.advance(-86_400)
    assert [one.key for one in offenders.top()] == ["ann"]
    clock.advance(200)
    assert offenders.top() == []


def test_keys_are_veiled():
    """A key is shown as twelve digits that depend on the secret; the same key looks the same under every rule."""
    plain, clock = Offenders(secret="ours"), ManualClock()
    for rule in ("a", "b"):
        plain.offer(rule, "user:42")
    keys = {one.key for one in plain.top()}
    assert keys == {KeyHash("ours")("user:42")}
    assert keys != {KeyHash("theirs")("user:42")} != {KeyHash()("user:42")}
    assert all(len(key) == 12 and int(key, 16) >= 0 for key in keys)
    own = Offenders(clock=clock)
    own.offer("a", "\udcff")
    assert own.top()[0].key == KeyHash()("\udcff")


def test_a_hash_begins_like_the_partition_key():
    """With the gate's secret, the hash of a key in the log is the beginning of its hash in a RateLimit field."""
    shown = partition_key(b"ours", "user:42").removeprefix(b";pk=:").removesuffix(b":")
    assert b64decode(shown)[:6].hex() == KeyHash(b"ours")("user:42")


def test_a_long_key_takes_no_room():
    """A key longer than usual is kept as its hash, and shown as the same hash that a log line has."""
    for show in (True, False):
        offenders = Offenders(secret="ours", show_keys=show)
        offenders.offer("ip", "x" * 10_000)
        assert max(len(key) for _, key in offenders._current.counts) <= MAX_KEY_LENGTH
        assert offenders.top()[0].key == KeyHash("ours")("x" * 10_000)


def test_threads_lose_nothing():
    """Four threads that offer at once are counted to the last one."""
    offenders, _ = shown()

    def run() -> None:
        for n in range(5_000):
            offenders.offer("user", f"u{n % 50}")

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert {one.count for one in offenders.top()} == {400}
    assert offenders.offered == 20_000


def test_no_caller_waits_for_a_counter():
    """An offer while another thread counts returns at once; the pending ones are bounded, and counted later."""
    offenders, _ = shown()
    with offenders._lock:
        for n in range(MAX_PENDING // 2):
            offenders.offer("user", f"u{n % 3}")
        offenders._pending.extend([("user", "u0")] * MAX_PENDING)
        offenders.offer("user", "u1")
        assert len(offenders._pending) == MAX_PENDING
    assert offenders.offered == MAX_PENDING


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_counts_for_itself():
    """A child forked during a count starts anew and is not blocked."""
    offenders, _ = shown()
    offenders.offer("user", "ann")
    with offenders._lock:
        child = os.fork()
        if child == 0:
            offenders.offer("user", "bob")
            os._exit(0 if [one.key for one in offenders.top()] == ["bob"] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [one.key for one in offenders.top()] == ["ann"]


@pytest.mark.parametrize("size", [0, -1, True, 1.5, 1_000_000])
def test_a_senseless_size_is_an_error(size):
    """A sketch of no size, or of an invalid one, is an error that names the right form."""
    with pytest.raises(ConfigurationError, match="64 is enough"):
        Offenders(size)


def test_senseless_secrets_and_windows_are_errors():
    """An empty secret hides nothing and a window of no time counts nothing: both are errors."""
    with pytest.raises(ConfigurationError, match="secret must be"):
        Offenders(secret="")
    with pytest.raises(ConfigurationError, match="5min"):
        Offenders(window=0)
