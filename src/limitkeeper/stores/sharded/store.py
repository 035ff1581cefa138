"""ShardedStore: many stores as one, each key at home on one of them (the handbook's level 3, sticky sharding).

The routing key is the key's text, so all limits of one key stay together and most decisions ask one shard. Which one is
consistent hashing (slots.py); the way there is compiled (routing.py); keys that live apart are decided in two steps
(span.py); a planned change hands state over (handoff.py); a key with all the traffic is leased from its home (heavy.py and
LeasedStore).

Bound: no more than the limits admit, while membership is stable; for hot keys the bound of their leases. A shard that is lost
fails with StoreUnavailable; with on_loss="rehash" its keys start anew on the next shard: one more burst per key per loss.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any

from ...algorithms.claim import Claim, NamedLimit
from ...decision import STORE, Decision
from ...errors import ConfigurationError, StoreError, StoreUnavailable
from ...rate import Duration, duration_us
from ..cell_store import checked, only_claims
from ..contract import Store
from . import two_phase
from .membership import Membership
from .routing import Shard
from .steps import Call, Closed, Run, Step, Steps, fine, opened
from .two_phase import ShardGroup

log = logging.getLogger("limitkeeper")
#: Hits a second from which on a key is hot.
HOT = 1000
#: How many charges on shards with different clocks are remembered with their own starts.
STARTS = 10_000
_tags = itertools.count()


class ShardedStore(Membership):
    """`ShardedStore({"a": store, "b": store})`: each key at home on one of several stores; a list names them by position.

    `weights` gives shards another share than 1. `on_loss` "fail" raises StoreUnavailable for the keys of a shard that can't be
    reached, "rehash" sends them to the next shard. `hot` is from how many hits a second on a key is leased from a far shard
    (True: 1000, False: never); `lease` and `life` are the LeasedStore's. `pause` is how long a decision waits for a key that
    is being moved.
    """

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
    ) -> None:
        if on_loss not in ("fail", "rehash"):
            raise ConfigurationError(f"on_loss={on_loss!r}: write 'fail' or 'rehash'")
        if not isinstance(hot, int) or hot < 0:
            raise ConfigurationError(f"hot={hot!r}: write True, False, or from how many hits a second on a key is hot")
        rate = HOT if hot is True else int(hot)
        leases = {name: value for name, value in (("lease", lease), ("life", life)) if value is not None}
        super().__init__(shards, weights, on_loss == "rehash", rate, leases, duration_us(pause))
        self._starts: dict[Any, int] = {}
        self._tag = f"{os.getpid()}:{next(_tags)}:"
        self._tasks: set[asyncio.Task[Any]] = set()

    # What is there -----------------------------------------------------------------------------------------------

    @property
    def clock(self) -> Any:
        return self._first().clock

    def now_us(self) -> int:
        return self._first().now_us()

    def _first(self) -> Store:
        store: Store = next(iter(self._shards.values())).store
        return store

    @property
    def overflow(self) -> int:
        return sum(shard.store.overflow for shard in self._shards.values())

    def __len__(self) -> int:
        """How many keys the shards hold, as far as they say so."""
        return sum(len(shard.store) for shard in self._shards.values() if isinstance(shard.store, Sized))

    def __bool__(self) -> bool:
        return True

    def register(self, limit: NamedLimit) -> None:
        self._known[limit.identity] = limit
        for shard in self._shards.values():
            self._tell(limit, shard)

    def can_reserve(self, limit: NamedLimit) -> bool:
        return all(shard.store.can_reserve(limit) for shard in self._shards.values())

    def answers_within(self, budget_us: int) -> bool:
        """A quarter of the budget for every call of a shard, and for a key on its way: two steps make several calls."""
        self._budget_us = budget_us
        self._pause_us = min(self._pause_us, budget_us // 4)
        promises = [self._hurry(shard) for shard in self._shards.values()]  # all of them are asked
        return all(promises)

    # Deciding ------------------------------------------------------------------------------------------------------

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
        decision = self.straight(asked, max_wait_us, commit)
        if decision is None:
            checked(asked)
            decision = self._drive(lambda: self._deciding(asked, max_wait_us, commit))
        return decision

    def decide_many(self, asks: Sequence[Sequence[Claim]], max_wait_us: int | None = 0) -> list[Decision]:
        asked = [checked(claims) for claims in asks]
        found: list[Any] = [None] * len(asked)
        self._drive(lambda: self._deciding_many(asked, max_wait_us, found))
        return found

    def give_back(self, claims: Sequence[Claim], charged_at: int = -1, source: str = STORE) -> None:
        asked = some_claims(claims)
        self._drive(lambda: self._returning(asked, charged_at))

    def reset(self, claims: Sequence[Claim]) -> None:
        asked = some_claims(claims)
        self._drive(lambda: self._resetting(asked))

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
        lost: Any = None
        side = self.step_in()
        try:
            shard = self.only(asked)
            if shard is not None and shard.open:
                way = self.way(shard, asked)
                sent = self.sent(asked, way)
                decision: Decision = await way.store.adecide(sent, max_wait_us, commit=commit)
                self.kept(asked, sent)
                if shard.heavy is not None:
                    self.counted(shard, asked, decision)
                return decision
        except StoreUnavailable as error:
            lost = error
        finally:
            self.step_out(side)
        if lost is not None:
            await self._aelsewhere(shard, lost)
        work = self._adrive(lambda: self._deciding(checked(asked), max_wait_us, commit))
        return await self._to_the_end(work, asked)

    async def adecide_many(self, asks: Sequence[Sequence[Claim]], max_wait_us: int | None = 0) -> list[Decision]:
        asked = [checked(claims) for claims in asks]
        found: list[Any] = [None] * len(asked)
        await self._adrive(lambda: self._deciding_many(asked, max_wait_us, found))
        return found

    async def agive_back(self, claims: Sequence[Claim], charged_at: int = -1, source: str = STORE) -> None:
        asked = some_claims(claims)
        await self._adrive(lambda: self._returning(asked, charged_at))

    async def areset(self, claims: Sequence[Claim]) -> None:
        asked = some_claims(claims)
        await self._adrive(lambda: self._resetting(asked))

    # The steps of a call, for both colours ----------------------------------------------------------------------------

    def _deciding(self, asked: list[Claim], max_wait_us: int | None, commit: bool) -> Steps:
        shard = self.only(asked)
        if shard is None:
            groups = self._groups(asked)
            joined: two_phase.Joined = yield from two_phase.decide(groups, max_wait_us, commit, self._tag)
            for group, start_us in joined.charged:
                self.kept([asked[place] for place in group.places], group.claims)
                self._remember(joined.decision.start_us, start_us, group.claims)
            return joined.decision
        way = self.way(opened(shard), asked)
        sent = self.sent(asked, way)
        answers = fine((yield Step([Call(way, "decide", (sent, max_wait_us), {"commit": commit})])))
        self.kept(asked, sent)
        if shard.heavy is not None:
            self.counted(shard, asked, answers[0])
        return answers[0]

    def _deciding_many(self, asks: list[list[Claim]], max_wait_us: int | None, found: list[Any]) -> Steps:
        """One call per shard; an ask that spans shards waits for those before it. What is answered is not asked again."""
        waiting: dict[Shard, list[int]] = {}
        for i, asked in enumerate(asks):
            if found[i] is not None:
                continue
            shard = self.only(asked)
            if shard is not None:
                waiting.setdefault(opened(shard), []).append(i)
                continue
            yield from self._many(asks, max_wait_us, waiting, found)
            waiting = {}
            found[i] = yield from self._deciding(asked, max_wait_us, True)
        yield from self._many(asks, max_wait_us, waiting, found)

    def _many(self, asks: Any, max_wait_us: int | None, waiting: dict[Shard, list[int]], found: list[Any]) -> Steps:
        if not waiting:
            return
        sent = {shard: [self.sent(asks[i], shard) for i in places] for shard, places in waiting.items()}
        answers = yield Step([Call(shard, "decide_many", (copies, max_wait_us)) for shard, copies in sent.items()])
        for (shard, places), answer in zip(waiting.items(), answers, strict=True):
            if isinstance(answer, StoreError):
                continue
            for i, copies, decision in zip(places, sent[shard], answer, strict=True):
                self.kept(asks[i], copies)
                found[i] = decision
        fine(answers)

    def _returning(self, asked: list[Claim], charged_at: int) -> Steps:
        calls = []
        for group in self._groups(asked, leased=True):
            starts: dict[int, list[Claim]] = {}
            for claim in group.claims:
                at = self._starts.get((charged_at, claim.limit.identity, claim.key), charged_at)
                starts.setdefault(at, []).append(claim)
            calls += [Call(group.shard, "give_back", (some, at)) for at, some in starts.items()]
        answers = yield Step(calls)
        fine(answers)

    def _resetting(self, asked: list[Claim]) -> Steps:
        groups = self._groups(asked, leased=True)
        fine((yield Step([Call(group.shard, "reset", (group.claims,)) for group in groups])))

    def _groups(self, asked: list[Claim], leased: bool = False) -> list[ShardGroup]:
        """The claims by the shards they live on, in the order in which these are first named; hot ones through their leases."""
        places: dict[Shard, list[int]] = {}
        for i, claim in enumerate(asked):
            shard = opened(self.home(claim.key))
            places.setdefault(self.way(shard, [claim]) if leased else shard, []).append(i)
        return [ShardGroup(shard, self.sent([asked[i] for i in some], shard), some) for shard, some in places.items()]

    def _remember(self, told_us: int, start_us: int, claims: list[Claim]) -> None:
        """A charge on a shard whose clock differs is given back at that shard's own start."""
        if told_us == start_us:
            return
        for claim in claims:
            self._starts[told_us, claim.limit.identity, claim.key] = start_us
        while len(self._starts) > STARTS:
            self._starts.pop(next(iter(self._starts)), None)

    # Driving the steps --------------------------------------------------------------------------------------------------

    def _drive(self, make: Callable[[], Steps]) -> Any:
        """Makes the calls of each step one after the other; again from the start when a shard was closed or lost."""
        while True:
            run = Run(self._budget_us)
            side = self.step_in()
            try:
                work = make()
                answers: list[Any] | None = None
                while True:
                    step = work.send(answers)  # type: ignore[arg-type]
                    answers = []
                    for call in step.calls:
                        answers.append(run.made(call))
                        if step.eager and not answers[-1]:
                            break
            except StopIteration as end:
                return end.value
            except (Closed, StoreUnavailable) as error:
                blocked = run.blocked(error)
            finally:
                self.step_out(side)
            self.elsewhere(*blocked)

    async def _adrive(self, make: Callable[[], Steps]) -> Any:
        """As _drive; the calls of a step are made at once."""
        while True:
            run = Run(self._budget_us)
            side = self.step_in()
            try:
                work = make()
                answers: list[Any] | None = None
                while True:
                    step = work.send(answers)  # type: ignore[arg-type]
                    if len(step.calls) == 1:
                        answers = [await run.amade(step.calls[0])]
                    else:
                        answers = await asyncio.gather(*[run.amade(call) for call in step.calls])
            except StopIteration as end:
                return end.value
            except (Closed, StoreUnavailable) as error:
                blocked = run.blocked(error)
            finally:
                self.step_out(side)
            await self._aelsewhere(*blocked)

    async def _to_the_end(self, work: Any, asked: list[Claim]) -> Decision:
        """A decision on several shards is finished although its caller is cancelled, and then given back."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            undo = asyncio.ensure_future(self._undo(task, asked))
            self._tasks.add(undo)
            undo.add_done_callback(self._tasks.discard)
            raise

    async def _undo(self, task: asyncio.Future[Decision], asked: list[Claim]) -> None:
        try:
            decision = await task
            if decision:
                await self.agive_back(asked, decision.start_us)
        except StoreError as error:
            log.warning("a cancelled decision could not be given back: %s", error)

    # Hand-over and the end -----------------------------------------------------------------------------------------------

    def items(self, limit: NamedLimit) -> Iterable[tuple[str, Any]]:
        for shard in self._shards.values():
            if shard.name not in self._lost:
                found = shard.store.items(self.at(limit, shard))
                yield from [(key, state) for key, state in found if self.home(key) is shard]

    def load(self, limit: NamedLimit, items: Iterable[tuple[str, Any]]) -> None:
        pairs = list(items)
        for key, _ in pairs:
            if type(key) is not str:
                raise TypeError(f"a key must be a str, not {type(key).__name__}: {key!r}")
        self._drive(lambda: self._loading(limit, pairs))

    def _loading(self, limit: NamedLimit, pairs: list[tuple[str, Any]]) -> Steps:
        by_home: dict[Shard, list[tuple[str, Any]]] = {}
        for key, state in pairs:
            by_home.setdefault(opened(self.home(key)), []).append((key, state))
        answers = yield Step([Call(shard, "load", (self.at(limit, shard), some)) for shard, some in by_home.items()])
        fine(answers)

    def close(self) -> None:
        """Closes every shard, its leases first."""
        for store in self._stores():
            store.close()

    async def aclose(self) -> None:
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))
        for store in self._stores():
            await store.aclose()

    def _stores(self) -> list[Store]:
        """What is to be closed: who leases from a shard closes it."""
        return [(shard.leasing or shard).store for shard in self._shards.values()]


def some_claims(claims: Sequence[Claim]) -> list[Claim]:
    found = list(claims)
    only_claims(found)
    return found
