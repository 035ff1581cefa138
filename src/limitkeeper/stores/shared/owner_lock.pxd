# C declarations of owner_lock.py.
from limitkeeper.stores.shared.cell_table cimport SharedCellTable

cdef class OwnerLock:
    cdef readonly str path
    cdef SharedCellTable table
    cdef public long long timeout_us
    cdef readonly bint atomic
    cdef long long owner, dead_owner, restored
    cdef int fd
    cdef int acquire(self)
    cdef int release(self)
