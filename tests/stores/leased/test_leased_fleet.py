"""Leases on a virtual clock: 1, 4 and 16 nodes against an adversary, a crash, an idle node, and loads below and above the limit.

Every bound is the one that `over_admission` states. The adversary hoards (calls until its leases are as large as they get, then
stops while the parent fills up) and spends everything, and all that still comes, at the edge of a window.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from leased_fleet import BEGIN, Fleet, Report, poisson

from limitkeeper import (
    FixedWindow,
    LeakyBucket,
    LeasedStore,
    Limiter,
    MemoryStore,
    SlidingWindowCounter,
    SlidingWindowLog,
    StoreUnavailable,
    TokenBucket,
)
from limitkeeper.algorithms.limit_parser import parse_limit
from limitkeeper.testing import ManualClock

SECOND = 1_000_000
BUCKET = TokenBucket("1000/s burst 100")
RULES = [BUCKET, LeakyBucket("1000/s", capacity=100), FixedWindow("1000/s"), SlidingWindowLog("1000/s")]
RULES += [SlidingWindowCounter("1000/s")]
every_rule = pytest.mark.parametrize("limit", RULES, ids=lambda limit: limit.kind)
every_size = pytest.mark.parametrize("nodes", [1, 4, 16])


def own_bound(limit) -> int:
    """The most that the rule itself admits in any window of its period."""
    if limit.gain:
        return int(limit.capacity + limit.count)
    return int(limit.count if limit.logs else 2 * limit.count)


def hoard_and_spend(fleet: Fleet, hammer: float = 1.3) -> Report:
    """The adversary; two rounds of it."""
    for _ in range(2):
        for step in range(200):
            fleet.to(fleet.clock.now_us() + 250)
            node = step % len(fleet.stores)
            if step < 40 or fleet.stores[node].leased(fleet.limiters[node].named[0], fleet.key) <= 1:
                fleet.hit(node)
        fleet.to(fleet.clock.now_us() + int(fleet.life_us * 0.9))
        end = fleet.clock.now_us() + int(hammer * SECOND)
        while fleet.clock.now_us() < end:
            for node in range(len(fleet.stores)):
                while fleet.hit(node) and fleet.stores[node].leased(fleet.limiters[node].named[0], fleet.key):
                    pass
            fleet.to(fleet.clock.now_us() + 1000)
    return fleet.report


def central(limit, arrivals) -> int:
    """The admissions of the parent alone."""
    clock = ManualClock(BEGIN)
    limiter, begin, admitted = Limiter(limit, store=MemoryStore(clock=clock)), clock.now_us(), 0
    for moment, _ in arrivals:
        clock.advance((begin + moment - clock.now_us()) / 1e6)
        admitted += bool(limiter.hit("k"))
    return admitted


@every_size
@pytest.mark.parametrize("lease", [None, 5, 50])
@every_rule
def test_over_admission_is_within_the_stated_bound(limit, lease, nodes):
    """Against an adversary no window holds more than the rule's own worst case and min(nodes × held, rate × life)."""
    fleet = Fleet(limit, nodes, lease=lease)
    report = hoard_and_spend(fleet)
    assert report.most_in(SECOND) <= own_bound(limit) + fleet.stores[0].over_admission(limit, nodes)
    if isinstance(limit, FixedWindow):
        assert max(Counter(moment // SECOND for moment, _ in report.admitted).values()) <= 1000


@pytest.mark.parametrize("strict", [False, True])
def test_batches_of_a_fixed_size_that_nodes_hold_in_turn_are_within_the_stated_bound(strict):
    """Nodes on which a key is rare hold a batch in turn and return most of it, while the bucket refills: beyond its bound they
    admit nodes × held at most, and nothing in strict mode."""
    limit = TokenBucket("60/s burst 100")
    fleet = Fleet(limit, 4, lease=20, strict=strict)
    for step in range(100):
        fleet.hit(step % 4)
        fleet.to(fleet.clock.now_us() + 45_000)
    fleet.hit(0)
    for _ in range(1000):
        for node in range(4):
            while fleet.hit(node):
                pass
        fleet.to(fleet.clock.now_us() + 1000)
    assert fleet.report.most_in(SECOND) <= own_bound(limit) + fleet.stores[0].over_admission(limit, 4)


@pytest.mark.parametrize("lease", [None, 5])
def test_no_interval_holds_more_than_the_stated_bound(lease):
    """Calls of mixed costs on one node, in bursts: no interval of any length holds more than burst + rate × T and two batches."""
    limit = TokenBucket("1000/s burst 50")
    for seed in range(40):
        chance, fleet = random.Random(seed), Fleet(limit, 1, lease=lease)
        level, last_us, worst = 0.0, fleet.clock.now_us(), 0.0
        for _ in range(200):
            fleet.to(fleet.clock.now_us() + chance.choice([0, 500, 1000, 3000, 10_000, 30_000]))
            level, last_us = max(0.0, level - (fleet.clock.now_us() - last_us) / 1000), fleet.clock.now_us()
            cost = chance.choice([1, 1, 2, 5])
            for _ in range(chance.randrange(8)):
                level += cost * bool(fleet.limiters[0].hit("k", cost))
            worst = max(worst, level - 50)
        assert worst <= fleet.stores[0].over_admission(limit, 1), f"seed {seed}"


@every_size
@every_rule
def test_strict_never_exceeds_the_limit_in_any_window(limit, nodes):
    """In strict mode no window of the period holds more than the rule itself allows, hoarded or not."""
    report = hoard_and_spend(Fleet(limit, nodes, lease=20, strict=True))
    assert report.most_in(SECOND) <= own_bound(limit)


@every_size
def test_strict_costs_its_price_and_no_more(nodes):
    """Under saturation a strict bucket admits its lowered rate: 1 − life / (period + life), within a hundredth."""
    limit = TokenBucket("1000/s burst 10")
    fleet = Fleet(limit, nodes, strict=True, life="50ms")
    report = fleet.play(poisson([4000 / nodes] * nodes, 4.0))
    price = fleet.stores[0].prices[str(limit)]
    assert price == pytest.approx(0.05 / 1.05)
    assert len(report.admitted) / 4000 == pytest.approx(1 - price, abs=0.02)


@pytest.mark.parametrize(("nodes", "life"), [(1, "100ms"), (4, "400ms"), (16, "1600ms")])
def test_at_half_load_a_batch_is_one_operation(nodes, life):
    """At 0.5 × load the parent gets one operation for each batch of 20, and one for each node's last."""
    fleet = Fleet(TokenBucket("1000/s burst 1000"), nodes, lease=20, life=life)
    report = fleet.play(poisson([500 / nodes] * nodes, 4.0))
    assert len(report.admitted) == report.offered
    assert report.operations <= report.offered / 20 + 2 * nodes


@pytest.mark.parametrize(("load", "most"), [(2, 0.1), (10, 0.02)])
@pytest.mark.parametrize(("nodes", "life"), [(1, "100ms"), (4, "100ms"), (16, "250ms")])
@pytest.mark.parametrize("lease", [None, 20])
@pytest.mark.parametrize("limit", [BUCKET, FixedWindow("1000/s")], ids=lambda limit: limit.kind)
def test_overload_costs_the_parent_almost_nothing(limit, lease, nodes, life, load, most):
    """At 2 × load at most 0.1 operations a decision, at 10 × at most 0.02: refusals are decided in RAM."""
    report = Fleet(limit, nodes, lease=lease, life=life).play(poisson([1000 * load / nodes] * nodes, 8.0 / load**0.6))
    assert report.per_decision <= most


@every_size
@every_rule
def test_leases_lose_no_utilisation(limit, nodes):
    """At 0.8 × load at least 0.99 of what the parent alone admits is admitted."""
    arrivals = list(poisson([800 / nodes] * nodes, 3.0))
    report = Fleet(limit, nodes).play(arrivals)
    assert len(report.admitted) >= 0.99 * central(limit, arrivals)


#: Rules with their rates per second: bursts from ten times to a hundredth of the rate, and every kind of window.
SHARED = [(f"token bucket {rate}/s burst 100", rate) for rate in (20, 100, 1000)]
SHARED += [("token bucket 100/s burst 10", 100), ("token bucket 1000/s burst 10", 1000), ("token bucket 1000/s burst 20", 1000)]
SHARED += [("leaky bucket 1000/s capacity 50", 1000), ("fixed window 600/min", 10)]
SHARED += [(f"{kind} {rate}/s", rate) for kind in ("fixed window", "sliding window log") for rate in (20, 40, 100, 1000)]
SHARED += [(f"sliding window counter {rate}/s", rate) for rate in (20, 40, 100, 1000)]


@pytest.mark.parametrize("load", [0.5, 1, 2])
@pytest.mark.parametrize("limits", [1, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(("rule", "rate"), SHARED, ids=[rule for rule, _ in SHARED])
def test_leases_admit_what_an_exact_store_admits(rule, rate, limits, load):
    """Four nodes admit at least 0.99 of what one exact store admits, for one, two and three limits of the same rule, except the
    tokens in hand at the end."""
    chosen = {f"limit {i}": parse_limit(rule) for i in range(limits)}
    arrivals = list(poisson([rate * load / 4] * 4, max(4, 1500 / rate) / min(load, 1)))
    fleet = Fleet(chosen, 4)
    report = fleet.play(arrivals)
    in_hand = max(sum(store.leased(named, "k") for store in fleet.stores) for named in fleet.limiters[0].named)
    assert len(report.admitted) + in_hand >= 0.99 * central(chosen, arrivals)


@pytest.mark.parametrize("costs", [(1,), (1, 2, 5)])
@pytest.mark.parametrize("nodes", [1, 3])
def test_calls_that_wait_for_several_limits_use_up_a_saturated_bucket(nodes, costs):
    """Every fifth call may wait 20 ms for its two limits; the nodes admit the rate, except the tokens in hand at the end."""
    clock, order = ManualClock(BEGIN), random.Random(nodes)
    parent = MemoryStore(clock=clock)
    stores = [LeasedStore(parent) for _ in range(nodes)]
    limiters = [Limiter({"one": BUCKET, "two": BUCKET}, store=store, name="several") for store in stores]
    admitted, end = 0, clock.now_us() + SECOND
    while clock.now_us() < end:
        clock.advance(order.expovariate(2000 / sum(costs) * len(costs)))
        limiter, cost = order.choice(limiters), order.choice(costs)
        admitted += cost * bool(limiter.reserve("k", cost, max_wait=0.02 if order.random() < 0.2 else 0))
        for store in stores:
            store.tend()
    assert admitted + 1000 * 0.1 >= 0.99 * (100 + 1000)


def test_waiters_of_several_batches_keep_their_start_when_another_leaves():
    """A start in the batches of two limits can't move up in both at once: it stays where it is, and belongs to both limits."""
    clock = ManualClock(BEGIN)
    store = LeasedStore(MemoryStore(clock=clock))
    limiter = Limiter({"one": BUCKET, "two": BUCKET}, store=store, name="several")
    waiting = []
    for _ in range(4000):
        clock.advance(0.0005)
        limiter.hit("k")
        store.tend()
        if clock.now_us() > (BEGIN + 1) * SECOND:
            waiting = [limiter.reserve("k", cost, max_wait=0.1) for cost in (1, 2, 1)]
        if waiting and all(one.wait and one.decision.source == "lease" for one in waiting):
            break
    assert [one.decision.source for one in waiting] == ["lease"] * 3
    starts = [one.decision for one in waiting]
    store.return_all()
    assert waiting[0].cancel()
    assert [one.decision for one in waiting] == starts


@every_size
def test_a_saturated_bucket_is_used_up(nodes):
    """At 2 × load the nodes together admit the rate, except the tokens in hand or reserved at the end: rate × life at most."""
    report = Fleet(BUCKET, nodes).play(poisson([2000 / nodes] * nodes, 4.0))
    later = [moment for moment, _ in report.admitted if moment - report.begin_us > SECOND]
    assert len(later) + 1000 * 0.1 >= 0.995 * 3000


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("longest", [0.01, 0.05, 1.0])
@pytest.mark.parametrize("costs", [(1,), (1, 1, 2, 4)])
def test_calls_that_may_wait_starve_no_other(nodes, longest, costs):
    """Of 3000 calls in 3 s, one in twenty may wait; the nodes admit what refills, at the end as at the beginning."""
    clock = ManualClock(BEGIN / SECOND)
    parent = MemoryStore(clock=clock)
    stores = [LeasedStore(parent, lease=20, life="400ms") for _ in range(nodes)]
    limiters = [Limiter(TokenBucket("300/s burst 60"), store=store) for store in stores]
    seconds = Counter()
    for step in range(3000):
        clock.advance(0.001)
        store, limiter = stores[step % nodes], limiters[step % nodes]
        store.tend()
        cost = costs[step // nodes // 5 % len(costs)]
        start = limiter.reserve("a", cost, longest).decision if step % 20 == 0 else limiter.hit("a", cost)
        seconds[step // 1000] += cost * start.allowed
    assert all(0.9 * 300 <= seconds[second] <= 60 + 300 + 120 for second in range(3)), seconds


@pytest.mark.parametrize("nodes", [4, 16])
def test_nodes_share_a_scarce_limit_evenly(nodes):
    """Under overload every node gets its part: the fairness of what each was admitted (Jain) is at least 0.95."""
    report = Fleet(BUCKET, nodes).play(poisson([5000 / nodes] * nodes, 3.0))
    parts = [len(report.of(node)) for node in range(nodes)]
    assert sum(parts) ** 2 / (nodes * sum(part * part for part in parts)) >= 0.95


def test_an_idle_node_blocks_the_others_for_no_longer_than_the_lease_life():
    """A node that took everything and fell idle gives it back after one life; an active one then has it."""
    fleet = Fleet(TokenBucket("60/h burst 50"), 2, lease=50, life="100ms")
    assert fleet.hit(0)
    begin = fleet.clock.now_us()
    while not fleet.hit(1):
        fleet.to(fleet.clock.now_us() + 1000)
        assert fleet.clock.now_us() - begin <= fleet.life_us


def test_an_idle_reservation_of_a_scarce_batch_is_given_back():
    """A node that reserved a batch ahead and fell idle does not delay the queue for longer than a life."""
    fleet = Fleet(TokenBucket("100/s burst 10"), 2, lease=10, life="100ms")
    for _ in range(30):
        fleet.hit(0)
    fleet.to(fleet.clock.now_us() + 2 * fleet.life_us)
    assert sum(fleet.hit(1) for _ in range(10)) == 10


def test_a_crash_loses_at_most_the_lease():
    """A node that dies with a batch takes that batch with it; the other has all the rest, and no node gets more."""
    fleet = Fleet(TokenBucket("60/h burst 100"), 2, lease=50)
    assert fleet.hit(0)
    fleet.down.add(0)
    fleet.to(fleet.clock.now_us() + 10 * fleet.life_us)
    assert sum(fleet.hit(1) for _ in range(100)) == 50


def test_a_lone_node_admits_all_that_there_is():
    """Without other nodes leases lose nothing: a burst of 100 is 100, whatever the lease."""
    for lease in (None, 1, 7, 50, 1000):
        clock = ManualClock(BEGIN)
        limiter = Limiter("100/h", store=LeasedStore(MemoryStore(clock=clock), lease=lease))
        assert sum(bool(limiter.hit("a")) for _ in range(150)) == 100


def test_what_comes_back_late_is_at_most_what_a_node_held():
    """A node that could not give back in time does so later; a bucket that filled up meanwhile then admits that much more: the
    tokens that the node held, as documented, and no more."""
    fleet = Fleet(TokenBucket("60/s burst 100"), 1, lease=50)
    store, named = fleet.stores[0], fleet.limiters[0].named[0]
    for key in "ab":
        store.decide_one(named, key, 1, 0, True)
    fleet.clock.advance(0.15)
    fleet.tally.failing["give_back"] = StoreUnavailable("cut")
    with pytest.raises(StoreUnavailable):
        store.tend()
    fleet.tally.failing.clear()
    fleet.clock.advance(10)
    for key in "ab":
        assert fleet.tally.inner.decide_one(named, key, 100, 0, True)
    store.tend()
    late = [fleet.tally.inner.decide_one(named, key, 1, 0, False).remaining for key in "ab"]
    assert sorted(late) == [0, 49]  # of the call that failed it is unknown whether it was executed: nothing comes back


@pytest.mark.parametrize("rebooks", [False, True])
def test_starts_that_are_given_up_on_one_node_destroy_no_token(rebooks):
    """Of calls that wait beside hits on an overloaded bucket a third is cancelled: in the end the bucket and the lease have what
    the others did not use."""
    for seed in range(6):
        chance = random.Random(seed)
        fleet = Fleet(BUCKET, 1, lease=chance.choice([None, 5]))
        if rebooks:  # the parent itself, not behind a Tally, which can't
            fleet.stores = [LeasedStore(fleet.tally.inner, lease=fleet.stores[0].cache.fixed_batch or None)]
            fleet.limiters = [Limiter(BUCKET, store=fleet.stores[0])]
        limiter, begin_us, used, waiting = fleet.limiters[0], fleet.clock.now_us(), 0, []
        for _ in range(300):
            fleet.to(fleet.clock.now_us() + int(chance.expovariate(0.01)))
            if chance.random() < 0.7:
                used += fleet.hit(0)
            elif reservation := limiter.reserve("k", max_wait=1):
                used += 1
                waiting.append(reservation)
            waiting = [one for one in waiting if one.decision.start_us > fleet.clock.now_us()]
            if waiting and chance.random() < 0.1:
                assert waiting.pop(chance.randrange(len(waiting))).cancel()
                used -= 1
        lease = fleet.stores[0].cache.find(limiter.claims("k")[0].limit, "k")
        held = lease.left + lease.next_left if lease else 0
        missing = fleet.tally.inner.decide(limiter.claims("k", 0), commit=False).reset_us / 1000  # until it is full
        assert used + held - missing == pytest.approx((fleet.clock.now_us() - begin_us) / 1000, abs=1.5), f"history {seed}"
