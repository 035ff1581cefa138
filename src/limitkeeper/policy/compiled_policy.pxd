# The C face of compiled_policy.py.
from limitkeeper.policy.compiled_rule cimport CompiledRule
from limitkeeper.policy.request_context cimport RequestContext

cdef class CompiledExemption:
    cdef readonly object networks, headers, when, rules
    cdef readonly bint whole
    cpdef bint applies(self, dict identities, RequestContext context, object address)

cdef class MatchedRules:
    cdef readonly list rules, exemptions
    cdef readonly object hosts, captured, named
    cdef readonly dict narrow
    cdef readonly bint exempt

cdef class CompiledPolicy:
    cdef readonly object policy, address, shut_key, matcher, handlers
    cdef readonly dict identities, known
    cdef readonly list rules, exemptions
    cdef public long long remembered
    cdef public object store
    cpdef MatchedRules match(self, RequestContext context)
    cpdef MatchedRules match_host(self, MatchedRules matched, RequestContext context)
    cpdef object exempted_rules(self, MatchedRules matched, RequestContext context)
