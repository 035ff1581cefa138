"""A cluster of three primaries: the contract, decisions that span slots, moved slots, lost nodes."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from effort import effort, scaled
from fault_lab.scheduling_delay import Watch
from limitkeeper import AsyncLimiter, Limiter, SlidingWindowLog, StoreError, StoreUnavailable, TokenBucket
from limitkeeper.clock import SYSTEM
from limitkeeper.stores.contract import Booking
from limitkeeper.stores.redis import RedisStore
from limitkeeper.stores.redis.cluster import slot_of
from limitkeeper.testing import ManualClock, StoreContract
from limitkeeper.testing.store_contract import MemoryStoreWithoutRebook
from servers.cluster import Cluster
from servers.valkey import Valkey
from stand_ins import driven
from virtual_time import VirtualClock

_fresh = itertools.count()
#: A budget that no busy machine uses up.
AMPLE = 60.0
HUNDRED = TokenBucket("1/h", burst=100)
BOTH = {"user": TokenBucket("1/s", burst=5), "tenant": TokenBucket("2/s", burst=8)}
RULES = ("1/s burst 3", "leaky bucket 2/s capacity 4", "leaky bucket queue 1/s capacity 4", "fixed window 4/3s")
RULES += ("sliding window log 5/4s", "sliding window counter 4/3s")
BOTH_SLOW = {"user": TokenBucket("1/d", burst=5), "tenant": TokenBucket("2/d", burst=8)}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as started:
        yield started


def fresh(cluster: Cluster, **options: Any) -> RedisStore:
    return RedisStore(cluster.url, **{"prefix": f"cluster-{next(_fresh)}", "timeout": "60s", **options})


def apart(cluster: Cluster, count: int = 3) -> list[str]:
    """Keys that lie on different nodes."""
    found: dict[int, str] = {}
    for number in itertools.count():
        found.setdefault(cluster.keeper(slot_of(f"k{number}".encode())), f"k{number}")
        if len(found) == count:
            return list(found.values())
    raise AssertionError


class TestRedisCluster(StoreContract):
    """A plain key goes to every limit and lies in one slot; mappings of keys span slots."""

    examples = scaled(4)
    threads = 20

    @pytest.fixture(autouse=True)
    def _cluster(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def make_store(self, clock: ManualClock) -> RedisStore:
        return fresh(self.cluster, clock=clock)


def test_slots_are_those_of_the_server(cluster: Cluster) -> None:
    """Our slots equal those of CLUSTER KEYSLOT, hash tags included."""
    with cluster.nodes[0].client() as client:
        for key in ("", "a", "limitkeeper:abc:{user:42}", "{}x", "{a}{b}", "a{b", "x{y}z", "é", "{" * 3 + "}"):
            assert slot_of(key.encode()) == client.execute_command("CLUSTER", "KEYSLOT", key)


def test_a_decision_over_limits_of_one_key_is_one_call(cluster: Cluster) -> None:
    """All limits on one key lie in one slot: one script call on one node, nothing elsewhere."""
    with fresh(cluster) as store:
        limiter = Limiter(BOTH, store=store)
        limiter.hit("k")
        before = [scripts(node) for node in cluster.nodes]
        limiter.hit("k")
        assert sorted(after - was for after, was in zip(map(scripts, cluster.nodes), before, strict=True)) == [0, 0, 1]


def scripts(node: Valkey) -> int:
    with node.client() as client:
        result: Any = client.info("commandstats")
    return sum(result.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("eval", "evalsha"))


def test_a_batch_is_one_write_for_each_node(cluster: Cluster) -> None:
    """Sixty tasks on sixty keys: every node reads once (or little more), however many slots there are."""

    async def work() -> None:
        async with fresh(cluster) as store:
            limiter = AsyncLimiter(HUNDRED, store=store)
            await asyncio.gather(*[limiter.hit(f"k{number}") for number in range(60)])
            clients = [node.client() for node in cluster.nodes]
            before = [client.info("stats")["total_reads_processed"] for client in clients]
            found = await asyncio.gather(*[limiter.hit(f"k{number}") for number in range(60)])
            after = [client.info("stats")["total_reads_processed"] for client in clients]
            for client in clients:
                client.close()
            assert [one.remaining for one in found] == [98] * 60
            assert all(now - was <= 10 for now, was in zip(after, before, strict=True))  # cluster bus and INFO included

    asyncio.run(work())


# Spanning slots


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_decision_over_several_slots_is_all_or_nothing(cluster: Cluster, mode: str) -> None:
    """Where the tenant's limit refuses, the user's is not charged; and the other way round."""
    clock = ManualClock(1000)
    one, other, _ = apart(cluster)
    with fresh(cluster, clock=clock) as store:
        limiter = Limiter(BOTH, store=store)
        tasks = AsyncLimiter(BOTH, store=store)

        def hit(key: Any, cost: Any = 1) -> Any:
            return limiter.hit(key, cost) if mode == "sync" else driven(tasks.hit(key, cost))

        assert hit({"user": one, "tenant": other}, {"user": 2, "tenant": 8}).remaining == 0
        before = [sorted(store.items(named)) for named in limiter.named]
        refused = hit({"user": one, "tenant": other})
        assert (refused.allowed, refused.name, refused.retry_after) == (False, "tenant", 0.5)
        assert [sorted(store.items(named)) for named in limiter.named] == before
        assert hit({"user": one, "tenant": "elsewhere"}, {"user": 3, "tenant": 1})
        assert not hit({"user": one, "tenant": "elsewhere"})
        assert limiter.peek({"user": "new", "tenant": "elsewhere"}).decisions[1].remaining == 7


@effort(25)
@given(st.data())
def test_spanning_decisions_are_those_of_memory(cluster: Cluster, data: st.DataObject) -> None:
    """Hits, peeks, reservations and cancellations under any rules over different keys are answered as by MemoryStore."""
    names = ("user", "tenant", "all")
    some = dict(zip(names, data.draw(st.lists(st.sampled_from(RULES), min_size=3, max_size=3), "rules"), strict=True))
    clock = ManualClock(1_700_000_000)
    keys = st.sampled_from(("a", "b", "c", None))
    with fresh(cluster, clock=clock) as store:
        here, there = Limiter(some, store=MemoryStoreWithoutRebook(clock=clock)), Limiter(some, store=store)
        held: list[tuple[Any, Any]] = []
        for _ in range(data.draw(st.integers(1, 10), "steps")):
            clock.advance(data.draw(st.sampled_from((0, 0, 0.3, 1, 2.5)), "pass"))
            key = {name: data.draw(keys, name) for name in some}
            verb = data.draw(st.sampled_from(("hit", "peek", "reserve", "reserve", "cancel")), "verb")
            if verb == "cancel" and held:
                mine, theirs = held.pop(data.draw(st.integers(0, len(held) - 1), "which"))
                assert mine.cancel() == theirs.cancel()
            elif verb == "reserve":
                patience = data.draw(st.sampled_from((None, 1, 3)), "patience")
                mine, theirs = here.reserve(key, max_wait=patience), there.reserve(key, max_wait=patience)
                assert whole(theirs.decision) == whole(mine.decision)
                held.append((mine, theirs))
            elif verb != "cancel":
                assert whole(getattr(there, verb)(key)) == whole(getattr(here, verb)(key))


def whole(decision: Any) -> Any:
    """The relevant fields of a decision; parts of a refused one may have a common start where memory gives each its own."""
    return {name: value for name, value in decision.to_dict().items() if name != "decisions"}


def test_two_callers_of_the_same_keys_never_get_more_than_the_limits(cluster: Cluster) -> None:
    """Eight threads over two slots: admissions are within both limits, and refused calls gave all of it back."""
    one, other, _ = apart(cluster)
    with fresh(cluster) as store:
        limiter = Limiter({"user": TokenBucket("1/h", burst=60), "tenant": TokenBucket("1/h", burst=40)}, store=store)
        admitted: list[int] = []
        key = {"user": one, "tenant": other}
        threads = [
            threading.Thread(target=lambda: admitted.append(sum(bool(limiter.hit(key)) for _ in range(12)))) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(admitted) <= 40
        result = limiter.peek(key)
        assert [part.remaining for part in result.decisions] == [60 - sum(admitted), 40 - sum(admitted)]
        while limiter.hit(key):
            admitted.append(1)
        assert sum(admitted) == 40


def test_a_common_start_over_several_slots(cluster: Cluster) -> None:
    """Reservations whose keys are free at different times start when the last of them is, in all slots."""
    clock = ManualClock(1000)
    one, other, third = apart(cluster)
    with fresh(cluster, clock=clock) as store:
        limiter = Limiter({"user": TokenBucket("1/s", burst=1), "tenant": TokenBucket("1 per 5s", burst=1)}, store=store)
        limiter.hit({"user": one, "tenant": other})
        later = limiter.reserve({"user": one, "tenant": other}, max_wait=10)
        assert (later.wait, [part.wait for part in later.decision.decisions]) == (5.0, [5.0, 5.0])
        assert not limiter.reserve({"user": third, "tenant": other}, max_wait=7)
        assert limiter.hit({"user": third, "tenant": None}, 1)
        assert later.cancel()
        assert limiter.reserve({"user": one, "tenant": other}, max_wait=10).wait == 5.0


def test_tasks_that_wait_at_once_for_several_slots_get_starts_one_after_the_other(cluster: Cluster) -> None:
    """Keys that are free some microseconds apart: each of ten tasks gets the next common start, and no start is left out."""
    clock = ManualClock(1000)
    one, other, _ = apart(cluster)
    limits = {"user": TokenBucket("10/s", burst=1), "tenant": TokenBucket("10/s", burst=1)}

    async def waits(store: RedisStore) -> list[float]:
        limiter = AsyncLimiter(limits, store=store)
        await limiter.hit({"user": one, "tenant": None})
        clock.advance(0.000037)
        await limiter.hit({"user": None, "tenant": other})
        both = {"user": one, "tenant": other}
        return [found.wait for found in await asyncio.gather(*[limiter.reserve(both) for _ in range(10)])]

    with fresh(cluster, clock=clock) as store:
        assert sorted(asyncio.run(waits(store))) == [round(0.1 * number, 1) for number in range(1, 11)]


def test_no_slot_starts_before_it_may(cluster: Cluster) -> None:
    """`not_before_us` holds in every slot, for sync and async callers, and the charge remembers the states around it."""
    clock = ManualClock(1000)
    one, other, _ = apart(cluster)
    with fresh(cluster, clock=clock) as store:
        limiter = Limiter({"user": TokenBucket("1/s", burst=2), "tenant": TokenBucket("1/s", burst=3)}, store=store)
        start_us = clock.now_us() + 4_000_000
        claims = limiter.claims({"user": one, "tenant": other})
        decision = store.decide(claims, None, not_before_us=start_us)
        assert (decision.wait, [part.wait for part in decision.decisions]) == (4.0, [4.0, 4.0])
        store.give_back(claims, decision.start_us)
        claims = limiter.claims({"user": one, "tenant": other})
        decision = asyncio.run(store.adecide(claims, None, not_before_us=start_us, remember=True))
        assert decision.start_us == start_us
        assert all(claim.remembered() is not None for claim in claims)
        assert not store.decide(limiter.claims({"user": one, "tenant": other}), not_before_us=start_us)


def test_two_decisions_with_one_start_give_back_their_own_entries(cluster: Cluster) -> None:
    """A log gives back the entry of the claim's own start, though another decision with the same one had another start in it."""
    keys = dict(zip(("user", "tenant"), apart(cluster, 2), strict=True))
    with fresh(cluster, clock=ManualClock(1000)) as store:
        limiter = Limiter({"user": SlidingWindowLog("5/h"), "tenant": SlidingWindowLog("5/h")}, store=store)
        claims = limiter.claims(keys, 2)
        start_us = store.decide(claims, None).start_us
        for claim in claims:
            store.names.starts[start_us, store.names.key(claim.limit, claim.key)] = start_us - 5  # of the other
        store.give_back(claims, start_us)
        assert [part.remaining for part in limiter.peek(keys).decisions] == [5, 5]


