# C declarations of cell_table.py.
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.unicode cimport PyUnicode_DATA, PyUnicode_FromKindAndData, PyUnicode_GET_LENGTH, PyUnicode_KIND
from libc.string cimport memcmp, memcpy
from limitkeeper.stores.keyed_hash cimport hash_bytes
from limitkeeper.stores.cell_table cimport Rates, RatesPointer
from limitkeeper.stores.shared.log_rings cimport LogRings

cdef class SharedCellTable(LogRings):
    cdef long long heads, cells, blocks, mask, blocks_room, secret, other
    cdef readonly list units, births, entries
    cdef public bint unread
    cdef Rates scratch
    cdef long long hash_of(self, str key, long long limit_id)
    cdef long long find(self, long long limit_id, str key, long long hash)
    cdef bint holds(self, long long cell, str key)
    cdef long long overflow_cell(self, long long limit_id, str key, long long now_us)
    cdef long long overflow_number(self, long long limit_id, str key, long long now_us)
    cdef int set_unit(self, long long cell, long long unit)
    cdef int set_state(self, long long cell, long long unit, long long a, long long b, long long c)
    cdef bint is_overflow(self, long long cell)
    cdef long long insert(self, long long limit_id, long long unit, str key, long long hash)
    cdef long long insert_overflow_cell(self, long long limit_id, long long unit, str key, long long now_us)
    cdef long long fresh_cell(self)
    cdef int place(self, long long cell, long long hash, long long size, long long tag)
    cdef bint has_blocks(self, long long size)
    cdef long long fresh_block(self, long long following)
    cdef long long store_long(self, str key, long long size)
    cdef int remove(self, long long cell, bint logs)
    cdef long long link_to(self, long long cell)
    cdef int free_long(self, long long first)
    cdef long long unit_of(self, long long cell)
    cdef long long rates_word(self, long long cell, long long i)
    cdef RatesPointer read_rates(self, long long cell)
    cdef bint write_rates(self, long long cell, RatesPointer rates, bint logs)
    cdef int copy_cell(self, long long source, long long target, bint logs)
    cdef int adopt_all(self, SharedCellTable old)
    cdef int adopt(self, SharedCellTable old, long long cell)
    cdef long long due_us(self, long long cell, long long now_us)
    cdef long long state_due_us(self, long long cell, long long unit, long long a, long long b, long long c, long long now_us)
    cdef bint is_new(self, long long cell, long long now_us)
    cdef int unsettle(self)
    cdef int collapse(self, long long cell, long long now_us)
    cdef int sweep(self, long long budget, long long now_us)

cdef long long overflow_hash(long long limit_id, long long number) noexcept

# Keys as bytes in words; plain, the functions at the top of cell_table.py.
cdef inline long long kind_of(str key) noexcept:
    return PyUnicode_KIND(key)

cdef inline long long size_of(str key) noexcept:
    return PyUnicode_GET_LENGTH(key) * PyUnicode_KIND(key)

cdef inline long long hashed(str key, long long secret, long long other, long long limit_id) noexcept:
    return hash_bytes(PyUnicode_DATA(key), PyUnicode_GET_LENGTH(key) * PyUnicode_KIND(key), PyUnicode_KIND(key), secret, other, limit_id)

cdef inline void copy_in(long long* words, long long at, str key, long long offset, long long size) noexcept:
    memcpy(words + at, <const char*> PyUnicode_DATA(key) + offset, size)

cdef inline bint same_at(long long* words, long long at, str key, long long offset, long long size) noexcept:
    return memcmp(words + at, <const char*> PyUnicode_DATA(key) + offset, size) == 0

cdef inline bytes copy_out(long long* words, long long at, long long size):
    return PyBytes_FromStringAndSize(<const char*> (words + at), size)

cdef inline str text_of(long long kind, bytes data):
    return PyUnicode_FromKindAndData(<int> kind, <const char*> data, len(data) // kind)
