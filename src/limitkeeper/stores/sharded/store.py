"""ShardedStore: many stores as one, each key on one of them (sticky sharding).

The key's text is hashed, so all limits of one key stay together and most decisions call one shard (slots.py). The route is
compiled (router.py); claims on several shards are decided in two phases (cross_shard_decision.py); shards are added and removed
with their state (membership.py); a key with most of the traffic is leased from its shard (hot_key_detector.py and LeasedStore).

Bound: no more than the limits admit, while membership is stable; for hot keys the bound of their leases. The keys of a lost
shard fail with StoreUnavailable; with on_loss="rehash" they start again on the next shard: one more burst per key per loss.
Processes whose lists of shards differ: one more burst and one more rate per further list, for each key whose home differs; not so
where the shards are service nodes, which hold the list themselves and refuse other ones (service_node_membership.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence, Sized
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

from ...algorithms.claim import Claim, NamedLimit
from ...algorithms.constants import MAX_WAIT
from ...clock import SYSTEM, Clock
from ...decision import Decision
from ...errors import ConfigurationError, StoreError, StoreTimeout, StoreUnavailable
from ...rate import Duration, duration_us
from ..contract import Booking, KeyState, Requests, Store, charges_of, checked, checked_pairs, listed_claims
from ..leased import LeasedStore
from ..sans_io import Call, Left, Plan, Recorded, aperform_call, arun, left_of, perform_call, run
from ..store_hash import StoreHash
from ..two_phase_decision import Group, group_claims
from ..wrapper_store import WrapperStore, copy_states
from .cross_shard_decision import CrossShardDecision, give_back_bookings, raise_failure, resolved
from .membership import Listener, Membership, named_shards
from .router import Router, Shard, ShardUnavailable, require_open
from .service_node_membership import FencedMembership

T = TypeVar("T")
#: `asyncio.to_thread`, or what runs blocking code like it.
RunInThread = Callable[..., Coroutine[Any, Any, Any]]
log = logging.getLogger("limitkeeper")
#: Hits a second from which on a key is hot.
HOT = 1000
#: How many charges whose start or source differs from that of their joined decision are remembered.
MAX_CHARGES = 10_000


@cython.cclass
class ShardedStore(WrapperStore):
    """`ShardedStore({"a": store, "b": store})`: each key on one of several stores; a list names them by position.

    `weights` gives shards another share than 1. `on_loss` "fail" raises StoreUnavailable for the keys of a shard that can't be
    reached, "rehash" sends them to the next shard. `hot` is from how many hits a second on a key is leased from a remote shard
    (True: 1000, False: never); `lease` and `life` are the LeasedStore's. `pause` is how long a decision waits for a key that
    is being moved. For tests: `clock` times all of it, `run_in_thread` makes changes for async callers, `rng` draws pauses.
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
        run_in_thread: RunInThread = asyncio.to_thread,
        rng: Any = None,
    ) -> None:
        if on_loss not in ("fail", "rehash"):
            raise ConfigurationError(f"on_loss={on_loss!r}: expected 'fail' or 'rehash'")
        if not isinstance(hot, int) or hot < 0:
            raise ConfigurationError(f"hot={hot!r}: expected True, False, or the hits a second from which on a key is hot")
        # A clock that is moved by hand would be moved by the leases' background: they follow their parent's then.
        lease_clock = None if clock is SYSTEM or hasattr(clock, "advance") else clock
        make_lease = partial(LeasedStore, lease=lease, life="100ms" if life is None else life, clock=lease_clock)
        rate = HOT if hot is True else int(hot)
        self.router = Router()
        kind = FencedMembership if all(store.fences for store in named_shards(shards).values()) else Membership
        self.membership: Membership = kind(
            self.router, shards, weights or {}, on_loss == "rehash", rate, make_lease, duration_us(pause), clock
        )
        self._clock, self._rng = clock, rng
        self._run_in_thread = run_in_thread
        self._charges: dict[tuple[int, str, tuple[str, str, str], str], tuple[int, str]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    # Properties -------------------------------------------------------------------------------------------------

    @property
    def local(self) -> bool:  # type: ignore[override]
        return self.membership.local

    @property
    def never_waits(self) -> bool:
        return False

    @property
    def blocks_event_loop(self) -> bool:
        return any(store.blocks_event_loop for store in self.shards.values())

    @property
    def clock(self) -> Clock:
        return self._first().clock

    def now_us(self) -> int:
        return self.membership.now_us()

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
        found = [shard.hot_keys.hot for shard in self.membership.shards.values() if shard.hot_keys is not None]
        return {key: rate for hot in found for key, rate in hot.items()}

    def register(self, limit: NamedLimit) -> None:
        self.membership.register(limit)

    def unregister(self, limit: NamedLimit) -> None:
        self.membership.unregister(limit)

    @property
    def can_rebook(self) -> bool:
        return all(store.can_rebook for store in self.shards.values())

    def can_reserve(self, limit: NamedLimit) -> bool:
        return all(store.can_reserve(limit) for store in self.shards.values())

    def open_hash(self, name: str) -> StoreHash | None:
        return self._first().open_hash(name)

    def answers_within(self, budget_us: int) -> bool:
        return self.membership.answers_within(budget_us)

    # Deciding on one shard: direct calls, since a plan would cost 0.4 µs -----------------------------------------

    @cython.ccall
    def decide_one(
        self, named: NamedLimit, key: str, cost: cython.longlong, max_wait_us: cython.longlong, commit: cython.bint
    ) -> Decision:
        router: Router = self.router
        side: cython.int = router.enter()
        try:
            shard: Shard = router.find(key)
            if shard.gate is not None:
                raise ShardUnavailable(shard)
            home: Shard = router.lease_of(shard, key)
            decision: Decision = home.store.decide_one(router.limit_at(named, home), key, cost, max_wait_us, commit)
            router.count_hit(shard, key, decision)
            return decision
        except StoreUnavailable as error:
            failure = error
        finally:
            router.leave(side)
        return self.run_plan(self._plan_again(shard, failure, named, key, cost, max_wait_us, commit), called=True)

    async def adecide_one(self, named: NamedLimit, key: str, cost: int, max_wait_us: int, commit: bool) -> Decision:
        router: Router = self.router
        side = router.enter()
        try:
            shard: Shard = router.find(key)
            if shard.gate is not None:
                raise ShardUnavailable(shard)
            home: Shard = router.lease_of(shard, key)
            decision = await home.store.adecide_one(router.limit_at(named, home), key, cost, max_wait_us, commit)
            router.count_hit(shard, key, decision)
            return decision
        except StoreUnavailable as error:
            failure = error
        finally:
            router.leave(side)
        return await self.arun_plan(self._plan_again(shard, failure, named, key, cost, max_wait_us, commit), called=True)

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

    @cython.ccall
    @cython.annotation_typing(False)
    def _decide(
        self, claims: Sequence[Claim], max_wait_us: int | None, commit: bool, remember: bool, not_before_us: int
    ) -> Decision:
        asked = list(claims) or checked(claims)
        router: Router = self.router
        side: cython.int = router.enter()
        sent: list[Claim] = []
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
        except BaseException:
            if sent:
                router.copy_states(asked, sent)  # the caller gives back what an interrupted call has charged
            raise
        finally:
            router.leave(side)
        return self.run_plan(self.plan_decide(asked, max_wait_us, commit, remember, not_before_us), called=shard is not None)

    async def _adecide(
        self, claims: Sequence[Claim], max_wait_us: int | None, commit: bool, remember: bool, not_before_us: int
    ) -> Decision:
        asked = list(claims) or checked(claims)
        router: Router = self.router
        side: cython.int = router.enter()
        sent: list[Claim] = []
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
        except BaseException:
            if sent:
                router.copy_states(asked, sent)  # the caller gives back what an interrupted call has charged
            raise
        finally:
            router.leave(side)
        copies = [Claim(claim.limit, claim.key, claim.cost, claim.charged) for claim in asked]
        plan = self.plan_decide(copies, max_wait_us, commit, remember, not_before_us)
        decision = await self._finish(self.arun_plan(plan, called=shard is not None), copies if commit else [])
        copy_states(asked, copies)
        return decision

    def _decided(self, shard: Shard, asked: list[Claim], sent: list[Claim], decision: Decision) -> Decision:
        """Keeps the states of a charge and counts the hit."""
        self.router.copy_states(asked, sent)
        self.router.count_hit(shard, asked[0].key, decision)
        return decision

    # Plans, for sync and async callers ---------------------------------------------------------------------------

    def plan_left(self, called: bool = False) -> Left | None:
        """The last call of a plan begins after seven twelfths of the budget; half, when a call was made before the plan. It takes
        a quarter, and on leases two thirds of one more."""
        return left_of(0.5 if called else 0.583, self.membership.budget_us, self._clock)

    def run_plan(self, plan: Plan[T], called: bool = False) -> T:
        return run(plan, self._perform, self._clock.sleep, left=self.plan_left(called))

    async def arun_plan(self, plan: Plan[T], called: bool = False) -> T:
        return await arun(plan, self._aperform, self._clock.asleep, left=self.plan_left(called))

    def _perform(self, call: Call) -> object:
        try:
            return perform_call(resolved(call))
        except StoreUnavailable as error:
            raise ShardUnavailable(call.target, error) from error

    async def _aperform(self, call: Call) -> object:
        try:
            return await aperform_call(resolved(call))
        except StoreUnavailable as error:
            raise ShardUnavailable(call.target, error) from error

    def _plan_again(
        self, shard: Shard, error: StoreUnavailable, named: NamedLimit, key: str, cost: int, max_wait_us: int, commit: bool
    ) -> Plan[Decision]:
        """A decision on one limit whose slot was moving or whose shard was lost."""
        yield from self._plan_recovery(shard, error)
        claims, wait_us = [Claim(named, key, cost)], None if max_wait_us >= MAX_WAIT else max_wait_us
        return (yield from self.plan_decide(claims, wait_us, commit, False, 0))

    def _plan_retries(self, make_plan: Callable[[], Plan[T]]) -> Plan[T]:
        """A plan, made again from the start when a slot was moving or a shard was lost."""
        attempt, since_us = -1, 0
        while True:
            side = self.router.enter()
            try:
                return (yield from make_plan())
            except ShardUnavailable as error:
                shard, failure = error.shard, error.error
            finally:
                self.router.leave(side)
            attempt, since_us = attempt + 1, since_us or self._clock.now_us()
            yield from self._plan_recovery(shard, failure, attempt, since_us)

    def _plan_recovery(self, shard: Shard, error: StoreUnavailable | None, attempt: int = 0, since_us: int = 0) -> Plan[None]:
        """Waits for the gate of a moving slot, or has a lost shard's slots point to others; raises when neither works."""
        if shard.gate is None:
            yield from self.membership.plan_recovery(shard, error, attempt, since_us or self._clock.now_us())
            return
        pause_s = self.membership.pause_us / 1e6
        if (yield Call(shard.gate, "result", (pause_s,))) is not None:
            raise StoreTimeout(
                f"shard {shard.name!r} is handing keys over, and this key had not arrived after {pause_s:g} s; "
                "try again, or give ShardedStore a longer pause="
            )

    def plan_decide(
        self, claims: Sequence[Claim], max_wait_us: int | None, commit: bool, remember: bool, not_before_us: int
    ) -> Plan[Decision]:
        asked = checked(claims)
        return self._plan_retries(lambda: self._plan_decide(asked, max_wait_us, commit, remember, not_before_us))

    def plan_decide_many(self, asks: Requests, max_wait_us: int | None) -> Plan[list[Decision]]:
        asked = [checked(claims) for claims in asks]
        found: list[Decision | None] = [None] * len(asked)
        try:
            decisions: list[Decision] = yield from self._plan_retries(lambda: self._plan_decide_many(asked, max_wait_us, found))
            return decisions
        except BaseException:  # no caller is answered: what was charged goes back, where that is possible
            for claims, decision in zip(asked, found, strict=True):
                for some, at_us, source in charges_of(claims, decision) if decision else ():
                    with suppress(StoreError):
                        yield from self._plan_give_back(list(some), [], at_us, source)
            raise

    def plan_give_back(self, claims: Sequence[Claim], charged_at: int, source: str) -> Plan[bool]:
        left, found = listed_claims(claims), list[bool]()
        return self._plan_retries(lambda: self._plan_give_back(left, found, charged_at, source))

    def plan_rebook(self, bookings: Sequence[Booking]) -> Plan[list[Decision | None]]:
        """Each shard rebooks what is charged on it alone; bookings on several shards give back, or keep their starts."""
        found: list[Decision | None] = [None] * len(bookings)
        left = dict(enumerate(bookings))
        return self._plan_retries(lambda: self._plan_rebook(left, found))

    def plan_reset(self, claims: Sequence[Claim]) -> Plan[None]:
        asked = listed_claims(claims)
        return self._plan_retries(lambda: self._plan_reset(asked))

    def plan_load(self, limit: NamedLimit, items: Iterable[KeyState]) -> Plan[None]:
        pairs = checked_pairs(items)
        return self._plan_retries(lambda: self._plan_load(limit, pairs))

    def _plan_decide(
        self, asked: list[Claim], max_wait_us: int | None, commit: bool = True, remember: bool = False, not_before_us: int = 0
    ) -> Plan[Decision]:
        shard = self.router.only_shard(asked)
        if shard is None:
            groups = self._groups(asked)
            joined = yield from CrossShardDecision(groups, max_wait_us, commit, not_before_us, self._clock, self._rng).decide()
            for group in groups:
                if group.charged:
                    self.router.copy_states([asked[position] for position in group.positions], group.claims)
                    self._remember_charge(joined, group.decision, group.claims)
            return joined
        home = self.router.lease_of_all(require_open(shard), asked)
        sent = self.router.copy_claims(asked, home)
        options = {"commit": commit, "remember": remember, "not_before_us": not_before_us}
        decision: Decision = yield Call(home, "decide", (sent, max_wait_us), options)
        return self._decided(shard, asked, sent, decision)

    def _plan_decide_many(self, asks: list[list[Claim]], max_wait_us: int | None, found: list[Decision | None]) -> Plan[Any]:
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
            found[i] = yield from self._plan_decide(asked, max_wait_us)
        yield from self._plan_batch(asks, max_wait_us, waiting, found)
        return found

    def _plan_batch(
        self, asks: list[list[Claim]], max_wait_us: int | None, waiting: dict[Shard, list[int]], found: list[Decision | None]
    ) -> Plan[None]:
        sent = {shard: [self.router.copy_claims(asks[i], shard) for i in numbers] for shard, numbers in waiting.items()}
        calls, answers = Recorded(Call(shard, "decide_many", (copies, max_wait_us)) for shard, copies in sent.items()), None
        try:
            answers = yield calls
        finally:  # interrupted: what was answered so far
            for (shard, numbers), answer in zip(waiting.items(), answers or calls.answers, strict=False):
                if not isinstance(answer, StoreError):
                    for i, copies, decision in zip(numbers, sent[shard], answer, strict=True):
                        self.router.copy_states(asks[i], copies)
                        found[i] = decision
        raise_failure(answers)

    def _plan_give_back(self, left: list[Claim], found: list[bool], charged_at: int, source: str) -> Plan[bool]:
        """Claims that have given back go from `left`, their answers to `found`: a plan made again does not repeat them."""
        calls, given = [], []
        asked = list(left)
        for group in self._groups(asked, leased=True):
            charges: dict[tuple[int, str], list[int]] = {}
            for i, claim in enumerate(group.claims):
                noted = self._charges.get((charged_at, source, claim.limit.identity, claim.key), (charged_at, source))
                own_us = claim.charged_at() if noted[0] != charged_at else -1  # two decisions may have the same joined start
                charges.setdefault((own_us if own_us >= 0 else noted[0], noted[1]), []).append(i)
            for charge, some in charges.items():
                calls.append(Call(group.place, "give_back", ([group.claims[i] for i in some], *charge)))
                given.append([asked[group.positions[i]] for i in some])
        answers = yield calls
        for claims, answer in zip(given, answers, strict=True):
            if not isinstance(answer, StoreError):
                found.append(answer)
                for claim in claims:
                    left.remove(claim)
        raise_failure(answers)
        return not found or any(found)

    def _plan_rebook(self, left: dict[int, Booking], found: list[Decision | None]) -> Plan[list[Decision | None]]:
        places: dict[Shard | None, list[int]] = {}
        for at, one in left.items():
            asked = list(one.claims)
            shard = self.router.only_shard(asked)
            place = self.router.lease_of_all(require_open(shard), asked) if shard is not None else None
            places.setdefault(place, []).append(at)
        for place, some in places.items():
            leaving = [at for at in some if not left[at].stays]
            if place is None:
                yield from give_back_bookings(left, leaving[::-1], self._plan_give_back)
            elif leaving:
                sent = [left[at]._replace(claims=self.router.copy_claims(list(left[at].claims), place)) for at in some]
                for at, one, decision in zip(some, sent, (yield Call(place, "rebook", (sent,))), strict=True):
                    self.router.copy_states(list(left[at].claims), list(one.claims))
                    found[at] = decision
            for at in some:
                left.pop(at, None)  # done: a plan that is made again does not repeat it
        return found

    def _plan_reset(self, asked: list[Claim]) -> Plan[None]:
        raise_failure((yield [Call(group.place, "reset", (group.claims,)) for group in self._groups(asked, leased=True)]))

    def _plan_load(self, limit: NamedLimit, pairs: list[KeyState]) -> Plan[None]:
        by_home: dict[Shard, list[KeyState]] = {}
        for key, state in pairs:
            by_home.setdefault(require_open(self.router.find(key)), []).append((key, state))
        loads = [Call(shard, "load", (self.router.limit_at(limit, shard), some)) for shard, some in by_home.items()]
        raise_failure((yield loads))

    def _groups(self, asked: list[Claim], leased: bool = False) -> list[Group]:
        """The claims by their shards, as these know them; `leased`: hot ones through their leases."""
        router: Router = self.router

        def place_of(claim: Claim) -> Shard:
            shard = require_open(router.find(claim.key))
            return router.lease_of(shard, claim.key) if leased else shard

        groups = group_claims(asked, place_of)
        for group in groups:
            group.claims = router.copy_claims(group.claims, group.place)
        return groups

    def _remember_charge(self, joined: Decision, charge: Decision, claims: list[Claim]) -> None:
        """A charge with another start or source than the joined decision is given back with its own."""
        for some, start_us, source in charges_of(claims, charge):
            for claim in some:
                known = (joined.start_us, joined.source, claim.limit.identity, claim.key)  # an earlier decision may have them
                if known[:2] != (start_us, source) or known in self._charges:
                    self._charges[known] = (start_us, source)
        while len(self._charges) > MAX_CHARGES:
            self._charges.pop(next(iter(self._charges)), None)

    async def _finish(self, work: Coroutine[Any, Any, Decision], asked: list[Claim]) -> Decision:
        """Completes a decision on several shards although its caller is cancelled, and then gives it back. `asked` are copies:
        the caller gives back what its own claims have charged."""
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
            for charge in charges_of(asked, decision) if decision and asked else ():  # a peek charges nothing
                await self.agive_back(*charge)
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
        await self._run_in_thread(self.membership.add, name, store, weight, handoff, progress)

    async def aremove(self, name: str, *, handoff: bool = True, progress: Listener | None = None) -> Store:
        """As `remove`, in a thread."""
        return await self._run_in_thread(self.membership.remove, name, handoff, progress)  # type: ignore[no-any-return]

    async def arestore(self, name: str, *, handoff: bool = True, progress: Listener | None = None) -> None:
        """As `restore`, in a thread."""
        await self._run_in_thread(self.membership.restore, name, handoff, progress)

    async def arebalance(self, *, handoff: bool = True, progress: Listener | None = None) -> None:
        """As `rebalance`, in a thread."""
        await self._run_in_thread(self.membership.rebalance, handoff, progress)

    def items(self, limit: NamedLimit) -> Iterable[KeyState]:
        return self.membership.items(limit)

    def rate_items(self, limit: NamedLimit) -> Iterable[KeyState]:
        return self.membership.items(limit, of_rate=True)

    def release(self, leaving: Callable[[str], bool]) -> None:
        for store in self.membership.outer_stores():
            store.release(leaving)

    def close(self) -> None:
        """Closes every shard, its leases first."""
        for store in self.membership.outer_stores():
            store.close()

    async def aclose(self) -> None:
        loop = asyncio.get_running_loop()
        while own := [task for task in tuple(self._tasks) if task.get_loop() is loop]:  # those of a closed loop never end
            await asyncio.wait(own)
        for store in self.membership.outer_stores():
            await store.aclose()
