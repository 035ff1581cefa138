"""MemoryStore: the state in this process, exact, bounded, without a thread of its own.

Atomic by construction. Compiled, a decision runs from reading the cell to writing it without allocating, calling Python
or dropping a reference, so nothing can come in between under the interpreter's lock. Plain, a re-entrant lock keeps
other threads out, and a stamp tells when a finaliser that ran meanwhile decided something itself; then it is done again.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from headgate import _plain as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.headgate.algorithms import all_of
    from cython.cimports.headgate.algorithms.claim import Claim, NamedLimit
    from cython.cimports.headgate.algorithms.limit import Answer, Limit, State
    from cython.cimports.headgate.algorithms.verdict import MAX_WAIT, PLAIN, REFUSED
    from cython.cimports.headgate.decision import Decision
    from cython.cimports.headgate.stores.cells import Cells, Place
    from cython.cimports.headgate.stores.table import Table
else:
    from ..algorithms import all_of
    from ..algorithms.claim import Claim, NamedLimit
    from ..algorithms.limit import Answer, Limit, State
    from ..algorithms.verdict import MAX_WAIT, PLAIN, REFUSED
    from ..decision import Decision, fresh
    from .cells import Cells, Place
    from .table import Table

    def blank(store: MemoryStore, place: Place) -> Decision:
        """A Decision to be filled in."""
        return fresh(place.name)


from ..algorithms.all_of import together
from ..errors import ConfigurationError


@cython.cclass
class MemoryStore(Cells):
    """The default store. `max_keys` bounds it; `clock` is for tests."""

    # Deciding --------------------------------------------------------------------------------------------------

    @cython.cfunc
    def decide_one(
        self,
        decision: Decision,
        place: Place,
        key: str,
        cost: cython.longlong,
        max_wait_us: cython.longlong,
        commit: cython.bint,
        now_us: cython.longlong,
    ) -> Decision:
        """One limit, one key: the hot path. The answer goes into `decision`, so nothing is allocated once the cell is found."""
        limit: Limit = place.limit
        table: Table = place.table
        tick: cython.longlong = limit.tick
        now: cython.longlong = now_us if limit.fine else now_us // tick
        patience: cython.longlong = 0
        if max_wait_us > 0 and limit.reserves:
            patience = (now_us + max_wait_us) // tick - now
        full: cython.bint = False
        answer: Answer
        state: State
        a: cython.longlong
        b: cython.longlong
        c: cython.longlong
        start: cython.longlong
        retry: cython.longlong
        remaining: cython.longlong
        reset: cython.longlong
        while True:
            if PLAIN:
                stamp = self.stamp
            cell = table.find(key)
            known: cython.bint = False
            if cell:
                known = cell.unit == place.unit
            else:
                full = self.is_full(table, 1, now_us)
            if known:
                answer = limit.rule(limit, cell.a, cell.b, cell.c, now, now, cost, patience)
            else:
                state = self.read(place, key, now_us, full)
                answer = limit.rule(limit, state[0], state[1], state[2], now, now, cost, patience)
            if not PLAIN or stamp == self.stamp:
                break
        a, b, c, start, retry, remaining, reset = answer
        if start >= 0 and commit and cost > 0:
            if known and not table.logs:
                cell.a = a
                cell.b = b
                cell.c = c
                self.stamp += 1
            else:
                self.put(place, key, a, b, c, now_us, full)
        elif not commit or cost == 0:
            return self.glance(place, key, cost, start, retry, now_us)
        decision.limit = limit.capacity
        decision.remaining = remaining
        decision.reset_us = reset * tick - now_us if reset > now else 0
        decision.retry_us = 0
        decision.wait_us = 0
        decision.start_us = now_us
        decision.allowed = start >= 0
        if start > now:
            decision.start_us = start * tick
            decision.wait_us = start * tick - now_us
        elif start < 0:
            decision.retry_us = retry * tick - now_us if start == REFUSED else -1
            if not limit.fine and patience_given(limit, max_wait_us) and start == REFUSED:
                state = self.read(place, key, now_us, full)
                retry = all_of.retry_us(limit, state[0], state[1], state[2], now_us, cost, max_wait_us)
                decision.retry_us = retry - now_us
        self.calls += 1
        if self.calls & 63 == 0:
            table.sweep(16, now_us)
        if PLAIN:
            decision.__class__ = Decision
        return decision

    @cython.cfunc
    def glance(
        self,
        place: Place,
        key: str,
        cost: cython.longlong,
        start: cython.longlong,
        retry: cython.longlong,
        now_us: cython.longlong,
    ) -> Decision:
        """The answer to a peek: the verdict on a hit, beside what is there now."""
        limit: Limit = place.limit
        now: cython.longlong = now_us // limit.tick
        state: State = self.read(place, key, now_us, self.is_full(place.table, 1, now_us))
        answer: Answer = limit.rule(limit, state[0], state[1], state[2], now, now, 0, 0)
        allowed = start >= 0 or cost == 0
        start_us: cython.longlong = start * limit.tick if start > now and cost > 0 else now_us
        return Decision(
            allowed,
            limit.capacity,
            answer[5],
            0 if allowed else (retry * limit.tick - now_us if start == -1 else -1),
            answer[6] * limit.tick - now_us if answer[6] > now else 0,
            start_us - now_us,
            start_us,
            place.name,
        )

    @cython.cfunc
    def decide_all(self, claims: list, max_wait_us: cython.longlong, commit: cython.bint, now_us: cython.longlong) -> Decision:  # type: ignore[type-arg]
        """Several limits: load, decide, store. When anything was decided in between, it is done again."""
        i: cython.Py_ssize_t
        claim: Claim
        n: cython.Py_ssize_t = len(claims)
        while True:
            full: cython.bint = False
            for i in range(n):  # whatever has to be made first may run Python
                claim = claims[i]
                full = full or self.is_full(self.place_of(claim.named).table, n, now_us)
            stamp: cython.ulonglong = self.stamp
            for i in range(n):
                claim = claims[i]
                state: State = self.read(claim.named.place, claim.key, now_us, full)
                claim.a = state[0]
                claim.b = state[1]
                claim.c = state[2]
            start_us: cython.longlong = all_of.decide(claims, now_us, max_wait_us)
            if stamp == self.stamp:
                break
        if start_us >= 0 and commit:
            for i in range(n):
                claim = claims[i]
                if claim.cost > 0:
                    self.put(claim.named.place, claim.key, claim.new_a, claim.new_b, claim.new_c, now_us, full)
                    claim.undoable = True
        return together(claims, now_us, start_us, commit)

    def decide(self, claims: Sequence[Claim], max_wait_us: int | None = 0, commit: bool | int = True) -> Decision:
        wait: cython.longlong = patience_us(max_wait_us)
        asked = checked(claims)
        if cython.compiled:
            return self.decide_all(asked, wait, commit, self.now())
        with self._lock:
            return self.decide_all(asked, wait, bool(commit), self.now())

    def decide_many(self, asks: Sequence[Sequence[Claim]], max_wait_us: int | None = 0) -> list[Decision]:
        wait: cython.longlong = patience_us(max_wait_us)
        asked = [checked(claims) for claims in asks]
        with self._lock:
            now_us: cython.longlong = self.now()
            return [self.decide_all(claims, wait, True, now_us) for claims in asked]

    # Giving back -----------------------------------------------------------------------------------------------

    @cython.cfunc
    def return_all(self, claims: list, charged_at: cython.longlong, now_us: cython.longlong) -> cython.int:  # type: ignore[type-arg]
        claim: Claim
        for claim in claims:
            self.return_one(claim, charged_at, now_us)
        return 0

    @cython.cfunc
    def return_one(self, claim: Claim, charged_at: cython.longlong, now_us: cython.longlong) -> cython.int:
        place: Place = self.place_of(claim.named)
        limit: Limit = place.limit
        tick: cython.longlong = limit.tick
        at: cython.longlong = charged_at // tick if charged_at >= 0 else -1
        full: cython.bint = self.is_full(place.table, 1, now_us)
        while True:
            stamp: cython.ulonglong = self.stamp
            if claim.cost >= 0 and not self.find(place, claim.key, now_us, full):
                return 0
            state: State = self.read(place, claim.key, now_us, full)
            untouched = state[0] == claim.new_a and state[1] == claim.new_b and state[2] == claim.new_c
            if untouched and claim.undoable and not place.table.logs and claim.cost == claim.charged:
                claim.undoable = False  # nothing has happened since: as if it had never been charged
                return self.put(place, claim.key, claim.a, claim.b, claim.c, now_us, full)
            back: State = limit.undo(limit, state[0], state[1], state[2], now_us // tick, claim.cost, claim.charged, at)
            if stamp == self.stamp:
                break
        return self.put(place, claim.key, back[0], back[1], back[2], now_us, full)

    def give_back(self, claims: Sequence[Claim], charged_at: int = -1) -> None:
        asked = list(claims)
        only_claims(asked)
        with self._lock:
            self.return_all(asked, charged_at, self.now())

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
            with self._lock:
                return self.rebooked(list(turns), self.now())
        finally:
            if collecting:
                gc.enable()

    def rebooked(self, turns: list[Any], now_us: int) -> list[Decision | None]:
        claims = {(claim.limit.identity, claim.key): claim for turn in turns for claim in turn[0]}
        saved = [(claim, self.saved(self.place_of(claim.limit), claim.key, now_us)) for claim in claims.values()]
        for asked, charged_at, _, stays in reversed(turns):
            if not stays or charged_at > now_us:
                self.return_all(list(asked), charged_at, now_us)
        found: list[Decision | None] = []
        for asked, charged_at, deadline_us, stays in turns:
            if not stays or charged_at <= now_us:
                found.append(None)
                continue
            left = None if deadline_us is None else max(0, deadline_us - now_us)
            decision: Decision = self.decide_all(list(asked), patience_us(left), True, now_us)
            if not decision.allowed or decision.start_us > charged_at:
                return self.put_back(turns, saved, now_us)
            found.append(decision)
        return found

    def saved(self, place: Place, key: str, now_us: int) -> Any:
        """A key's state as plain data in its limit's units; None when there is none."""
        unit, state = place.table.saved(key)
        return state if state is None else self.in_units(place, unit, state, now_us)

    def in_units(self, place: Place, unit: int, state: Any, now_us: int) -> Any:
        """A state of another rate of the same name, converted."""
        if unit == place.unit or place.limit.logs:
            return state
        return place.limit.convert(place.table.units[unit - 1], state, min(now_us, place.since_us))

    def put_back(self, turns: list[Any], saved: list[Any], now_us: int) -> list[Decision | None]:
        """Undoes a rebooking that would have hurt somebody; those who leave give back as if nobody could move."""
        for claim, state in saved:
            table = self.place_of(claim.limit).table
            table.discard(claim.key)
            if state is not None:
                self.restore(self.place_of(claim.limit), claim.key, state, now_us)
        for asked, charged_at, _, stays in reversed(turns):
            if not stays:
                self.return_all(list(asked), charged_at, now_us)
        return [None] * len(turns)

    @cython.cfunc
    def restore(self, place: Place, key: str, state: Any, now_us: cython.longlong) -> cython.int:
        """Stores a state given as plain data: three integers, or the entries of a log."""
        full: cython.bint = self.is_full(place.table, 1, now_us)
        if not place.table.logs:
            return self.put(place, key, state[0], state[1], state[2], now_us, full)
        for moment, cost in state[0]:
            self.put(place, key, moment, cost, 0, now_us, full)
        return 0

    # Keeping house ---------------------------------------------------------------------------------------------

    def reset(self, claims: Sequence[Claim]) -> None:
        with self._lock:
            for claim in claims:
                self.place_of(claim.named).table.discard(claim.key)
                self.stamp += 1

    def items(self, limit: NamedLimit) -> Iterable[tuple[str, Any]]:
        with self._lock:
            place = self.place(limit)
            now_us = self.now()
            return [(key, self.in_units(place, unit, state, now_us)) for key, unit, state in place.table.items()]

    def load(self, limit: NamedLimit, items: Iterable[tuple[str, Any]]) -> None:
        pairs = list(items)
        for key, _ in pairs:
            if type(key) is not str:
                raise TypeError(f"a key must be a str, not {type(key).__name__}: {key!r}")
        with self._lock:
            place: Place = self.place(limit)
            now_us: cython.longlong = self.now()
            for key, state in pairs:
                place.table.discard(key)
                self.restore(place, key, state, now_us)

    def sweep(self, budget: int = 1_000_000) -> None:
        """Forgets idle keys now, rather than a few at a time as calls come in."""
        with self._lock:
            now_us = self.now()
            for table in self._tables.values():
                table.tidy(budget, now_us)

    def __len__(self) -> int:
        return self.room.live

    def __bool__(self) -> bool:
        return True

    def close(self) -> None:
        with self._lock:
            for table in self._tables.values():
                table.clear()


@cython.cfunc
@cython.exceptval(check=False)
def patience_given(limit: Limit, max_wait_us: cython.longlong) -> cython.bint:
    return max_wait_us > 0 and limit.reserves


def patience_us(max_wait_us: Any) -> int:
    """A wait in microseconds: None is without bound."""
    if max_wait_us is None or max_wait_us > MAX_WAIT:
        return MAX_WAIT
    return int(max_wait_us)


def checked(claims: Any) -> Any:
    """The claims of one decision: at least one, and a limit may be asked once for a key."""
    asked = list(claims)
    if not asked:
        raise ConfigurationError("a decision needs at least one claim")
    only_claims(asked)
    if len(asked) > 1 and len({(claim.limit.identity, claim.key) for claim in asked}) < len(asked):
        raise ConfigurationError("one decision names the same limit and key twice; name it once, with the whole cost")
    return asked


def only_claims(claims: Any) -> None:
    """Nothing but claims may go below the waist: there, C takes them at their word."""
    for claim in claims:
        if not isinstance(claim, Claim):
            raise TypeError(f"{claim!r} is no Claim")
