# The C face of passage.py.
from headgate.algorithms.claim cimport NamedLimit
from headgate.decision cimport Decision

cdef class Entry:
    cdef readonly object rule, clause
    cdef readonly NamedLimit named
    cdef readonly str label
    cdef public object posting

cdef class Passage:
    cdef public object gate, edition, facts, refusal
    cdef public bint allowed, owes, special
    cdef public Decision decision
    cdef public list entries, keys
    cdef public object shadows, costs, claims, shadow, onces, reason
    cdef public long long wait_us, began_us
