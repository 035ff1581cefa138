# The C face of cell_table.py.
from limitkeeper.stores.shared.log_rings cimport LogRings

cdef class SharedCellTable(LogRings):
    cdef long long heads, cells, blocks, mask, blocks_room, secret, other
    cdef readonly list units, births
    cdef long long find(self, long long limit_id, str key, long long hash)
    cdef bint holds(self, long long cell, str key)
    cdef long long overflow_cell(self, long long limit_id, long long hash)
    cdef bint is_overflow(self, long long cell)
    cdef long long insert(self, long long limit_id, long long unit, str key, long long hash)
    cdef long long insert_overflow_cell(self, long long limit_id, long long unit, long long hash)
    cdef long long fresh_cell(self, long long room)
    cdef int place(self, long long cell, long long hash, long long size, long long tag)
    cdef bint has_blocks(self, long long size)
    cdef long long store_long(self, str key, long long size)
    cdef int remove(self, long long cell, bint logs)
    cdef int free_long(self, long long first)
    cdef bint is_new(self, long long cell, long long now_us)
    cdef int sweep(self, long long budget, long long now_us)

cdef long long overflow_hash(long long limit_id, long long number) noexcept
