"""The versioned shard map: nodes refuse callers of another version, so that no traffic and no change admits more than the rule.

The nodes are MemoryStores behind a NodeMap, without a transport, so that every interleaving can be tried on a virtual clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import effort
from limitkeeper import (
    ConfigurationError,
    FixedWindow,
    Limit,
    Limiter,
    SlidingWindowCounter,
    SlidingWindowLog,
    StoreTimeout,
    StoreUnavailable,
    TokenBucket,
)
from limitkeeper.algorithms.claim import NamedLimit
from limitkeeper.stores import MemoryStore, Store
from limitkeeper.stores.remote.messages import limit_json
from limitkeeper.stores.sharded import ShardedStore
from limitkeeper.stores.sharded.shard_map import NodeMap, ShardMap, SlotWaiting, StaleMap, as_new_us
from limitkeeper.stores.sharded.slots import slot_of
from limitkeeper.testing import ManualClock

KEYS = [f"user:{i}" for i in range(40)]
FIVE = FixedWindow("5/h", align="first")


class Node:
    """The state of a service node; it loses everything when it is restarted."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock, self.down = clock, False
        self.restart()

    def restart(self) -> None:
        self.store, self.map, self.limits = MemoryStore(clock=self.clock), NodeMap(), dict[tuple[str, ...], NamedLimit]()


class NodeClient(Store):
    """One process's connection to a node, as RemoteStore is."""

    fences = True
    can_rebook = True

    def __init__(self, fleet: Fleet, location: str) -> None:
        self.fleet, self._location, self.map_id = fleet, location, (0, 0)

    @property
    def node(self) -> Node:
        if self.fleet.interrupt is not None:
            self.fleet.interrupt()
        node = self.fleet.nodes[self.location]
        if node.down:
            raise StoreUnavailable(f"{self.location} is down")
        return node

    @property
    def clock(self) -> Any:
        return self.fleet.clock

    @property
    def location(self) -> str:
        return self._location

    def sibling(self, location: str) -> NodeClient:
        return NodeClient(self.fleet, location)

    def use_map(self, map_id: tuple[int, int]) -> None:
        self.map_id = map_id

    def exchange_map(self, message: dict[str, Any]) -> dict[str, Any]:
        node = self.node
        node.map.change(message, node.clock.now_us())
        return {**node.map.status(node.clock.now_us()), "limits": list(node.limits)}

    def _checked(self, claims: Any) -> MemoryStore:
        node = self.node
        for claim in claims:
            node.limits[tuple(limit_json(claim.named))] = claim.named
        node.map.check(self.map_id, [(claim.named, claim.key) for claim in claims], node.clock.now_us())
        return node.store

    def decide(self, claims: Any, max_wait_us: int | None = 0, **options: Any) -> Any:
        return self._checked(claims).decide(claims, max_wait_us, **options)

    def decide_many(self, asks: Any, max_wait_us: int | None = 0) -> Any:
        return self._checked([claim for claims in asks for claim in claims]).decide_many(asks, max_wait_us)

    def give_back(self, claims: Any, charged_at: int = -1, source: str = "store") -> bool:
        return self._checked(claims).give_back(claims, charged_at)

    def reset(self, claims: Any) -> None:
        self._checked(claims).reset(claims)

    def forget(self, claims: Any) -> None:
        self.node.store.forget(claims)

    def items(self, limit: Any) -> Any:
        return self.node.store.items(limit)

    def load(self, limit: Any, items: Any) -> None:
        self.node.store.load(limit, items)


class Fleet:
    """Nodes by name, and processes that use them."""

    def __init__(self, names: str = "abcd") -> None:
        self.clock = ManualClock(1_700_000_000)
        self.nodes = {name: Node(self.clock) for name in names}
        self.interrupt: Callable[[], None] | None = None  # called before every step of a change

    def process(self, names: str) -> ShardedStore:
        return ShardedStore({name: self.client(name) for name in names}, hot=False, pause=0.02, clock=self.clock)

    def client(self, name: str) -> NodeClient:
        return NodeClient(self, name)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def limiter_on(store: Store, limit: Limit = FIVE) -> Limiter:
    return Limiter(limit, store, name="shared")


def spent(limiter: Limiter, times: int = 1) -> int:
    return sum(bool(limiter.hit(key)) for key in KEYS for _ in range(times))


