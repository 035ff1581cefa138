# The C face of evaluation.py.
from limitkeeper.algorithms.claim cimport NamedLimit
from limitkeeper.decision cimport Decision

cdef class Entry:
    cdef readonly object rule, compiled_rule
    cdef readonly NamedLimit named
    cdef readonly str label
    cdef public object field_template

cdef class Refusal:
    cdef readonly str reason, message
    cdef readonly object retry_after, rule
    cdef readonly tuple violated
    cdef readonly long long status, limit, remaining, retry_us

cdef class Evaluation:
    cdef public object gate, compiled, context, refusal, near_rule
    cdef public bint allowed, origin, needs_settlement, special
    cdef public Decision decision
    cdef public list entries, keys, costs, claims, shadow, idempotent
    cdef public object shadows, reason
    cdef public long long wait_us, began_us

cdef inline Evaluation new_evaluation(object gate, object compiled):
    """An evaluation as its constructor makes it, without calling it."""
    cdef Evaluation evaluation = Evaluation.__new__(Evaluation)
    evaluation.gate = gate
    evaluation.compiled = compiled
    evaluation.allowed = True
    evaluation.entries = []
    evaluation.keys = []
    evaluation.shadows = ()
    evaluation.reason = "quota"
    return evaluation
