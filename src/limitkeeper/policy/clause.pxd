# The C face of clause.py.
from limitkeeper.policy.facts cimport Facts
from limitkeeper.policy.passage cimport Entry

cpdef object identity_of(dict identities, Facts facts, str name)
cpdef object first_present(dict identities, Facts facts, tuple names, bint plain)
cpdef object key_of(dict identities, Facts facts, tuple key, bint plain=*)
cpdef bint holds(dict identities, Facts facts, tuple when)

cdef class Clause:
    cdef readonly str limiter, name
    cdef readonly object rule, overrides, by, otherwise, overridden, lone
    cdef readonly tuple key, when
    cdef readonly dict identities, made, tiers
    cdef readonly bint named, once, share, owes, shadow, waits
    cdef readonly long long constant
    cdef readonly double alert
    cdef public long long passed, refused, waited, queue_full, degraded, shadow_refused, near, alerts, given_back, replayed
    cdef public long long failed_open, failed_closed, failed_local
    cdef public object crowd
    cdef public list times, statuses, elders
    cdef public dict past
    cdef public double sum_ms
    cpdef object key_for(self, Facts facts)
    cpdef tuple limits_for(self, Facts facts, str key)
    cpdef long long cost_for(self, Facts facts)
    cpdef bint meant(self, Facts facts)
