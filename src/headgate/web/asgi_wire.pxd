# The C face of asgi_wire.py.
from headgate.policy.facts cimport Facts

cdef class AsgiFacts(Facts):
    cdef readonly object scope
    cdef object _query

cdef class Sending:
    cdef object _passage, _send
