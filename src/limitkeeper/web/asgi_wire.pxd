# The C face of asgi_wire.py.
from limitkeeper.policy.facts cimport Facts
from limitkeeper.policy.passage cimport Passage

cdef class AsgiFacts(Facts):
    cdef readonly object scope
    cdef object _query

cdef class Sending:
    cdef Passage _passage
    cdef object _send

cdef long long LENGTHS

cpdef bint has_origin(object scope)
cpdef object begun(Passage passage, object message)
cdef list together(object given, list added)