@pytest.mark.parametrize("method", ["acquire", "reserve"])
def test_a_cancelled_task_gives_back_what_several_slots_charged(cluster: Cluster, method: str) -> None:
    """A task that is cancelled in any iteration of a decision over two slots leaves both as they were."""

    async def main() -> None:
        keys = dict(zip(BOTH, apart(cluster, 2), strict=True))
        async with fresh(cluster, clock=ManualClock(1000)) as store:
            limiter = AsyncLimiter(BOTH, store=store)
            await limiter.hit(keys)

            async def call() -> Any:
                return await getattr(limiter, method)(keys)

            for iterations in range(12):
                task = asyncio.ensure_future(call())
                for _ in range(iterations):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
                if not task.cancelled():  # its answer came first
                    await limiter.refund(keys)
            assert [part.remaining for part in (await limiter.peek(keys)).decisions] == [4, 7]

    asyncio.run(main())


def test_waiters_in_several_slots_that_leave_together_let_those_behind_move_up(cluster: Cluster) -> None:
    """Waiters of three keys leave in one turn: each slot rebooks its own, whatever the others do."""

    async def main() -> None:
        clock, keys = VirtualClock(), apart(cluster)
        async with fresh(cluster, clock=clock) as store:
            limiter = AsyncLimiter("1/s burst 3", store=store)
            for key in keys:
                await limiter.hit(key, 3)
            waiting = [await limiter.reserve(key, cost) for cost in (1, 2, 3) for key in keys]
            assert await asyncio.gather(*[one.cancel() for one in waiting[:3]]) == [True] * 3
            assert [one.wait for one in waiting[3:]] == [2.0] * 3 + [5.0] * 3  # not 3 and 6

    asyncio.run(main())


