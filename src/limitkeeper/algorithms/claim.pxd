# The C face of claim.py.
from limitkeeper.algorithms.limit cimport Limit

cdef class NamedLimit:
    cdef readonly str limiter, name
    cdef readonly Limit limit
    cdef readonly tuple identity
    cdef Py_hash_t hashed
    cdef readonly object handle

cdef class Claim:
    cdef readonly NamedLimit named
    cdef readonly str key
    cdef public long long cost, charged
    cdef long long a, b, c, new_a, new_b, new_c
    cdef long long start, retry, remaining, reset
    cdef bint undoable
    cdef public object others
    cdef void* cell
    cdef public long long reset_id, number