def test_processes_without_a_change_move_with_it(fleet: Fleet) -> None:
    """A process with an old map is refused, adopts the map in the refusal, and continues at the new homes."""
    one, other = fleet.process("ab"), fleet.process("ab")
    ours, theirs = limiter_on(one), limiter_on(other)
    assert spent(theirs, 2) == 2 * len(KEYS)
    one.add("c", fleet.client("c"))
    moved = [key for key in KEYS if one.home_of(key) == "c"]
    assert moved
    assert other.home_of(moved[0]) != "c"
    assert spent(theirs, 2) + spent(ours, 4) == 3 * len(KEYS)
    assert [other.home_of(key) for key in KEYS] == [one.home_of(key) for key in KEYS]


def test_a_process_with_another_list_of_shards_uses_that_of_the_nodes(fleet: Fleet) -> None:
    """Two processes that were started with different lists count together, wherever their lists put a key."""
    total = sum(spent(limiter_on(fleet.process(names)), 5) for names in ("abc", "ab", "bcd"))
    assert total == 5 * len(KEYS)


def test_a_removed_node_sends_its_callers_on(fleet: Fleet) -> None:
    """A node that is no member any more refuses with the map, and its keys keep their counters."""
    one, other = fleet.process("abc"), fleet.process("abc")
    ours, theirs = limiter_on(one), limiter_on(other)
    assert spent(theirs, 3) == 3 * len(KEYS)
    one.remove("c")
    assert spent(theirs, 3) + spent(ours) == 2 * len(KEYS)
    assert "c" not in other.shards
    assert list(fleet.nodes["c"].store.items(ours.named[0])) == []


def test_a_slot_is_decided_nowhere_while_it_moves(fleet: Fleet) -> None:
    """Between the old home's stop and the hand-over both homes refuse: the caller retries until its pause is over."""
    one, other = fleet.process("ab"), fleet.process("ab")
    theirs = limiter_on(other)
    spent(theirs)
    client = fleet.client("c")
    seen = []

    def load(limit: Any, items: Any) -> None:
        key = items[0][0]
        with pytest.raises(StoreTimeout, match="waits for the state of this key"):
            theirs.hit(key)
        seen.append(key)
        NodeClient.load(client, limit, items)

    client.load = load  # type: ignore[method-assign]
    one.add("c", client)
    assert seen
    assert spent(theirs, 5) == 4 * len(KEYS)


def test_the_pause_counts_the_time_of_the_calls(fleet: Fleet) -> None:
    """A caller of a closed slot is answered when the pause is over, also where each call of the node takes as long."""
    one, other = fleet.process("ab"), fleet.process("ab")
    theirs, client, waited_us = limiter_on(other), fleet.client("c"), []

    def load(limit: Any, items: Any) -> None:
        begun_us = fleet.clock.now_us()
        fleet.interrupt = lambda: fleet.clock.advance(0.02)
        with pytest.raises(StoreTimeout, match="waits for the state of this key"):
            theirs.hit(items[0][0])
        fleet.interrupt = None
        waited_us.append(fleet.clock.now_us() - begun_us)
        NodeClient.load(client, limit, items)

    spent(theirs)
    client.load = load  # type: ignore[method-assign]
    one.add("c", client)
    assert waited_us
    assert max(waited_us) <= 150_000


def test_a_node_that_has_moved_to_another_address_hands_over_from_there(fleet: Fleet) -> None:
    """A process that knows the node's first address finishes its removal, which another has left, at the present one."""
    one, other = fleet.process("abc"), fleet.process("abc")
    ours, theirs = limiter_on(one), limiter_on(other)
    assert spent(theirs) == len(KEYS)
    one.remove("c")
    one.add("c", fleet.client("d"))
    assert spent(ours, 2) == 2 * len(KEYS)
    calls = itertools.count()

    def fail() -> None:
        if next(calls) > 8:
            raise KeyboardInterrupt

    fleet.interrupt = fail
    with pytest.raises(KeyboardInterrupt):
        one.remove("c")
    fleet.interrupt = None
    other.rebalance()
    assert sorted(other.shards) == ["a", "b"]
    assert spent(theirs, 5) == 2 * len(KEYS)


def test_a_coordinator_that_fails_leaves_slots_closed_and_another_process_continues(fleet: Fleet) -> None:
    """`rebalance()` of any process finishes what another has begun; nothing is admitted twice."""
    one, other = fleet.process("ab"), fleet.process("ab")
    ours, theirs = limiter_on(one), limiter_on(other)
    assert spent(ours, 3) == 3 * len(KEYS)
    client = fleet.client("c")

    def load(limit: Any, items: Any) -> None:
        raise StoreUnavailable("the coordinator was cut off")

    client.load = load  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailable):
        one.add("c", client)
    moving = next(key for key in KEYS if one.home_of(key) == "c")
    with pytest.raises(StoreTimeout):
        ours.hit(moving)
    other.rebalance()
    assert spent(theirs, 3) + spent(ours) == 2 * len(KEYS)