def test_however_many_over_several_slots_leave_one_round_trip_gives_them_back(cluster: Cluster) -> None:
    """The number of those that leave in one turn grows with the time of a round trip, so it must not take one for each."""
    one, other, _ = apart(cluster)
    with fresh(cluster) as store:
        limiter = Limiter({"user": HUNDRED, "tenant": HUNDRED}, store=store)
        key = {"user": one, "tenant": other}
        bookings = []
        for _ in range(20):
            claims = limiter.claims(key)
            bookings.append(Booking(claims, store.decide(claims, remember=True).start_us, 0, False))
        plan, steps = store.plan_rebook(bookings), 0
        with suppress(StopIteration):
            sent = next(plan)
            while True:
                steps += 1
                sent = plan.send(store.pool.exchange(sent, SYSTEM.now_us() + 60_000_000))
        assert steps == 1
        assert [part.remaining for part in limiter.peek(key).decisions] == [100, 100]


def test_logs_of_several_slots_get_back_what_was_charged(cluster: Cluster) -> None:
    """Every node charges at its own time; settled, cancelled, or given up by a cancelled task, each log is as it was."""
    keys = dict(zip("abc", apart(cluster), strict=True))
    limits = dict.fromkeys(keys, SlidingWindowLog("100/d"))

    async def give_up(limiter: AsyncLimiter) -> None:
        task = asyncio.ensure_future(limiter.acquire(keys))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():  # its answer came first
            await limiter.refund(keys)

    with fresh(cluster) as store:
        limiter = Limiter(limits, store=store)
        for _ in range(4):
            assert limiter.reserve(keys, cost=3).settle(1)
            assert limiter.reserve(keys, cost=3).cancel()
            driven(give_up(AsyncLimiter(limits, store=store)))
        assert [part.remaining for part in limiter.peek(keys).decisions] == [96, 96, 96]


