# The C face of evaluation.py.
from limitkeeper.algorithms.claim cimport NamedLimit
from limitkeeper.decision cimport Decision

cdef class Entry:
    cdef readonly object rule, clause
    cdef readonly NamedLimit named
    cdef readonly str label
    cdef public object posting

cdef class Refusal:
    cdef readonly str reason, message
    cdef readonly object retry_after, rule
    cdef readonly tuple violated
    cdef readonly long long status, limit, remaining, retry_us

cdef class Evaluation:
    cdef public object gate, edition, facts, refusal, near_by
    cdef public bint allowed, origin, owes, special
    cdef public Decision decision
    cdef public list entries, keys, costs, claims, shadow, onces
    cdef public object shadows, reason
    cdef public long long wait_us, began_us

cdef inline Evaluation begun(object gate, object edition):
    """A passage as its constructor makes it, without calling it."""
    cdef Evaluation passage = Evaluation.__new__(Evaluation)
    passage.gate = gate
    passage.edition = edition
    passage.allowed = True
    passage.entries = []
    passage.keys = []
    passage.shadows = ()
    passage.reason = "quota"
    return passage
