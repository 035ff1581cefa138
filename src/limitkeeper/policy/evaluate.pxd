# The C face of evaluate.py.
from limitkeeper.decision cimport Decision
from limitkeeper.policy.compiled_rule cimport CompiledRule
from limitkeeper.policy.compiled_policy cimport CompiledPolicy
from limitkeeper.policy.request_context cimport RequestContext
from limitkeeper.policy.evaluation cimport Entry, Evaluation
from limitkeeper.stores.contract cimport Store

cdef Py_ssize_t BOUNDS, DOUBLING, RESPONSE_BOUNDS

cdef class Evaluator:
    cdef public CompiledPolicy compiled
    cdef public Store store
    cdef public bint remote
    cdef public object on_failure, queue, penalty_box, offenders, callback_errors, _publisher
    cdef public long long requests, allowed_requests, refused_requests, exempt_requests, unlimited_requests
    cdef public list latency
    cdef public long long latency_sum
    cdef object __weakref__
    cdef Evaluation prepare(self, RequestContext context)
    cdef int add(self, Evaluation evaluation, CompiledRule compiled_rule, RequestContext context, str key)
    cdef list claims(self, Evaluation evaluation)
    cdef Decision decide(self, Evaluation evaluation)
    cdef Evaluation passed(self, Evaluation evaluation, Decision decision)
    cdef int count_one(self, Evaluation evaluation, Entry entry, Decision part, Py_ssize_t i)
    cdef int timed(self, Evaluation evaluation)
    cdef Evaluation free(self, Evaluation evaluation)
    cpdef void count_response(self, Evaluation evaluation, int status)
    cdef Evaluation ask_lease(self, Evaluation evaluation)
