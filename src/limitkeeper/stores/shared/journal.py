"""Words of a mapped file, every change of which is written down before it is made.

    note(word)      journal ← (word, old value), then its length      before a word that matters is changed
    commit          journal's length ← 0                               the change is whole
    roll_back       old values back, the last first                    whoever finds a journal with somebody else's change in it

A process may be killed between any two instructions; what it leaves is either the change or its journal. Words that nothing
points to yet (a fresh cell, a fresh block) need no note: taking back the pointer takes them back. The lock is one for the
file: a decision holds it for about a tenth of a microsecond, so a million decisions a second keep it busy for a tenth of the
time; stripes would make a decision on several limits hold several locks, and its undoing a protocol between journals.

Compiled, `words` is a pointer into the file; plain, a memoryview on it. The same source reads and writes both.
"""

from __future__ import annotations

from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.stores.shared import key_codec as w
    from cython.cimports.limitkeeper.stores.shared import layout as lay
else:
    from . import key_codec as w
    from . import layout as lay

from ...errors import StoreError

TOO_LARGE = "one change of a shared file is larger than its journal; use shorter keys, or fewer limits at once"


@cython.cclass
class Journal:
    """The words of one file. Whoever calls holds the file's lock."""

    def __init__(self, memory: Any, journal: int) -> None:
        self.memory = memory
        self.journal = journal
        if cython.compiled:
            view: cython.uchar[::1] = memory
            self.words = cython.cast(cython.p_longlong, cython.address(view[0]))
        else:
            self.words: Any = memoryview(memory).cast("q")

    @cython.cfunc
    def note(self, at: cython.longlong) -> cython.int:
        """Writes a word's value down, before it is changed."""
        n: cython.longlong = self.words[lay.JOURNAL]
        if n >= lay.JOURNAL_ROOM:
            raise StoreError(TOO_LARGE)
        self.words[self.journal + 2 * n] = at
        self.words[self.journal + 2 * n + 1] = self.words[at]
        w.publish(self.words, lay.JOURNAL, n + 1)
        return 0

    @cython.cfunc
    def note_state(self, at: cython.longlong) -> cython.int:
        """As note, for the three words of a state, at the price of one."""
        n: cython.longlong = self.words[lay.JOURNAL]
        if n > lay.JOURNAL_ROOM - 3:
            raise StoreError(TOO_LARGE)
        i: cython.longlong
        for i in range(3):
            self.words[self.journal + 2 * (n + i)] = at + i
            self.words[self.journal + 2 * (n + i) + 1] = self.words[at + i]
        w.publish(self.words, lay.JOURNAL, n + 3)
        return 0

    @cython.cfunc
    def change(self, at: cython.longlong, value: cython.longlong) -> cython.int:
        """Changes a word that matters."""
        self.note(at)
        self.words[at] = value
        return 0

    @cython.cfunc
    def commit(self) -> cython.int:
        """The change is whole."""
        w.publish(self.words, lay.JOURNAL, 0)
        return 0

    @cython.cfunc
    def roll_back(self) -> cython.longlong:
        """Takes an unfinished change back; answers how many words it had changed."""
        n: cython.longlong = self.words[lay.JOURNAL]
        i: cython.longlong = n
        while i > 0:
            i -= 1
            self.words[self.words[self.journal + 2 * i]] = self.words[self.journal + 2 * i + 1]
        w.publish(self.words, lay.JOURNAL, 0)
        return n

    def mend(self, end: int) -> None:
        """Rolls back what a machine that stopped left behind, if it makes sense."""
        n: cython.longlong = self.words[lay.JOURNAL]
        if 0 < n <= lay.JOURNAL_ROOM and all(0 < self.words[self.journal + 2 * i] < end for i in range(n)):
            self.roll_back()

    def get(self, at: cython.longlong) -> int:
        return self.words[at] if self.words else 0

    def set(self, at: cython.longlong, value: cython.longlong) -> None:
        w.publish(self.words, at, value)

    def close(self) -> None:
        """Lets go of the memory."""
        if cython.compiled:
            self.words = cython.NULL
        else:
            self.words.release()
            self.words = None
        self.memory = None
