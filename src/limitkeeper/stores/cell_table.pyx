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
    SHARED = 1024       # cells for overflow
    LOOSE = 67108864    # bytes of long keys and logs freed before malloc_trim

#: A cell stores its unit number in two bytes.
MOST_UNITS = 65_535
TOO_MANY_UNITS = f"more than {MOST_UNITS} different limits under one name; round them to fewer, or give them names of their own"


cdef class Capacity:
    """The number of keys a store may hold and holds, over all its tables, and its decisions on overflow cells."""

    def __init__(self, max_keys):
        self.max_keys = max_keys
        self.live = 0
        self.overflow = 0


@cython.no_gc_clear
cdef class Table:
    """The cells of one limit name."""

    def __cinit__(self, Capacity capacity, long long birth_us, bint logs):
        self.capacity = capacity
        self.birth_us = birth_us
        self.logs = logs
        self.units = []
        self.numbers = {}
        self.since = []
        self.secret = int.from_bytes(os.urandom(8), "little") | 1
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
            for i in range(SHARED):
                forget(&self.overflow[i], self.logs)
            free(self.overflow)
        if self.capacity is not None:
            self.capacity.live -= self.n

    # Adding ----------------------------------------------------------------------------------------------------

    cdef Cell* insert(self, str key, long long now_us) noexcept:
        """Adds a cell for a key that has none; NULL when out of memory."""
        cdef Cell* cell
        cdef unsigned int* head
        cdef int kind = PyUnicode_KIND(key)
        cdef unsigned int size = <unsigned int> (PyUnicode_GET_LENGTH(key) * kind)
        cdef char* copy = NULL
        self.sweep(2, now_us)
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
        head = self.chain(cell.hash)
        cell.next = head[0]
        head[0] = <unsigned int> self.n
        if self.old == NULL and <unsigned long long> self.n * 2 > self.mask + 1:
            self.resize((self.mask + 1) * 2)
        self.migrate(4)
        return cell

    cdef Cell* overflow_cell(self, str key) noexcept:
        """The overflow cell of a key that is new to a full store, chosen by the keyed hash."""
        if self.overflow == NULL:
            self.overflow = <Cell*> calloc(SHARED, sizeof(Cell))
            if self.overflow == NULL:
                return NULL
        return &self.overflow[(self.hashed(key) >> 20) % SHARED]

    cdef inline bint is_shared(self, Cell* cell) noexcept nogil:
        return self.overflow != NULL and cell >= self.overflow and cell < self.overflow + SHARED

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

    # Removing --------------------------------------------------------------------------------------------------

    cdef bint is_new(self, Cell* cell, long long now_us) noexcept:
        """Whether the cell's state equals that of an unseen key."""
        cdef Limit limit = <Limit> self.units[cell.unit - 1]
        cdef long long now = now_us // limit.tick
        if limit.ramp > 0 and now < self.birth_us // limit.tick + limit.ramp:
            return False
        return limit.rule(limit, cell.a, cell.b, cell.c, now, now, 0, 0)[6] <= now

    cdef void sweep(self, Py_ssize_t budget, long long now_us) noexcept:
        """Checks `budget` cells, in rotation, and removes those whose state equals that of an unseen key."""
        cdef Cell* cell
        if budget > self.n:
            budget = self.n
        while budget > 0 and self.n > 0:
            budget -= 1
            if self.cursor >= self.n:
                self.cursor = 0
            cell = self.at(self.cursor)
            if cell.unit and self.is_new(cell, now_us):
                self.remove(self.cursor)
            else:
                self.cursor += 1
        if self.old == NULL and self.mask >= SMALLEST and <unsigned long long> self.n * 16 < self.mask + 1:
            self.resize((self.mask + 1) // 4)
        self.migrate(8)

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

    # Reading ---------------------------------------------------------------------------------------------------

    cdef tuple state_of(self, Cell* cell):
        """The state as plain data: three integers, or the entries of a log."""
        cdef long long* log
        if self.logs:
            log = <long long*> cell.c
            if log == NULL:
                return ((), 0, 0)
            return (tuple(read_log([log[i] for i in range(4 + 2 * log[2])])), 0, 0)
        return (cell.a, cell.b, cell.c)

    cdef str key_of(self, Cell* cell):
        if cell.size <= INLINE:
            return PyUnicode_FromKindAndData(cell.kind, cell.key, cell.size // cell.kind)
        return PyUnicode_FromKindAndData(cell.kind, (<char**> cell.key)[0], cell.size // cell.kind)

    def saved(self, str key):
        """A key's unit and state as plain data; (0, None) without a cell."""
        cdef Cell* cell = self.find(key)
        return (0, None) if cell == NULL else (cell.unit, self.state_of(cell))

    def __len__(self):
        return self.n

    def clear(self):
        """Removes every key."""
        while self.n > 0:
            self.remove(self.n - 1)

    def items(self):
        """(key, unit, state) of every key; keys added or removed meanwhile may be missed."""
        cdef Py_ssize_t i = 0
        cdef list found = []
        collecting = gc.isenabled()
        gc.disable()  # a finaliser that decides could move cells during this loop
        try:
            while i < self.n:
                if self.at(i).unit:
                    found.append((self.key_of(self.at(i)), self.at(i).unit, self.state_of(self.at(i))))
                i += 1
        finally:
            if collecting:
                gc.enable()
        return found

    def tidy(self, Py_ssize_t budget, long long now_us):
        """Sweeps `budget` keys, finishes the migration of the index, and returns freed memory."""
        while budget > 0 and self.n > 0:
            self.sweep(64, now_us)
            budget -= 64
        self.migrate(<Py_ssize_t> self.old_mask + 1)
        if self.loose > 0:
            self.release_loose()

    def unit_of(self, Limit limit, long long now_us):
        """The number of a limit's units in this table, from 1; registers a new limit."""
        found = self.numbers.get(limit)
        if found is None:
            if len(self.units) >= MOST_UNITS:
                raise ConfigurationError(TOO_MANY_UNITS)
            self.since.append(now_us)
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
    if cell.size > INLINE:
        free((<char**> cell.key)[0])
    if logs:
        free(<void*> cell.c)
