# C declarations of evaluation.py.
from limitkeeper.decision cimport Decision
from limitkeeper.policy.compiled_policy cimport CompiledPolicy, MatchedRules
from limitkeeper.policy.compiled_rule cimport CompiledRule, Entry
from limitkeeper.policy.request_context cimport RequestContext
from limitkeeper.stores.contract cimport Store

cdef Py_ssize_t BOUNDS, DOUBLING, RESPONSE_BOUNDS

cdef class Evaluation:
    cdef public object gate, context, refusal, near_rule, alerting
    cdef public CompiledPolicy compiled
    cdef public MatchedRules matched
    cdef public bint allowed, origin, needs_settlement, special, declined
    cdef public Decision decision
    cdef public list entries, keys, costs, claims, shadow, idempotent, marks, capacity
    cdef public object shadows, reason
    cdef public long long wait_us, began_us
    cpdef void count_response(self, int status)

cdef inline Evaluation new_evaluation(object gate, CompiledPolicy compiled):
    """An Evaluation as its constructor creates it, without calling it."""
    cdef Evaluation evaluation = Evaluation.__new__(Evaluation)
    evaluation.gate = gate
    evaluation.compiled = compiled
    evaluation.allowed = True
    evaluation.entries = []
    evaluation.keys = []
    evaluation.shadows = ()
    evaluation.reason = "quota"
    return evaluation

cdef class Evaluator:
    cdef public CompiledPolicy compiled
    cdef public object offenders, secret
    cdef public bint _busy
    cdef public object _on_failure, _waiting, _penalty_box, _attempts, _callback_errors, _publisher
    cdef public long long _requests, _allowed, _refused, _exempt, _unlimited
    cdef public list _latency
    cdef public long long _latency_sum
    cdef object __weakref__
    cdef Decision _hit_lease(self, Evaluation evaluation)
    cdef Evaluation _evaluate_nowait(self, Evaluation evaluation, bint may_queue)
    cdef Evaluation _prepare(self, RequestContext context)
    cpdef Evaluation prepare_rule(self, CompiledRule rule, str key, long long cost, str tier)
    cdef int _add(self, Evaluation evaluation, CompiledRule rule, RequestContext context, str key)
    cpdef list _claims(self, Evaluation evaluation)
    cdef Decision _decide(self, Evaluation evaluation)
    cdef bint _fill_claims(self, Evaluation evaluation, MatchedRules matched)
    cpdef Evaluation _allow(self, Evaluation evaluation, Decision decision)
    cdef int _count_allowed(self, Evaluation evaluation, Py_ssize_t i, long long limit, long long remaining)
    cpdef Evaluation _allow_unlimited(self, Evaluation evaluation)
    cpdef Evaluation _refuse(self, Evaluation evaluation, Decision decision)
    cdef int _count_decision(self, Evaluation evaluation)
    cdef int _count_latency(self, long long took)
