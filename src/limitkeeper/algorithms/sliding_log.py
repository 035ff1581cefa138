"""Sliding window log: stores the time of every admitted call, so that no window ever holds more than the limit.

    a cost fits when  (sum of the costs in (t − W, t]) + cost ≤ count        an entry exactly W old no longer counts

The log is a ring of (moment, running total) in one flat array of integers, `[head, entries, room, base, m0, t0, m1, …]`:
a list in Python, C memory when compiled. Running totals make both lookups a binary search: which entries have expired
(by moment), and when enough of them will have (by total). An admitted call adds one entry whatever its cost; calls of one
tick share an entry. Entries may lie in the future; all unexpired ones count, so that a reservation is never overtaken.

State: (−, −, log). `decide` reads the log and returns the entry to add, (start, cost, log); `add` adds it. A
refused call therefore writes nothing. Worst case in any interval of W: count, exactly.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, MutableSequence
from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

from ..rate import Duration, RateValue

if cython.compiled:
    from cython.cimports.cpython.array import array as c_array
    from cython.cimports.limitkeeper.algorithms.constants import MAX_WAIT, NEVER, REFUSED
    from cython.cimports.limitkeeper.algorithms.limit import I64, Answer, Limit, State
else:
    from .constants import MAX_WAIT, NEVER, REFUSED
    from .limit import I64, Answer, Limit, State

from .limit import Result, StateData

Integers = MutableSequence[int]
Entries = Iterable[tuple[int, int]]


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def slot(log: cython.p_longlong, i: I64) -> I64:
    """The index of the moment of entry i in the array; its running total is at the next index."""
    i += log[0]
    if i >= log[2]:
        i -= log[2]
    return 4 + 2 * i


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def total_before(log: cython.p_longlong, i: I64) -> I64:
    """The running total just before entry i."""
    return log[3] if i == 0 else log[slot(log, i - 1) + 1]  # type: ignore[no-any-return]


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def first_beyond(log: cython.p_longlong, field: I64, bound: I64, low: I64) -> I64:
    """The first entry ≥ low whose field (0 moment, 1 total) exceeds `bound`: exponential, then binary search."""
    n: I64 = log[1]
    step: I64 = 1
    high: I64 = low
    while high < n and log[slot(log, high) + field] <= bound:
        low = high + 1
        high += step
        step += step
    if high > n:
        high = n
    while low < high:
        middle: I64 = (low + high) // 2
        if log[slot(log, middle) + field] <= bound:
            low = middle + 1
        else:
            high = middle
    return low


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def decide(limit: Limit, _moment: I64, _cost: I64, state: I64, now: I64, not_before: I64, cost: I64, max_wait: I64) -> Answer:
    start: I64 = not_before if not_before > now else now
    if not state:
        if cost > limit.count:
            return (0, 0, state, NEVER, now, limit.count, now)
        if start - now > max_wait:
            return (0, 0, state, REFUSED, start - max_wait, limit.count, now)
        return (start, cost, state, start, now, limit.count - cost, start + limit.window if cost > 0 else now)
    if cython.compiled:
        log = cython.cast(cython.p_longlong, state)
    else:
        log: Any = state
    n: I64 = log[1]
    live: I64 = first_beyond(log, 0, now - limit.window, 0)
    end: I64 = total_before(log, n)
    left: I64 = limit.count - (end - total_before(log, live))
    reset: I64 = log[slot(log, n - 1)] + limit.window if live < n else now
    verdict: I64 = REFUSED
    retry: I64 = now
    if cost > limit.count:
        verdict = NEVER
    else:
        if start > now:
            live = first_beyond(log, 0, start - limit.window, live)
        over: I64 = end - total_before(log, live) + cost - limit.count
        if over > 0:  # wait until entries worth `over` have expired
            live = first_beyond(log, 1, total_before(log, live) + over - 1, live)
            start = log[slot(log, live)] + limit.window
        if start - now <= max_wait:
            if cost > 0 and start + limit.window > reset:
                reset = start + limit.window
            left -= cost
            return (start, cost, state, start, now, left if left > 0 else 0, reset)
        retry = start - max_wait
    return (0, 0, state, verdict, retry, left if left > 0 else 0, reset)


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def prune(log: cython.p_longlong, before: I64) -> I64:
    """Removes the entries at or before `before`; returns the number left."""
    gone: I64 = first_beyond(log, 0, before, 0)
    log[3] = total_before(log, gone)
    log[0] = (log[0] + gone) % log[2]
    log[1] -= gone
    if log[1] == 0:
        log[0] = 0
        log[3] = 0
    return log[1]  # type: ignore[no-any-return]


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def add(log: cython.p_longlong, at: I64, cost: I64) -> cython.void:
    """Inserts an entry in time order. The store must have made room for it."""
    i: I64 = log[1]
    while i > 0 and log[slot(log, i - 1)] > at:  # later entries move up
        log[slot(log, i - 1) + 1] += cost
        i -= 1
    if i > 0 and log[slot(log, i - 1)] == at:
        log[slot(log, i - 1) + 1] += cost
        return
    j: I64 = log[1]
    while j > i:
        log[slot(log, j)] = log[slot(log, j - 1)]
        log[slot(log, j) + 1] = log[slot(log, j - 1) + 1]
        j -= 1
    log[1] += 1
    log[slot(log, i)] = at
    log[slot(log, i) + 1] = total_before(log, i) + cost


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def take(log: cython.p_longlong, i: I64, cost: I64) -> cython.void:
    """Subtracts `cost` from entry i and removes the entry when nothing is left of it."""
    j: I64 = i
    while j < log[1]:
        log[slot(log, j) + 1] -= cost
        j += 1
    if log[slot(log, i) + 1] > total_before(log, i):
        return
    j = i
    while j < log[1] - 1:
        log[slot(log, j)] = log[slot(log, j + 1)]
        log[slot(log, j) + 1] = log[slot(log, j + 1) + 1]
        j += 1
    log[1] -= 1


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def give_back(limit: Limit, _moment: I64, _cost: I64, state: I64, now: I64, cost: I64, charged: I64, charged_at: I64) -> State:
    if cost < 0:  # settled above its estimate: the store adds an entry at `now`
        return (now, -cost if -cost < MAX_WAIT else MAX_WAIT, state)
    if not state:
        return (0, 0, state)
    if cython.compiled:
        log = cython.cast(cython.p_longlong, state)
    else:
        log: Any = state
    i: I64
    part: I64
    if charged_at >= 0:
        i = first_beyond(log, 0, charged_at - 1, 0)
        if i < log[1] and log[slot(log, i)] == charged_at and charged_at > now - limit.window:
            part = log[slot(log, i) + 1] - total_before(log, i)
            take(log, i, cost if cost < part else part)
        return (0, 0, state)
    i = first_beyond(log, 0, now, 0) - 1
    while cost > 0 and i >= 0:  # a refund: from the newest entries up to now, not from reservations
        if log[slot(log, i)] <= now - limit.window:
            break
        part = log[slot(log, i) + 1] - total_before(log, i)
        if part > cost:
            part = cost
        take(log, i, part)
        cost -= part
        i -= 1
    return (0, 0, state)


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def used(limit: Limit, _moment: I64, _cost: I64, state: I64, now: I64) -> I64:
    if not state:
        return 0
    if cython.compiled:
        log = cython.cast(cython.p_longlong, state)
    else:
        log: Any = state
    return total_before(log, log[1]) - total_before(log, first_beyond(log, 0, now - limit.window, 0))


def new_log(entries: Entries, room: int = 0) -> Integers:
    """Makes a log, an array of integers, from (moment, cost) pairs in order."""
    pairs = list(entries)
    room = max(room, len(pairs), 1)
    log = array("q", [0, len(pairs), room, 0] + [0] * (2 * room))
    total = 0
    for i, (moment, cost) in enumerate(pairs):
        total += cost
        log[4 + 2 * i] = moment
        log[5 + 2 * i] = total
    return log


def read_log(log: Integers) -> list[tuple[int, int]]:
    """The (moment, cost) pairs of a log."""
    entries, before = [], log[3]
    for i in range(log[1]):
        at = 4 + 2 * ((log[0] + i) % log[2])
        entries.append((log[at], log[at + 1] - before))
        before = log[at + 1]
    return entries


@cython.cfunc
def memory_of(log: object) -> I64:
    """The `state` argument of `decide` for an array: its address when compiled, otherwise the array."""
    if cython.compiled:
        return cython.cast(cython.longlong, cython.cast(c_array, log).data.as_longlongs)
    return log  # type: ignore[return-value]


@cython.cfunc
@cython.exceptval(check=False)
def write(memory: I64, before: I64, at: I64, cost: I64) -> cython.void:
    """Prunes a log, then adds an entry."""
    if cython.compiled:
        prune(cython.cast(cython.p_longlong, memory), before)
        add(cython.cast(cython.p_longlong, memory), at, cost)
    else:
        prune(memory, before)
        add(memory, at, cost)


@cython.cclass
class SlidingWindowLog(Limit):
    """`SlidingWindowLog("5/min")`: never more than `count` in any window; stores one entry per call."""

    __slots__ = ()
    kind = "sliding window log"

    def __init__(self, rate: RateValue, *, per: Duration | None = None) -> None:
        self._read(rate, per)
        self.logs = True
        self.rule = decide
        self.undo = give_back
        self.usage = used
        self._seal(f"{self.kind} {self.rate}")

    def decide(self, state: StateData, now: int, cost: int = 1, max_wait: int = 0, not_before: int = 0) -> Result:
        """As `Limit.decide`; the state is a tuple of (moment, cost) pairs and two zeros."""
        log = new_log(state[0], len(state[0]) + 1)
        answer = self.rule(self, 0, 0, memory_of(log), now, max(now, not_before), cost, max_wait)
        if answer[3] >= 0 and cost:
            write(memory_of(log), now - self.window, answer[0], answer[1])
        return (tuple(read_log(log)) if answer[3] >= 0 else state[0], 0, 0, *answer[3:])

    def give_back(self, state: StateData, now: int, cost: int, charged_at: int, charged: int = -1) -> StateData:
        log = new_log(state[0], len(state[0]) + 1)
        change = self.undo(self, 0, 0, memory_of(log), now, cost, cost, charged_at)
        if change[1]:
            write(memory_of(log), now - self.window, change[0], change[1])
        return (tuple(read_log(log)), 0, 0)

    def used(self, state: StateData, now: int) -> int:
        log = new_log(state[0])
        return self.usage(self, 0, 0, memory_of(log), now)

    def new(self, birth_us: int = 0) -> StateData:
        return ((), 0, 0)
