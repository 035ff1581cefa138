# C declarations of compiled_policy.py.
from limitkeeper.policy.compiled_rule cimport CompiledRule
from limitkeeper.policy.request_context cimport RequestContext
from limitkeeper.stores.contract cimport Store

cdef class CompiledExemption:
    cdef readonly object networks, headers, rules
    cdef readonly tuple condition
    cdef readonly bint unconditional
    cpdef bint applies(self, dict identities, RequestContext context, object address)

cdef class MatchedRules:
    cdef readonly list rules, exemptions
    cdef readonly tuple captures
    cdef public list claims
    cdef public tuple names
    cdef readonly bint exempt

cdef class PathShape:
    cdef readonly str method
    cdef readonly tuple readings, unsure
    cdef readonly object inexact
    cdef readonly bint by_host, captures
    cdef public MatchedRules plan
    cdef readonly dict plans
    cdef readonly PathMatch match
    cdef list first

cdef class PathMatch:
    cdef readonly PathShape shape
    cdef readonly tuple readings
    cdef public tuple captured

cdef class CompiledPolicy:
    cdef readonly object policy, client_ip, handlers, matcher
    cdef readonly dict identities, cached_paths, cached_hosts, shapes, rules_by_name
    cdef readonly list rules, exemptions
    cdef readonly bint limits_messages, waits, concurrent
    cdef public Store store
    cdef public bint remote
    cdef public object version
    cdef readonly Py_ssize_t cached_bytes
    cpdef MatchedRules match(self, RequestContext context)
    cpdef MatchedRules match_host(self, PathShape shape, RequestContext context)
    cpdef object exempted_rules(self, MatchedRules matched, RequestContext context)
