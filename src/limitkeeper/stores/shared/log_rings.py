"""Ring buffers of sliding logs in a mapped file, all of one length: allocated for a cell and freed with it.

A ring is what `sliding_log` works on, `[head, entries, room, base, m0, t0, m1, …]`; a free one links to the next through its
first word. A full ring refuses (`log_full_until`), unless its two oldest entries count for rates of longer windows only: then
they become one. An entry that must be added (debt) is merged into one that counts at least as long. Rejected: growing rings;
every cell may have one, so the size of the file is known when it is created.
"""

from __future__ import annotations

from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.algorithms import sliding_log
    from cython.cimports.limitkeeper.algorithms.limit import I64
    from cython.cimports.limitkeeper.stores.shared import layout as lay
    from cython.cimports.limitkeeper.stores.shared.journal import Journal
else:
    from ...algorithms import sliding_log
    from ...algorithms.limit import I64
    from . import layout as lay
    from .journal import Journal

from ...errors import StoreError
from .layout import Regions


@cython.cclass
class LogRings(Journal):
    """The logs of one file. Callers hold the file's lock."""

    def __init__(self, memory: Any, plan: Regions, max_keys: int, fd: int) -> None:
        super().__init__(memory, plan.journal, fd)
        self.logs, self.log_words, self.cells_room = plan.logs, plan.log_words, plan.cells_room
        self.max_keys = max_keys

    @cython.cfunc
    def log_at(self, number: I64) -> I64:
        """The log as the algorithm takes it: its address when compiled, a memoryview otherwise; 0 for none."""
        if not number:
            return 0
        at: I64 = self.logs + (number - 1) * self.log_words
        if cython.compiled:
            return cython.cast(cython.longlong, self.words + at)
        return self.words[at : at + self.log_words]  # type: ignore[no-any-return]

    @cython.cfunc
    def log_of_cell(self, cell: I64) -> I64:
        """The number of the cell's log, made when there is none."""
        number: I64 = self.words[cell + lay.STATE + 2]
        if number:
            return number
        number = self.words[lay.LOGS_FREE]
        at: I64
        if number:
            at = self.logs + (number - 1) * self.log_words
            self.change(lay.LOGS_FREE, self.words[at])
            self.journal_words(at, 1)
        else:
            number = self.words[lay.LOGS_HIGH] + 1
            if number > self.cells_room:
                raise StoreError("a shared file has no room for another log; raise max_keys, or use several files")
            self.allocate(lay.LOGS_READY, number, self.logs, self.log_words, self.cells_room)
            at = self.logs + (number - 1) * self.log_words
            self.change(lay.LOGS_HIGH, number)
        self.words[at] = self.words[at + 1] = self.words[at + 3] = 0
        self.words[at + 2] = (self.log_words - 4) // 2
        self.change(cell + lay.STATE + 2, number)
        return number

    @cython.cfunc
    def copy_log(self, source: I64, target: I64) -> cython.int:
        """Gives a new cell a copy of another cell's log."""
        number: I64 = self.words[source + lay.STATE + 2]
        if number:
            old: I64 = self.logs + (number - 1) * self.log_words
            at: I64 = self.logs + (self.log_of_cell(target) - 1) * self.log_words
            i: I64
            for i in range(self.log_words):
                self.words[at + i] = self.words[old + i]
        return 0

    @cython.cfunc
    def free_log(self, number: I64) -> cython.int:
        at: I64 = self.logs + (number - 1) * self.log_words
        self.change(at, self.words[lay.LOGS_FREE])
        return self.change(lay.LOGS_FREE, number)

    @cython.cfunc
    def journal_log(self, number: I64) -> cython.int:
        """Records a log before an algorithm changes it in place: its first four words and its entries. What lies in a free place
        does not matter; with it, two changes of one long log would not fit into the journal."""
        if not number:
            return 0
        at: I64 = self.logs + (number - 1) * self.log_words
        head: I64 = self.words[at]
        n: I64 = self.words[at + 1]
        to_the_end: I64 = self.words[at + 2] - head
        self.journal_words(at, 4)
        self.journal_words(at + 4 + 2 * head, 2 * (n if n < to_the_end else to_the_end))
        return self.journal_words(at + 4, 2 * (n - to_the_end)) if n > to_the_end else 0

    @cython.cfunc
    def log_full_until(self, cell: I64, moment: I64, window: I64, own: I64, retry: I64, now: I64) -> I64:
        """When a full log has room for an entry of that time; 0: at `retry`. `window` is the longest one used on the key, `own`
        the caller's."""
        number: I64 = self.words[cell + lay.STATE + 2]
        if not number:
            return 0
        at: I64 = self.logs + (number - 1) * self.log_words
        n: I64 = self.words[at + 1]
        room: I64 = self.words[at + 2]
        if n < room:
            return 0
        head: I64 = self.words[at]
        first: I64 = self.words[at + 4 + 2 * head]
        if first <= now - window:  # adding prunes first
            return 0
        until: I64 = first + window
        i: I64
        if n > 1:  # or joins the two oldest
            second: I64 = self.words[at + 4 + 2 * ((head + 1) % room)]
            if second <= now - own:
                return 0
            if second + own < until:
                until = second + own
        if until <= retry:
            return 0
        for i in range(n):
            if self.words[at + 4 + 2 * ((head + i) % room)] == moment:  # calls of one moment share an entry
                return 0
        self.words[lay.LOG_FULL] += 1
        return until

    @cython.cfunc
    def add(self, cell: I64, moment: I64, cost: I64, before: I64, unseen: I64) -> cython.int:
        """Prunes the cell's log up to `before` and adds an entry. Without a free place, the two oldest entries become one where
        the caller's own window, which begins after `unseen`, has neither: for longer ones the older counts longer then."""
        number: I64 = self.log_of_cell(cell)
        at: I64 = self.logs + (number - 1) * self.log_words
        n: I64 = self.words[at + 1]
        room: I64 = self.words[at + 2]
        if n >= room and self.words[at + 4 + 2 * self.words[at]] > before:
            second: I64 = (self.words[at] + 1) % room
            if n == 1 or self.words[at + 4 + 2 * second] > unseen:
                return self.merge_entry(number, moment, cost)
            self.journal_words(at, 2)
            self.journal_words(at + 4 + 2 * self.words[at], 2)  # its place may be written next
            self.words[at] = second  # its running total is that of both
            n -= 1
            self.words[at + 1] = n
        last: I64 = at + 4 + 2 * ((self.words[at] + n + room - 1) % room)
        if n > 0 and self.words[last] > moment:  # entries dated later move up
            self.journal_log(number)
        else:
            self.journal_words(at, 6)  # with the first place, where a log begins anew when nothing is left of it
            self.journal_words(last + 1, 1)
            self.journal_words(at + 4 + 2 * ((self.words[at] + n) % room), 2)
        sliding_log.write(self.log_at(number), before, moment, cost)
        return 0

    @cython.cfunc
    def merge_entry(self, number: I64, moment: I64, cost: I64) -> cython.int:
        """Adds to a log without a free place what must be added (debt, say): it joins the next later entry, or the last one,
        which is dated later then. Either counts longer than it would have, never shorter."""
        at: I64 = self.logs + (number - 1) * self.log_words
        n: I64 = self.words[at + 1]
        i: I64 = n - 1
        self.journal_log(number)
        entry: I64 = at + 4 + 2 * ((self.words[at] + i) % n)
        if self.words[entry] < moment:
            self.words[entry] = moment
        while i >= 0 and self.words[entry] >= moment:
            self.words[entry + 1] += cost
            i -= 1
            entry = at + 4 + 2 * ((self.words[at] + i) % n)
        return 0

    @cython.cfunc
    def fill(self, cell: I64, entries: Any) -> cython.int:
        """Gives a cell a log of just these (moment, cost) pairs; those that are too many count as long as the latest of them.
        Nothing points to a new log yet, so nothing of it is noted but the way to it."""
        room: I64 = (self.log_words - 4) // 2
        pairs = sorted(entries)
        extra: I64 = len(pairs) - room
        if extra > 0:
            pairs = [(pairs[extra][0], sum(cost for _, cost in pairs[: extra + 1])), *pairs[extra + 1 :]]
        if self.words[cell + lay.STATE + 2]:
            self.journal_log(self.words[cell + lay.STATE + 2])
        number: I64 = self.log_of_cell(cell)
        at: I64 = self.logs + (number - 1) * self.log_words
        self.words[at] = self.words[at + 3] = 0
        total: I64 = 0
        n: I64 = 0
        for moment, cost in pairs:
            total += cost
            self.words[at + 4 + 2 * n] = moment
            self.words[at + 5 + 2 * n] = total
            n += 1
        self.words[at + 1] = n
        return 0