@pytest.mark.parametrize("method", ["acquire", "reserve"])
def test_a_refused_task_that_is_cancelled_gives_back_once(cluster: Cluster, method: str) -> None:
    """One slot charges and the other refuses; a task that is cancelled meanwhile leaves both as they were."""

    async def main() -> None:
        keys = dict(zip(BOTH, apart(cluster, 2), strict=True))
        async with fresh(cluster, clock=ManualClock(1000)) as store:
            limiter = AsyncLimiter(BOTH, store=store)
            await limiter.hit(keys, cost={"user": 3, "tenant": 8})

            async def call() -> Any:
                return await getattr(limiter, method)(keys, 1, 0.25)

            for iterations in range(1, 6):
                task = asyncio.ensure_future(call())
                for _ in range(iterations):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
                assert [part.remaining for part in (await limiter.peek(keys)).decisions] == [2, 0]

    asyncio.run(main())


def test_a_caller_that_dies_between_the_steps_leaves_at_most_one_decision_charged(cluster: Cluster) -> None:
    """The stated bound: its costs stay in the slots that had allowed it. Too strict by one decision, never too lax."""
    one, other, _ = apart(cluster)
    with fresh(cluster) as store:
        limiter = Limiter({"user": TokenBucket("1/h", burst=3), "tenant": TokenBucket("1/h", burst=1)}, store=store)
        key = {"user": one, "tenant": other}
        assert limiter.hit(key)
        plan = store.plan_decide(limiter.claims(key), 0, True, False, 0)
        sent = next(plan)
        replies = store.pool.exchange(sent, SYSTEM.now_us() + 60_000_000)
        withdrawal = plan.send(replies)  # it dies before this is sent
        assert withdrawal
        plan.close()
        result = limiter.peek(key)
        assert [part.remaining for part in result.decisions] == [1, 0]


