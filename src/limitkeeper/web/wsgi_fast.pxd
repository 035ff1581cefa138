# C declarations of wsgi_fast.py.
from limitkeeper.policy.request_context cimport RequestContext
from limitkeeper.policy.evaluation cimport Evaluation

cdef class WsgiRequestContext(RequestContext):
    cdef public dict environ

cdef class HeaderStartResponse:
    cdef readonly object start_response
    cdef readonly Evaluation evaluation
    cdef readonly int status

cdef class WsgiApp:
    cdef public object app, ask
