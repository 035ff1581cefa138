# The C face of shared.py.
from headgate.algorithms.limit cimport State
from headgate.stores.near cimport Place
from headgate.stores.returns cimport Returns
from headgate.stores.sheet cimport Sheet

cdef class Row(Place):
    cdef readonly long long table, birth_us

cdef class SharedStore(Returns):
    cdef Sheet sheet
    cdef readonly str path
    cdef object _mapped, _tables, _units, _since, _known
    cdef int _lock_fd, depth
    cdef bint atomic, holding
    cdef long long me, hash, timeout_us
    cdef int take(self)
    cdef int leave(self)
    cdef int tidy(self, long long now_us)
    cdef long long find(self, Place place, str key, long long now_us, bint full)
    cdef State first(self, Place place)
    cdef State converted(self, Place place, long long cell, long long unit, long long now_us)

cdef inline Row row(Place place):
    """A place in a shared file."""
    return <Row> place
