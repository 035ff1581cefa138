# The C face of wsgi_wire.py.
from limitkeeper.policy.facts cimport Facts
from limitkeeper.policy.passage cimport Passage

cdef class WsgiFacts(Facts):
    cdef public dict environ

cdef class Start:
    cdef readonly object start_response
    cdef readonly Passage passage
    cdef readonly int status

cdef class Doorway:
    cdef public object app, ask
