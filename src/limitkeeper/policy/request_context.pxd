# The C face of request_context.py.
cdef class RequestContext:
    cdef public str method, path, routed
    cdef public object raw, captured
    cdef public dict identities
