# C declarations of store.py.
from limitkeeper.algorithms.limit cimport State
from limitkeeper.stores.cell_store cimport CellStore, LimitHandle
from limitkeeper.stores.shared.cell_table cimport SharedCellTable
from limitkeeper.stores.shared.owner_lock cimport OwnerLock

cdef class SharedLimitHandle(LimitHandle):
    cdef readonly long long limit_id, birth_us

cdef class SharedStore(CellStore):
    cdef SharedCellTable table
    cdef OwnerLock file_lock
    cdef readonly str path
    cdef object _file, _directory, cached_key
    cdef int depth
    cdef bint atomic, closing, in_change
    cdef long long cached_limit, cached_cell, hash
    cdef int sweep_sometimes(self, long long now_us)
    cdef long long find(self, LimitHandle handle, str key, long long now_us, bint full)
    cdef State unseen_state(self, LimitHandle handle)
    cdef State converted(self, LimitHandle handle, long long cell, long long unit, long long now_us)

cdef inline SharedLimitHandle row(LimitHandle handle):
    return <SharedLimitHandle> handle