@pytest.mark.parametrize(
    "limit", [FixedWindow("5/h"), TokenBucket("5/h"), SlidingWindowLog("5/h"), SlidingWindowCounter("5/h")], ids=str
)
def test_the_new_home_of_a_node_that_is_lost_waits_until_its_state_is_over(fleet: Fleet, limit: Limit) -> None:
    """Keys of an unreachable node are refused on their new homes until an exhausted key would be as new."""
    one = fleet.process("abc")
    ours = limiter_on(one, limit)
    lost = next(key for key in KEYS if one.home_of(key) == "c")
    assert [bool(ours.hit(lost)) for _ in range(6)] == [True] * 5 + [False]
    fleet.nodes["c"].down = True
    one.remove("c")
    fleet.clock.advance(as_new_us(limit) / 1e6 - 0.001)
    with pytest.raises(SlotWaiting, match=r"in 0\.001 s"):
        ours.hit(lost)
    fleet.clock.advance(0.001)
    assert [bool(ours.hit(lost)) for _ in range(6)] == [True] * 5 + [False]


def test_a_slot_that_waits_goes_on_waiting_where_it_is_handed_over(fleet: Fleet) -> None:
    """Its state was lost with node c; nodes that are added later wait for the rest of the time too."""
    limit = FixedWindow("5/h", align="first")
    one = fleet.process("abc")
    ours = limiter_on(one, limit)
    before = {key: one.home_of(key) for key in KEYS}
    assert spent(ours, 6) == 5 * len(KEYS)
    fleet.nodes["c"].down = True
    one.remove("c")
    fleet.clock.advance(1000)
    one.add("d", fleet.client("d"))
    moved = [key for key in KEYS if before[key] == "c" and one.home_of(key) == "d"]
    assert moved
    fleet.clock.advance(2599.999)
    for key in moved:
        with pytest.raises(SlotWaiting, match=r"in 0\.001 s"):
            ours.hit(key)
    fleet.clock.advance(0.001)
    assert [bool(ours.hit(moved[0])) for _ in range(6)] == [True] * 5 + [False]


def test_a_node_that_missed_a_change_gets_it_from_any_caller(fleet: Fleet) -> None:
    """The lost node comes back with its old map; the first caller with the new one updates it."""
    one, other = fleet.process("ab"), fleet.process("ab")
    ours, theirs = limiter_on(one), limiter_on(other)
    spent(theirs)
    before = {key: one.home_of(key) for key in KEYS}
    fleet.nodes["a"].down = True
    one.add("c", fleet.client("c"))
    fleet.nodes["a"].down = False
    assert fleet.nodes["a"].map.map.version == 1
    assert ours.hit(next(key for key in KEYS if one.home_of(key) == "a"))
    assert fleet.nodes["a"].map.map == one.membership.map  # type: ignore[attr-defined]
    moved = next(key for key in KEYS if before[key] == "a" and one.home_of(key) == "c")
    with pytest.raises(SlotWaiting):
        theirs.hit(moved)


def test_a_restarted_node_is_sent_the_map_by_its_callers(fleet: Fleet) -> None:
    """A node in memory starts again with nothing; its callers send it the map, and only its own keys start again."""
    store = fleet.process("ab")
    ours = limiter_on(store)
    assert spent(ours, 6) == 5 * len(KEYS)
    fleet.nodes["a"].restart()
    assert spent(ours, 6) == 5 * sum(store.home_of(key) == "a" for key in KEYS)


def test_a_node_never_returns_to_an_older_map(fleet: Fleet) -> None:
    """An older map is ignored, whichever caller sends it."""
    node = NodeMap()
    maps = [ShardMap.of(version, [("a", "a:1", 1), *extra]) for version, extra in ((1, []), (2, [("b", "b:1", 1)]))]
    for found in (maps[1], maps[0]):
        node.change({"map": found, "name": "a"}, 0)
        assert node.map == maps[1]
    with pytest.raises(StaleMap) as refused:
        node.check(maps[0].id, [], 0)
    assert refused.value.map == maps[1]


def test_options_that_would_count_apart_are_refused(fleet: Fleet) -> None:
    """Service nodes take no on_loss='rehash', no change without hand-over, and no shard that is not a node."""
    with pytest.raises(ConfigurationError, match="count keys apart"):
        ShardedStore({"a": fleet.client("a")}, on_loss="rehash")
    store = fleet.process("ab")
    with pytest.raises(ConfigurationError, match="hand state over"):
        store.add("c", fleet.client("c"), handoff=False)
    with pytest.raises(ConfigurationError, match="RemoteStore"):
        store.add("c", MemoryStore(clock=fleet.clock))
    with pytest.raises(ConfigurationError, match="restore"):
        store.restore("c")


