# C declarations of compiled_rule.py.
from limitkeeper.algorithms.claim cimport NamedLimit
from limitkeeper.policy.request_context cimport RequestContext

cpdef object identity_of(dict identities, RequestContext context, str name)
cpdef object first_present(dict identities, RequestContext context, tuple names)
cpdef object key_of(dict identities, RequestContext context, tuple key)
cpdef str bounded(str key)
cpdef bint condition_holds(dict identities, RequestContext context, tuple condition)

cdef class Entry:
    cdef readonly object rule
    cdef readonly CompiledRule compiled_rule
    cdef readonly NamedLimit named, replays
    cdef readonly str label
    cdef public object field_template

cdef class CompiledRule:
    cdef readonly str limiter, name, single_identity, tier_identity
    cdef readonly object config, overrides
    cdef readonly tuple key, condition, default_entries
    cdef readonly dict identities, entries_by_limits, tier_entries, static_overrides
    cdef readonly bint has_alternatives, share_unidentified, needs_settlement, shadow, waits
    cdef readonly NamedLimit idempotent
    cdef readonly long long constant_cost, spread_us
    cdef public long long total_concurrency
    cdef readonly double alert
    cdef public long long passed, refused, waited, queue_full, degraded, shadow_refused, near, alerts, given_back, replayed
    cdef public long long failed_open, failed_closed, failed_local
    cdef public object waiting, register, operator_overrides, capacity
    cdef readonly Entry capacity_entry
    cdef readonly tuple blocked
    cdef public list response_times, statuses, predecessors
    cdef public dict past_counts
    cdef public double sum_ms
    cdef bint varies(self)
    cpdef bint applies(self, RequestContext context)
    cpdef object key_for(self, RequestContext context)
    cpdef tuple entries_for(self, RequestContext context, str key)
    cpdef long long cost_for(self, RequestContext context)
    cpdef void count_response(self, Py_ssize_t bucket, Py_ssize_t family, double took_ms)
