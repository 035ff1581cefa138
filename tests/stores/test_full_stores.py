"""Full stores, in memory and in a shared file: expired keys of every limit are reclaimed, newcomers share by a keyed hash."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

import limitkeeper
from effort import scaled
from limitkeeper import FixedWindow, LeakyBucketQueue, Limiter, MemoryStore, SharedStore, SlidingWindowLog, TokenBucket
from limitkeeper.stores.contract import Store
from limitkeeper.testing import ManualClock
from limitkeeper.testing.admission_bounds import check_bound

START = 1_700_000_000.0
RULES = ["token bucket 5/min", "leaky bucket 5/min capacity 5", "fixed window 5/min", "sliding window log 5/min"]
RULES += ["sliding window counter 5/min", "leaky bucket queue 5/min capacity 5"]
every_rule = pytest.mark.parametrize("rule", RULES)


@pytest.fixture
def clock():
    return ManualClock(START)


@pytest.fixture(params=["memory", "shared"])
def make(request, tmp_path, clock):
    """Makes stores of one kind on one clock."""
    numbers, made = itertools.count(), []

    def create(max_keys: int) -> Store:
        shared = request.param == "shared"
        store = SharedStore(tmp_path / f"{next(numbers)}", max_keys=max_keys, log_entries=8, clock=clock) if shared else None
        made.append(store or MemoryStore(max_keys=max_keys, clock=clock))
        return made[-1]

    yield create
    for store in made:
        store.close()


def slots(max_keys: int, earlier: int = 0) -> int:
    """The overflow cells of a limit, after so many other limits of its store have got theirs."""
    left = max_keys // 2 + 2048
    for _ in range(earlier):
        left -= left // 2
    return left // 2


# Sweeping


@every_rule
def test_expired_keys_of_one_limit_make_room_for_those_of_another(make, clock, rule):
    """A store full of expired keys of a limit that is no longer used: no new key of another limit shares a cell."""
    store = make(500)
    old, new = Limiter(rule, store=store, name="old"), Limiter("10/h", store=store, name="new")
    for number in range(500):
        old.hit(f"old {number}")
    clock.advance(3600)
    for number in range(490):
        assert new.hit(f"new {number}")
    assert store.overflow == 0
    assert len(store) <= 500


def test_the_last_expired_key_is_found_before_any_key_shares(make, clock):
    """Of keys that fit into one check, whichever is expired is reclaimed for a newcomer; only then do newcomers share."""
    for place in (0, 1, 57, 99):
        store = make(100)
        long, short = Limiter("1/d", store=store, name="long"), Limiter("1/s", store=store, name="short")
        for number in range(100):
            (short if number == place else long).hit(f"key {number}")
        clock.advance(60)
        assert long.hit("newcomer")
        assert store.overflow == 0
        long.hit("another")
        assert store.overflow > 0


def test_several_limits_at_once_find_room_as_well(make, clock):
    """A decision over two limits needs two cells: expired ones of a third limit are reclaimed for it."""
    store = make(100)
    old, pair = Limiter("1/s", store=store, name="old"), Limiter({"a": "5/d", "b": "fixed window 5/d"}, store=store)
    for number in range(100):
        old.hit(f"old {number}")
    clock.advance(60)
    for number in range(50):
        assert pair.hit(f"new {number}")
    assert store.overflow == 0


@every_rule
def test_the_sweep_keeps_pace_with_a_trickle_of_new_keys(make, clock, rule):
    """One new key every 10 s for hours: the store holds those of the last minutes, and a third more at most."""
    store = make(1000)
    limiter = Limiter(rule, store=store)
    for number in range(2000):
        clock.advance(10)
        limiter.hit(f"key {number}")
    live = sum(limiter.peek(f"key {number}").reset_after > 0 for number in range(1900, 2000))
    assert 0 < live <= 13
    assert len(store) <= live * 4 / 3 + 2


def test_the_sweep_keeps_pace_over_all_limits(make, clock):
    """New keys of one limit drop the expired ones of all others, a flood that is over included."""
    store = make(4000)
    others = [Limiter("1/s", store=store, name=f"other {number}") for number in range(5)]
    for number in range(3000):
        others[number % 5].hit(f"key {number}")
    clock.advance(3600)
    trickle = Limiter("fixed window 5/min", store=store)
    for number in range(1600):
        clock.advance(10)
        trickle.hit(f"key {number}")
    assert len(store) <= 16


def test_keys_of_a_rate_that_another_process_registered_are_swept(tmp_path, clock):
    """A process without a rate reads it from the file when its sweep meets a key of it."""
    with SharedStore(tmp_path / "limits", clock=clock) as one, SharedStore(tmp_path / "limits", clock=clock) as two:
        mine = Limiter("5/s", store=one, name="mine")
        mine.hit("a")
        theirs = Limiter("5/s", store=two, name="theirs")
        for number in range(100):
            theirs.hit(f"key {number}")
        clock.advance(60)
        for number in range(60):
            mine.hit(f"new {number}")
        assert len(one) <= 60


def test_items_are_complete_while_cells_move(tmp_path, clock, monkeypatch):
    """Keys are listed in parts; a sweep between two parts moves cells, and no active key is missed."""
    from limitkeeper.stores.shared import store as shared_store

    store = SharedStore(tmp_path / "limits", max_keys=6000, clock=clock)
    short, long = Limiter("1/s", store=store, name="short"), Limiter("1/d", store=store, name="long")
    for number in range(5000):
        (long if number % 2 else short).hit(f"key {number}")
    clock.advance(60)
    begin, calls = store.begin if not limitkeeper.compiled else None, itertools.count()
    if begin is not None:
        monkeypatch.setattr(shared_store, "AT_A_TIME", 512)

        def sweeping() -> int:
            found = begin()
            if next(calls) < 8:
                store.cached_key = None
                store.table.sweep(700, store.now())
            return found

        store.begin = sweeping
    found = dict(store.items(long.named[0]))
    assert sorted(found) == sorted(f"key {number}" for number in range(1, 5000, 2))
    store.close()


# Overflow


@pytest.mark.parametrize("max_keys", [10, 1000, 20_000])
def test_the_number_of_overflow_cells_follows_max_keys(make, max_keys):
    """A flood in a full store is admitted once per overflow cell of a limit of one: max_keys / 4 + 1024."""
    if max_keys > 1000 and not limitkeeper.compiled:
        pytest.skip("20 000 keys take long on the plain build")
    store = make(max_keys)
    limiter = Limiter(FixedWindow("1/d"), store=store)
    for number in range(max_keys):
        limiter.hit(f"known {number}")
    cells = slots(max_keys)
    admitted = sum(bool(limiter.hit(f"flood {number}")) for number in range(4 * cells))
    assert 0.95 * cells <= admitted <= cells


def test_a_second_limit_has_overflow_cells_of_its_own(make):
    """Each limit that overflows takes half of the remaining cells."""
    store = make(10)
    first, second = (Limiter(FixedWindow("1/d"), store=store, name=name) for name in ("first", "second"))
    for number in range(10):
        first.hit(f"known {number}")
    for earlier, limiter in enumerate((first, second)):
        admitted = sum(bool(limiter.hit(f"flood {number}")) for number in range(4 * slots(10)))
        assert 0.95 * slots(10, earlier) <= admitted <= slots(10, earlier)


def test_many_limits_share_a_full_store(make):
    """Sixty limits overflow in one full store: each has at least 64 cells, and none fails."""
    store = make(10)
    limiters = [Limiter(FixedWindow("1/d"), store=store, name=f"limit {number}") for number in range(60)]
    for number in range(10):
        limiters[0].hit(f"known {number}")
    for limiter in limiters:
        assert sum(bool(limiter.hit(f"flood {number}")) for number in range(30)) > 9


def admitted_keys(store: Store, keys: list[str]) -> list[bool]:
    limiter = Limiter(FixedWindow("1/d"), store=store)
    limiter.hit("known")
    return [bool(limiter.hit(key)) for key in keys]


def test_which_keys_share_a_cell_differs_from_store_to_store(make):
    """The hash is keyed by a secret of the store: keys that collide in one do not collide in the next."""
    keys = [f"key {number}" for number in range(900)]
    collided = [{key for key, passed in zip(keys, admitted_keys(make(1), keys), strict=True) if not passed} for _ in range(2)]
    assert all(len(some) > 200 for some in collided)
    assert len(collided[0] & collided[1]) < 0.8 * min(map(len, collided))


def test_a_fixed_hash_seed_does_not_fix_the_cells(python):
    """With PYTHONHASHSEED=0, when the hashes of strings are public, two processes share cells differently."""
    work = """
    import os, sys
    from limitkeeper import FixedWindow, Limiter, MemoryStore
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"})
    limiter = Limiter(FixedWindow("1/d"), store=MemoryStore(max_keys=1))
    limiter.hit("known")
    print(*(int(bool(limiter.hit(f"key {number}"))) for number in range(600)))
    """
    first, second = (python(work) for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr
    assert first.stdout != second.stdout


@pytest.mark.parametrize(("first", "code"), [("\u0430", "utf-16-le"), ("\U0001f600", "utf-32-le")])
def test_keys_of_the_same_bytes_share_no_cell(make, first, code):
    """Characters are one, two or four bytes wide, so the same bytes are several keys: nobody can choose one that shares the cell
    of a given one."""
    limiter = Limiter(FixedWindow("1/d"), store=make(1))
    limiter.hit("known")
    wide = [first + chr(ord(first) + number) for number in range(100)]
    for key in wide:
        limiter.hit(key)
    assert sum(bool(limiter.hit(key.encode(code).decode("latin-1"))) for key in wide) > 60


def test_which_keys_share_a_cell_changes_once_per_longest_window(make, clock):
    """The same newcomers share in every hour of a day, and others on the next day: the longest window of the store is a day."""
    store = make(1)
    hourly, daily = Limiter(FixedWindow("1/h"), store=store), Limiter(FixedWindow("1/d"), store=store)
    patterns = []
    for _ in range(40):
        clock.advance(3600)
        daily.hit("known")
        patterns.append(tuple(bool(hourly.hit(f"key {number}")) for number in range(400)))
    assert len(set(patterns)) == 2


def test_a_change_of_the_cells_grants_one_more_burst(make, clock):
    """A newcomer that has used up its overflow cell meets another one when the longest window is over, and known keys notice
    nothing."""
    store = make(1)
    limiter = Limiter(TokenBucket("24/d burst 2"), store=store, name="two hours")
    Limiter(FixedWindow("1/d"), store=store, name="longest window")
    limiter.acquire("known", cost=2, timeout=0)
    admitted = 0
    for _ in range(96):  # a quarter of an hour each
        clock.advance(900)
        limiter.hit("known", cost=1)
        admitted += bool(limiter.hit("newcomer"))
    assert admitted <= 2 + 24 + 2  # burst, a day's refill, and one change


@every_rule
def test_newcomers_get_at_most_one_more_burst_for_each_change(make, clock, rule):
    """Three keys call and reserve at random in a full store whose cells change each minute, which is five more a minute."""
    for seed in range(scaled(20)):
        rng, store = random.Random(seed), make(1)
        limiter, filler = Limiter(rule, store=store, name=f"{seed}"), Limiter("sliding window log 1/min", store=store)
        for _ in range(7):
            filler.reserve("known")
        reservations = {key: [] for key in "abc"}
        for _ in range(200):
            clock.advance(rng.choice((0, 0.001, 1, 2, 5)))
            key, wait = rng.choice("abc"), rng.choice((0, 0, 30, 300))
            reservations[key].append((limiter.reserve(key, cost := rng.randint(1, 3), max_wait=wait), cost))
        assert (len(store), store.overflow > 0) == (1, True)
        (limit,) = limiter.limits.values()
        if "bucket" in rule:
            limit = LeakyBucketQueue("10/min") if "queue" in rule else TokenBucket("10/min burst 5")
        for some in reservations.values():
            check_bound(limit, [(one.decision.start_us // limit.tick, cost) for one, cost in some if one], extra=5)


@pytest.mark.parametrize("call", ["reserve", "acquire"])
@pytest.mark.parametrize("rule", RULES[:4])
def test_keys_keep_their_cell_until_its_reserved_starts_have_begun(make, clock, rule, call):
    """A newcomer that waits far ahead on its cell gets five a minute once, not once more on each cell that it has later."""
    store = make(1)
    limiter, filler = Limiter(rule, store=store), Limiter("sliding window log 1/min", store=store)
    for _ in range(7):
        filler.reserve("known")
    starts = []

    def ask():
        if call == "reserve":
            return limiter.reserve("newcomer", max_wait=300).decision
        return store.decide_one(limiter.named[0], "newcomer", 1, 300_000_000, True)

    for _ in range(60):
        while one := ask():
            starts.append(one.start_us)
        clock.advance(5)
    assert 20 < sum(start <= clock.now_us() for start in starts) <= 35


@every_rule
def test_a_newcomer_gets_its_own_cell_with_what_it_used_when_there_is_room(make, clock, rule):
    """It shares no longer than necessary, though its overflow cell is in use, and it is not forgiven."""
    store = make(1)
    limiter, known = Limiter(rule, store=store), Limiter("1/d", store=store, name="known")
    known.hit("a")
    for _ in range(3):
        if not limiter.reserve("newcomer"):
            pytest.fail("five are free")
    assert len(store) == 1
    known.reset("a")
    before = limiter.peek("newcomer").reset_after
    assert before > 0
    limiter.reserve("newcomer")
    assert limiter.peek("newcomer").reset_after >= before
    assert len(store) == 1
    assert [key for key, _ in store.items(limiter.named[0])] == ["newcomer"]
    overflow = store.overflow
    assert limiter.reserve("newcomer")
    assert not limiter.reserve("newcomer", max_wait=0)
    assert store.overflow == overflow


def test_a_log_is_copied_whole(make, clock):
    """Each entry of the overflow cell's log expires in the newcomer's own cell at its original time."""
    store = make(1)
    limiter = Limiter(SlidingWindowLog("5/min"), store=store)
    limiter.hit("known")
    for _ in range(4):
        clock.advance(10)
        assert limiter.hit("newcomer")
    limiter.reset("known")
    clock.advance(10)
    assert limiter.hit("newcomer")
    assert len(store) == 1
    refused = limiter.hit("newcomer")
    assert (refused.allowed, refused.retry_after) == (False, 20.0)


@pytest.mark.parametrize("rule", ["token bucket 5/h", "fixed window 5/h", "sliding window log 5/h"])
def test_a_reset_does_not_forgive_the_keys_of_an_overflow_cell(make, clock, rule):
    """Two newcomers share an overflow cell. When there is room again, resetting one of them gives it a cell of its own, as new;
    the other stays refused."""
    store = make(8)
    short, limiter = Limiter("fixed window 1/s", store=store, name="short"), Limiter(rule, store=store, name="long")
    for number in range(8):
        short.hit(f"known {number}")
    assert limiter.hit("one", 5)
    other = next(key for key in (f"other {number}" for number in itertools.count()) if not limiter.peek(key))
    clock.advance(2)
    limiter.reset(other)
    assert limiter.peek(other).remaining == 5
    assert not limiter.hit("one")
    assert limiter.hit(other, 4).remaining == 1
    assert not limiter.hit("one")


@pytest.mark.parametrize("kind", ["memory", "shared"])
def test_a_peek_on_an_overflow_cell_stores_nothing(kind: str, tmp_path: Path) -> None:
    """Law 2: a rate that starts empty is peeked under; another rate of the name then still finds its burst."""
    clock = ManualClock(1_700_000_000.0)
    with MemoryStore(1, clock) if kind == "memory" else SharedStore(str(tmp_path / "limits"), max_keys=1, clock=clock) as store:
        Limiter(FixedWindow("1/d"), store=store, name="other").hit("active")
        empty, full = (Limiter({"limit": TokenBucket("3/h", initial=n)}, store=store, name="api") for n in (0, None))
        assert not empty.peek("new")
        assert full.peek("new").remaining == 3


def test_resets_of_unknown_keys_never_exceed_max_keys(make):
    """In a full store that has a key "" too, a reset of an unused key takes no cell."""
    store = make(8)
    limiter = Limiter(FixedWindow("5/d"), store=store)
    for key in ("", *"abcdefg"):
        limiter.hit(key)
    for number in range(100):
        limiter.reset(f"unknown {number}")
    assert len(store) == 8


# Waiters on overflow cells


def sharing(limiter: Limiter, key: str, used: int) -> str:
    """Uses up a key's overflow cell; another key that shares it."""
    assert limiter.hit(key, used)
    return next(other for other in map(str, itertools.count()) if not limiter.peek(other, used))


@pytest.mark.parametrize("rule", RULES[:4])
def test_a_waiter_that_leaves_an_overflow_cell_takes_nothing_of_others_with_it(make, clock, rule):
    """Two newcomers wait on one overflow cell, and those behind the one that leaves can't move up: the remaining ones keep their
    charges, and the store keeps within max_keys."""
    store = make(1)
    limiter, known = Limiter(rule, store=store), Limiter("1/d", store=store)
    known.hit("known")
    other = sharing(limiter, "key", 5)
    leaving = limiter.reserve("key", 2)
    staying = [limiter.reserve(key, cost) for key, cost in ((other, 2), ("key", 1), (other, 4))]
    before = limiter.peek(other)
    assert leaving.cancel()
    after = limiter.peek(other)
    assert limiter.peek("key") == after
    assert 0 <= before.reset_after - after.reset_after <= 24
    assert len(store) == 1
    if "window" in rule:
        staying[2].cancel()
        clock.advance(60)  # two and one begin
        assert limiter.peek(other).remaining == 2
