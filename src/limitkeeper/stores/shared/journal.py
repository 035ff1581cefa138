"""Undo journal over the words of a mapped file: the old value of a word is recorded before the word changes.

    journal_word    journal ← (word, old value), then its length      before a word changes
    commit          journal's length ← 0                               the change is complete
    roll_back       restores the old values, the last one first        by a process that finds the journal of a dead one

A process may be killed between any two instructions; it leaves either the change or its journal. Words that nothing points to yet
(a new cell, a new block) are not recorded: restoring the pointer undoes them. The lock is one for the
file: a decision holds it for about 0.1 µs, so a million decisions a second keep it busy for a tenth of the time. Rejected: lock
stripes, because a decision on several limits would hold several locks, and undoing it would be a protocol between journals.

Compiled, `words` is a pointer into the file; plain, a memoryview on it. The same source reads and writes both.
"""

from __future__ import annotations

from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.stores.shared import atomics
    from cython.cimports.limitkeeper.stores.shared import layout as lay
else:
    from . import atomics
    from . import layout as lay

from ...errors import StoreError

TOO_LARGE = "one change of a shared file is larger than its journal; use shorter keys, or fewer limits at once"


@cython.cclass
class Journal:
    """The words of one file. Callers hold the file's lock."""

    def __init__(self, memory: Any, journal: int) -> None:
        self.memory = memory
        self.journal = journal
        if cython.compiled:
            view: cython.uchar[::1] = memory
            self.words = cython.cast(cython.p_longlong, cython.address(view[0]))
        else:
            self.words: Any = memoryview(memory).cast("q")

    @cython.cfunc
    def journal_word(self, at: cython.longlong) -> cython.int:
        """Records a word's value before it changes."""
        n: cython.longlong = self.words[lay.JOURNAL]
        if n >= lay.JOURNAL_ROOM:
            raise StoreError(TOO_LARGE)
        self.words[self.journal + 2 * n] = at
        self.words[self.journal + 2 * n + 1] = self.words[at]
        atomics.publish(self.words, lay.JOURNAL, n + 1)
        return 0

    @cython.cfunc
    def journal_state(self, at: cython.longlong) -> cython.int:
        """Records the three words of a state with one write of the length."""
        n: cython.longlong = self.words[lay.JOURNAL]
        if n > lay.JOURNAL_ROOM - 3:
            raise StoreError(TOO_LARGE)
        i: cython.longlong
        for i in range(3):
            self.words[self.journal + 2 * (n + i)] = at + i
            self.words[self.journal + 2 * (n + i) + 1] = self.words[at + i]
        atomics.publish(self.words, lay.JOURNAL, n + 3)
        return 0

    @cython.cfunc
    def change(self, at: cython.longlong, value: cython.longlong) -> cython.int:
        """Records and changes a word."""
        self.journal_word(at)
        self.words[at] = value
        return 0

    @cython.cfunc
    def commit(self) -> cython.int:
        """Ends the change."""
        atomics.publish(self.words, lay.JOURNAL, 0)
        return 0

    @cython.cfunc
    def roll_back(self) -> cython.longlong:
        """Undoes an unfinished change; returns the number of restored words."""
        n: cython.longlong = self.words[lay.JOURNAL]
        i: cython.longlong = n
        while i > 0:
            i -= 1
            self.words[self.words[self.journal + 2 * i]] = self.words[self.journal + 2 * i + 1]
        atomics.publish(self.words, lay.JOURNAL, 0)
        return n

    def mend(self, end: int) -> None:
        """Rolls back the journal of a file from before a reboot, if its entries are in range."""
        n: cython.longlong = self.words[lay.JOURNAL]
        if 0 < n <= lay.JOURNAL_ROOM and all(0 < self.words[self.journal + 2 * i] < end for i in range(n)):
            self.roll_back()

    def get(self, at: cython.longlong) -> int:
        return self.words[at] if self.words else 0

    def set(self, at: cython.longlong, value: cython.longlong) -> None:
        atomics.publish(self.words, at, value)

    def close(self) -> None:
        """Releases the memory."""
        if cython.compiled:
            self.words = cython.NULL
        else:
            self.words.release()
            self.words = None
        self.memory = None
