"""States in Redis: times to live, their units, nothing written on refusal, changed rates, clocks that went back."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import libfaketime
import pytest
from lua_store import LuaStore

from limitkeeper import (
    ConfigurationError,
    FixedWindow,
    LeakyBucket,
    LeakyBucketQueue,
    Limit,
    Limiter,
    MemoryStore,
    SlidingWindowCounter,
    SlidingWindowLog,
    TokenBucket,
)
from limitkeeper.algorithms.claim import Claim, NamedLimit
from limitkeeper.stores.redis import script_request
from limitkeeper.stores.redis.limit_and_state_codec import entry_of
from limitkeeper.testing import ManualClock
from servers.valkey import Valkey
from stand_ins import NOON

ALL = [
    TokenBucket("3/min burst 3"),
    LeakyBucket("3/min", 3),
    LeakyBucketQueue("3/min", 3),
    FixedWindow("3/h"),
    FixedWindow("3/min", align="first"),
    SlidingWindowCounter("3/h"),
    SlidingWindowLog("3/min"),
]
every_rule = pytest.mark.parametrize("limit", ALL, ids=str)


@pytest.fixture
def client(valkey: Valkey) -> Iterator[Any]:
    with valkey.client() as client:
        client.flushall()
        yield client


def dumped(client: Any) -> dict[bytes, Any]:
    """Everything that the server holds, as bytes."""
    return {name: client.dump(name) for name in client.scan_iter()}


def named(limit: Limit, name: str = "kept") -> NamedLimit:
    return NamedLimit(name, name, limit)


# Time to live ------------------------------------------------------------------------------------------------------------


@every_rule
def test_a_state_lives_until_it_is_as_new_and_a_second_more(client: Any, limit: Limit) -> None:
    """After every charge, with a wait or without, and after giving back, a key's time to live is its reset plus a second."""
    store, one = LuaStore(client), named(limit)
    store.register(one)
    for step in range(3):
        if step == 2:
            store.give_back([Claim(one, "a", 1)], store.server_us())
        else:
            assert store.decide([Claim(one, "a", 1)], 0 if step == 0 else None) or not limit.reserves
        reset_ms = store.decide([Claim(one, "a", 0)], 0, commit=False).reset_us // 1000
        left_ms = client.pttl(store.names.key(one, "a"))
        assert reset_ms + 900 <= left_ms <= reset_ms + 1500, (step, reset_ms, left_ms)


@every_rule
def test_nothing_is_left_without_a_time_to_live(client: Any, limit: Limit) -> None:
    """After any request, every key that it left expires; so does the entry of a limit, much later."""
    store = LuaStore(client)
    one, ramp = named(limit), named(TokenBucket("5/s burst 10 initial 1"), "ramp")
    for each in (one, ramp):
        store.register(each)
        for key in ("a", "b" * 500):
            store.decide([Claim(each, key, 2)], None)
            store.give_back([Claim(each, key, 1)], store.server_us())
            store.give_back([Claim(each, key, -5)], store.server_us())
        store.load(each, store.items(each))
    assert client.dbsize() == 6
    assert all(client.pttl(name) > 0 for name in client.scan_iter())


def test_a_key_outlives_the_ramp_of_its_limit(client: Any) -> None:
    """While a new key would hold less than a full bucket, a used key is not forgotten."""
    store, one = LuaStore(client), named(TokenBucket("1/s burst 100 initial 90"))
    store.register(one)
    assert store.decide([Claim(one, "a", 1)])
    assert 10_000 < client.pttl(store.names.key(one, "a")) <= 12_000


@pytest.mark.parametrize("max_wait_us", [0, 1])
@pytest.mark.parametrize("count", [1, 2])
def test_a_state_that_is_as_new_after_centuries_is_stored(client: Any, count: int, max_wait_us: int) -> None:
    """A large bucket that fills slowly: 285 years are 2^53 µs, above which not every number of microseconds is a double."""
    store = LuaStore(client)
    some = [named(TokenBucket("7/d", burst=10**7), name) for name in "ab"[:count]]
    for one in some:
        store.register(one)
    for _ in range(30):
        assert store.decide([Claim(one, "a", 333_333) for one in some], max_wait_us)


def test_made_up_times_are_kept_for_an_hour(client: Any) -> None:
    """On a clock of one's own the time to live of a state is unknown, so it is an hour."""
    store, one = LuaStore(client, ManualClock(NOON)), named(TokenBucket("5/s"))
    store.register(one)
    store.decide([Claim(one, "a", 1)])
    store.decide([Claim(one, "a", 1)], None)
    assert all(3_590_000 < client.pttl(name) <= 3_600_000 for name in client.scan_iter())