# Slots that move, nodes that die


@pytest.mark.untraced
def test_a_handler_that_raises_in_a_decision_over_several_slots_leaves_no_charge(cluster: Cluster, python: Any) -> None:
    """An interrupted `reserve` determines its charges on each node, and gives them back."""
    done = python(f"""
        import random, signal
        from limitkeeper import Limiter, TokenBucket
        from limitkeeper.stores.redis import RedisStore
        class Interrupted(Exception): pass
        def handler(*_): raise Interrupted
        signal.signal(signal.SIGALRM, handler)
        with RedisStore({cluster.url!r}, prefix="interrupted", timeout="50s") as store:
            limits = {{name: TokenBucket("1/400d", burst=100_000) for name in ("user", "tenant")}}
            limiter, keys = Limiter(limits, store=store), dict(zip(limits, {apart(cluster, 2)!r}))
            limiter.hit(keys)
            rng, charged, interrupts = random.Random(1), 1, 0
            while interrupts < 200:
                reserved = False
                try:
                    try:
                        signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.0001, 0.0012))
                        reserved = limiter.reserve(keys, max_wait=5)
                    finally:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                except Interrupted:
                    interrupts += 1
                charged += bool(reserved)
            print(*(part.limit - part.remaining - charged for part in limiter.peek(keys).decisions))
    """)
    assert done.returncode == 0, done.stderr
    left = [int(units) for units in done.stdout.split()]
    assert len(left) == 2
    assert max(left) <= 4, "an interrupt after the call has returned, or a second one while it gives back, leaves a charge"


@pytest.fixture(scope="module")
def moving() -> Iterator[Cluster]:
    """A cluster for faults; the tests that use it come last, and the one that kills a node is the last of them."""
    with Cluster() as started:
        yield started


def wait_until(true: Callable[[], object]) -> None:
    end = time.monotonic() + AMPLE
    while not true():
        assert time.monotonic() < end, "never happened"


def move(cluster: Cluster, slot: int, source: int, target: int, finish: bool = True) -> None:
    """Moves a slot with its keys; unfinished, both nodes are in the middle of it."""
    ids = [cluster.node_id(number) for number in range(len(cluster.nodes))]
    with cluster.nodes[source].client() as old, cluster.nodes[target].client() as new:
        new.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
        old.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
        keys = old.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100_000)
        if keys:
            old.execute_command("MIGRATE", "127.0.0.1", cluster.nodes[target].port, "", 0, 60_000, "KEYS", *keys)
        if finish:
            new.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[target])
            old.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[target])


@pytest.mark.asyncio_only(reason="it leaves the servers of the module changed")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_moved_and_moving_slots_are_followed(moving: Cluster, mode: str) -> None:
    """ASK while a slot moves, MOVED when it has: the decision is made once, where the key is."""
    key = f"{mode} mover"
    with RedisStore(moving.url, timeout="60s") as store:
        limiter, tasks = Limiter(HUNDRED, store=store), AsyncLimiter(HUNDRED, store=store)

        def hit() -> int:
            return (limiter.hit(key) if mode == "sync" else driven(tasks.hit(key))).remaining

        slot = slot_of(store.names.key(limiter.named[0], key))
        source = moving.keeper(slot)
        target = (source + 1) % 3
        assert hit() == 99
        move(moving, slot, source, target, finish=False)
        assert [hit(), hit()] == [98, 97]
        move(moving, slot, source, target)
        assert [hit(), hit()] == [96, 95]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_node_that_hangs_costs_a_new_store_a_part_of_the_budget(moving: Cluster, mode: str) -> None:
    """The map of slots is requested from the next node in time."""
    hangs, *others = moving.nodes
    key = next(key for key in map(str, itertools.count()) if owns(others[0], slot_of(key.encode())))
    hangs.freeze()
    try:
        with RedisStore(moving.url, prefix=f"{{{key}}}", timeout="8s") as store:
            assert store.address.endpoints[0].port == hangs.port
            assert (
                Limiter(HUNDRED, store=store).hit("k") if mode == "sync" else driven(AsyncLimiter(HUNDRED, store=store).hit("k"))
            )
    finally:
        hangs.thaw()


