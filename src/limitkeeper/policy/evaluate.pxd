# The C face of evaluate.py.
from limitkeeper.decision cimport Decision
from limitkeeper.policy.compiled_rule cimport CompiledRule
from limitkeeper.policy.compiled_policy cimport CompiledPolicy
from limitkeeper.policy.request_context cimport RequestContext
from limitkeeper.policy.evaluation cimport Entry, Evaluation
from limitkeeper.stores.contract cimport Store

cdef Py_ssize_t BOUNDS, DOUBLING, RESPONSE_BOUNDS

cdef class Evaluator:
    cdef public CompiledPolicy edition
    cdef public Store store
    cdef public bint far
    cdef public object failing, queue, shutter, offenders, complaints, _publisher
    cdef public long long requests, allowed_requests, refused_requests, exempt_requests, unlimited_requests
    cdef public list latency
    cdef public long long latency_sum
    cdef object __weakref__
    cdef Evaluation prepare(self, RequestContext facts)
    cdef int add(self, Evaluation passage, CompiledRule clause, RequestContext facts, str key)
    cdef list claims(self, Evaluation passage)
    cdef Decision decide(self, Evaluation passage)
    cdef Evaluation passed(self, Evaluation passage, Decision decision)
    cdef int count_one(self, Evaluation passage, Entry entry, Decision part, Py_ssize_t i)
    cdef int timed(self, Evaluation passage)
    cdef Evaluation free(self, Evaluation passage)
    cpdef void count_response(self, Evaluation passage, int status)
    cdef Evaluation quick_far(self, Evaluation passage)
