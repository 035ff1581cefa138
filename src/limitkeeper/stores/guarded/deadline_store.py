"""Any store, made to answer or fail in time: a hung call is left to others, and what it charges after all is given back.

For stores that can't promise that themselves (`answers_within`). Each call is an errand (errands.py), with claims of its own:
whoever comes late writes into nobody's. A store whose async face is the sync one is asked by a thread in asyncio too,
or it would stop the loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from ...algorithms.claim import Claim, NamedLimit
from ...decision import STORE, Decision
from ..contract import Store
from .deadline_pool import DeadlinePool

Asks = Sequence[Sequence[Claim]]


class DeadlineStore(Store):
    """`PromptStore(store, 20_000)`: every verb but `items` and `load` ends within 20 ms, with an answer or with StoreTimeout."""

    def __init__(self, store: Store, budget_us: int) -> None:
        self.inner = store
        self.budget_us = budget_us
        self.errands = DeadlinePool()
        self.two_faced = type(store).adecide is not Store.adecide

    @property
    def clock(self) -> Any:
        return self.inner.clock

    @property
    def overflow(self) -> int:
        return self.inner.overflow

    def answers_within(self, budget_us: int) -> bool:
        self.budget_us = min(budget_us, self.budget_us)
        return True

    def can_reserve(self, limit: NamedLimit) -> bool:
        return self.inner.can_reserve(limit)

    def register(self, limit: NamedLimit) -> None:
        self._run(lambda: self.inner.register(limit))

    def items(self, limit: NamedLimit) -> Iterable[tuple[str, Any]]:
        return self.inner.items(limit)

    def load(self, limit: NamedLimit, items: Iterable[tuple[str, Any]]) -> None:
        self.inner.load(limit, items)

    # Errands ---------------------------------------------------------------------------------------------------

    def _run(self, call: Callable[[], Any], charges: Asks = ()) -> Any:
        return self.errands.run(call, self._late(charges), self.budget_us)

    async def _arun(self, acall: Callable[[], Awaitable[Any]], call: Callable[[], Any], charges: Asks = ()) -> Any:
        if self.two_faced:
            return await self.errands.arun(acall, self._alate(charges), self.budget_us)
        return await self.errands.run_async(call, self._late(charges), self.budget_us)

    def _late(self, charges: Asks) -> Callable[[Any], None] | None:
        """What to do with an answer that comes when nobody waits any more: what it charged goes back."""
        if not charges:
            return None

        def give_back(found: Any) -> None:
            for claims, decision in zip(charges, found if isinstance(found, list) else [found], strict=True):
                if decision:
                    self.inner.give_back(claims, decision.start_us)

        return give_back

    def _alate(self, charges: Asks) -> Callable[[Any], Awaitable[None]] | None:
        if not charges:
            return None

        async def give_back(found: Any) -> None:
            for claims, decision in zip(charges, found if isinstance(found, list) else [found], strict=True):
                if decision:
                    await self.inner.agive_back(claims, decision.start_us)

        return give_back

    # Looking whether it is back: by those who are kept for that, also when all others hang ---------------------------

    def look(self, claims: Sequence[Claim]) -> None:
        self.errands.run(lambda: self.inner.decide(claims, 0, commit=False), None, self.budget_us, looks=True)

    async def alook(self, claims: Sequence[Claim]) -> None:
        if self.two_faced:
            await self.errands.arun(lambda: self.inner.adecide(claims, 0, commit=False), None, self.budget_us, looks=True)
        else:
            await self.errands.run_async(lambda: self.inner.decide(claims, 0, commit=False), None, self.budget_us, looks=True)

    # Verbs -----------------------------------------------------------------------------------------------------

    def decide_one(self, named: NamedLimit, key: str, cost: int, max_wait_us: int, commit: bool) -> Decision:
        found: Decision = self._run(
            lambda: self.inner.decide_one(named, key, cost, max_wait_us, commit), [[Claim(named, key, cost)]] if commit else ()
        )
        return found

    def hit_nowait(self, named: NamedLimit, key: str, cost: int) -> Decision | None:
        return self.inner.hit_nowait(named, key, cost)

    def decide(
        self,
        claims: Sequence[Claim],
        max_wait_us: int | None = 0,
        *,
        commit: bool = True,
        remember: bool = False,
        not_before_us: int = 0,
    ) -> Decision:
        asked = copied(claims)
        found: Decision = self._run(
            lambda: self.inner.decide(asked, max_wait_us, commit=commit, remember=remember, not_before_us=not_before_us),
            [asked] if commit else (),
        )
        copy_states(claims, asked)
        return found

    async def adecide(
        self,
        claims: Sequence[Claim],
        max_wait_us: int | None = 0,
        *,
        commit: bool = True,
        remember: bool = False,
        not_before_us: int = 0,
    ) -> Decision:
        asked = copied(claims)
        found: Decision = await self._arun(
            lambda: self.inner.adecide(asked, max_wait_us, commit=commit, remember=remember, not_before_us=not_before_us),
            lambda: self.inner.decide(asked, max_wait_us, commit=commit, remember=remember, not_before_us=not_before_us),
            [asked] if commit else (),
        )
        copy_states(claims, asked)
        return found

    def decide_many(self, asks: Asks, max_wait_us: int | None = 0) -> list[Decision]:
        found: list[Decision] = self._run(lambda: self.inner.decide_many(asks, max_wait_us), asks)
        return found

    async def adecide_many(self, asks: Asks, max_wait_us: int | None = 0) -> list[Decision]:
        found: list[Decision] = await self._arun(
            lambda: self.inner.adecide_many(asks, max_wait_us), lambda: self.inner.decide_many(asks, max_wait_us), asks
        )
        return found

    def give_back(self, claims: Sequence[Claim], charged_at: int = -1, source: str = STORE) -> None:
        self._run(lambda: self.inner.give_back(claims, charged_at, source))

    async def agive_back(self, claims: Sequence[Claim], charged_at: int = -1, source: str = STORE) -> None:
        await self._arun(
            lambda: self.inner.agive_back(claims, charged_at, source), lambda: self.inner.give_back(claims, charged_at, source)
        )

    def reset(self, claims: Sequence[Claim]) -> None:
        self._run(lambda: self.inner.reset(claims))

    async def areset(self, claims: Sequence[Claim]) -> None:
        await self._arun(lambda: self.inner.areset(claims), lambda: self.inner.reset(claims))

    def close(self) -> None:
        self.errands.close()
        self.inner.close()

    async def aclose(self) -> None:
        self.errands.close()
        await self.inner.aclose()


def copied(claims: Sequence[Claim]) -> list[Claim]:
    """Claims of their own for a call that may be abandoned."""
    return [Claim(claim.limit, claim.key, claim.cost, claim.charged) for claim in claims]


def copy_states(claims: Sequence[Claim], asked: Sequence[Claim]) -> None:
    """Lets claims know what their copies remember of a charge."""
    for claim, copy in zip(claims, asked, strict=True):
        before_and_after = copy.remembered()
        if before_and_after is not None:
            claim.remember(*before_and_after)
