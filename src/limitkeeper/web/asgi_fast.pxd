# C declarations of asgi_fast.py.
from limitkeeper.policy.request_context cimport RequestContext
from limitkeeper.policy.evaluation cimport Evaluation

cdef class AsgiRequestContext(RequestContext):
    cdef readonly object scope
    cdef dict _query

cdef class HeaderSend:
    cdef Evaluation _evaluation
    cdef object _send

cpdef bint has_origin(object scope)
