# Cells in C memory, found by key: the compiled twin of table.py.
cdef struct Cell:
    unsigned long long hash
    long long a, b, c
    unsigned int next          # index + 1 of the next cell of the chain
    unsigned int size          # bytes of the key
    char key[21]               # the key itself, or a pointer to it
    unsigned char kind         # width of the key's characters
    unsigned short unit        # which limit's units the state is in; 0: none yet

cdef class Room:
    cdef readonly long long max_keys, live, shared

cdef class Table:
    cdef readonly Room room
    cdef readonly long long birth_us
    cdef readonly list units
    cdef bint logs
    cdef unsigned int* heads
    cdef unsigned long long mask
    cdef unsigned int* old
    cdef unsigned long long old_mask, moved
    cdef Cell** segments
    cdef Py_ssize_t n, allocated, segment_room, cursor
    cdef Cell* overflow
    cdef unsigned long long secret
    cdef Cell* find(self, str key) noexcept
    cdef Cell* insert(self, str key, long long now_us) noexcept
    cdef Cell* stranger(self, str key) noexcept
    cdef unsigned long long hashed(self, str key) noexcept
    cdef bint is_shared(self, Cell* cell) noexcept nogil
    cdef void discard(self, str key) noexcept
    cdef void sweep(self, Py_ssize_t budget, long long now_us) noexcept
    cdef bint make_room(self, Cell* cell, long long before) noexcept
    cdef unsigned int* chain(self, unsigned long long hash) noexcept nogil
    cdef Cell* at(self, Py_ssize_t i) noexcept nogil
    cdef bint grow(self) noexcept
    cdef void resize(self, unsigned long long size) noexcept
    cdef void migrate(self, Py_ssize_t budget) noexcept
    cdef void remove(self, Py_ssize_t i) noexcept
    cdef bint is_new(self, Cell* cell, long long now_us) noexcept
    cdef tuple state_of(self, Cell* cell)
    cdef str key_of(self, Cell* cell)
