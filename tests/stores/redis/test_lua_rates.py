"""Several rates under one name, and keys that were reset: the scripts against the slow model and against the pure functions."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lua_store import LuaStore
from test_lua_rules import Draw, exact
from test_lua_states import ALL, dumped, every_rule

from effort import effort
from laws.test_law_12_several_rates import WITHOUT_LOG, Call, rates_and_calls
from limitkeeper import Decision, FixedWindow, Limit, MemoryStore, SlidingWindowLog, TokenBucket
from limitkeeper.algorithms.all_of import charged_too, seeded
from limitkeeper.algorithms.claim import Claim, NamedLimit
from limitkeeper.algorithms.limit_parser import parse_limit
from limitkeeper.stores.redis import limit_and_state_codec as codec
from limitkeeper.stores.redis import script_request
from limitkeeper.testing import ManualClock
from limitkeeper.testing.strategies import LIMITS, limits
from models.limiter_model import Ask
from models.rates import RatesWorld
from servers.valkey import Valkey
from stand_ins import NOON

RESERVING = [limit for limit in ALL if limit.reserves]


@pytest.fixture
def client(valkey: Valkey) -> Iterator[Any]:
    with valkey.client() as client:
        client.flushall()
        yield client


def named(limit: Limit) -> NamedLimit:
    return NamedLimit("plans", "name", limit)


def another(limit: Limit) -> Limit:
    """Another rate of the same rule."""
    return parse_limit(f"{limit.kind} 900/h capacity 900" if limit.kind == "leaky bucket" else f"{limit.kind} 900/h")


def registered(store: LuaStore, *some: Limit) -> list[NamedLimit]:
    found = [named(limit) for limit in some]
    for one in found:
        store.register(one)
    return found


def without_source(decision: Decision) -> Any:
    """The model's decision as a Decision."""
    found = {name: value for name, value in decision.to_dict().items() if name != "source"}
    return {**found, "decisions": [without_source(part) for part in decision.decisions]} if len(decision.decisions) > 1 else found


# Several rates -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", LIMITS, ids=lambda rule: rule.kind)
def test_rates_in_any_order_answer_as_the_model(client: Any, rule: type[Limit]) -> None:
    """One to six rates of one name on one key: every hit and every wait is answered as the model answers it."""

    @effort(60)
    @given(rates_and_calls(rule, 6))
    def law(drawn: tuple[tuple[Limit, ...], list[Call]]) -> None:
        client.flushall()
        clock = ManualClock(NOON)
        store = LuaStore(client, clock)
        rates = registered(store, *drawn[0])
        world = RatesWorld({"name": drawn[0][0]}, clock.now_us())
        for call in drawn[1]:
            clock.advance(call.after_us / 1e6)
            world.use("name", drawn[0][call.rate])
            if not world.is_exact("name", "key", clock.now_us()):
                return
            expected, _ = world.decide([Ask("name", "key", call.cost)], clock.now_us(), call.max_wait_us)
            decision = store.decide([Claim(rates[call.rate], "key", call.cost)], call.max_wait_us)
            assert without_source(decision) == expected, (call, drawn[0][call.rate])

    law()


@effort(40)
@given(st.lists(st.sampled_from(list(LIMITS)).flatmap(lambda rule: rates_and_calls(rule, 3)), min_size=2, max_size=3))
def test_several_names_with_several_rates_answer_as_the_model(
    valkey: Valkey, drawn: list[tuple[tuple[Limit, ...], list[Call]]]
) -> None:
    """A decision over two or three names, each under one of its rates: all or nothing, and at one start."""
    with valkey.client() as client:
        client.flushall()
        clock = ManualClock(NOON)
        store = LuaStore(client, clock)
        names = [f"name {number}" for number in range(len(drawn))]
        rates = [[NamedLimit("plans", name, limit) for limit in some] for name, (some, _) in zip(names, drawn, strict=True)]
        for one in [one for some in rates for one in some]:
            store.register(one)
        # A fixed window with a reservation more than one window ahead has no count of the current window, and assumes all of it.
        patient = not any(isinstance(one.limit, FixedWindow) for some in rates for one in some)
        world = RatesWorld({name: some[0] for name, (some, _) in zip(names, drawn, strict=True)}, clock.now_us())
        for call in [call for _, trace in drawn for call in trace]:
            clock.advance(call.after_us / 1e6)
            chosen = [some[(call.rate + number) % len(some)] for number, some in enumerate(rates)]
            for name, one in zip(names, chosen, strict=True):
                world.use(name, one.limit)
            max_wait_us = call.max_wait_us if patient else 0
            asks = [Ask(name, "key", min(call.cost, 10**6)) for name in names]
            expected, _ = world.decide(asks, clock.now_us(), max_wait_us)
            decision = store.decide([Claim(one, "key", asks[0].cost) for one in chosen], max_wait_us)
            assert without_source(decision) == expected, (call, chosen)


