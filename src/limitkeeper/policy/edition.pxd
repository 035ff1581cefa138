# The C face of edition.py.
from limitkeeper.policy.clause cimport Clause
from limitkeeper.policy.facts cimport Facts

cdef class Pardon:
    cdef readonly object networks, headers, when, rules
    cdef readonly bint whole
    cpdef bint applies(self, dict identities, Facts facts, object address)

cdef class Plan:
    cdef readonly list clauses, pardons
    cdef readonly object hosts, captured, named
    cdef readonly dict narrow
    cdef readonly bint exempt

cdef class Edition:
    cdef readonly object policy, address, shut_key, matcher, handlers
    cdef readonly dict identities, known
    cdef readonly list clauses, pardons
    cdef public long long remembered
    cdef public object store
    cpdef Plan plan(self, Facts facts)
    cpdef Plan hosted(self, Plan plan, Facts facts)
    cpdef object pardoned(self, Plan plan, Facts facts)
