# The C face of asgi_fast.py.
from limitkeeper.policy.request_context cimport RequestContext
from limitkeeper.policy.evaluation cimport Evaluation

cdef class AsgiRequestContext(RequestContext):
    cdef readonly object scope
    cdef object _query

cdef class HeaderSend:
    cdef Evaluation _passage
    cdef object _send

cdef long long LENGTHS

cpdef bint has_origin(object scope)
cpdef object begun(Evaluation passage, object message)
cdef list together(object given, list added)
