"""Table: the cells of MemoryStore by key, a chained hash table in C memory with 64 bytes per key (compiled build).

Cells lie densely in segments that never move, so a pointer stays valid while nothing is removed. The index of chain heads
grows incrementally, a few buckets per call (doubling it in one step would stop the process for tens of milliseconds at a
million keys). Removing a cell moves the last one into its slot, and empty segments are returned to the system.
`cell_table.py` has the same interface in the pure-Python build.
"""

import gc
import os

cimport cython
from cpython.unicode cimport PyUnicode_DATA, PyUnicode_FromKindAndData, PyUnicode_GET_LENGTH, PyUnicode_KIND
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp, memcpy, memset

from limitkeeper.algorithms.sliding_log import read_log
from limitkeeper.errors import ConfigurationError

from limitkeeper.algorithms.limit cimport Limit
from limitkeeper.algorithms cimport sliding_log
from limitkeeper.stores.keyed_hash cimport hash_bytes

cdef extern from *:
    """
    /* Whole pages from the system: zeroed on first access, returned at once when released. */
    #if defined(_WIN32)
    #include <stdlib.h>
    static void* limitkeeper_pages(size_t size) { return calloc(1, size); }
    static void limitkeeper_release(void* pages, size_t size) { free(pages); }
    static void limitkeeper_release_part(void* pages, size_t size) { }
    #else
    #include <sys/mman.h>
    static void* limitkeeper_pages(size_t size) {
        void* pages = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (pages == MAP_FAILED) return 0;
    #ifdef MADV_NOHUGEPAGE
        madvise(pages, size, MADV_NOHUGEPAGE);  /* zeroing a huge page would pause the process */
    #endif
        return pages;
    }
    static void limitkeeper_release(void* pages, size_t size) { munmap(pages, size); }
    static void limitkeeper_release_part(void* pages, size_t size) { madvise(pages, size, MADV_DONTNEED); }
    #endif
    /* Long keys and logs come from malloc, which keeps freed memory until malloc_trim. */
    #if defined(__GLIBC__)
    #include <malloc.h>
    static void limitkeeper_trim(void) { malloc_trim(0); }
    #else
    static void limitkeeper_trim(void) { }
    #endif
    """
    void* pages "limitkeeper_pages"(size_t size) nogil
    void release "limitkeeper_release"(void* pages, size_t size) nogil
    void release_part "limitkeeper_release_part"(void* pages, size_t size) nogil
    void trim "limitkeeper_trim"() nogil

cdef enum:
    SMALLEST = 1024     # chain heads: one page
    PART = 16384        # heads of the old index released in one step
    LOOSE = 67108864    # bytes of long keys and logs freed before malloc_trim

#: A cell stores its unit number in two bytes, of which one value stands for several rates.
MOST_UNITS = 65_534
TOO_MANY_UNITS = f"more than {MOST_UNITS} different limits under one name; round them to fewer, or give them names of their own"


cdef class Capacity:
    """The number of keys a store may hold and holds, over all its tables, and its decisions on overflow cells.

    `ungranted` overflow cells are left for tables. The era is part of the secret by which keys are mapped to overflow cells; it
    ends at `era_end_us` and lasts for the longest window of the store's limits. `checked` cells in rotation are not as new before
    `soonest_us`: when these are all, a full store need not be swept before that.
    """

    def __init__(self, max_keys):
        self.max_keys = max_keys
        self.ungranted = max_keys // 2 + 2048
        self.live = self.overflow = self.era = self.era_end_us = self.window_us = 0
        self.unsettle()

    cdef void unsettle(self) noexcept nogil:
        """Called when a cell may be as new sooner than it was: the rotation begins again."""
        self.checked, self.soonest_us = 0, 1LL << 62

    cdef long long grant(self) noexcept nogil:
        """The number of overflow cells of one more table: half of those that are left, at least 64."""
        cdef long long granted = self.ungranted // 2 if self.ungranted >= 128 else 64
        self.ungranted = self.ungranted - granted if self.ungranted > granted else 0
        return granted

    cdef long long era_at(self, long long now_us) noexcept nogil:
        if now_us >= self.era_end_us:
            self.era += 1
            self.era_end_us = now_us + self.window_us
        return self.era

    def widen(self, long long window_us):
        """Registers the window of a limit."""
        if window_us > self.window_us:
            self.era_end_us += window_us - self.window_us
            self.window_us = window_us


