# C declarations of store.py.
from limitkeeper.stores.several_rates_per_key cimport LimitHandle
from limitkeeper.stores.cell_store cimport CellStore
from limitkeeper.stores.shared.cell_table cimport SharedCellTable
from limitkeeper.stores.shared.journal cimport OwnerLock

cdef class SharedStore(CellStore):
    cdef SharedCellTable table
    cdef OwnerLock file_lock
    cdef readonly str path
    cdef object _file, _directory, cached_key
    cdef int depth, waiting
    cdef bint atomic, closing, in_change
    cdef int inserted
    cdef long long cached_limit, cached_cell, hash
    cdef int sweep_sometimes(self, long long now_us)
    cdef int sweep_inserted(self, long long now_us)
    cdef long long find(self, LimitHandle handle, str key, long long now_us, bint full)
    cdef long long own_cell(self, LimitHandle handle, str key)
    cdef long long new_cell(self, LimitHandle handle, str text, long long shared, long long now_us, bint full)
