# The C face of asking.py.
from limitkeeper.decision cimport Decision
from limitkeeper.policy.clause cimport Clause
from limitkeeper.policy.edition cimport Edition
from limitkeeper.policy.facts cimport Facts
from limitkeeper.policy.passage cimport Entry, Passage
from limitkeeper.stores.contract cimport Store

cdef Py_ssize_t BOUNDS, DOUBLING, RESPONSE_BOUNDS

cdef class Asking:
    cdef public Edition edition
    cdef public Store store
    cdef public bint far
    cdef public object failing, queue, shutter, offenders, complaints, _publisher
    cdef public long long requests, allowed_requests, refused_requests, exempt_requests, unlimited_requests
    cdef public list latency
    cdef public long long latency_sum
    cdef object __weakref__
    cdef Passage prepare(self, Facts facts)
    cdef int add(self, Passage passage, Clause clause, Facts facts, str key)
    cdef list claims(self, Passage passage)
    cdef Decision decide(self, Passage passage)
    cdef Passage passed(self, Passage passage, Decision decision)
    cdef int count_one(self, Passage passage, Entry entry, Decision part, Py_ssize_t i)
    cdef int timed(self, Passage passage)
    cdef Passage free(self, Passage passage)
    cpdef void count_response(self, Passage passage, int status)
    cdef Passage quick_far(self, Passage passage)
