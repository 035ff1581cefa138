# The C face of decision.py: six integers and a name.
cimport cython

@cython.freelist(16)
cdef class Decision:
    cdef readonly bint allowed
    cdef readonly long long limit, remaining
    cdef readonly long long retry_us, reset_us, wait_us, start_us
    cdef readonly str name

cdef class Decisions(Decision):
    cdef readonly tuple parts
