"""CellStore: decides, gives back and rebooks claims over cells in this machine's memory.

A subclass says where the cells are: `read`, `put`, `known`, `is_full`, `discard`, and how other writers are kept out meanwhile
(`begin`, `end`). Everything else is the same for the cells of this process (`memory.py`) and for those of a file that several
processes share (`shared/`). Subclassing rather than a part with its own methods: the lock and the journal of a shared file
span the cells and the decision, and `MemoryStore` decides on a cell without a call in between.

Time never runs backwards here: when a clock does, the store carries on from the last moment it saw.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable, Sequence
from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.algorithms import all_of
    from cython.cimports.limitkeeper.algorithms.claim import Claim, NamedLimit
    from cython.cimports.limitkeeper.algorithms.constants import MAX_WAIT, REFUSED
    from cython.cimports.limitkeeper.algorithms.limit import Answer, Limit, State
    from cython.cimports.limitkeeper.clock import SystemClock
    from cython.cimports.limitkeeper.decision import Decision, Decisions
    from cython.cimports.limitkeeper.monotonic import monotonic_us
    from cython.cimports.limitkeeper.stores.cell_table import Table
    from cython.cimports.limitkeeper.stores.contract import Store
else:
    from ..algorithms import all_of
    from ..algorithms.claim import Claim, NamedLimit
    from ..algorithms.constants import MAX_WAIT, REFUSED
    from ..algorithms.limit import Answer, Limit, State
    from ..clock import SystemClock, monotonic_us
    from ..decision import Decision, Decisions, fresh
    from .cell_table import Table
    from .contract import Store

    def blank(store: CellStore, handle: LimitHandle) -> Decision:
        """A Decision to be filled in."""
        return fresh(handle.name)

    def blank_joined(store: CellStore, names: tuple[str, ...]) -> Decisions | None:
        """Compiled, an answer with room for these limits; the plain build joins Decisions."""
        return None


from ..algorithms.all_of import together
from ..clock import SYSTEM, Clock
from ..decision import STORE
from ..errors import ConfigurationError
from ..fork import reset_after_fork
from .contract import Booking


@cython.cclass
class LimitHandle:
    """A limit as one store knows it: the number of its units there, since when it holds under its name, and its cells."""

    __slots__ = ("cells", "limit", "name", "since_us", "store", "unit")

    def __init__(
        self,
        store: CellStore,
        named: NamedLimit,
        unit: cython.int,
        since_us: cython.longlong,
        cells: Table = None,  # type: ignore[assignment]
    ) -> None:
        self.store = store
        self.limit = named.limit
        self.name = named.name
        self.unit = unit
        self.since_us = since_us
        self.cells = cells


@cython.cclass
class CellStore(Store):
    """A store whose cells are in memory: it decides, but does not know where its cells are."""

    local = True

    def __init__(self, clock: Clock | None = None) -> None:
        self.go_by(SYSTEM if clock is None else clock)
        self.last_us = 0
        self.shift_us = 0
        self.revision = 0
        self._lock = threading.RLock()
        reset_after_fork(self)

    # Time ------------------------------------------------------------------------------------------------------

    def go_by(self, clock: Clock) -> None:
        """Reads this clock from here on."""
        self._clock = clock
        self.system = self._clock if isinstance(self._clock, SystemClock) else None
        self.offset_us = 0 if self.system is None else self.system.offset_us

    @property
    def clock(self) -> Any:
        return self._clock

    @cython.cfunc
    def now(self) -> cython.longlong:
        """The clock, read once per decision; a clock that went back is carried on from where it was."""
        if self.system is not None:
            return monotonic_us() + self.offset_us
        now_us: cython.longlong = self._clock.now_us() + self.shift_us
        if now_us < self.last_us:
            self.shift_us += self.last_us - now_us
            now_us = self.last_us
        self.last_us = now_us
        return now_us

    def now_us(self) -> int:
        """This store's time."""
        return self.now()

    # What a kind of cells says ---------------------------------------------------------------------------------

    @cython.cfunc
    def place_of(self, named: NamedLimit) -> LimitHandle:
        """The place of a limit in this store; a limit remembers the last one."""
        place = named.place
        if isinstance(place, LimitHandle) and place.store is self:
            return place
        place = self.place(named)
        named.place = place
        return place

    def place(self, named: NamedLimit) -> LimitHandle:
        """The place of a limit in this store, made when it is first named."""
        raise NotImplementedError

    @cython.cfunc
    def is_full(self, place: LimitHandle, needed: cython.longlong, now_us: cython.longlong) -> cython.bint:
        """Whether there is no room for so many new keys, not even after looking for idle ones."""
        raise NotImplementedError

    @cython.cfunc
    def known(self, place: LimitHandle, key: str, now_us: cython.longlong, full: cython.bint) -> cython.bint:
        """Whether the key has a cell."""
        raise NotImplementedError

    @cython.cfunc
    def read(self, place: LimitHandle, key: str, now_us: cython.longlong, full: cython.bint) -> State:
        """The key's state in this limit's units; what an unseen key has when there is none. Nothing is written."""
        raise NotImplementedError

    @cython.cfunc
    def put(
        self,
        place: LimitHandle,
        key: str,
        a: cython.longlong,
        b: cython.longlong,
        c: cython.longlong,
        now_us: cython.longlong,
        full: cython.bint,
    ) -> cython.int:
        """Stores what a rule answered: three integers, or one more entry of a log."""
        raise NotImplementedError

    @cython.cfunc
    def crowded_until(self, place: LimitHandle, key: str, at: cython.longlong, now_us: cython.longlong) -> cython.longlong:
        """When a log that may only be so long has room for one more entry, dated `at`; 0: it has now."""
        return 0

    @cython.cfunc
    def expose(self, place: LimitHandle, key: str, now_us: cython.longlong, full: cython.bint) -> cython.int:
        """A rule is about to change this key's log in place."""
        return 0

    def discard(self, place: LimitHandle, key: str) -> None:
        """Forgets one key."""
        raise NotImplementedError

    def pairs(self, place: LimitHandle) -> list[tuple[str, int, Any]]:
        """(key, unit, state as plain data) of every key of a place."""
        raise NotImplementedError

    def saved(self, place: LimitHandle, key: str, now_us: int) -> Any:
        """A key's state as plain data in its limit's units; None when there is none."""
        raise NotImplementedError

    def limit_of(self, place: LimitHandle, unit: int) -> Limit:
        """The limit whose units this number means at a place."""
        raise NotImplementedError

    def in_units(self, place: LimitHandle, unit: int, state: Any, now_us: int) -> Any:
        """A state of another rate of the same name, converted."""
        if unit == place.unit or place.limit.logs:
            return state
        return place.limit.convert(self.limit_of(place, unit), state, min(now_us, place.since_us))

    @cython.cfunc
    def begin(self) -> cython.int:
        """Keeps everybody else out until `end`."""
        self._lock.acquire()
        return 0

    @cython.cfunc
    def end(self) -> cython.int:
        self._lock.release()
        return 0

    # Deciding --------------------------------------------------------------------------------------------------

    @cython.cfunc
    def decide_cell(
        self,
        decision: Decision,
        place: LimitHandle,
        key: str,
        cost: cython.longlong,
        max_wait_us: cython.longlong,
        commit: cython.bint,
        now_us: cython.longlong,
    ) -> cython.longlong:
        """One limit, one key, everybody else kept out; the answer goes into `decision`. Nothing is allocated in here."""
        limit: Limit = place.limit
        tick: cython.longlong = limit.tick
        now: cython.longlong = now_us // tick
        patience: cython.longlong = 0
        if max_wait_us > 0 and limit.reserves:
            patience = (now_us + max_wait_us) // tick - now
        full: cython.bint = self.is_full(place, 1, now_us)
        answer: Answer
        state: State
        until: cython.longlong = 0
        while True:
            stamp: cython.ulonglong = self.revision
            state = self.read(place, key, now_us, full)
            answer = limit.rule(limit, state[0], state[1], state[2], now, now, cost, patience)
            if stamp == self.revision:
                break
        start: cython.longlong = answer[3]
        if limit.logs and start >= 0 and cost > 0:
            until = self.crowded_until(place, key, answer[0], now_us)
            if until > 0:
                start = REFUSED
        seen: Answer = answer
        if not commit or cost == 0 or until > 0:  # what is there now, beside the verdict on a hit
            seen = limit.rule(limit, state[0], state[1], state[2], now, now, 0, 0)
        elif start >= 0:
            self.put(place, key, answer[0], answer[1], answer[2], now_us, full)
        decision.remaining = seen[5]
        decision.reset_us = seen[6] * tick - now_us if seen[6] > now else 0
        decision.allowed = start >= 0 or cost == 0
        decision.limit = limit.capacity
        decision.retry_us = 0
        decision.wait_us = 0
        decision.start_us = now_us
        if start > now and cost > 0:
            decision.start_us = start * tick
            decision.wait_us = start * tick - now_us
        elif start < 0 and cost > 0:
            if until > 0:
                decision.retry_us = until - now_us
            elif start != REFUSED:
                decision.retry_us = -1
            elif tick > 1 and max_wait_us > 0 and limit.reserves:
                decision.retry_us = all_of.retry_us(limit, state[0], state[1], state[2], now_us, cost, max_wait_us) - now_us
            else:
                decision.retry_us = answer[4] * tick - now_us
        return start

    @cython.cfunc
    def charge(
        self,
        claims: list,  # type: ignore[type-arg]
        max_wait_us: cython.longlong,
        commit: cython.bint,
        now_us: cython.longlong,
        not_before_us: cython.longlong,
    ) -> cython.longlong:
        """Several limits: load, decide, store. The common start, or REFUSED or NEVER; the answers are left in the claims.
        When anything was decided in between, it is done again."""
        i: cython.Py_ssize_t
        claim: Claim
        n: cython.Py_ssize_t = len(claims)
        while True:
            full: cython.bint = False
            for i in range(n):  # whatever has to be made first may run Python
                claim = claims[i]
                full = full or self.is_full(self.place_of(claim.named), n, now_us)
            stamp: cython.ulonglong = self.revision
            for i in range(n):
                claim = claims[i]
                state: State = self.read(self.place_of(claim.named), claim.key, now_us, full)
                claim.a = state[0]
                claim.b = state[1]
                claim.c = state[2]
            start_us: cython.longlong = all_of.decide(claims, now_us, not_before_us, max_wait_us)
            if stamp == self.revision:
                break
        if start_us >= 0 and self.is_crowded(claims, now_us):
            start_us = REFUSED
        if start_us >= 0 and commit:
            for i in range(n):
                claim = claims[i]
                if claim.cost > 0:
                    self.put(self.place_of(claim.named), claim.key, claim.new_a, claim.new_b, claim.new_c, now_us, full)
                    claim.undoable = True
        else:
            for i in range(n):
                all_of.look(claims[i], now_us)
        return start_us

    @cython.cfunc
    def is_crowded(self, claims: list, now_us: cython.longlong) -> cython.bint:  # type: ignore[type-arg]
        """Whether a log that may only be so long has no room for one of these claims; that claim is refused until it has."""
        found: cython.bint = False
        i: cython.Py_ssize_t
        claim: Claim
        for i in range(len(claims)):
            claim = claims[i]
            if claim.named.limit.logs and claim.cost > 0:
                until: cython.longlong = self.crowded_until(self.place_of(claim.named), claim.key, claim.new_a, now_us)
                if until > 0:
                    claim.start = REFUSED
                    claim.retry = until
                    found = True
        return found

    @cython.cfunc
    def decide_checked(
        self,
        claims: list,  # type: ignore[type-arg]
        names: tuple,  # type: ignore[type-arg]
        max_wait_us: cython.longlong,
        commit: cython.bint,
        not_before_us: cython.longlong,
    ) -> Decision:
        """Decides claims that name no limit and key twice; `names` are those of their limits."""
        joined: Decisions | None = blank_joined(self, names)
        self.begin()
        try:
            now_us: cython.longlong = self.now()
            start_us: cython.longlong = self.charge(claims, max_wait_us, commit, now_us, not_before_us)
        finally:
            self.end()
        return all_of.join_claims(claims, now_us, start_us, joined)

    def decide(
        self,
        claims: Sequence[Claim],
        max_wait_us: int | None = 0,
        *,
        commit: bool = True,
        remember: bool = False,
        not_before_us: int = 0,
    ) -> Decision:
        asked: list = checked(claims)  # type: ignore[type-arg]
        return self.decide_checked(asked, all_of.names_of(asked), patience_us(max_wait_us), commit, not_before_us)

    def decide_many(self, asks: Sequence[Sequence[Claim]], max_wait_us: int | None = 0) -> list[Decision]:
        wait: cython.longlong = patience_us(max_wait_us)
        asked = [checked(claims) for claims in asks]
        self.begin()
        try:
            now_us: cython.longlong = self.now()
            return [together(claims, now_us, self.charge(claims, wait, True, now_us, 0)) for claims in asked]
        finally:
            self.end()

    # Giving back ------------------------------------------------------------------------------------------------

    @cython.cfunc
    def give_back_all(self, claims: list, charged_at: cython.longlong, now_us: cython.longlong) -> cython.int:  # type: ignore[type-arg]
        claim: Claim
        for claim in claims:
            self.give_back_one(claim, charged_at, now_us)
        return 0

    @cython.cfunc
    def give_back_one(self, claim: Claim, charged_at: cython.longlong, now_us: cython.longlong) -> cython.int:
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
            self.give_back_all(asked, charged_at, self.now())
        finally:
            self.end()

    @property
    def can_rebook(self) -> bool:
        return True

    def rebook(self, bookings: Sequence[Booking]) -> list[Decision | None]:
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
                return self.rebooked(list(bookings), self.now())
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
                self.give_back_all(list(asked), charged_at, now_us)
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
                self.give_back_all(list(asked), charged_at, now_us)
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

    def register(self, limit: NamedLimit) -> None:
        self.place_of(limit)

    def __bool__(self) -> bool:
        return True

    def _reset_after_fork(self) -> None:
        self._lock = threading.RLock()


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
    if len(asked) > 1 and is_twice(asked):
        raise ConfigurationError("one decision names the same limit and key twice; name it once, with the whole cost")
    return asked


@cython.cfunc
def is_twice(claims: list) -> cython.bint:  # type: ignore[type-arg]
    """Whether a limit is asked twice for one key. A few claims are compared by hand: a set of pairs costs more than the rules."""
    n: cython.Py_ssize_t = len(claims)
    i: cython.Py_ssize_t
    j: cython.Py_ssize_t
    one: Claim
    two: Claim
    if n > 12:
        return len({(claim.limit.identity, claim.key) for claim in claims}) < n
    for i in range(1, n):
        one = claims[i]
        for j in range(i):
            two = claims[j]
            if one.named.name == two.named.name and one.key == two.key and one.named.identity == two.named.identity:
                return True
    return False


def only_claims(claims: Any) -> None:
    """Nothing but claims may go below the waist: there, C takes them at their word."""
    for claim in claims:
        if not isinstance(claim, Claim):
            raise TypeError(f"{claim!r} is no Claim")
