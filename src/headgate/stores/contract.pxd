# The C face of contract.py.
from headgate.algorithms.claim cimport NamedLimit
from headgate.decision cimport Decision

cdef class Store:
    cpdef Decision one(self, NamedLimit named, str key, long long cost, long long max_wait_us, bint commit)
    cpdef Decision at_once(self, NamedLimit named, str key, long long cost)