@pytest.mark.parametrize("rule", WITHOUT_LOG, ids=lambda rule: rule.kind)
def test_the_states_of_all_rates_are_those_of_the_pure_functions(client: Any, rule: type[Limit]) -> None:
    """From any states of any rates, at the edge of 2^53 too: seeded, charged, charged too and given back to the last bit."""

    @effort(150)
    @given(st.lists(limits(rule), min_size=2, max_size=4, unique_by=str), st.integers(0, 2**32))
    def check(some: list[Limit], seed: int) -> None:
        client.flushall()
        draws = [Draw(limit, seed + i) for i, limit in enumerate(some)]
        random, now_us = draws[0].random, draws[0].now * some[0].tick
        clock = ManualClock(now_us / 1e6)
        now_us = clock.now_us()
        store = LuaStore(client, clock)
        own, *_ = registered(store, *some)
        before = {limit: draw.state() for limit, draw in zip(some, draws, strict=True)}
        if random.random() < 0.5:
            del before[some[0]]
        if not all(exact((limit.used(state, now_us // limit.tick),)) for limit, state in before.items()):
            return
        write(store, own, before, now_us)
        most = max(limit.used(state, now_us // limit.tick) for limit, state in before.items())
        mine = before.get(some[0]) or seeded(some[0], codec.entry_of(store.names, own).birth_us or 0, now_us, most)
        cost, max_wait = random.choice((1, 2, some[0].capacity)), random.choice((0, draws[0].ahead())) * some[0].tick
        limit = some[0]
        now = now_us // limit.tick
        *after, start, _, _, _ = limit.decide(mine, now, cost, (now_us + max_wait) // limit.tick - now)
        decision = store.decide([Claim(own, "key", cost)], max_wait)
        assert decision.allowed == (start >= 0)
        if start < 0:
            first = start == -1 and limit not in before
            assert read(store, own) == (before | {limit: tuple(mine)} if first else before)
            return
        start_us = start * limit.tick if start > now else now_us
        expected = {other: charged_too(other, *state, now_us, start_us, cost) for other, state in before.items()}
        expected[limit] = tuple(after)
        if all(map(exact, expected.values())):
            assert read(store, own) == expected, (some, before, cost, max_wait)
            assert list(read(store, own)) == list(expected), "in the order of their first use"

    check()


def write(store: LuaStore, one: NamedLimit, states: dict[Limit, Any], now_us: int) -> None:
    """Stores states of several rates as a script stores them."""
    numbers: list[float] = [-len(states), now_us]
    for limit, state in states.items():
        numbers += [codec.fingerprint(str(limit)), *codec.numbers_of(limit), *state]
    store.client.set(store.names.key(one, "key"), struct.pack(f"<{len(numbers)}d", *numbers))


def read(store: LuaStore, one: NamedLimit, key: str = "key") -> dict[Limit, Any]:
    """The states of a key by their limits."""
    fields = store.client.hgetall(store.names.registry(one))
    value = store.client.get(store.names.key(one, key))
    return {codec.rate_of(fields, print_): state for print_, state in codec.decode_value(one.limit, value)[0]}  # type: ignore[misc]


def test_two_fixed_windows_in_turn_admit_what_each_leaves(client: Any) -> None:
    """10/min and 1000/h used in turn for ten minutes, twice a second: the small one gets what the large one leaves of ten a
    minute, and not nearly all of its 600 calls."""
    clock = ManualClock(NOON)
    store = LuaStore(client, clock)
    small, large = registered(store, FixedWindow("10/min"), FixedWindow("1000/h"))
    admitted = {small: 0, large: 0}
    for step in range(1200):
        one = (small, large)[step % 2]
        admitted[one] += store.decide([Claim(one, "ip", 1)]).allowed
        clock.advance(0.5)
    assert admitted == {small: 50, large: 600}


def test_an_upgraded_key_has_what_the_new_rate_leaves(client: Any) -> None:
    """An exhausted 60/min and then 5000/h: 4940 are left; a peek shows that, and writes nothing."""
    store = LuaStore(client, ManualClock(NOON))
    small, large = registered(store, FixedWindow("60/min"), FixedWindow("5000/h"))
    assert store.decide([Claim(small, "user", 60)])
    before = dumped(client)
    assert store.decide([Claim(large, "user", 1)], commit=False).remaining == 4940
    assert dict(store.items(large)) == {"user": seeded(large.limit, 0, int(NOON * 1e6), 60)}
    assert dumped(client) == before
    assert not store.decide([Claim(large, "user", 4941)])
    assert dict(store.items(large)) == {"user": seeded(large.limit, 0, int(NOON * 1e6), 60)}
    assert store.decide([Claim(large, "user", 4940)])


def test_a_fifth_rate_takes_the_place_of_the_one_nearest_to_as_new(client: Any) -> None:
    """A key has four rates at most; the dropped one is not the oldest but the one that is as new the soonest."""
    store = LuaStore(client, ManualClock(NOON))
    rates = registered(store, *[TokenBucket(f"{count}/h burst 50") for count in (3, 50, 4, 5, 6)])
    for one in rates:
        assert store.decide([Claim(one, "a", 1)])
    assert list(read(store, rates[0], "a")) == [rates[i].limit for i in (0, 2, 3, 4)]


def test_a_fifth_rate_replaces_one_whose_amount_another_holds(client: Any) -> None:
    """Of windows that end together not the one with the largest amount: it would begin again with what the others hold."""
    store = LuaStore(client, ManualClock(NOON))
    largest, *others = registered(store, *[FixedWindow(f"{count}/h") for count in (9, 1, 2, 3, 4)])
    assert store.decide([Claim(largest, "a", 9)])
    assert not any(store.decide([Claim(one, "a", 1)]) for one in others)
    assert not store.decide([Claim(largest, "a", 1)])


def test_a_log_is_kept_for_the_longest_window_in_use(client: Any) -> None:
    """A short window does not drop entries that a long one on the same key still counts, nor let the key expire."""
    store = LuaStore(client)
    short, long = registered(store, SlidingWindowLog("100/s"), SlidingWindowLog("5/h"))
    assert store.decide([Claim(long, "a", 2)])
    assert store.decide([Claim(short, "a", 2)])
    assert store.decide([Claim(long, "a", 1)], commit=False).remaining == 1
    assert 3_590_000 < client.pttl(store.names.key(short, "a")) <= 3_601_500


@every_rule
def test_a_key_with_one_rate_is_stored_as_before(client: Any, limit: Limit) -> None:
    """Whatever other rates its name has: no byte more, and the fast path's own script."""
    store = LuaStore(client, ManualClock(NOON))
    one, _ = registered(store, limit, another(limit))
    store.decide([Claim(one, "a", 1)], None)
    store.decide([Claim(one, "a", 1)])
    value = client.get(store.names.key(one, "a"))
    assert len(value) <= 32 + 2 * 16 if limit.logs else len(value) == 40


def test_a_key_with_several_rates_takes_one_round_trip_after_the_first_meeting(client: Any) -> None:
    """Stores of two processes with a rate each: at most one more call when they first meet, then one call per decision."""
    clock = ManualClock(NOON)
    stores = [LuaStore(client, clock), LuaStore(client, clock)]
    rates = [registered(store, TokenBucket(f"{n + 1}/s burst 1000"))[0] for n, store in enumerate(stores)]
    for store, one in zip(stores, rates, strict=True):
        store.decide([Claim(one, "a", 1)])
    stores[0].decide([Claim(rates[0], "a", 1)])
    for key in ("a", "b"):
        for store, one in zip(stores * 3, rates * 3, strict=True):
            store.round_trips = 0
            assert store.decide([Claim(one, key, 1)])
            assert store.round_trips == 1


def test_the_fast_path_is_tried_again_after_a_while(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """When no key has several rates any more, hits are sent as before."""
    monkeypatch.setattr(codec, "DECISIONS_WITHOUT_FAST_PATH", 3)
    store = LuaStore(client, ManualClock(NOON))
    old, new = registered(store, TokenBucket("1/s burst 100"), TokenBucket("2/s burst 100"))
    store.decide([Claim(old, "a", 1)])
    store.decide([Claim(new, "a", 1)])
    client.delete(store.names.key(new, "a"))
    kinds = [
        type(script_request.encode_decide(store.names, [Claim(new, "b", 1)], script_request.DecideOptions(now_us=1)))
        for _ in range(4)
    ]
    assert kinds == [script_request.DecideRequest] * 2 + [script_request.HitRequest] * 2


@pytest.mark.parametrize("back", [1.0, 59.0, 3601.0])
def test_several_rates_survive_a_clock_that_goes_back(client: Any, back: float) -> None:
    """Nothing extra under any of the rates, a new one included, and no caller waits longer than before the step."""
    for limit, other, third in (
        (TokenBucket("1/min burst 3"), TokenBucket("1/h burst 5"), TokenBucket("2/h burst 5")),
        (FixedWindow("3/min", align="first"), FixedWindow("5/h", align="first"), FixedWindow("4/h", align="first")),
    ):
        client.flushall()
        clock = ManualClock(NOON)
        store = LuaStore(client, clock)
        rates = registered(store, limit, other, third)
        for one in rates[:2]:
            while store.decide([Claim(one, "a", 1)]):
                pass
        before = [store.decide([Claim(one, "a", 1)]) for one in rates]
        clock.advance(-back)
        store.last_us = store.shift_us = 0  # unguarded, as the server's own time is
        after = [store.decide([Claim(one, "a", 1)]) for one in rates]
        assert not any(after)
        assert [one.retry_us for one in after] == [one.retry_us for one in before]
        clock.advance(after[0].retry_after)
        assert store.decide([Claim(rates[0], "a", 1)])


def test_other_rates_are_charged_at_the_common_start(client: Any) -> None:
    """As in memory, also where the ticks of the caller's rate are so coarse that it counts the start as now."""
    fine, coarse, slow = (
        TokenBucket("1000/s burst 1000"),
        TokenBucket("999999999/210d burst 1000000000"),
        TokenBucket("20/s burst 1"),
    )
    assert coarse.tick > 50_000
    found = []
    for store in (LuaStore(client, ManualClock(NOON)), MemoryStore(clock=ManualClock(NOON))):
        fine_one, coarse_one = named(fine), named(coarse)
        slow_one = NamedLimit("plans", "slow", slow)
        for one in (fine_one, coarse_one, slow_one):
            store.register(one)
        store.decide([Claim(fine_one, "a", 1), Claim(slow_one, "a", 1)])
        assert store.decide([Claim(coarse_one, "a", 3), Claim(slow_one, "a", 1)], None).wait_us == 50_000
        found.append(store.decide([Claim(fine_one, "a", 1)], commit=False))
    assert found[0] == found[1]


def test_load_replaces_the_state_of_its_rate_only(client: Any) -> None:
    """The other rates of the key stay as they are, also those unknown to this process; a reset is forgotten."""
    clock = ManualClock(NOON)
    store, other_process = LuaStore(client, clock), LuaStore(client, clock)
    one, _ = registered(store, TokenBucket("1/h burst 10"), TokenBucket("2/h burst 10"))
    (other,) = registered(other_process, TokenBucket("2/h burst 10"))
    other_process.decide([Claim(other, "a", 4)])
    store.load(one, [("a", (clock.now_us(), 0, 0))])
    assert [store.decide([Claim(each, "a", 1)], commit=False).remaining for each in (one, other)] == [10, 6]


# Giving back -------------------------------------------------------------------------------------------------------------


@every_rule
def test_a_cancelled_charge_is_given_back_to_all_rates(client: Any, limit: Limit) -> None:
    """A charge under one rate that is cancelled leaves all rates as they were."""
    clock = ManualClock(NOON)
    store = LuaStore(client, clock)
    one, other = registered(store, limit, another(limit))
    both = [Claim(other, "a", 1), Claim(one, "a", 1)]
    for _ in range(2):
        assert store.decide([Claim(other, "a", 1)], None)
        clock.advance(30)
        before = [store.decide([claim], commit=False) for claim in both]
        mine = Claim(one, "a", 1)
        decision = store.decide([mine])
        assert decision
        assert store.decide([both[0]], commit=False) != before[0]
        assert store.give_back([mine], decision.start_us)
        assert [store.decide([claim], commit=False) for claim in both] == before


@pytest.mark.parametrize("limit", RESERVING, ids=str)
def test_a_cancelled_reservation_leaves_no_rate_with_more_than_before(client: Any, limit: Limit) -> None:
    """Its own rate is restored exactly; of the others, a bucket that was full at the later start may stay a little emptier."""
    store = LuaStore(client, ManualClock(NOON))
    one, other = registered(store, limit, another(limit))
    cost = 2 if limit.refunds else 1  # a queue of three
    for each in (other, one):
        assert store.decide([Claim(each, "a", cost)], None)
    before = [store.decide([Claim(each, "a", 1)], None, commit=False) for each in (one, other)]
    mine = Claim(one, "a", cost)
    decision = store.decide([mine], None)
    assert decision.wait_us > 0
    assert store.give_back([mine], decision.start_us)
    after = [store.decide([Claim(each, "a", 1)], None, commit=False) for each in (one, other)]
    assert after[0] == before[0]
    assert after[1].remaining <= before[1].remaining
    assert after[1].wait_us >= before[1].wait_us


def test_settling_above_the_estimate_charges_all_rates(client: Any) -> None:
    """The charge beyond the estimate is made under every rate."""
    store = LuaStore(client, ManualClock(NOON))
    small, large = registered(store, TokenBucket("1/h burst 10"), TokenBucket("1/h burst 100"))
    store.decide([Claim(large, "a", 1)])
    claim = Claim(small, "a", 2)
    start_us = store.decide([claim], None).start_us
    assert store.give_back([Claim(small, "a", -5, 2, claim.reset_id)], start_us)
    assert store.decide([Claim(large, "a", 1)], commit=False).remaining == 92
    assert store.decide([Claim(small, "a", 1)], commit=False).remaining == 2


# Reset -------------------------------------------------------------------------------------------------------------------


@every_rule
@pytest.mark.parametrize("change", [1, 3, -2], ids=["settled below", "cancelled", "settled above"])
@pytest.mark.parametrize("max_wait_us", [0, None], ids=["now", "patient"])
@pytest.mark.parametrize("key", ["a", "k" * 200], ids=["short key", "long key"])
def test_a_charge_from_before_a_reset_gives_nothing_back(
    client: Any, limit: Limit, change: int, max_wait_us: int | None, key: str
) -> None:
    """Settled or cancelled after the reset it does nothing and returns False, under every rate; the next charge is given back
    again.
    """
    store = LuaStore(client, ManualClock(NOON))
    one, other = registered(store, limit, another(limit))
    for charged in (one, other):
        old = Claim(charged, key, 3)
        started = store.decide([old], max_wait_us)
        assert started
        store.reset([Claim(one, key)])
        assert store.decide([Claim(one, key, 1)], commit=False).reset_us == 0
        assert not list(store.items(one)), "a key that was reset has no state"
        new = Claim(other, key, 1)
        at = store.decide([new], max_wait_us)
        assert new.reset_id > 0
        before = dumped(client)
        assert not store.give_back([Claim(charged, key, change, 3, old.reset_id)], started.start_us)
        assert dumped(client) == before
        assert store.give_back([new], at.start_us)
        assert store.decide([Claim(other, key, 1)], commit=False).reset_us == 0
        store.reset([Claim(one, key)])


def test_a_refund_after_a_reset_gives_back_what_was_charged_since(client: Any) -> None:
    """A refund has no certain charge: it goes to the current state, and without one nothing happens."""
    store = LuaStore(client, ManualClock(NOON))
    (one,) = registered(store, TokenBucket("1/h burst 10"))
    store.decide([Claim(one, "a", 5)])
    store.reset([Claim(one, "a")])
    before = dumped(client)
    assert store.give_back([Claim(one, "a", 2)])
    assert dumped(client) == before
    store.decide([Claim(one, "a", 5)])
    assert store.give_back([Claim(one, "a", 2)])
    assert store.decide([Claim(one, "a", 0)], commit=False).remaining == 7


def test_a_reset_is_remembered_for_an_hour_or_until_the_limit_is_full_and_a_day_at_most(client: Any) -> None:
    """The marker lives that long, also on a key without a state: it may have been charged before."""
    store = LuaStore(client)
    for limit, hours in ((TokenBucket("5/s"), 1), (FixedWindow("5 per 3h"), 3), (SlidingWindowLog("5 per 300h"), 24)):
        one = NamedLimit("kept", str(limit), limit)
        store.register(one)
        store.decide([Claim(one, "a", 1)])
        store.reset([Claim(one, "a"), Claim(one, "never seen")])
        for key in ("a", "never seen"):
            left_ms = client.pttl(store.names.key(one, key))
            assert hours * 3_600_000 - 2000 < left_ms <= hours * 3_600_000 + 1500


def test_when_a_reset_is_forgotten_the_key_is_plain_again(client: Any) -> None:
    """The first charge after that time drops the marker; a key with one rate then is stored as any other."""
    clock = ManualClock(NOON)
    store = LuaStore(client, clock)
    (one,) = registered(store, TokenBucket("1/h burst 2"))
    store.decide([Claim(one, "a", 1)])
    store.reset([Claim(one, "a")])
    store.decide([Claim(one, "a", 1)])
    assert len(client.get(store.names.key(one, "a"))) == 16 + 2 * 72
    clock.advance(7201)
    store.decide([Claim(one, "a", 1)])
    assert len(client.get(store.names.key(one, "a"))) == 40