def test_a_task_does_not_wait_for_a_node_that_hangs(moving: Cluster) -> None:
    """Hits of one iteration of a loop are answered as their nodes answer, not when the last of them does."""
    keys = apart(moving)

    async def work() -> None:
        async with RedisStore(moving.url, timeout=AMPLE) as store:
            limiter = AsyncLimiter(HUNDRED, store=store)
            for key in keys:
                await limiter.hit(key)
            hangs = next(node for node in moving.nodes if owns(node, slot_of(keys[0].encode())))
            hangs.freeze()
            try:
                first, *others = [asyncio.ensure_future(limiter.hit(key)) for key in keys]
                assert all(await asyncio.wait_for(asyncio.gather(*others), AMPLE / 2))
                assert not first.done()
            finally:
                hangs.thaw()
            assert await first

    asyncio.run(work())


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_nodes_of_a_cluster_are_known_when_its_only_seed_hangs(moving: Cluster, mode: str) -> None:
    """Callers whose budget is used up remove no node: keys of the others are decided."""
    seed, other = moving.nodes[:2]
    lost, kept = [next(key for key in map(str, itertools.count()) if owns(node, slot_of(key.encode()))) for node in (seed, other)]
    with RedisStore(f"redis+cluster://127.0.0.1:{seed.port}", timeout="200ms", prefix=f"seed {mode}") as store:
        limiter, tasks = Limiter(HUNDRED, store=store), AsyncLimiter(HUNDRED, store=store)

        def hit(key: str) -> bool | None:
            with suppress(StoreError):
                return bool(limiter.hit(key) if mode == "sync" else driven(tasks.hit(key)))
            return None

        wait_until(lambda: hit(lost) and hit(kept))
        seed.freeze()
        try:
            assert [hit(lost) for _ in range(3)] == [None] * 3
            wait_until(lambda: hit(kept))
        finally:
            seed.thaw()


@pytest.fixture
def halfway(moving: Cluster) -> Iterator[tuple[Cluster, int, int, int]]:
    """A slot that moves during the whole test, with its source and target node; moved at the end."""
    slot = slot_of(b"{moves}")
    source = next(number for number, node in enumerate(moving.nodes) if owns(node, slot))
    target = (source + 1) % 3
    begin_move(moving, slot, source, target)
    yield moving, slot, source, target
    move(moving, slot, source, target)


def owns(node: Valkey, slot: int) -> bool:
    with node.client() as client:
        ranges: Any = client.execute_command("CLUSTER", "SLOTS")
        mine: Any = client.execute_command("CLUSTER", "MYID")
    return any(first <= slot <= last and primary[2] == mine for first, last, primary, *_ in ranges)


def begin_move(cluster: Cluster, slot: int, source: int, target: int) -> None:
    with cluster.nodes[source].client() as old, cluster.nodes[target].client() as new:
        new.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", cluster.node_id(source))
        old.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", cluster.node_id(target))


def move_key(cluster: Cluster, key: bytes, source: int, target: int) -> None:
    with cluster.nodes[source].client() as old:
        old.execute_command("MIGRATE", "127.0.0.1", cluster.nodes[target].port, "", 0, 60_000, "KEYS", key)


Halfway = tuple[Cluster, int, int, int]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_decision_over_two_keys_of_a_moving_slot(halfway: Halfway, mode: str) -> None:
    """New keys, keys on either node, one of two that has moved: TRYAGAIN until the move is over, and decided all the same."""
    cluster, _, source, target = halfway
    with fresh_moving(cluster) as store:
        limiter, tasks = Limiter(BOTH_SLOW, store=store), AsyncLimiter(BOTH_SLOW, store=store)

        def hit(key: str) -> Any:
            return limiter.hit(key) if mode == "sync" else driven(tasks.hit(key))

        assert [part.remaining for part in hit("new").decisions] == [4, 7]
        assert [part.remaining for part in hit("new").decisions] == [3, 6]
        begin = hit("half")
        move_key(cluster, store.names.key(limiter.named[1], "half"), source, target)
        assert [part.remaining - was.remaining for part, was in zip(hit("half").decisions, begin.decisions, strict=True)] == [
            -1,
            -1,
        ]
        assert [bool(hit("half")) for _ in range(4)] == [True] * 3 + [False]
        assert [part.remaining for part in limiter.peek("half").decisions] == [0, 3]


