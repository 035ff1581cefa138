# The C face of shared.py.
from limitkeeper.algorithms.limit cimport State
from limitkeeper.stores.shared.held cimport Held, Row
from limitkeeper.stores.near cimport Place

cdef class SharedStore(Held):
    cdef bint holding
    cdef long long hash
    cdef int tidy(self, long long now_us)
    cdef long long find(self, Place place, str key, long long now_us, bint full)
    cdef State first(self, Place place)
    cdef State converted(self, Place place, long long cell, long long unit, long long now_us)

cdef inline Row row(Place place):
    """A place in a shared file."""
    return <Row> place