def test_no_decision_depends_on_a_key_having_expired(client: Any) -> None:
    """A state that still exists long after it is as new answers as a new key."""
    for limit in ALL:
        clock = ManualClock(NOON)
        store, one = LuaStore(client, clock), named(limit, str(limit))
        store.register(one)
        store.decide([Claim(one, "old", 3)], None)
        clock.advance(10 * 3600)
        assert store.decide([Claim(one, "old", 2)], None) == store.decide([Claim(one, "new", 2)], None)


@pytest.mark.parametrize("name", ["x", None])
def test_a_token_bucket_takes_at_most_120_bytes(client: Any, name: str | None) -> None:
    """Name, state and time to live of a key such as user:42, under a short name and under the text of the rule."""
    store = LuaStore(client)
    limiter = Limiter(TokenBucket("1234567 per 86399 s", burst=7654321), store=store, name=name)
    assert limiter.hit("user:42")
    assert client.memory_usage(store.names.key(limiter.named[0], "user:42")) <= 120


# Writing -----------------------------------------------------------------------------------------------------------------


@every_rule
def test_refused_and_peeked_write_nothing(client: Any, limit: Limit) -> None:
    """Refused, refused for ever, peeked, a cost of nothing, and given back without a state: not a byte changes."""
    store, one, other = LuaStore(client), named(limit), named(TokenBucket("1000/s"), "other")
    for each in (one, other):
        store.register(each)
        store.decide([Claim(each, "a", 1)])
    while store.decide([Claim(one, "a", 1)]):
        pass
    before = dumped(client)
    for max_wait_us in (0, 1):
        assert not store.decide([Claim(one, "a", 3)], max_wait_us)
        assert not store.decide([Claim(one, "a", 10**18)], max_wait_us)
        assert not store.decide([Claim(other, "a", 1), Claim(one, "a", 2)], max_wait_us)
        assert not store.decide([Claim(other, "b", 1), Claim(one, "a", 2)], max_wait_us)
        assert store.decide([Claim(one, "a", 0)], max_wait_us)
        store.decide([Claim(one, "c", 1)], max_wait_us, commit=False)
    store.give_back([Claim(one, "never seen", 1)])
    assert dumped(client) == before


# Whose units -------------------------------------------------------------------------------------------------------------

CHANGES = [
    (TokenBucket("5/s burst 10"), TokenBucket("7/min burst 4")),
    (TokenBucket("7 per 3 hours burst 1000"), TokenBucket("1234567/d")),
    (LeakyBucket("5/s", 10), LeakyBucket("1/s", 10)),
    (LeakyBucketQueue("5/s"), LeakyBucketQueue("3/s", 4)),
    (FixedWindow("5/min"), FixedWindow("9/min")),
    (FixedWindow("5/min"), FixedWindow("9/h")),
    (FixedWindow("5/min"), FixedWindow("9/min", align="first")),
    (SlidingWindowCounter("5/min"), SlidingWindowCounter("9/min")),
    (SlidingWindowCounter("5/min"), SlidingWindowCounter("9/h")),
    (SlidingWindowLog("5/min"), SlidingWindowLog("2/h")),
]


@pytest.mark.parametrize(("old", "new"), CHANGES, ids=str)
def test_a_changed_rate_counts_the_old_state_as_memory_does(client: Any, old: Limit, new: Limit) -> None:
    """Under one name the rate changes, and back: every answer and every state on the way is MemoryStore's."""
    clocks = [ManualClock(NOON), ManualClock(NOON)]
    stores: list[Any] = [LuaStore(client, clocks[0]), MemoryStore(clock=clocks[1])]
    result: list[list[Any]] = [[], []]
    for store, clock, found in zip(stores, clocks, result, strict=True):
        for step, limit in enumerate((old, new, old, new)):
            one = NamedLimit("changing", "rate", limit)
            store.register(one)
            for cost, max_wait_us, commit in ((1, 0, False), (2, 0, True), (1, 10**7, True), (1, 0, True)):
                found.append(store.decide([Claim(one, "a", cost)], max_wait_us, commit=commit))
                clock.advance(0.37 + step)
            found.append(store.items(one))
    assert result[0] == result[1]


