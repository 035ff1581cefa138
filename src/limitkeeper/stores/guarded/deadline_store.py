"""Wraps a store that can't promise a deadline itself (`answers_within`): every call ends within the budget.

Each call runs in a DeadlinePool, with copies of the claims, since an abandoned call may write into them at any time. What an
abandoned call charged after all is given back. A store whose async methods block is called by a thread in asyncio too, so
that it does not stop the event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from ...algorithms.claim import Claim, NamedLimit
from ...clock import Clock
from ...decision import STORE, Decision
from ..contract import Store
from ..sans_io import Call, Plan, aperform_call, arun, perform_call, run
from .deadline_pool import DeadlinePool, StartThread, start_daemon

Requests = Sequence[Sequence[Claim]]
KeyState = tuple[str, Any]


class DeadlineStore(Store):
    """`DeadlineStore(store, 20_000)`: every method but `items` and `load` ends within 20 ms, with an answer or StoreTimeout."""

    def __init__(self, store: Store, budget_us: int, start_thread: StartThread = start_daemon) -> None:
        self.inner = store
        self.budget_us = budget_us
        self.pool = DeadlinePool(start_thread=start_thread)
        self.awaits = type(store).adecide is not Store.adecide

    @property
    def clock(self) -> Clock:
        return self.inner.clock  # type: ignore[no-any-return]

    @property
    def overflow(self) -> int:
        return self.inner.overflow

    def answers_within(self, budget_us: int) -> bool:
        self.budget_us = min(budget_us, self.budget_us)
        return True

    def can_reserve(self, limit: NamedLimit) -> bool:
        return self.inner.can_reserve(limit)

    def items(self, limit: NamedLimit) -> Iterable[KeyState]:
        return self.inner.items(limit)

    def load(self, limit: NamedLimit, items: Iterable[KeyState]) -> None:
        self.inner.load(limit, items)

    async def aload(self, limit: NamedLimit, items: Iterable[KeyState]) -> None:
        await self.inner.aload(limit, items)

    # Calls -----------------------------------------------------------------------------------------------------

    def _call(self, call: Call, charged: Requests = (), probe: bool = False) -> Any:
        """Makes a call of the store. `charged` are the claims that an allowed answer has charged."""
        late = partial(self._run_late, charged) if charged else None
        return self.pool.run(partial(perform_call, call), late, self.budget_us, probe)

    async def _acall(self, call: Call, charged: Requests = (), probe: bool = False) -> Any:
        if self.awaits:
            alate = partial(self._arun_late, charged) if charged else None
            return await self.pool.arun(partial(aperform_call, call), alate, self.budget_us, probe)
        late = partial(self._run_late, charged) if charged else None
        return await self.pool.run_async(partial(perform_call, call), late, self.budget_us, probe)

    def _give_back_late(self, charged: Requests, answer: Decision | list[Decision]) -> Plan[None]:
        """Gives back what a call charged after it was abandoned."""
        for claims, decision in zip(charged, answer if isinstance(answer, list) else [answer], strict=True):
            if decision:
                yield Call(self.inner, "give_back", (claims, decision.start_us, decision.source))

    def _run_late(self, charged: Requests, answer: Decision | list[Decision]) -> None:
        run(self._give_back_late(charged, answer))

    async def _arun_late(self, charged: Requests, answer: Decision | list[Decision]) -> None:
        await arun(self._give_back_late(charged, answer))

    # Methods ---------------------------------------------------------------------------------------------------

    def register(self, limit: NamedLimit) -> None:
        self._call(Call(self.inner, "register", (limit,)))

    def probe(self, claims: Sequence[Claim]) -> None:
        """Decides without charging, in a worker that is kept for this: it works also when all others hang."""
        self._call(Call(self.inner, "decide", (claims, 0), {"commit": False}), probe=True)

    async def aprobe(self, claims: Sequence[Claim]) -> None:
        await self._acall(Call(self.inner, "decide", (claims, 0), {"commit": False}), probe=True)

    def decide_one(self, named: NamedLimit, key: str, cost: int, max_wait_us: int, commit: bool) -> Decision:
        charged = [[Claim(named, key, cost)]] if commit else ()
        call = Call(self.inner, "decide_one", (named, key, cost, max_wait_us, commit))
        return self._call(call, charged)  # type: ignore[no-any-return]

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
        copies = copy_claims(claims)
        options = {"commit": commit, "remember": remember, "not_before_us": not_before_us}
        found: Decision = self._call(Call(self.inner, "decide", (copies, max_wait_us), options), [copies] if commit else ())
        copy_states(claims, copies)
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
        copies = copy_claims(claims)
        options = {"commit": commit, "remember": remember, "not_before_us": not_before_us}
        found: Decision = await self._acall(
            Call(self.inner, "decide", (copies, max_wait_us), options), [copies] if commit else ()
        )
        copy_states(claims, copies)
        return found

    def decide_many(self, asks: Requests, max_wait_us: int | None = 0) -> list[Decision]:
        return self._call(Call(self.inner, "decide_many", (asks, max_wait_us)), asks)  # type: ignore[no-any-return]

    async def adecide_many(self, asks: Requests, max_wait_us: int | None = 0) -> list[Decision]:
        return await self._acall(Call(self.inner, "decide_many", (asks, max_wait_us)), asks)  # type: ignore[no-any-return]

    def give_back(self, claims: Sequence[Claim], charged_at: int = -1, source: str = STORE) -> None:
        self._call(Call(self.inner, "give_back", (claims, charged_at, source)))

    async def agive_back(self, claims: Sequence[Claim], charged_at: int = -1, source: str = STORE) -> None:
        await self._acall(Call(self.inner, "give_back", (claims, charged_at, source)))

    def reset(self, claims: Sequence[Claim]) -> None:
        self._call(Call(self.inner, "reset", (claims,)))

    async def areset(self, claims: Sequence[Claim]) -> None:
        await self._acall(Call(self.inner, "reset", (claims,)))

    def close(self) -> None:
        self.pool.close()
        self.inner.close()

    async def aclose(self) -> None:
        self.pool.close()
        await self.inner.aclose()


def copy_claims(claims: Sequence[Claim]) -> list[Claim]:
    """Copies for a call that may be abandoned."""
    return [Claim(claim.limit, claim.key, claim.cost, claim.charged) for claim in claims]


def copy_states(into: Sequence[Claim], claims: Sequence[Claim], logs: bool = True) -> None:
    """Copies the states that claims remember of a charge; those of logs only with `logs`."""
    for target, claim in zip(into, claims, strict=True):
        states = claim.remembered()
        if states is not None and (logs or not claim.limit.limit.logs):
            target.remember(*states)
