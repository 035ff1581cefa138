# The C face of wsgi_wire.py.
from limitkeeper.policy.request_context cimport RequestContext
from limitkeeper.policy.evaluation cimport Evaluation

cdef class WsgiFacts(RequestContext):
    cdef public dict environ

cdef class Start:
    cdef readonly object start_response
    cdef readonly Evaluation passage
    cdef readonly int status

cdef class Doorway:
    cdef public object app, ask