def test_limits_that_all_meet_another_rate_are_decided_together(client: Any) -> None:
    """One decision whose limits have all changed is still one decision, and a batch of them keeps its order."""
    clock = ManualClock(NOON)
    store, memory = LuaStore(client, clock), MemoryStore(clock=clock)
    result: list[list[Any]] = [[], []]
    for limits in (ALL[:2], [TokenBucket("1/min burst 9"), LeakyBucket("2/min", 7)]):
        named_limits = [NamedLimit("several", type(limit).kind, limit) for limit in limits]
        for each, found in zip((store, memory), result, strict=True):
            for one in named_limits:
                each.register(one)
            found += each.decide_many([[Claim(one, "a") for one in named_limits]] * 5)
            each.give_back([Claim(one, "a") for one in named_limits])
            found.append(each.decide([Claim(one, "a") for one in named_limits], 10**6))
    assert result[0] == result[1]


def test_giving_back_under_a_new_rate_is_as_in_memory(client: Any) -> None:
    """A refund under a new rate goes to the states of both."""
    clock = ManualClock(NOON)
    states = []
    for store in (LuaStore(client, clock), MemoryStore(clock=clock)):
        for limit in (TokenBucket("5/s burst 10"), TokenBucket("7/min burst 9")):
            one = NamedLimit("x", "x", limit)
            store.register(one)
            store.decide([Claim(one, "a", 4)])
            store.give_back([Claim(one, "a", 1)])
        states.append(list(store.items(one)))
    assert states[0] == states[1]


def test_several_limits_of_which_some_meet_another_rate(client: Any) -> None:
    """A hit on several limits of which some have a new rate, or a state from the future, answers as in memory."""
    answers = []
    for kind in (LuaStore, MemoryStore):
        clock = ManualClock(NOON)
        store = kind(client, clock) if kind is LuaStore else MemoryStore(clock=clock)
        found = []
        for limits in (("5/s burst 10", "3/min burst 4"), ("5/s burst 10", "7/min burst 9"), ("1/s burst 2", "7/min burst 9")):
            several = [NamedLimit("x", f"limit {n}", TokenBucket(limit)) for n, limit in enumerate(limits)]
            for one in several:
                store.register(one)
            for cost in (1, 2, 5):
                clock.advance(0.1)
                found.append(store.decide([Claim(one, "a", cost) for one in several]))
        answers.append((found, [list(store.items(one)) for one in several]))
    assert answers[0] == answers[1]


def test_a_state_of_a_rate_missing_in_the_registry_counts_as_used_up(client: Any) -> None:
    """When the registry is gone, an old state of another process is not forgiven: the key starts empty, and fills up at the new
    rate."""
    store, other = LuaStore(client), LuaStore(client)
    old, new = named(TokenBucket("5/s burst 10")), named(TokenBucket("1/h burst 3"))
    other.register(old)
    assert other.decide([Claim(old, "a", 1)])
    client.delete(other.names.registry(old))
    assert store.decide([Claim(new, "a", 1)]).remaining == 0
    assert store.decide([Claim(new, "b", 1)]).remaining == 2


def test_a_state_that_changed_meanwhile_is_not_overwritten(client: Any) -> None:
    """A request that is sent again decides on the current state: when another caller came first, on its state."""
    clock = ManualClock(NOON)
    store = LuaStore(client, clock)
    old, new = named(TokenBucket("1/h burst 10")), named(TokenBucket("2/h burst 10"))
    for one in (old, new):
        store.register(one)
    store.decide([Claim(old, "a", 3)])
    options = script_request.DecideOptions(now_us=store.moment())
    request = script_request.encode_decide(store.names, [Claim(new, "a", 1)], options)
    script_request.decode_call(
        [request], client.eval(script_request.encode_call([request])[0].source, 1, *request.keys, request.body)
    )
    assert request.stale
    assert store.decide([Claim(new, "a", 2)]).remaining == 5
    assert store.send(store.again(request))[0].remaining == 4


# Remembering limits ------------------------------------------------------------------------------------------------------


def test_a_birth_is_written_once(client: Any) -> None:
    """A limiter made later, on any machine, gets the same birth, and new keys fill up from it."""
    clock = ManualClock(NOON)
    one = named(TokenBucket("1/s burst 10 initial 0"))
    LuaStore(client, clock).register(one)
    clock.advance(4)
    later = LuaStore(client, clock)
    with pytest.raises(ConfigurationError, match="birth"):
        later.decide([Claim(one, "a", 1)])
    later.register(one)
    assert later.decide([Claim(one, "a", 4)]).remaining == 0
    clock.advance(3)
    assert later.decide([Claim(one, "b", 1)]).remaining == 6