@cython.no_gc_clear
cdef class Table:
    """The cells of one limit name."""

    def __cinit__(self, Capacity capacity, long long birth_us, bint logs):
        self.capacity = capacity
        self.birth_us = birth_us
        self.logs = logs
        self.units = []
        self.numbers = {}
        self.secret = int.from_bytes(os.urandom(8), "little") | 1
        self.other = int.from_bytes(os.urandom(8), "little")
        self.heads = <unsigned int*> pages(SMALLEST * sizeof(unsigned int))
        if self.heads == NULL:
            raise MemoryError
        self.mask = SMALLEST - 1

    def __dealloc__(self):
        cdef Py_ssize_t i
        if self.heads == NULL:
            return
        for i in range(self.n):
            forget(self.at(i), self.logs)
        for i in range(self.allocated // SEGMENT):
            release(self.segments[i], SEGMENT * sizeof(Cell))
        free(self.segments)
        release(self.heads, (self.mask + 1) * sizeof(unsigned int))
        if self.old != NULL:
            release(self.old, (self.old_mask + 1) * sizeof(unsigned int))
        if self.overflow != NULL:
            for i in range(self.slots):
                forget(&self.overflow[i], self.logs)
            free(self.overflow)
        if self.capacity is not None:
            self.capacity.live -= self.n

    # Adding ----------------------------------------------------------------------------------------------------

    cdef Cell* insert(self, str key) noexcept:
        """Adds a cell for a key that has none; NULL when out of memory."""
        cdef Cell* cell
        cdef unsigned int* head
        cdef int kind = PyUnicode_KIND(key)
        cdef unsigned int size = <unsigned int> (PyUnicode_GET_LENGTH(key) * kind)
        cdef char* copy = NULL
        if self.n == self.allocated and not self.grow():
            return NULL
        if size > INLINE:
            copy = <char*> malloc(size)
            if copy == NULL:
                return NULL
        cell = self.at(self.n)
        memset(cell, 0, sizeof(Cell))
        cell.hash = self.hashed(key)
        cell.kind = kind
        cell.size = size
        if copy == NULL:
            memcpy(cell.key, PyUnicode_DATA(key), size)
        else:
            memcpy(copy, PyUnicode_DATA(key), size)
            (<char**> cell.key)[0] = copy
        self.n += 1
        self.capacity.live += 1
        self.capacity.unsettle()
        head = self.chain(cell.hash)
        cell.next = head[0]
        head[0] = <unsigned int> self.n
        if self.old == NULL and <unsigned long long> self.n * 2 > self.mask + 1:
            self.resize((self.mask + 1) * 2)
        self.migrate(4)
        return cell

    cdef Cell* overflow_cell(self, str key, long long now_us) noexcept:
        """The overflow cell of a key that is new to a full store, chosen by a hash with two secrets of its own and the era."""
        cdef int kind = PyUnicode_KIND(key)
        cdef Py_ssize_t size = PyUnicode_GET_LENGTH(key) * kind
        cdef unsigned long long chosen
        if self.overflow == NULL:
            if self.slots == 0:
                self.slots = self.capacity.grant()
            self.overflow = <Cell*> calloc(self.slots, sizeof(Cell))
            if self.overflow == NULL:
                return NULL
        chosen = hash_bytes(PyUnicode_DATA(key), size, kind, self.secret, self.other, self.capacity.era_at(now_us))
        return &self.overflow[chosen % <unsigned long long> self.slots]

    cdef inline bint is_shared(self, Cell* cell) noexcept nogil:
        return self.overflow != NULL and cell >= self.overflow and cell < self.overflow + self.slots

    cdef bint grow(self) noexcept:
        """Allocates another segment of cells."""
        cdef Py_ssize_t segment = self.allocated // SEGMENT
        cdef Cell** more
        if segment == self.segment_room:
            more = <Cell**> realloc(self.segments, (segment * 2 + 8) * sizeof(Cell*))
            if more == NULL:
                return False
            self.segments = more
            self.segment_room = segment * 2 + 8
        self.segments[segment] = <Cell*> pages(SEGMENT * sizeof(Cell))
        if self.segments[segment] == NULL:
            return False
        self.allocated += SEGMENT
        return True

    cdef void resize(self, unsigned long long size) noexcept:
        """Starts the migration to an index of another size; when out of memory, the chains get longer instead."""
        cdef unsigned int* fresh = <unsigned int*> pages(size * sizeof(unsigned int))
        if fresh == NULL:
            return
        self.old, self.old_mask, self.moved = self.heads, self.mask, 0
        self.heads, self.mask = fresh, size - 1

    cdef void migrate(self, Py_ssize_t budget) noexcept:
        """Moves `budget` chains of the old index into the new one; sixteen empty ones count as one."""
        budget *= 16
        cdef unsigned int link, following
        cdef bint occupied
        cdef unsigned int* head
        cdef Cell* cell
        while self.old != NULL and budget > 0:
            link = self.old[self.moved]
            occupied = link != 0
            while link:
                cell = self.at(link - 1)
                following = cell.next
                head = &self.heads[cell.hash & self.mask]
                cell.next = head[0]
                head[0] = link
                link = following
            self.moved += 1
            budget -= 16 if occupied else 1
            if self.moved % PART == 0:
                release_part(self.old + self.moved - PART, PART * sizeof(unsigned int))
            if self.moved > self.old_mask:
                release(self.old, (self.old_mask + 1) * sizeof(unsigned int))
                self.old = NULL

    cdef bint set_rates(self, Cell* cell, Rates* rates) noexcept:
        """Stores the rates of a key: a single one in the cell itself, otherwise in a block of their own. False: out of memory."""
        cdef Rates* block = <Rates*> cell.a if cell.unit == SEVERAL else NULL
        if rates.n == 1 and rates.reset_id == 0:
            free(block)
            cell.unit = rates.unit[0]
            cell.a = cell.b = 0
            if not self.logs:
                cell.a, cell.b, cell.c = rates.a[0], rates.b[0], rates.c[0]
            return True
        if block == NULL:
            block = <Rates*> malloc(sizeof(Rates))
            if block == NULL:
                return False
        block[0] = rates[0]
        cell.unit, cell.a, cell.b = SEVERAL, <long long> block, 0
        return True

    # Removing --------------------------------------------------------------------------------------------------

    cdef long long due_us(self, Cell* cell, long long now_us) noexcept:
        """When the cell's state equals that of an unseen key. Of several rates, all must: a rate whose state is dropped while
        another's remains would start again with what that one holds."""
        cdef Rates* rates
        cdef int i
        cdef long long due, latest
        if cell.unit == 0:
            return now_us + 1
        if cell.unit != SEVERAL:
            return self.state_due_us(cell.unit, cell.a, cell.b, cell.c, now_us)
        rates = <Rates*> cell.a
        latest = rates.reset_until
        for i in range(rates.n):
            due = self.state_due_us(rates.unit[i], rates.a[i], rates.b[i], cell.c if self.logs else rates.c[i], now_us)
            if due > latest:
                latest = due
        return latest

    cdef long long state_due_us(self, int unit, long long a, long long b, long long c, long long now_us) noexcept:
        cdef Limit limit = <Limit> self.units[unit - 1]
        cdef long long now = now_us // limit.tick
        cdef long long reset = limit.rule(limit, a, b, c, now, now, 0, 0)[6]
        if limit.ramp > 0 and reset < self.birth_us // limit.tick + limit.ramp:
            reset = self.birth_us // limit.tick + limit.ramp
        return reset * limit.tick

    cdef bint is_new(self, Cell* cell, long long now_us) noexcept:
        return self.due_us(cell, now_us) <= now_us

    cdef Py_ssize_t sweep(self, Py_ssize_t budget, long long now_us) noexcept:
        """Checks the next `budget` cells and removes those whose state equals that of an unseen key. At the end of the table,
        what is left of the budget; before, −1."""
        cdef Cell* cell
        cdef long long due_us
        while budget > 0 and self.cursor < self.n:
            budget -= 1
            cell = self.at(self.cursor)
            due_us = self.due_us(cell, now_us)
            if due_us <= now_us:
                self.remove(self.cursor)
            else:
                self.capacity.checked += 1
                if due_us < self.capacity.soonest_us:
                    self.capacity.soonest_us = due_us
                self.cursor += 1
        if self.old == NULL and self.mask >= SMALLEST and <unsigned long long> self.n * 16 < self.mask + 1:
            self.resize((self.mask + 1) // 4)
        self.migrate(8)
        if self.cursor < self.n:
            return -1
        self.cursor = 0
        return budget

    cdef void remove(self, Py_ssize_t i) noexcept:
        """Removes cell i; the last cell moves into its slot, and an empty segment is returned to the system."""
        cdef Cell* cell = self.at(i)
        cdef Py_ssize_t last = self.n - 1
        cdef unsigned int* link = self.chain(cell.hash)
        while link[0] != <unsigned int> (i + 1):
            link = &self.at(link[0] - 1).next
        link[0] = cell.next
        self.loose += loose_bytes(cell, self.logs)
        forget(cell, self.logs)
        if i != last:
            link = self.chain(self.at(last).hash)
            while link[0] != <unsigned int> (last + 1):
                link = &self.at(link[0] - 1).next
            link[0] = <unsigned int> (i + 1)
            memcpy(cell, self.at(last), sizeof(Cell))
        self.n = last
        self.capacity.live -= 1
        if self.allocated - self.n >= 2 * SEGMENT:
            self.allocated -= SEGMENT
            release(self.segments[self.allocated // SEGMENT], SEGMENT * sizeof(Cell))
            if self.loose > LOOSE:
                self.release_loose()

    cdef void release_loose(self) noexcept:
        self.loose = 0
        trim()

    cdef void discard(self, str key) noexcept:
        """Removes one key."""
        cdef Cell* cell = self.find(key)
        cdef unsigned int link
        if cell == NULL:
            return
        link = self.chain(cell.hash)[0]
        while link and self.at(link - 1) != cell:
            link = self.at(link - 1).next
        if link:
            self.remove(link - 1)

    # Logs ------------------------------------------------------------------------------------------------------

    cdef bint make_room(self, Cell* cell, long long before) noexcept:
        """Makes room for one more entry in the cell's log: prunes it, doubles a full one, shrinks a nearly empty one."""
        cdef long long* log = <long long*> cell.c
        cdef long long* fresh
        cdef long long n = 0, room = 4, first
        if log != NULL:
            n = sliding_log.prune(log, before)
            room = log[2]
            if n < room and (room <= 16 or n * 8 > room):
                return True
            room = room * 2 if n == room else room // 4
        fresh = <long long*> malloc((4 + 2 * room) * sizeof(long long))
        if fresh == NULL:
            return log != NULL and n < log[2]
        fresh[0], fresh[1], fresh[2], fresh[3] = 0, n, room, 0
        if log != NULL:
            fresh[3] = log[3]
            first = log[2] - log[0] if log[0] + n > log[2] else n  # entries before the ring wraps around
            memcpy(fresh + 4, log + 4 + 2 * log[0], first * 16)
            memcpy(fresh + 4 + 2 * first, log + 4, (n - first) * 16)
            free(log)
        cell.c = <long long> fresh
        return True

    cdef void empty(self, Cell* cell) noexcept:
        """Removes the states of an overflow cell that is as new, and the entries of its log: another rate may have a longer
        window."""
        forget(cell, self.logs)
        cell.unit = cell.a = cell.b = cell.c = 0

    cdef bint copy_cell(self, Cell* source, Cell* target) noexcept:
        """Gives a new cell a copy of another cell's log or states."""
        cdef long long* log = <long long*> source.c if self.logs else NULL
        cdef size_t size
        if source.unit == SEVERAL and not self.set_rates(target, <Rates*> source.a):
            return False
        if source.unit != SEVERAL:
            target.unit = source.unit
            if not self.logs:
                target.a, target.b, target.c = source.a, source.b, source.c
        if log != NULL:
            size = (4 + 2 * log[2]) * sizeof(long long)
            target.c = <long long> malloc(size)
            if not target.c:
                return False
            memcpy(<void*> target.c, log, size)
        return True

    # Reading ---------------------------------------------------------------------------------------------------

    cdef list states_of(self, Cell* cell):
        """(unit, state as plain data) of each rate: three integers, or the entries of a log."""
        cdef long long* log = <long long*> cell.c
        cdef Rates* rates = <Rates*> cell.a
        cdef int i
        if self.logs:
            entries = () if log == NULL else tuple(read_log([log[i] for i in range(4 + 2 * log[2])]))
            if cell.unit == SEVERAL:
                return [(rates.unit[0], (entries, 0, 0))] if rates.n else []
            return [(cell.unit, (entries, 0, 0))]
        if cell.unit == SEVERAL:
            return [(rates.unit[i], (rates.a[i], rates.b[i], rates.c[i])) for i in range(rates.n)]
        return [(cell.unit, (cell.a, cell.b, cell.c))] if cell.unit else []

    cdef str key_of(self, Cell* cell):
        if cell.size <= INLINE:
            return PyUnicode_FromKindAndData(cell.kind, cell.key, cell.size // cell.kind)
        return PyUnicode_FromKindAndData(cell.kind, (<char**> cell.key)[0], cell.size // cell.kind)

    def states(self, str key):
        """(unit, state as plain data) of each rate of a key."""
        cdef Cell* cell = self.find(key)
        return [] if cell == NULL else self.states_of(cell)

    def __len__(self):
        return self.n

    def clear(self):
        """Removes every key, and the states of overflow cells."""
        cdef Py_ssize_t i
        while self.n > 0:
            self.remove(self.n - 1)
        if self.overflow != NULL:
            for i in range(self.slots):
                self.empty(&self.overflow[i])

    def items(self):
        """(key, [(unit, state), …]) of every key; keys added or removed meanwhile may be missed."""
        cdef Py_ssize_t i = 0
        cdef list found = []
        collecting = gc.isenabled()
        gc.disable()  # a finaliser that decides could move cells during this loop
        try:
            while i < self.n:
                found.append((self.key_of(self.at(i)), self.states_of(self.at(i))))
                i += 1
        finally:
            if collecting:
                gc.enable()
        return found

    def tidy(self, Py_ssize_t budget, long long now_us):
        """Sweeps `budget` keys, finishes the migration of the index, and returns freed memory."""
        self.cursor = 0
        self.capacity.unsettle()
        while budget > 0 and self.sweep(64, now_us) < 0:
            budget -= 64
        self.migrate(<Py_ssize_t> self.old_mask + 1)
        if self.loose > 0:
            self.release_loose()

    def unit_of(self, Limit limit):
        """The number of a limit's units in this table, from 1; registers a new limit."""
        found = self.numbers.get(limit)
        if found is None:
            if len(self.units) >= MOST_UNITS:
                raise ConfigurationError(TOO_MANY_UNITS)
            self.units.append(limit)
            found = self.numbers[limit] = len(self.units)
        return found


cdef inline Py_ssize_t loose_bytes(Cell* cell, bint logs) noexcept nogil:
    """Bytes allocated with malloc for this cell."""
    cdef Py_ssize_t found = cell.size if cell.size > INLINE else 0
    if logs and cell.c:
        found += 16 * (<long long*> cell.c)[2]
    return found


cdef inline void forget(Cell* cell, bint logs) noexcept nogil:
    if cell.unit == SEVERAL:
        free(<void*> cell.a)
    if cell.size > INLINE:
        free((<char**> cell.key)[0])
    if logs:
        free(<void*> cell.c)
