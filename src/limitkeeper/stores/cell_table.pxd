# C declarations of cell_table.pyx.
cimport cython
from cpython.unicode cimport PyUnicode_DATA, PyUnicode_GET_LENGTH, PyUnicode_KIND
from libc.string cimport memcmp, memcpy

cdef extern from *:
    """
    /* A str caches its hash; PyObject_Hash would be a call through two pointers. */
    static inline Py_hash_t limitkeeper_str_hash(PyObject* key) {
        Py_hash_t known = ((PyASCIIObject*) key)->hash;
        return known != -1 ? known : PyObject_Hash(key);
    }
    """
    Py_hash_t str_hash "limitkeeper_str_hash"(str key) noexcept

cdef struct Cell:
    unsigned long long hash
    long long a, b, c
    unsigned int next          # index + 1 of the next cell of the chain
    unsigned int size          # bytes of the key
    char key[21]               # the key itself, or a pointer to it
    unsigned char kind         # width of the key's characters
    unsigned short unit        # which rate's state it is; 0: none yet; SEVERAL: `a` points to Rates

cdef enum:
    SEVERAL = 65535     # the unit of a cell whose key has several rates, or was reset
    MOST_RATES = 4      # rates of one key
    SEGMENT = 4096      # cells: 256 KiB
    INLINE = 21         # bytes of a key that fit into its cell
    CHECKS_PER_INSERT = 4   # cells checked for each one inserted
    CHECKS_WHEN_FULL = 512  # and for a key that is new to a full store

cdef struct Rates:
    long long reset_id         # number of the key's last reset; 0: none
    long long reset_until      # until when it counts, in microseconds
    int n
    int unit[4]                # in order of their first use
    long long a[4]
    long long b[4]
    long long c[4]

ctypedef Rates* RatesPointer

cdef inline bint same_key(Cell* cell, unsigned int size, int kind, const void* data) noexcept nogil:
    cdef const char* own = &cell.key[0]
    cdef const char* other = <const char*> data
    cdef unsigned long long x, y
    cdef unsigned int u, v
    if cell.size != size or cell.kind != kind:
        return False
    if size > INLINE:
        own = (<char**> own)[0]
    # Most keys are short, and comparing overlapping words inline is faster than a call of memcmp.
    if size >= 8:
        while size > 8:
            memcpy(&x, own, 8)
            memcpy(&y, other, 8)
            if x != y:
                return False
            if size < 16:
                own += size - 8
                other += size - 8
                size = 8
            else:
                own += 8
                other += 8
                size -= 8
        memcpy(&x, own, 8)
        memcpy(&y, other, 8)
        return x == y
    if size >= 4:
        memcpy(&u, own, 4)
        memcpy(&v, other, 4)
        if u != v:
            return False
        memcpy(&u, own + size - 4, 4)
        memcpy(&v, other + size - 4, 4)
        return u == v
    while size:
        size -= 1
        if own[size] != other[size]:
            return False
    return True

@cython.final
cdef class Capacity:
    cdef readonly long long max_keys, live, overflow
    cdef long long ungranted, era, era_end_us, window_us, checked, soonest_us
    cdef void unsettle(self) noexcept nogil
    cdef long long grant(self) noexcept nogil
    cdef long long era_at(self, long long now_us) noexcept nogil

@cython.final
cdef class Table:
    cdef readonly Capacity capacity
    cdef readonly long long birth_us
    cdef readonly list units
    cdef dict numbers
    cdef bint logs
    cdef unsigned int* heads
    cdef unsigned long long mask
    cdef unsigned int* old
    cdef unsigned long long old_mask, moved
    cdef Cell** segments
    cdef Py_ssize_t n, allocated, segment_room, cursor, loose, slots
    cdef Cell* overflow
    cdef unsigned long long secret, other
    cdef Cell* insert(self, str key) noexcept
    cdef Cell* overflow_cell(self, str key, long long now_us) noexcept
    cdef bint is_shared(self, Cell* cell) noexcept nogil
    cdef void discard(self, str key) noexcept
    cdef Py_ssize_t sweep(self, Py_ssize_t budget, long long now_us) noexcept
    cdef bint make_room(self, Cell* cell, long long before) noexcept
    cdef bint copy_cell(self, Cell* source, Cell* target) noexcept
    cdef void empty(self, Cell* cell) noexcept
    cdef bint grow(self) noexcept
    cdef void resize(self, unsigned long long size) noexcept
    cdef void migrate(self, Py_ssize_t budget) noexcept
    cdef void remove(self, Py_ssize_t i) noexcept
    cdef void release_loose(self) noexcept
    cdef long long due_us(self, Cell* cell, long long now_us) noexcept
    cdef bint set_rates(self, Cell* cell, Rates* rates) noexcept
    cdef bint is_new(self, Cell* cell, long long now_us) noexcept
    cdef long long state_due_us(self, int unit, long long a, long long b, long long c, long long now_us) noexcept
    cdef list states_of(self, Cell* cell)
    cdef str key_of(self, Cell* cell)

    # Looking up a cell is most of the hot path, so it is defined here, where the C compiler can inline it.

    cdef inline Cell* at(self, Py_ssize_t i) noexcept nogil:
        return &self.segments[i // SEGMENT][i % SEGMENT]

    cdef inline unsigned int* chain(self, unsigned long long hashed) noexcept nogil:
        """The head of the chain that holds, or would hold, this hash."""
        if self.old != NULL and (hashed & self.old_mask) >= self.moved:
            return &self.old[hashed & self.old_mask]
        return &self.heads[hashed & self.mask]

    cdef inline unsigned long long hashed(self, str key) noexcept:
        """The string's hash mixed with a secret: PYTHONHASHSEED may be fixed, and its low bits can then be chosen."""
        cdef unsigned long long mixed = (<unsigned long long> str_hash(key) ^ self.secret) * <unsigned long long> 0x9E3779B97F4A7C15
        return mixed ^ (mixed >> 32)

    cdef inline Cell* find(self, str key) noexcept:
        cdef unsigned long long hashed = self.hashed(key)
        cdef unsigned int link = self.chain(hashed)[0]
        cdef int kind = PyUnicode_KIND(key)
        cdef unsigned int size = <unsigned int> (PyUnicode_GET_LENGTH(key) * kind)
        cdef Cell* cell
        while link:
            cell = self.at(link - 1)
            if cell.hash == hashed and same_key(cell, size, kind, PyUnicode_DATA(key)):
                return cell
            link = cell.next
        return NULL
