# The C face of shared.py.
from limitkeeper.algorithms.limit cimport State
from limitkeeper.stores.shared.held cimport Held, Row
from limitkeeper.stores.cell_store cimport LimitHandle

cdef class SharedStore(Held):
    cdef bint holding
    cdef long long hash
    cdef int tidy(self, long long now_us)
    cdef long long find(self, LimitHandle place, str key, long long now_us, bint full)
    cdef State first(self, LimitHandle place)
    cdef State converted(self, LimitHandle place, long long cell, long long unit, long long now_us)

cdef inline Row row(LimitHandle place):
    """A place in a shared file."""
    return <Row> place
