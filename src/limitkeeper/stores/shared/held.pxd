# The C face of held.py.
from limitkeeper.stores.near cimport Place
from limitkeeper.stores.returns cimport Returns
from limitkeeper.stores.shared.sheet cimport Sheet

cdef class Row(Place):
    cdef readonly long long table, birth_us

cdef class Held(Returns):
    cdef Sheet sheet
    cdef readonly str path
    cdef object _mapped, _tables, _units, _since, _known
    cdef int _lock_fd, depth
    cdef bint atomic, closing
    cdef long long me, timeout_us, seen_table, seen_cell, dead, undone
    cdef object seen
    cdef int take(self)
    cdef int leave(self)
