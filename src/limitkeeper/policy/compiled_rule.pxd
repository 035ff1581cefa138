# The C face of compiled_rule.py.
from limitkeeper.policy.request_context cimport RequestContext
from limitkeeper.policy.evaluation cimport Entry

cpdef object identity_of(dict identities, RequestContext context, str name)
cpdef object first_present(dict identities, RequestContext context, tuple names, bint plain)
cpdef object key_of(dict identities, RequestContext context, tuple key, bint plain=*)
cpdef bint holds(dict identities, RequestContext context, tuple when)

cdef class CompiledRule:
    cdef readonly str limiter, name
    cdef readonly object config, overrides, by, otherwise, overridden, lone
    cdef readonly tuple key, when
    cdef readonly dict identities, made, tiers
    cdef readonly bint named, once, share, needs_settlement, shadow, waits
    cdef readonly long long constant
    cdef readonly double alert
    cdef public long long passed, refused, waited, queue_full, degraded, shadow_refused, near, alerts, given_back, replayed
    cdef public long long failed_open, failed_closed, failed_local
    cdef public object waiting
    cdef public list times, statuses, elders
    cdef public dict past
    cdef public double sum_ms
    cpdef object key_for(self, RequestContext context)
    cpdef tuple limits_for(self, RequestContext context, str key)
    cpdef long long cost_for(self, RequestContext context)
    cpdef bint meant(self, RequestContext context)
