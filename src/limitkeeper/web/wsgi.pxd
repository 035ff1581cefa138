# C declarations of wsgi.py.
from limitkeeper.policy.request_context cimport RequestContext
from limitkeeper.policy.evaluation cimport Evaluation

cdef class WsgiRequestContext(RequestContext):
    cdef public dict environ

cdef class HeaderStartResponse:
    cdef readonly object start_response
    cdef readonly Evaluation evaluation
    cdef readonly int status

cdef class RateLimitMiddleware:
    cdef public object app, ask, gate
    cdef bint _owns_gate
    cdef dict __dict__
    cdef object __weakref__
