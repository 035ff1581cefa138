# C declarations of contract.py.
from limitkeeper.algorithms.claim cimport NamedLimit
from limitkeeper.decision cimport Decision

cdef class Store:
    cdef public object wait_queue
    cpdef Decision decide_one(self, NamedLimit named, str key, long long cost, long long max_wait_us, bint commit)
    cpdef Decision hit_nowait(self, NamedLimit named, str key, long long cost)

cdef class PlannedStore(Store):
    cpdef _decide(self, claims, max_wait_us, commit, remember, not_before_us)

cdef bint is_twice(list claims)
