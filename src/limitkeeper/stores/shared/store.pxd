# The C face of shared.py.
from limitkeeper.algorithms.limit cimport State
from limitkeeper.stores.shared.locked_file cimport LockedFile, RowHandle
from limitkeeper.stores.cell_store cimport LimitHandle

cdef class SharedStore(LockedFile):
    cdef bint holding
    cdef long long hash
    cdef int tidy(self, long long now_us)
    cdef long long find(self, LimitHandle place, str key, long long now_us, bint full)
    cdef State first(self, LimitHandle place)
    cdef State converted(self, LimitHandle place, long long cell, long long unit, long long now_us)

cdef inline RowHandle row(LimitHandle place):
    """A place in a shared file."""
    return <RowHandle> place
