"""CellRates: the states in a key's cell, one for each rate (of one name) that was used on the key.

A key has at most four rates: a fifth replaces the one nearest to as-new (`least_needed`). Almost every key has one, which is in
its cell; several, and the number of the key's last reset, are loaded into `rates`, changed there and saved. A rate has a state
from its first call on, admitted or refused. A sliding log is one for all rates, pruned by the longest window used on the key.

A subclass implements access to its cells (`read`, `put`, `fetch_rates`, `save_rates`, `can_keep`, `discard`). Inheritance, not a
separate cells object: the lock and the journal of a shared file cover cells and decision, and `MemoryStore` decides without a
call in between.
"""

from __future__ import annotations

import gc

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.algorithms import all_of
    from cython.cimports.limitkeeper.algorithms.claim import Claim, NamedLimit
    from cython.cimports.limitkeeper.algorithms.limit import I64, Answer, Limit, State
    from cython.cimports.limitkeeper.stores.cell_table import MOST_RATES, Table
    from cython.cimports.limitkeeper.stores.contract import Store
else:
    from ..algorithms import all_of
    from ..algorithms.claim import Claim, NamedLimit
    from ..algorithms.limit import I64, Answer, Limit, State
    from .cell_table import MOST_RATES, Rates, Table
    from .contract import Store

from ..algorithms.limit import StateData

#: The states of a key: (unit, state as plain data) of each rate.
UnitStates = list[tuple[int, StateData]]


@cython.cclass
class LimitHandle:
    """A limit registered in one store: the number of its rate there, when its name was first used, and its cells (in a
    MemoryStore) or the number of its name (in a shared file)."""

    __slots__ = ("birth_us", "cells", "limit", "limit_id", "name", "store", "unit")

    def __init__(self, store: CellRates, named: NamedLimit, unit: I64, birth_us: I64, cells: Table | None, limit_id: I64) -> None:
        self.store, self.limit, self.name = store, named.limit, named.name
        self.unit, self.birth_us, self.limit_id = unit, birth_us, limit_id
        self.cells: Table = cells  # type: ignore[assignment]