def fresh_moving(cluster: Cluster, **options: Any) -> RedisStore:
    return fresh(cluster, prefix=f"{{moves}}{next(_fresh)}", **options)


def test_one_new_user_does_not_fail_the_others_of_a_batch(halfway: Halfway) -> None:
    """Thirty tasks in one batch of one slot: those whose keys stay, those whose keys have moved, and one that has none yet."""
    cluster, _, source, target = halfway
    with fresh_moving(cluster) as store:
        limiter, tasks = Limiter(HUNDRED, store=store, name="n"), AsyncLimiter(HUNDRED, store=store, name="n")
        assert all(limiter.hit_many([f"k{number}" for number in range(29)]))
        for number in range(0, 29, 3):
            move_key(cluster, store.names.key(limiter.named[0], f"k{number}"), source, target)

        async def batch() -> list[Any]:
            return await asyncio.gather(*[tasks.hit(f"k{number}") for number in range(30)], return_exceptions=True)

        assert [one.remaining for one in driven(batch())] == [98] * 29 + [99]
        assert [one.remaining for one in limiter.hit_many([f"k{number}" for number in range(31)])] == [97] * 29 + [98, 99]


@effort(25)
@given(st.data())
def test_decisions_in_a_moving_slot_are_those_of_memory(halfway: Halfway, data: st.DataObject) -> None:
    """Hits, peeks, reservations and cancellations under any rules, while keys move one by one, are answered as by MemoryStore."""
    cluster, _, source, target = halfway
    names = ("user", "tenant", "all")
    some = dict(zip(names, data.draw(st.lists(st.sampled_from(RULES), min_size=3, max_size=3), "rules"), strict=True))
    clock = ManualClock(1_700_000_000)
    keys = st.sampled_from(("a", "b", None))
    with fresh_moving(cluster, clock=clock) as store:
        here, there = Limiter(some, store=MemoryStoreWithoutRebook(clock=clock)), Limiter(some, store=store)
        held: list[tuple[Any, Any]] = []
        for _ in range(data.draw(st.integers(1, 10), "steps")):
            clock.advance(data.draw(st.sampled_from((0, 0, 0.3, 1, 2.5)), "pass"))
            key = {name: data.draw(keys, name) for name in some}
            verb = data.draw(st.sampled_from(("hit", "peek", "reserve", "cancel", "move")), "verb")
            if verb == "move":
                named = data.draw(st.sampled_from(there.named), "limit")
                move_key(cluster, store.names.key(named, data.draw(st.sampled_from(("a", "b")), "key")), source, target)
            elif verb == "cancel":
                if held:
                    mine, theirs = held.pop(data.draw(st.integers(0, len(held) - 1), "which"))
                    assert mine.cancel() == theirs.cancel()
            elif verb == "reserve":
                patience = data.draw(st.sampled_from((None, 1, 3)), "patience")
                mine, theirs = here.reserve(key, max_wait=patience), there.reserve(key, max_wait=patience)
                assert whole(theirs.decision) == whole(mine.decision)
                held.append((mine, theirs))
            else:
                assert whole(getattr(there, verb)(key)) == whole(getattr(here, verb)(key))


def test_logs_in_a_moving_slot_give_back_what_was_not_used(halfway: Halfway) -> None:
    """On the server's time each key of such a decision is charged at a moment of its own, by which a log finds the entry."""
    with fresh_moving(halfway[0]) as store:
        limiter = Limiter({"user": SlidingWindowLog("5/h"), "tenant": SlidingWindowLog("8/h")}, store=store)
        keys: tuple[Any, ...] = ("new", {"user": "ann", "tenant": "acme"})
        for key, used in itertools.product(keys, (0, 1)):
            before = [part.remaining for part in limiter.peek(key).decisions]
            reservation = limiter.reserve(key, 2)
            assert reservation.settle(used) if used else reservation.cancel()
            assert [part.remaining for part in limiter.peek(key).decisions] == [left - used for left in before]