def test_two_limits_that_meet_in_one_digest_are_distinguished(client: Any) -> None:
    """Should 72 bits ever not be enough, the second limit is refused by name instead of sharing the first one's state."""
    store = LuaStore(client)
    first, second = named(TokenBucket("5/s"), "first"), named(TokenBucket("5/s"), "second")
    store.register(first)
    entry_of(store.names, second).registry = store.names.registry(first)
    with pytest.raises(ConfigurationError, match=r"second.*first.*rename"):
        store.register(second)


@every_rule
def test_items_come_back_whole_and_load_takes_them(client: Any, limit: Limit) -> None:
    """Every key, long ones and strange ones too, with its state; loaded elsewhere, it answers the same."""
    clock = ManualClock(NOON)
    store, other, one = LuaStore(client, clock), LuaStore(client, clock, prefix="other"), named(limit)
    keys = ["", "a", "}{", "\ud800\0", "x" * 10_000, "y" * 129]
    for each in (store, other):
        each.register(one)
    for cost, key in enumerate(keys):
        store.decide([Claim(one, key, 1 + cost % 3)], None)
    found = dict(store.items(one))
    assert sorted(found) == sorted(keys)
    other.load(one, found.items())
    assert dict(other.items(one)) == found
    for key in keys:
        assert other.decide([Claim(one, key, 1)], 10**6) == store.decide([Claim(one, key, 1)], 10**6)


def test_a_reset_is_no_use_of_a_rate_on_a_log(client: Any) -> None:
    """After a reset under the long window a log forgets what the short one, the only one in use, has forgotten: as in memory."""
    short, long = named(SlidingWindowLog("5/min")), named(SlidingWindowLog("5/h"))
    left = []
    for make in (lambda clock: LuaStore(client, clock), lambda clock: MemoryStore(clock=clock)):
        clock = ManualClock(NOON)
        store = make(clock)
        for one in (short, long):
            store.register(one)
        assert store.decide([Claim(long, "a", 1)])
        store.reset([Claim(long, "a", 1)])
        assert store.decide([Claim(short, "a", 3)])
        clock.advance(61)
        assert store.decide([Claim(short, "a", 1)])
        left.append(store.decide([Claim(long, "a", 1)]).remaining)
    assert left == [3, 3]


# Clocks that go back -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("was_reset", [False, True])
def test_a_new_key_fills_up_where_the_clock_went_back_behind_the_birth(client: Any, was_reset: bool) -> None:
    """A limit that starts empty was registered an hour ahead of the present time: its keys fill up from their first call on."""
    clock = ManualClock(NOON)
    store, one = LuaStore(client, clock), named(TokenBucket("1/s burst 10 initial 0"))
    store.register(one)
    clock.advance(-3600)
    store.last_us = store.shift_us = 0
    if was_reset:
        store.reset([Claim(one, "a", 1)])
    refused = store.decide([Claim(one, "a", 1)])
    assert (refused.allowed, refused.retry_after) == (False, 1.0)
    clock.advance(0.999999)
    assert not store.decide([Claim(one, "a", 1)])
    clock.advance(0.000001)
    assert store.decide([Claim(one, "a", 1)]).remaining == 0
    assert dict(store.items(one)).keys() == {"a"}


@every_rule
@pytest.mark.parametrize("back", [0.000001, 1.0, 59.0, 3601.0, 86_400 * 30.0])
def test_a_clock_that_went_back_grants_nothing_and_blocks_no_caller(client: Any, limit: Limit, back: float) -> None:
    """After a step back nothing extra is granted, and a lone caller waits no longer than before the step."""
    clock = ManualClock(NOON)
    store, one = LuaStore(client, clock), named(limit)
    store.register(one)
    while store.decide([Claim(one, "a", 1)]):
        pass
    result = store.decide([Claim(one, "a", 1)])
    clock.advance(-back)
    store.last_us = store.shift_us = 0  # unguarded, as the server's own time is
    after = store.decide([Claim(one, "a", 1)])
    window_us = limit.period if limit.gain == 0 else 0  # on the clock, windows end by the clock
    assert not after
    assert after.remaining == result.remaining == 0
    assert after.retry_us <= result.retry_us + window_us
    before = dumped(client)
    again = store.decide([Claim(one, "a", 1)])
    assert again == after
    assert dumped(client) == before, "once the dates are right, a refusal writes nothing"
    clock.advance(after.retry_after)
    assert store.decide([Claim(one, "a", 1)])