@cython.cclass
class CellRates(Store):
    """The states of keys in cells; a subclass implements access to the cells."""

    def __init__(self) -> None:
        self.revision = 0
        self.seen_reset = self.unmarked_reset = 0
        self.is_first_use = False  # set by `read_rates`: the rate is new to a key that has others
        if not cython.compiled:
            self.rates = Rates()

    # Access to cells: implemented by subclasses -----------------------------------------------------------------

    @cython.cfunc
    def read(self, handle: LimitHandle, key: str, now_us: I64, full: cython.bint) -> State:
        """The state of this rate on the key (`read_rates`). Writes nothing but `seen_reset`, and that only after a reset."""
        raise NotImplementedError

    @cython.cfunc
    def put(self, handle: LimitHandle, key: str, a: I64, b: I64, c: I64, now_us: I64, full: cython.bint) -> cython.int:
        """Stores the state that an algorithm returned: three integers, or an entry to add to a log. Returns 1 when the key has
        states of other rates, which the caller changes next."""
        raise NotImplementedError

    @cython.cfunc
    def load_rates(self, handle: LimitHandle, key: str, now_us: I64, full: cython.bint) -> cython.int:
        """Copies all states of the key, and its last reset, into `rates`; returns the number of rates."""
        if not cython.compiled:
            self.rates = Rates()
        self.rates.n = 0
        self.rates.reset_id = self.rates.reset_until = 0
        self.fetch_rates(handle, key, now_us, full)
        if now_us >= self.rates.reset_until:
            self.rates.reset_id = 0
        return self.rates.n

    @cython.cfunc
    def fetch_rates(self, handle: LimitHandle, key: str, now_us: I64, full: cython.bint) -> cython.int:
        """Copies what the key has into `rates`, which is empty."""
        raise NotImplementedError

    @cython.cfunc
    def save_rates(self, handle: LimitHandle, key: str, now_us: I64, full: cython.bint) -> cython.int:
        """Replaces what the key has by `rates`; without space for several, by the state of this rate."""
        raise NotImplementedError

    @cython.cfunc
    def can_keep(self, handle: LimitHandle, key: str, now_us: I64, full: cython.bint) -> cython.bint:
        """Whether the key's cell has room for one more rate."""
        raise NotImplementedError

    @cython.cfunc
    def last_unmarked_reset(self, number: I64) -> I64:
        """The number of the last reset that found no room for a marker on its key: charges from before it give nothing back,
        whatever their key. Too strict, never too lax, and only in a store that is half full or more. Sets it, unless 0."""
        self.unmarked_reset = number or self.unmarked_reset
        return self.unmarked_reset

    @cython.cfunc
    def limit_at(self, handle: LimitHandle, unit: I64) -> Limit:
        """The limit with this unit number."""
        raise NotImplementedError

    @cython.cfunc
    def log_full_until(self, handle: LimitHandle, key: str, at: I64, retry: I64, now_us: I64) -> I64:
        """When a log of bounded length can take an entry at `at`; 0: at `retry`, when its limit allows that, or before."""
        return 0

    @cython.cfunc
    def expose(self, handle: LimitHandle, key: str, now_us: I64, full: cython.bint) -> cython.int:
        """Called before an algorithm changes this key's log in place."""
        return 0

    @cython.cfunc
    def unsettle(self) -> cython.int:
        """Called before a cell changes such that it may be as new sooner than it was."""
        return 0

    def discard(self, handle: LimitHandle, key: str) -> None:
        """Deletes the state of one key."""
        raise NotImplementedError

    def pairs(self, handle: LimitHandle) -> list[tuple[str, UnitStates]]:
        """(key, [(unit, state as plain data), …]) of every key of a limit."""
        raise NotImplementedError

    def states(self, handle: LimitHandle, key: str) -> UnitStates:
        """(unit, state as plain data) of each rate of a key that has a cell of its own."""
        raise NotImplementedError

    # Several rates of one key -----------------------------------------------------------------------------------

    @cython.cfunc
    def read_rates(self, handle: LimitHandle, key: str, now_us: I64, full: cython.bint) -> State:
        """The state of this rate on the key; when it is new to the key, the one that it starts with there."""
        n: cython.int = self.load_rates(handle, key, now_us, full)
        self.seen_reset = self.rates.reset_id or self.last_unmarked_reset(0)
        self.is_first_use = n > 0
        if handle.limit.logs:  # one log for all
            return (0, 0, 0)
        most: I64 = 0
        i: cython.int
        for i in range(n):
            if self.rates.unit[i] == handle.unit:
                self.is_first_use = False
                return (self.rates.a[i], self.rates.b[i], self.rates.c[i])
            used: I64 = self.rate_used(handle, i, now_us)
            if used > most:
                most = used
        if n == 0:
            return handle.limit.unseen(handle.birth_us)
        return all_of.seeded(handle.limit, handle.birth_us, now_us, most)

    @cython.cfunc
    def keep_seed(self, handle: LimitHandle, key: str, now_us: I64, full: cython.bint) -> cython.int:
        """Stores the state that a rate starts with on the key when its first call there is refused. Seeded afresh by the next
        call, the rate could refuse that at the retry time of this one: the others hold their amounts for a time of their own."""
        if not self.can_keep(handle, key, now_us, full):
            return 0
        self.is_first_use = False
        state: State = self.read_rates(handle, key, now_us, full)
        if self.is_first_use and handle.limit.logs:
            self.log_window(handle, key, now_us, full, True)
        elif self.is_first_use:
            self.set_rate(handle, state[0], state[1], state[2], now_us)
            self.save_rates(handle, key, now_us, full)
        return 0

    @cython.cfunc
    def put_rate(self, handle: LimitHandle, key: str, a: I64, b: I64, c: I64, now_us: I64, full: cython.bint) -> cython.int:
        """`put` for a key that has another rate, or was reset."""
        self.load_rates(handle, key, now_us, full)
        self.set_rate(handle, a, b, c, now_us)
        self.save_rates(handle, key, now_us, full)
        return self.rates.n > 1

    @cython.cfunc
    def set_rate(self, handle: LimitHandle, a: I64, b: I64, c: I64, now_us: I64) -> cython.int:
        """Sets the state of this rate in `rates`. A new one is added at the end; the fifth takes the place of another."""
        i: cython.int = 0
        while i < self.rates.n and self.rates.unit[i] != handle.unit:
            i += 1
        if i == MOST_RATES:
            for i in range(self.least_needed(handle, now_us), MOST_RATES - 1):
                self.rates.unit[i] = self.rates.unit[i + 1]
                self.rates.a[i] = self.rates.a[i + 1]
                self.rates.b[i] = self.rates.b[i + 1]
                self.rates.c[i] = self.rates.c[i + 1]
            i = MOST_RATES - 1
        elif i == self.rates.n:
            self.rates.n += 1
        self.rates.unit[i] = handle.unit
        self.rates.a[i] = a
        self.rates.b[i] = b
        self.rates.c[i] = c
        return 0

    @cython.cfunc
    def least_needed(self, handle: LimitHandle, now_us: I64) -> cython.int:
        """The rate that a fifth replaces: one that is as new the soonest, of equals the oldest; first of those beside which
        another holds as much for as long. Without that, calls under five rates in turn would forget what was admitted."""
        found: cython.int = -1
        soonest: I64 = 0
        is_covered: cython.bint = False
        i: cython.int
        j: cython.int
        for i in range(MOST_RATES):
            left_us: I64 = self.rate_left_us(handle, i, now_us)
            used: I64 = self.rate_used(handle, i, now_us)
            covered: cython.bint = False
            for j in range(MOST_RATES):
                if j != i and self.rate_used(handle, j, now_us) >= used and self.rate_left_us(handle, j, now_us) >= left_us:
                    covered = True
            if found < 0 or (covered and not is_covered) or (covered == is_covered and left_us < soonest):
                found, soonest, is_covered = i, left_us, covered
        return found

    @cython.cfunc
    def rate_used(self, handle: LimitHandle, i: cython.int, now_us: I64) -> I64:
        """What the rate at this place of `rates` holds as used."""
        limit: Limit = self.limit_at(handle, self.rates.unit[i])
        return limit.usage(limit, self.rates.a[i], self.rates.b[i], self.rates.c[i], now_us // limit.tick)

    @cython.cfunc
    def rate_left_us(self, handle: LimitHandle, i: cython.int, now_us: I64) -> I64:
        """The time until the rate at this place of `rates` is as new."""
        limit: Limit = self.limit_at(handle, self.rates.unit[i])
        now: I64 = now_us // limit.tick
        answer: Answer = limit.rule(limit, self.rates.a[i], self.rates.b[i], self.rates.c[i], now, now, 0, 0)
        return answer[6] * limit.tick - now_us if answer[6] > now else 0

    @cython.cfunc
    def charge_others(self, handle: LimitHandle, key: str, start_us: I64, cost: I64, now_us: I64, full: cython.bint) -> tuple:  # type: ignore[type-arg]
        """Charges what this rate has admitted to the other rates of the key. Returns the unit of each and its states before and
        after, for an exact undo: a state does not tell where another rate's charge went, nor what was idle before its start."""
        if gc.isenabled():  # a tuple of states allocates: no finaliser may decide meanwhile, which would change `rates`
            try:
                gc.disable()
                return CellRates.charge_others(self, handle, key, start_us, cost, now_us, full)
            finally:
                gc.enable()
        n: cython.int = self.load_rates(handle, key, now_us, full)
        i: cython.int
        changes: list[tuple[int, ...]] = []
        for i in range(n):
            if self.rates.unit[i] != handle.unit:
                limit: Limit = self.limit_at(handle, self.rates.unit[i])
                a: I64 = self.rates.a[i]
                b: I64 = self.rates.b[i]
                c: I64 = self.rates.c[i]
                new: State = all_of.charged_too(limit, a, b, c, now_us, start_us, cost)
                self.rates.a[i], self.rates.b[i], self.rates.c[i] = new
                changes.append((self.rates.unit[i], a, b, c, new[0], new[1], new[2]))
        self.save_rates(handle, key, now_us, full)
        return tuple(changes)

    @cython.cfunc
    def give_back_others(
        self,
        handle: LimitHandle,
        claim: Claim,
        charged_at: I64,
        now_us: I64,
        full: cython.bint,
        known: cython.bint,
        untouched: cython.bint,
    ) -> cython.int:
        """Removes a charge of this rate from the other rates of the key. Where nothing was charged since (`untouched`), the
        states before it are restored, which the claim has if they are `known`."""
        changes: dict[int, tuple[int, ...]] = {change[0]: change for change in claim.others or ()} if known else {}
        n: cython.int = self.load_rates(handle, claim.key, now_us, full)
        i: cython.int
        for i in range(n):
            if self.rates.unit[i] != handle.unit:
                limit: Limit = self.limit_at(handle, self.rates.unit[i])
                state: State = (self.rates.a[i], self.rates.b[i], self.rates.c[i])
                change = changes.get(self.rates.unit[i])
                before_until: I64 = -1
                if change is not None:
                    if untouched and tuple(change[4:]) == state:
                        self.rates.a[i], self.rates.b[i], self.rates.c[i] = change[1], change[2], change[3]
                        continue
                    if change[6] == state[2]:
                        before_until = change[3]
                state = all_of.given_back(limit, state, now_us, claim.cost, claim.charged, charged_at, before_until)
                self.rates.a[i], self.rates.b[i], self.rates.c[i] = state
        return self.save_rates(handle, claim.key, now_us, full)

    @cython.cfunc
    def log_window(self, handle: LimitHandle, key: str, now_us: I64, full: cython.bint, keep: cython.bint) -> I64:
        """The longest window used on the key's log, this rate's included; `keep`: an entry of this rate is added."""
        if self.load_rates(handle, key, now_us, full) > 0:
            longest: Limit = self.limit_at(handle, self.rates.unit[0])
            if longest.window >= handle.limit.window:
                return longest.window
        if keep:
            self.rates.n = 1
            self.rates.unit[0] = handle.unit
            self.save_rates(handle, key, now_us, full)
        return handle.limit.window
