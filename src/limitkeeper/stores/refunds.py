"""Giving back, booking anew, handing over: what happens to charges after they were decided, over cells near by."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.algorithms.claim import Claim, NamedLimit
    from cython.cimports.limitkeeper.algorithms.limit import Limit, State
    from cython.cimports.limitkeeper.decision import Decision
    from cython.cimports.limitkeeper.stores.cell_store import CellStore, LimitHandle
else:
    from ..algorithms.claim import Claim, NamedLimit
    from ..algorithms.limit import Limit, State
    from ..decision import Decision
    from .cell_store import CellStore, LimitHandle

from ..algorithms.all_of import together
from ..decision import STORE
from .cell_store import only_claims, patience_us


@cython.cclass
class RefundingStore(CellStore):
    """A store near by that takes back what it gave."""

    @cython.cfunc
    def return_all(self, claims: list, charged_at: cython.longlong, now_us: cython.longlong) -> cython.int:  # type: ignore[type-arg]
        claim: Claim
        for claim in claims:
            self.return_one(claim, charged_at, now_us)
        return 0

    @cython.cfunc
    def return_one(self, claim: Claim, charged_at: cython.longlong, now_us: cython.longlong) -> cython.int:
        place: LimitHandle = self.place_of(claim.named)
        limit: Limit = place.limit
        tick: cython.longlong = limit.tick
        at: cython.longlong = charged_at // tick if charged_at >= 0 else -1
        full: cython.bint = self.is_full(place, 1, now_us)
        while True:
            stamp: cython.ulonglong = self.revision
            if claim.cost >= 0 and not self.known(place, claim.key, now_us, full):
                return 0
            state: State = self.read(place, claim.key, now_us, full)
            untouched = state[0] == claim.new_a and state[1] == claim.new_b and state[2] == claim.new_c
            if untouched and claim.undoable and not place.limit.logs and claim.cost == claim.charged:
                claim.undoable = False  # nothing has happened since: as if it had never been charged
                return self.put(place, claim.key, claim.a, claim.b, claim.c, now_us, full)
            if limit.logs:
                self.expose(place, claim.key, now_us, full)
            back: State = limit.undo(limit, state[0], state[1], state[2], now_us // tick, claim.cost, claim.charged, at)
            if stamp == self.revision:
                break
        return self.put(place, claim.key, back[0], back[1], back[2], now_us, full)

    def give_back(self, claims: Sequence[Claim], charged_at: int = -1, source: str = STORE) -> None:
        asked = list(claims)
        only_claims(asked)
        self.begin()
        try:
            self.return_all(asked, charged_at, self.now())
        finally:
            self.end()

    @property
    def can_rebook(self) -> bool:
        return True

    def rebook(self, turns: Sequence[Any]) -> list[Decision | None]:
        """Some leave a line and the others move up, in one step: each turn is (claims, charged_at, deadline_us, stays), in
        order. All whose start is still to come give back, from the last to the first; those who stay ask again, in order.
        Answers with their new Decisions, None for a turn that stays as it is.

        Nobody may come off worse. That could happen where several limits left gaps between their charges, which can't be
        given back one by one; then everything is put back, those who leave give back what the rules can take, and all
        others stay where they are.
        """
        collecting = gc.isenabled()
        gc.disable()  # a finaliser that decided something in between would be put back with the rest
        try:
            self.begin()
            try:
                return self.rebooked(list(turns), self.now())
            finally:
                self.end()
        finally:
            if collecting:
                gc.enable()

    def rebooked(self, turns: list[Any], now_us: int) -> list[Decision | None]:
        claims = {(claim.limit.identity, claim.key): claim for turn in turns for claim in turn[0]}
        saved = [(claim, self.saved(self.place_of(claim.limit), claim.key, now_us)) for claim in claims.values()]
        for asked, charged_at, _, stays, _ in reversed(turns):
            if not stays or charged_at > now_us:
                self.return_all(list(asked), charged_at, now_us)
        found: list[Decision | None] = []
        for asked, charged_at, deadline_us, stays, _ in turns:
            if not stays or charged_at <= now_us:
                found.append(None)
                continue
            left = None if deadline_us is None else max(0, deadline_us - now_us)
            again = list(asked)
            decision: Decision = together(again, now_us, self.charge(again, patience_us(left), True, now_us, 0))
            if not decision.allowed or decision.start_us > charged_at:
                return self.put_back(turns, saved, now_us)
            found.append(decision)
        return found

    def put_back(self, turns: list[Any], saved: list[Any], now_us: int) -> list[Decision | None]:
        """Undoes a rebooking that would have hurt somebody; those who leave give back as if nobody could move."""
        for claim, state in saved:
            self.replace(self.place_of(claim.limit), claim.key, state, now_us)
        for asked, charged_at, _, stays, _ in reversed(turns):
            if not stays:
                self.return_all(list(asked), charged_at, now_us)
        return [None] * len(turns)

    def replace(self, place: LimitHandle, key: str, state: Any, now_us: int) -> None:
        """Puts a state given as plain data in the place of whatever a key has; None: nothing."""
        self.discard(place, key)
        if state is not None:
            self.restore(place, key, state, now_us)

    @cython.cfunc
    def restore(self, place: LimitHandle, key: str, state: Any, now_us: cython.longlong) -> cython.int:
        """Stores a state given as plain data: three integers, or the entries of a log."""
        full: cython.bint = self.is_full(place, 1, now_us)
        if not place.limit.logs:
            return self.put(place, key, state[0], state[1], state[2], now_us, full)
        for moment, cost in state[0]:
            self.put(place, key, moment, cost, 0, now_us, full)
        return 0

    # Keeping house ---------------------------------------------------------------------------------------------

    def reset(self, claims: Sequence[Claim]) -> None:
        asked = list(claims)
        only_claims(asked)
        self.begin()
        try:
            for claim in asked:
                self.discard(self.place_of(claim.limit), claim.key)
                self.revision += 1
        finally:
            self.end()

    def items(self, limit: NamedLimit) -> Iterable[tuple[str, Any]]:
        place: LimitHandle = self.place(limit)
        now_us = self.now()
        return [(key, self.in_units(place, unit, state, now_us)) for key, unit, state in self.pairs(place)]

    def load(self, limit: NamedLimit, items: Iterable[tuple[str, Any]]) -> None:
        pairs = list(items)
        for key, _ in pairs:
            if type(key) is not str:
                raise TypeError(f"a key must be a str, not {type(key).__name__}: {key!r}")
        place: LimitHandle = self.place(limit)
        for start in range(0, len(pairs), 500):  # some at a time: others wait meanwhile
            self.begin()
            try:
                now_us: cython.longlong = self.now()
                for key, state in pairs[start : start + 500]:
                    self.replace(place, key, state, now_us)
            finally:
                self.end()