@every_rule
def test_a_peek_after_a_step_back_writes_nothing(client: Any, limit: Limit) -> None:
    """Only a charging call moves the dates; a peek sees them moved and leaves them."""
    clock = ManualClock(NOON)
    store, one = LuaStore(client, clock), named(limit)
    store.register(one)
    store.decide([Claim(one, "a", 1)])
    clock.advance(-100)
    store.last_us = store.shift_us = 0
    before = dumped(client)
    peeked = store.decide([Claim(one, "a", 1)], 0, commit=False)
    assert dumped(client) == before
    assert peeked.allowed == store.decide([Claim(one, "a", 1)]).allowed


def test_reservations_keep_their_distance_when_the_clock_goes_back(client: Any) -> None:
    """Reservations stay as far ahead as they were."""
    clock = ManualClock(NOON)
    store = LuaStore(client, clock)
    for limit in (
        TokenBucket("1/s burst 1"),
        LeakyBucketQueue("1/s"),
        SlidingWindowLog("1/s"),
        FixedWindow("1/s", align="first"),
    ):
        one = named(limit, str(limit))
        store.register(one)
        assert [store.decide([Claim(one, "a", 1)], None).wait for _ in range(3)] == [0.0, 1.0, 2.0]
        clock.advance(-3600)
        store.last_us = store.shift_us = 0
        assert store.decide([Claim(one, "a", 1)], None).wait == 3.0


@pytest.mark.parametrize("key", ["a", "a" * 200], ids=["short key", "long key"])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_entries_of_a_log_are_given_back_when_the_clock_went_back_since(client: Any, order: tuple[int, ...], key: str) -> None:
    """Each charge is found by its own time, after any number of steps of the clock."""
    clock = ManualClock(NOON)
    store, one = LuaStore(client, clock), named(SlidingWindowLog("3/h"))
    store.register(one)
    starts = []
    for _ in range(3):
        starts.append(store.decide([Claim(one, key, 1)]).start_us)
        clock.advance(-100)
        store.last_us = store.shift_us = 0
    for left, at in enumerate(order):
        assert [name for name, _ in store.items(one)] == [key]
        store.give_back([Claim(one, key, 1)], starts[at])
        assert store.decide([Claim(one, key, 1)], 0, commit=False).remaining == left + 1


class ServersClock:
    """The clock of a server under libfaketime, moved through a file; the test waits until the server shows it."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "offset"
        self.file.write_text("+0")
        library = sorted(Path(libfaketime.__file__).parent.rglob("libfaketime*.so*"))[0]
        self.env = {"LD_PRELOAD": str(library), "FAKETIME_TIMESTAMP_FILE": str(self.file), "FAKETIME_NO_CACHE": "1"}

    def move(self, store: LuaStore, seconds: int, eventually: Callable[..., None]) -> None:
        written = self.file.with_suffix(".new")
        written.write_text(f"{seconds:+d}")
        written.replace(self.file)
        eventually(lambda: abs(store.server_us() - time.time_ns() // 1000 - seconds * 1_000_000) < 5_000_000)


def test_the_servers_clock_goes_back(tmp_path: Path, eventually: Callable[..., None]) -> None:
    """A real server whose clock is set back an hour: nothing extra, and the callers continue as before."""
    clock = ServersClock(tmp_path)
    with Valkey(env=clock.env) as server, server.client() as client:
        store, one = LuaStore(client), named(TokenBucket("1/min burst 3"))
        store.register(one)
        started = store.server_us()
        assert [bool(store.decide([Claim(one, "a", 1)])) for _ in range(4)] == [True, True, True, False]
        clock.move(store, -3600, eventually)
        refused = store.decide([Claim(one, "a", 1)])
        assert not refused
        assert 55 < refused.retry_after <= 60
        value = client.get(store.names.key(one, "a"))
        assert struct.unpack_from("<d", value, 8)[0] < started - 3_000_000_000, "written at the current time"
        assert 175_000 < client.pttl(store.names.key(one, "a")) <= 182_000
        clock.move(store, 3600, eventually)
        assert store.decide([Claim(one, "a", 3)]), "an hour later all of it is available again"
        assert not store.decide([Claim(one, "a", 1)]), "and no more"