def test_a_cluster_that_is_down_is_called_again_within_the_budget(moving: Cluster, watch: Watch) -> None:
    """CLUSTERDOWN is an error when the budget is over, and no error when the slot is served again before that."""
    slot = slot_of(b"{down}")
    node = next(node for node in moving.nodes if owns(node, slot))
    with RedisStore(moving.url, prefix="{down}", timeout=AMPLE) as store, node.client() as client:
        limiter = Limiter(HUNDRED, store=store)
        assert limiter.hit("k")
        store.timeout_us = 300_000
        for other in moving.nodes:
            with other.client() as one:
                one.execute_command("CLUSTER", "DELSLOTS", slot)
        said, end = "", time.monotonic() + 60
        while "CLUSTERDOWN" not in said and "no node serves" not in said:  # the nodes may be late to report it
            assert time.monotonic() < end, said
            begun = time.monotonic()
            with pytest.raises(StoreError) as raised:
                limiter.hit("k")
            assert time.monotonic() - begun < watch.allows(5 * 0.3)
            said = str(raised.value) if isinstance(raised.value, StoreUnavailable) else ""
        store.timeout_us = round(AMPLE * 1e6)
        threading.Timer(0.1, client.execute_command, ("CLUSTER", "ADDSLOTS", slot)).start()
        assert limiter.hit("k").remaining == 98
    moving.settle()


@pytest.mark.asyncio_only(reason="it leaves the servers of the module changed")
def test_a_node_that_dies_takes_only_its_own_slots_with_it(moving: Cluster) -> None:
    """The others continue; its keys are StoreUnavailable within the budget; when it is back, they are decided again."""
    keys = apart(moving)
    with RedisStore(moving.url, timeout=AMPLE) as store:
        limiter, tasks = Limiter(HUNDRED, store=store), AsyncLimiter(HUNDRED, store=store)
        for key in keys:
            limiter.hit(key)
        both = {"user": keys[1], "tenant": keys[0]}
        slow = dict.fromkeys(both, HUNDRED)
        pair, pairs = Limiter(slow, store=store), AsyncLimiter(slow, store=store)
        assert pair.hit(both, cost=9)
        lost = moving.nodes[moving.keeper(slot_of(store.names.key(limiter.named[0], keys[0])))]
        lost.kill()
        for call in (lambda key: limiter.hit(key), lambda key: driven(tasks.hit(key))):
            begun = time.monotonic()
            with pytest.raises(StoreError):
                call(keys[0])
            assert time.monotonic() - begun < AMPLE / 2
            assert [bool(call(key)) for key in keys[1:]] == [True, True]
        for wait in (pair.acquire, pair.reserve, lambda key: driven(pairs.acquire(key))):
            with pytest.raises(StoreError):
                wait(both)
            assert pair.peek({**both, "tenant": None}).remaining == 91  # given back once

        async def together() -> list[Any]:
            return await asyncio.gather(*[tasks.hit(key) for key in keys], return_exceptions=True)

        result = driven(together())
        assert [isinstance(one, StoreError) for one in result] == [True, False, False]
        lost.start()
        moving.settle()
        assert limiter.hit(keys[0])


def test_ready_cluster_clients(cluster: Cluster) -> None:
    """A RedisCluster's settings lead to the same cluster."""
    client = redis.RedisCluster(port=cluster.nodes[0].port, host="127.0.0.1")
    with client, RedisStore(client, prefix="ready", timeout="60s") as store:
        limiter = Limiter(HUNDRED, store=store)
        assert [limiter.hit(key).remaining for key in apart(cluster)] == [99, 99, 99]
        assert len(list(store.items(limiter.named[0]))) == 3


def test_one_tag_in_the_prefix_keeps_everything_in_one_slot(cluster: Cluster) -> None:
    """`prefix="{app}"`: a decision over different keys is one call, on one node."""
    with RedisStore(cluster.url, prefix="{app}", timeout="60s") as store:
        limiter = Limiter(BOTH, store=store)
        key = {"user": "a", "tenant": "b"}
        limiter.hit(key)
        before = sum(map(scripts, cluster.nodes))
        assert limiter.hit(key)
        assert sum(map(scripts, cluster.nodes)) - before == 1


def test_many_decisions_are_made_in_order_across_slots(cluster: Cluster) -> None:
    """A decision that spans slots is made between those before it and those behind it: duplicates see each other in order."""
    one, two, _ = apart(cluster)
    limits = {"user": TokenBucket("1/h", burst=1), "tenant": TokenBucket("1/h", burst=9)}
    for keys, expected in (
        ([{"user": one, "tenant": two}, one, two], [True, False, True]),
        ([one, {"user": one, "tenant": two}, two, {"user": two, "tenant": one}], [True, False, True, False]),
    ):
        with fresh(cluster) as store:
            assert [bool(d) for d in Limiter(limits, store=store, name="n").hit_many(keys)] == expected
