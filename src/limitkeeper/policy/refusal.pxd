# C declarations of refusal.py.
from limitkeeper.decision cimport Decision
from limitkeeper.policy.compiled_rule cimport Entry

cdef class Refusal:
    cdef readonly str reason, message
    cdef readonly object retry_after, rule
    cdef readonly tuple violated
    cdef readonly long long status, limit, remaining, retry_us, spread_s

cpdef Refusal refusal_by(
    Decision decision, Entry entry, Decision part, tuple violated, str reason, long long retry_us, long long delay_us=*
)
