"""Ring buffers of sliding logs in a mapped file, all of one length: allocated for a cell and freed with it.

A ring is what `sliding_log` works on, `[head, entries, room, base, m0, t0, m1, …]`; a free one links to the next through its
first word. A full ring refuses (`log_full_until`); an entry that must be added (debt) is merged into one that counts at least as
long. Rejected: growing rings; every cell may have one, so the size of the file is known when it is created.
"""

from __future__ import annotations

from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.algorithms import sliding_log
    from cython.cimports.limitkeeper.stores.shared import layout as lay
    from cython.cimports.limitkeeper.stores.shared.journal import Journal
else:
    from ...algorithms import sliding_log
    from . import layout as lay
    from .journal import Journal

from ...errors import StoreError
from .layout import Regions


@cython.cclass
class LogRings(Journal):
    """The logs of one file. Callers hold the file's lock."""

    def __init__(self, memory: Any, plan: Regions, max_keys: int) -> None:
        super().__init__(memory, plan.journal)
        self.logs, self.log_words = plan.logs, plan.log_words
        self.max_keys = max_keys

    @cython.cfunc
    def log_at(self, number: cython.longlong) -> cython.longlong:
        """The log as the algorithm takes it: its address when compiled, a memoryview otherwise; 0 for none."""
        if not number:
            return 0
        at: cython.longlong = self.logs + (number - 1) * self.log_words
        if cython.compiled:
            return cython.cast(cython.longlong, self.words + at)
        return self.words[at : at + self.log_words]  # type: ignore[no-any-return]

    @cython.cfunc
    def log_of_cell(self, cell: cython.longlong) -> cython.longlong:
        """The number of the cell's log, made when there is none."""
        number: cython.longlong = self.words[cell + lay.STATE + 2]
        if number:
            return number
        number = self.words[lay.LOGS_FREE]
        at: cython.longlong
        if number:
            at = self.logs + (number - 1) * self.log_words
            self.change(lay.LOGS_FREE, self.words[at])
            self.journal_word(at)
        else:
            number = self.words[lay.LOGS_HIGH] + 1
            if number > self.max_keys + lay.RESERVE:
                raise StoreError("a shared file has no room for another log; raise max_keys, or use several files")
            at = self.logs + (number - 1) * self.log_words
            self.change(lay.LOGS_HIGH, number)
        self.words[at] = self.words[at + 1] = self.words[at + 3] = 0
        self.words[at + 2] = (self.log_words - 4) // 2
        self.change(cell + lay.STATE + 2, number)
        return number

    @cython.cfunc
    def free_log(self, number: cython.longlong) -> cython.int:
        at: cython.longlong = self.logs + (number - 1) * self.log_words
        self.change(at, self.words[lay.LOGS_FREE])
        return self.change(lay.LOGS_FREE, number)

    @cython.cfunc
    def journal_log(self, number: cython.longlong) -> cython.int:
        """Records a whole log before an algorithm changes it in place."""
        at: cython.longlong = self.logs + (number - 1) * self.log_words
        i: cython.longlong
        for i in range(self.log_words):
            self.journal_word(at + i)
        return 0

    @cython.cfunc
    def log_full_until(
        self, cell: cython.longlong, moment: cython.longlong, window: cython.longlong, now: cython.longlong
    ) -> cython.longlong:
        """When a full log has room for an entry of that time; 0: now."""
        number: cython.longlong = self.words[cell + lay.STATE + 2]
        if not number:
            return 0
        at: cython.longlong = self.logs + (number - 1) * self.log_words
        n: cython.longlong = self.words[at + 1]
        room: cython.longlong = self.words[at + 2]
        if n < room:
            return 0
        head: cython.longlong = self.words[at]
        first: cython.longlong = self.words[at + 4 + 2 * head]
        if first <= now - window:  # adding prunes first
            return 0
        i: cython.longlong
        for i in range(n):
            if self.words[at + 4 + 2 * ((head + i) % room)] == moment:  # calls of one moment share an entry
                return 0
        self.words[lay.LOG_FULL] += 1
        return first + window

    @cython.cfunc
    def add(self, cell: cython.longlong, moment: cython.longlong, cost: cython.longlong, before: cython.longlong) -> cython.int:
        """Prunes the cell's log and adds an entry."""
        number: cython.longlong = self.log_of_cell(cell)
        at: cython.longlong = self.logs + (number - 1) * self.log_words
        n: cython.longlong = self.words[at + 1]
        room: cython.longlong = self.words[at + 2]
        if n >= room and self.words[at + 4 + 2 * self.words[at]] > before:
            return self.merge_entry(number, moment, cost)
        last: cython.longlong = at + 4 + 2 * ((self.words[at] + n + room - 1) % room)
        i: cython.longlong
        if n > 0 and self.words[last] > moment:  # entries dated later move up
            self.journal_log(number)
        else:
            for i in range(4):
                self.journal_word(at + i)
            self.journal_word(last + 1)
            following: cython.longlong = at + 4 + 2 * ((self.words[at] + n) % room)
            self.journal_word(following)
            self.journal_word(following + 1)
        if cython.compiled:
            sliding_log.prune(self.words + at, before)
            if self.words[at + 1] == 0:  # begins anew at its first place
                self.journal_word(at + 4)
                self.journal_word(at + 5)
            sliding_log.add(self.words + at, moment, cost)
        else:
            log: Any = self.log_at(number)
            sliding_log.prune(log, before)
            if self.words[at + 1] == 0:
                self.journal_word(at + 4)
                self.journal_word(at + 5)
            sliding_log.add(log, moment, cost)
        return 0

    @cython.cfunc
    def merge_entry(self, number: cython.longlong, moment: cython.longlong, cost: cython.longlong) -> cython.int:
        """Adds to a log without a free place what must be added (debt, say): it joins the next later entry, or the last one,
        which is dated later then. Either counts longer than it would have, never shorter."""
        at: cython.longlong = self.logs + (number - 1) * self.log_words
        n: cython.longlong = self.words[at + 1]
        i: cython.longlong = n - 1
        self.journal_log(number)
        entry: cython.longlong = at + 4 + 2 * ((self.words[at] + i) % n)
        if self.words[entry] < moment:
            self.words[entry] = moment
        while i >= 0 and self.words[entry] >= moment:
            self.words[entry + 1] += cost
            i -= 1
            entry = at + 4 + 2 * ((self.words[at] + i) % n)
        return 0

    @cython.cfunc
    def fill(self, cell: cython.longlong, entries: Any) -> cython.int:
        """Gives a cell a log of just these (moment, cost) pairs; those that are too many count as long as the latest of them.
        Nothing points to a new log yet, so nothing of it is noted but the way to it."""
        room: cython.longlong = (self.log_words - 4) // 2
        pairs = sorted(entries)
        extra: cython.longlong = len(pairs) - room
        if extra > 0:
            pairs = [(pairs[extra][0], sum(cost for _, cost in pairs[: extra + 1])), *pairs[extra + 1 :]]
        if self.words[cell + lay.STATE + 2]:
            self.journal_log(self.words[cell + lay.STATE + 2])
        number: cython.longlong = self.log_of_cell(cell)
        at: cython.longlong = self.logs + (number - 1) * self.log_words
        self.words[at] = self.words[at + 3] = 0
        total: cython.longlong = 0
        n: cython.longlong = 0
        for moment, cost in pairs:
            total += cost
            self.words[at + 4 + 2 * n] = moment
            self.words[at + 5 + 2 * n] = total
            n += 1
        self.words[at + 1] = n
        return 0
