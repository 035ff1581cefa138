# The C face of facts.py.
cdef class Facts:
    cdef public str method, path
    cdef public object raw, captured
    cdef public dict found