NAMES = st.sampled_from("abcd")
CALLS = st.tuples(st.just("call"), st.integers(0, 2), st.sampled_from(KEYS[:8]), st.integers(1, 2))
CHANGES = st.tuples(st.sampled_from(["add", "remove"]), st.integers(0, 2), NAMES, st.lists(CALLS, max_size=12))
FAULTS = st.tuples(st.sampled_from(["lose", "find"]), NAMES)
LIMITS = [FixedWindow("4/h", align="first"), SlidingWindowLog("4/h"), TokenBucket("4/h")]


class Traffic:
    """Plays steps of three processes on a fleet and adds up the admissions of each key."""

    def __init__(self, limit: Limit) -> None:
        self.fleet = Fleet()
        self.processes = [self.fleet.process("ab") for _ in range(3)]
        self.limiters = [limiter_on(store, limit) for store in self.processes]
        self.admitted: dict[str, int] = {}

    def call(self, process: int, key: str, cost: int) -> None:
        try:
            if self.limiters[process].hit(key, cost):
                self.admitted[key] = self.admitted.get(key, 0) + cost
        except (StoreUnavailable, StoreTimeout):  # the node is lost, its slot waits, or is closed
            pass

    def add(self, process: int, name: str, meanwhile: list[Any]) -> None:
        self._change(meanwhile, lambda: self.processes[process].add(name, self.fleet.client(name)))

    def remove(self, process: int, name: str, meanwhile: list[Any]) -> None:
        self._change(meanwhile, lambda: self.processes[process].remove(name))

    def _change(self, meanwhile: list[Any], change: Callable[[], object]) -> None:
        """Other calls are made between the steps of a change."""
        rest = iter(meanwhile)

        def interrupt() -> None:
            self.fleet.interrupt = None
            for step in islice(rest, 3):
                self.call(*step[1:])
            self.fleet.interrupt = interrupt

        self.fleet.interrupt = interrupt
        try:
            change()
        except (ConfigurationError, StoreUnavailable):  # it exists already, does not, or is the last one; or is lost
            pass
        self.fleet.interrupt = None

    def lose(self, name: str) -> None:
        self.fleet.nodes[name].down = True

    def find(self, name: str) -> None:
        self.fleet.nodes[name].down = False


@effort(100)
@given(st.sampled_from(LIMITS), st.lists(CHANGES | CALLS | FAULTS, max_size=30))
def test_no_more_than_the_rule_is_admitted_whatever_changes(limit: Limit, steps: list[Any]) -> None:
    """Law 11: three processes, any order of calls, changes by any of them with calls in between, and nodes that can't be
    reached for a while: the cost admitted of a key stays within its rule."""
    traffic = Traffic(limit)
    for name, *arguments in steps:
        getattr(traffic, name)(*arguments)
    assert all(count <= 4 for count in traffic.admitted.values()), traffic.admitted


def test_a_node_refuses_keys_of_other_nodes() -> None:
    """A caller that has the node's map, and found the key's home in the map before, is refused."""
    node, found = NodeMap(), ShardMap.of(1, [("a", "a:1", 1), ("b", "b:1", 1)])
    node.change({"map": found, "name": "a"}, 0)
    named = NamedLimit("shared", "limit", FixedWindow("5/h"))
    on = {home: next(key for key in KEYS if found.homes()[slot_of(key)] == home) for home in "ab"}
    node.check(found.id, [(named, on["a"])], 0)
    with pytest.raises(StaleMap, match="on node 'b'"):
        node.check(found.id, [(named, on["b"])], 0)


def test_the_slots_of_a_map_move_only_to_and_from_the_members_that_change() -> None:
    """`moves` names exactly the slots whose home differs."""
    before, after = [("a", "a:1", 1), ("b", "b:1", 1)], [("a", "a:1", 1), ("b", "b:1", 1), ("c", "c:1", 1)]
    found = ShardMap.of(2, after, before)
    old, new = ShardMap.of(1, before).homes(), found.homes()
    assert found.moves().keys() == {slot for slot in range(len(new)) if old[slot] != new[slot]}
    assert {home for _, home in found.moves().values()} == {"c"}
    assert found.moves()[next(iter(found.moves()))][0].name == old[next(iter(found.moves()))]
    assert any(slot_of(key) in found.moves() for key in KEYS)
