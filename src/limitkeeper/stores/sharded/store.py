"""ShardedStore: many stores as one, each key on one of them (sticky sharding).

The key's text is hashed, so all limits of one key stay together and most decisions call one shard (slots.py). The route is
compiled (router.py); claims on several shards are decided in two phases (two_phase.py); shards are added and removed with
their state (membership.py, handoff.py); a key with most of the traffic is leased from its shard (hot_keys.py and LeasedStore).

Bound: no more than the limits admit, while membership is stable; for hot keys the bound of their leases. The keys of a lost
shard fail with StoreUnavailable; with on_loss="rehash" they start again on the next shard: one more burst per key per loss.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence, Sized
from typing import Any, TypeVar

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.algorithms.claim import Claim, NamedLimit
    from cython.cimports.limitkeeper.decision import Decision
    from cython.cimports.limitkeeper.stores.contract import Store
    from cython.cimports.limitkeeper.stores.sharded.router import Router, Shard
else:
    from ...algorithms.claim import Claim, NamedLimit
    from ...decision import Decision
    from ..contract import Store
    from .router import Router, Shard

from ...clock import SYSTEM, Clock
from ...decision import STORE
from ...errors import ConfigurationError, StoreError, StoreTimeout, StoreUnavailable
from ...rate import Duration, duration_us
from ..cell_store import checked, only_claims
from ..sans_io import Call, Plan, aperform_call, arun, perform_call, run
from .handoff import KeyGate, KeyState, Listener
from .membership import LeaseOptions, Membership
from .two_phase import ShardGroup, plan_decision, raise_failure

T = TypeVar("T")
log = logging.getLogger("limitkeeper")
#: Hits a second from which on a key is hot.
HOT = 1000
#: How many charges whose start or source differs from that of their joined decision are remembered.
MAX_CHARGES = 10_000


class SlotMoving(Exception):
    """The slot of a key is being moved: its gate is closed. Never leaves the store."""

    def __init__(self, shard: Shard) -> None:
        super().__init__(shard.name)
        self.gate: KeyGate = shard.gate  # type: ignore[assignment]


class ShardUnavailable(StoreUnavailable):
    """A call of this shard failed. Never leaves the store."""

    def __init__(self, shard: Shard, error: StoreUnavailable) -> None:
        super().__init__(str(error))
        self.shard = shard
        self.error = error


class ShardCalls:
    """Makes the calls of one plan on shards, within three quarters of a budget: the last call may take the fourth."""

    __slots__ = ("_budget_us", "_clock", "_deadline_us")

    def __init__(self, budget_us: int, clock: Clock) -> None:
        self._budget_us = budget_us
        self._clock = clock
        self._deadline_us = clock.now_us() + budget_us * 3 // 4 if budget_us else 0

    def _resolve(self, call: Call) -> Call:
        if self._deadline_us and self._clock.now_us() > self._deadline_us:
            raise StoreTimeout(f"the calls of several shards took longer than their budget of {self._budget_us} µs")
        return call._replace(target=call.target.store)

    def perform(self, call: Call) -> object:
        if not isinstance(call.target, Shard):
            return perform_call(call)
        try:
            return perform_call(self._resolve(call))
        except StoreUnavailable as error:
            raise ShardUnavailable(call.target, error) from error

    async def aperform(self, call: Call) -> object:
        if not isinstance(call.target, Shard):
            return await aperform_call(call)
        try:
            return await aperform_call(self._resolve(call))
        except StoreUnavailable as error:
            raise ShardUnavailable(call.target, error) from error


@cython.cclass
class ShardedStore(Store):
    """`ShardedStore({"a": store, "b": store})`: each key on one of several stores; a list names them by position.

    `weights` gives shards another share than 1. `on_loss` "fail" raises StoreUnavailable for the keys of a shard that can't be
    reached, "rehash" sends them to the next shard. `hot` is from how many hits a second on a key is leased from a remote shard
    (True: 1000, False: never); `lease` and `life` are the LeasedStore's. `pause` is how long a decision waits for a key that
    is being moved. `clock` measures the budget and the pause, for tests and simulations.
    """

    @cython.annotation_typing(False)
    def __init__(
        self,
        shards: Mapping[str, Store] | Sequence[Store],
        *,
        weights: Mapping[str, float] | None = None,
        on_loss: str = "fail",
        hot: bool | int = True,
        lease: int | None = None,
        life: Duration | None = None,
        pause: Duration = 5,
        clock: Clock = SYSTEM,
    ) -> None:
        if on_loss not in ("fail", "rehash"):
            raise ConfigurationError(f"on_loss={on_loss!r}: expected 'fail' or 'rehash'")
        if not isinstance(hot, int) or hot < 0:
            raise ConfigurationError(f"hot={hot!r}: expected True, False, or the hits a second from which on a key is hot")
        leases: LeaseOptions = {}
        if lease is not None:
            leases["lease"] = lease
        if life is not None:
            leases["life"] = life
        rate = HOT if hot is True else int(hot)
        self.router = Router()
        self.membership: Membership = Membership(
            self.router, shards, weights or {}, on_loss == "rehash", rate, leases, duration_us(pause), clock
        )
        self._clock = clock
        self._charges: dict[tuple[int, str, tuple[str, str, str], str], tuple[int, str]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    # Properties -------------------------------------------------------------------------------------------------

    @property
    def local(self) -> bool:  # type: ignore[override]
        return self.membership.local

    @property
    def clock(self) -> Clock:
        return self._first().clock

    def now_us(self) -> int:
        return self._first().now_us()

    def _first(self) -> Store:
        return next(iter(self.membership.shards.values())).store

    @property
    def overflow(self) -> int:
        return sum([store.overflow for store in self.shards.values()])

    def __len__(self) -> int:
        """How many keys the shards hold, where they can tell."""
        return sum([len(store) for store in self.shards.values() if isinstance(store, Sized)])

    def __bool__(self) -> bool:
        return True

    @property
    def shards(self) -> dict[str, Store]:
        """The stores by their names."""
        return {name: shard.store for name, shard in self.membership.shards.items()}

    @property
    def lost(self) -> list[str]:
        """Names of shards that could not be reached and whose keys went elsewhere; `restore` brings one back."""
        return list(self.membership.lost)

    def home_of(self, key: str) -> str:
        """The name of the shard that a key is on."""
        return self.router.find(key).name

    def hot_keys(self) -> dict[str, int]:
        """The keys that are hot now, with their hits a second from this process."""
        found: dict[str, int] = {}
        for shard in self.membership.shards.values():
            found |= shard.hot_keys.hot if shard.hot_keys is not None else {}
        return found

    def register(self, limit: NamedLimit) -> None:
        self.membership.register(limit)

    def can_reserve(self, limit: NamedLimit) -> bool:
        return all(store.can_reserve(limit) for store in self.shards.values())

    def answers_within(self, budget_us: int) -> bool:
        return self.membership.answers_within(budget_us)

    # Deciding on one shard: direct calls, since a plan would cost 0.4 µs -----------------------------------------

    @cython.ccall
    def decide_one(
        self, named: NamedLimit, key: str, cost: cython.longlong, max_wait_us: cython.longlong, commit: cython.bint
    ) -> Decision:
        router: Router = self.router
        side: cython.int = router.enter()
        shard: Shard = None  # type: ignore[assignment]
        decision: Decision
        try:
            shard = router.find(key)
            if shard.gate is not None:
                raise SlotMoving(shard)
            home: Shard = router.lease_of(shard, key)
            decision = home.store.decide_one(router.limit_at(named, home), key, cost, max_wait_us, commit)
            router.count_hit(shard, key, decision)
        except BaseException as error:
            router.leave(side)
            self._handle(shard, error)
        else:
            router.leave(side)
            return decision
        return self.decide_one(named, key, cost, max_wait_us, commit)

    async def adecide_one(self, named: NamedLimit, key: str, cost: int, max_wait_us: int, commit: bool) -> Decision:
        router: Router = self.router
        side = router.enter()
        try:
            shard: Shard = router.find(key)
            if shard.gate is not None:
                raise SlotMoving(shard)
            home: Shard = router.lease_of(shard, key)
            decision = await home.store.adecide_one(router.limit_at(named, home), key, cost, max_wait_us, commit)
            router.count_hit(shard, key, decision)
            return decision
        except (SlotMoving, StoreUnavailable) as error:
            failure = failure_of(shard, error)
        finally:
            router.leave(side)
        await arun(self._plan_recovery(failure))
        return await self.adecide_one(named, key, cost, max_wait_us, commit)

    @cython.ccall
    def hit_nowait(self, named: NamedLimit, key: str, cost: cython.longlong) -> Decision | None:
        router: Router = self.router
        side: cython.int = router.enter()
        try:
            shard: Shard = router.find(key)
            if shard.gate is not None:
                return None
            home: Shard = router.lease_of(shard, key)
            limit: NamedLimit = router.limit_at(named, home)
            if home.store.local:
                return home.store.decide_one(limit, key, cost, 0, True)
            decision: Decision = home.store.hit_nowait(limit, key, cost)  # type: ignore[assignment]
            router.count_hit(shard, key, decision)
            return decision
        finally:
            router.leave(side)

    def decide(
        self,
        claims: Sequence[Claim],
        max_wait_us: int | None = 0,
        *,
        commit: bool = True,
        remember: bool = False,
        not_before_us: int = 0,
    ) -> Decision:
        asked = list(claims) or checked(claims)
        router: Router = self.router
        side: cython.int = router.enter()
        try:
            shard: Shard = router.only_shard(asked)  # type: ignore[assignment]
            if shard is not None and shard.gate is None:
                home: Shard = router.lease_of_all(shard, asked)
                sent = router.copy_claims(asked, home)
                decision: Decision = home.store.decide(
                    sent, max_wait_us, commit=commit, remember=remember, not_before_us=not_before_us
                )
                return self._decided(shard, asked, sent, decision)
        except StoreUnavailable as error:
            self.membership.lose(shard, error)
        finally:
            router.leave(side)
        return self._run(lambda: self._plan_decide(checked(asked), max_wait_us, commit, remember, not_before_us))

    async def adecide(
        self,
        claims: Sequence[Claim],
        max_wait_us: int | None = 0,
        *,
        commit: bool = True,
        remember: bool = False,
        not_before_us: int = 0,
    ) -> Decision:
        asked = list(claims) or checked(claims)
        router: Router = self.router
        side: cython.int = router.enter()
        try:
            shard: Shard = router.only_shard(asked)  # type: ignore[assignment]
            if shard is not None and shard.gate is None:
                home: Shard = router.lease_of_all(shard, asked)
                sent = router.copy_claims(asked, home)
                decision: Decision = await home.store.adecide(
                    sent, max_wait_us, commit=commit, remember=remember, not_before_us=not_before_us
                )
                return self._decided(shard, asked, sent, decision)
        except StoreUnavailable as error:
            self.membership.lose(shard, error)
        finally:
            router.leave(side)
        plan = self._arun(lambda: self._plan_decide(checked(asked), max_wait_us, commit, remember, not_before_us))
        return await self._finish(plan, asked)

    def _decided(self, shard: Shard, asked: list[Claim], sent: list[Claim], decision: Decision) -> Decision:
        """Keeps the states of a charge and counts the hit."""
        self.router.copy_states(asked, sent)
        self.router.count_hit(shard, asked[0].key, decision)
        return decision

    def _handle(self, shard: Shard, error: BaseException) -> None:
        """Returns when the call can be made again; otherwise raises."""
        if not isinstance(error, (SlotMoving, StoreUnavailable)):
            raise error
        run(self._plan_recovery(failure_of(shard, error)))

    # Plans, for sync and async callers ---------------------------------------------------------------------------

    def _run(self, make_plan: Callable[[], Plan[T]]) -> T:
        return run(self._plan_retries(make_plan), ShardCalls(self.membership.budget_us, self._clock).perform)

    async def _arun(self, make_plan: Callable[[], Plan[T]]) -> T:
        return await arun(self._plan_retries(make_plan), ShardCalls(self.membership.budget_us, self._clock).aperform)

    def _plan_retries(self, make_plan: Callable[[], Plan[T]]) -> Plan[T]:
        """A plan, made again from the start when a slot was moving or a shard was lost."""
        while True:
            side = self.router.enter()
            try:
                return (yield from make_plan())
            except (SlotMoving, ShardUnavailable) as error:
                failure = error
            finally:
                self.router.leave(side)
            yield from self._plan_recovery(failure)

    def _plan_recovery(self, failure: SlotMoving | ShardUnavailable) -> Plan[None]:
        """Waits for the gate of a moving slot, or has a lost shard's slots point to others; raises when neither works."""
        if isinstance(failure, ShardUnavailable):
            self.membership.lose(failure.shard, failure.error)
            return
        pause_s = self.membership.pause_us / 1e6
        if not (yield Call(failure.gate, "wait_open", (pause_s,))):
            raise StoreTimeout(
                f"shard {failure.gate.shard!r} is handing keys over, and this key had not arrived after {pause_s:g} s; "
                "try again, or give ShardedStore a longer pause="
            )

    def decide_many(self, asks: Sequence[Sequence[Claim]], max_wait_us: int | None = 0) -> list[Decision]:
        asked = [checked(claims) for claims in asks]
        found: list[Decision | None] = [None] * len(asks)
        self._run(lambda: self._plan_decide_many(asked, max_wait_us, found))
        return found  # type: ignore[return-value]

    async def adecide_many(self, asks: Sequence[Sequence[Claim]], max_wait_us: int | None = 0) -> list[Decision]:
        asked = [checked(claims) for claims in asks]
        found: list[Decision | None] = [None] * len(asks)
        await self._arun(lambda: self._plan_decide_many(asked, max_wait_us, found))
        return found  # type: ignore[return-value]

    def give_back(self, claims: Sequence[Claim], charged_at: int = -1, source: str = STORE) -> None:
        asked = listed_claims(claims)
        self._run(lambda: self._plan_give_back(asked, charged_at, source))

    async def agive_back(self, claims: Sequence[Claim], charged_at: int = -1, source: str = STORE) -> None:
        asked = listed_claims(claims)
        await self._arun(lambda: self._plan_give_back(asked, charged_at, source))

    def reset(self, claims: Sequence[Claim]) -> None:
        asked = listed_claims(claims)
        self._run(lambda: self._plan_reset(asked))

    async def areset(self, claims: Sequence[Claim]) -> None:
        asked = listed_claims(claims)
        await self._arun(lambda: self._plan_reset(asked))

    def load(self, limit: NamedLimit, items: Iterable[KeyState]) -> None:
        pairs = checked_pairs(items)
        self._run(lambda: self._plan_load(limit, pairs))

    async def aload(self, limit: NamedLimit, items: Iterable[KeyState]) -> None:
        pairs = checked_pairs(items)
        await self._arun(lambda: self._plan_load(limit, pairs))

    def _plan_decide(
        self, asked: list[Claim], max_wait_us: int | None, commit: bool, remember: bool, not_before_us: int
    ) -> Plan[Decision]:
        shard = self.router.only_shard(asked)
        if shard is None:
            outcome = yield from plan_decision(self._groups(asked), max_wait_us, commit, not_before_us)
            for group, charge in outcome.charges:
                self.router.copy_states([asked[position] for position in group.positions], group.claims)
                self._remember_charge(outcome.decision, charge, group.claims)
            return outcome.decision
        home = self.router.lease_of_all(require_open(shard), asked)
        sent = self.router.copy_claims(asked, home)
        options = {"commit": commit, "remember": remember, "not_before_us": not_before_us}
        decision: Decision = yield Call(home, "decide", (sent, max_wait_us), options)
        return self._decided(shard, asked, sent, decision)

    def _plan_decide_many(self, asks: list[list[Claim]], max_wait_us: int | None, found: list[Decision | None]) -> Plan[None]:
        """One call per shard; a request on several shards waits for those before it. What is in `found` is not decided again."""
        waiting: dict[Shard, list[int]] = {}
        for i, asked in enumerate(asks):
            if found[i] is not None:
                continue
            shard = self.router.only_shard(asked)
            if shard is not None:
                waiting.setdefault(require_open(shard), []).append(i)
                continue
            yield from self._plan_batch(asks, max_wait_us, waiting, found)
            waiting = {}
            found[i] = yield from self._plan_decide(asked, max_wait_us, True, False, 0)
        yield from self._plan_batch(asks, max_wait_us, waiting, found)

    def _plan_batch(
        self, asks: list[list[Claim]], max_wait_us: int | None, waiting: dict[Shard, list[int]], found: list[Decision | None]
    ) -> Plan[None]:
        sent = {shard: [self.router.copy_claims(asks[i], shard) for i in numbers] for shard, numbers in waiting.items()}
        answers = yield [Call(shard, "decide_many", (copies, max_wait_us)) for shard, copies in sent.items()]
        for (shard, numbers), answer in zip(waiting.items(), answers, strict=True):
            if not isinstance(answer, StoreError):
                for i, copies, decision in zip(numbers, sent[shard], answer, strict=True):
                    self.router.copy_states(asks[i], copies)
                    found[i] = decision
        raise_failure(answers)

    def _plan_give_back(self, asked: list[Claim], charged_at: int, source: str) -> Plan[None]:
        calls = []
        for group in self._groups(asked, leased=True):
            charges: dict[tuple[int, str], list[Claim]] = {}
            for claim in group.claims:
                known = (charged_at, source, claim.limit.identity, claim.key)
                charges.setdefault(self._charges.get(known, (charged_at, source)), []).append(claim)
            calls += [Call(group.shard, "give_back", (some, *charge)) for charge, some in charges.items()]
        raise_failure((yield calls))

    def _plan_reset(self, asked: list[Claim]) -> Plan[None]:
        groups = self._groups(asked, leased=True)
        raise_failure((yield [Call(group.shard, "reset", (group.claims,)) for group in groups]))

    def _plan_load(self, limit: NamedLimit, pairs: list[KeyState]) -> Plan[None]:
        by_home: dict[Shard, list[KeyState]] = {}
        for key, state in pairs:
            by_home.setdefault(require_open(self.router.find(key)), []).append((key, state))
        limit_at = self.router.limit_at
        raise_failure((yield [Call(shard, "load", (limit_at(limit, shard), some)) for shard, some in by_home.items()]))

    def _groups(self, asked: list[Claim], leased: bool = False) -> list[ShardGroup]:
        """The claims by their shards, in the order in which these are first named; `leased`: hot ones through their leases."""
        router: Router = self.router
        positions: dict[Shard, list[int]] = {}
        for i, claim in enumerate(asked):
            shard = require_open(router.find(claim.key))
            positions.setdefault(router.lease_of(shard, claim.key) if leased else shard, []).append(i)
        return [ShardGroup(shard, router.copy_claims([asked[i] for i in some], shard), some) for shard, some in positions.items()]

    def _remember_charge(self, joined: Decision, charge: Decision, claims: list[Claim]) -> None:
        """A charge with another start or source than the joined decision is given back with its own."""
        if (joined.start_us, joined.source) == (charge.start_us, charge.source):
            return
        for claim in claims:
            known = (joined.start_us, joined.source, claim.limit.identity, claim.key)
            self._charges[known] = (charge.start_us, charge.source)
        while len(self._charges) > MAX_CHARGES:
            self._charges.pop(next(iter(self._charges)), None)

    async def _finish(self, work: Coroutine[Any, Any, Decision], asked: list[Claim]) -> Decision:
        """Completes a decision on several shards although its caller is cancelled, and then gives it back."""
        task = self._start_task(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._start_task(self._undo(task, asked))
            raise

    def _start_task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _undo(self, task: asyncio.Task[Decision], asked: list[Claim]) -> None:
        try:
            decision = await task
            if decision:
                await self.agive_back(asked, decision.start_us, decision.source)
        except StoreError as error:
            log.warning("a cancelled decision could not be given back: %s", error)

    # Membership and the end --------------------------------------------------------------------------------------

    def add(
        self, name: str, store: Store, weight: float = 1.0, *, handoff: bool = True, progress: Listener | None = None
    ) -> None:
        """Adds a shard; the keys of the slots that it wins move to it, from one shard after the other. Without `handoff` they
        start again."""
        self.membership.add(name, store, weight, handoff, progress)

    def remove(self, name: str, *, handoff: bool = True, progress: Listener | None = None) -> Store:
        """Removes a shard, its keys moving to the others; returns its store, which the caller closes."""
        return self.membership.remove(name, handoff, progress)

    def restore(self, name: str, *, handoff: bool = True, progress: Listener | None = None) -> None:
        """Takes a lost shard back: its keys return, with the state that they have where they went."""
        self.membership.restore(name, handoff, progress)

    def rebalance(self, *, handoff: bool = True, progress: Listener | None = None) -> None:
        """Moves every slot that is not on its shard to it; continues a move that failed half-way."""
        self.membership.rebalance(handoff, progress)

    async def aadd(
        self, name: str, store: Store, weight: float = 1.0, *, handoff: bool = True, progress: Listener | None = None
    ) -> None:
        """As `add`, in a thread: the event loop goes on. `progress` is called in that thread."""
        await asyncio.to_thread(self.membership.add, name, store, weight, handoff, progress)

    async def aremove(self, name: str, *, handoff: bool = True, progress: Listener | None = None) -> Store:
        """As `remove`, in a thread."""
        return await asyncio.to_thread(self.membership.remove, name, handoff, progress)

    async def arestore(self, name: str, *, handoff: bool = True, progress: Listener | None = None) -> None:
        """As `restore`, in a thread."""
        await asyncio.to_thread(self.membership.restore, name, handoff, progress)

    async def arebalance(self, *, handoff: bool = True, progress: Listener | None = None) -> None:
        """As `rebalance`, in a thread."""
        await asyncio.to_thread(self.membership.rebalance, handoff, progress)

    def items(self, limit: NamedLimit) -> Iterable[KeyState]:
        router: Router = self.router
        for shard in self.membership.shards.values():
            if shard.name not in self.membership.lost:
                found = shard.store.items(router.limit_at(limit, shard))
                yield from [(key, state) for key, state in found if router.find(key) is shard]

    def close(self) -> None:
        """Closes every shard, its leases first."""
        for store in self.membership.outer_stores():
            store.close()

    async def aclose(self) -> None:
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))
        for store in self.membership.outer_stores():
            await store.aclose()


def require_open(shard: Shard) -> Shard:
    if shard.gate is not None:
        raise SlotMoving(shard)
    return shard


def failure_of(shard: Shard, error: SlotMoving | StoreUnavailable) -> SlotMoving | ShardUnavailable:
    return ShardUnavailable(shard, error) if isinstance(error, StoreUnavailable) else error


def listed_claims(claims: Sequence[Claim]) -> list[Claim]:
    listed = list(claims)
    only_claims(listed)
    return listed


def checked_pairs(items: Iterable[KeyState]) -> list[KeyState]:
    pairs = list(items)
    for key, _ in pairs:
        if type(key) is not str:
            raise TypeError(f"a key must be a str, not {type(key).__name__}: {key!r}")
    return pairs
