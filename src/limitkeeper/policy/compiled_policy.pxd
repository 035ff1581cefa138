# C declarations of compiled_policy.py.
from limitkeeper.algorithms.claim cimport NamedLimit
from limitkeeper.policy.request_context cimport RequestContext

cpdef object identity_of(dict identities, RequestContext context, str name)
cpdef object first_present(dict identities, RequestContext context, tuple names, bint plain)
cpdef object key_of(dict identities, RequestContext context, tuple key, bint plain=*)
cpdef bint condition_holds(dict identities, RequestContext context, tuple condition)

cdef class Entry:
    cdef readonly object rule
    cdef readonly CompiledRule compiled_rule
    cdef readonly NamedLimit named
    cdef readonly str label
    cdef public object field_template

cdef class CompiledRule:
    cdef readonly str limiter, name, single_identity, tier_identity
    cdef readonly object config, overrides
    cdef readonly tuple key, condition, default_entries
    cdef readonly dict identities, entries_by_limits, tier_entries, static_overrides
    cdef readonly bint has_alternatives, share_unidentified, needs_settlement, shadow, waits
    cdef readonly NamedLimit idempotent
    cdef readonly long long constant_cost
    cdef readonly double alert
    cdef public long long passed, refused, waited, queue_full, degraded, shadow_refused, near, alerts, given_back, replayed
    cdef public long long failed_open, failed_closed, failed_local
    cdef public object waiting
    cdef public list response_times, statuses, predecessors
    cdef public dict past_counts
    cdef public double sum_ms
    cpdef bint applies(self, RequestContext context)
    cpdef object key_for(self, RequestContext context)
    cpdef tuple entries_for(self, RequestContext context, str key)
    cpdef long long cost_for(self, RequestContext context)

cdef class CompiledExemption:
    cdef readonly object networks, headers, rules
    cdef readonly tuple condition
    cdef readonly bint unconditional
    cpdef bint applies(self, dict identities, RequestContext context, object address)

cdef class MatchedRules:
    cdef readonly list rules, hosts, exemptions
    cdef public list claims
    cdef public tuple names
    cdef readonly object captured, host_patterns
    cdef readonly dict by_host
    cdef readonly bint exempt

cdef class CompiledPolicy:
    cdef readonly object policy, client_ip, handlers
    cdef object _matcher
    cdef readonly dict identities, cached_paths
    cdef readonly list rules, exemptions
    cdef long long _cached
    cdef public object store
    cpdef MatchedRules match(self, RequestContext context)
    cpdef MatchedRules match_host(self, MatchedRules matched, RequestContext context)
    cpdef object exempted_rules(self, MatchedRules matched, RequestContext context)
