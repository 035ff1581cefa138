# C declarations of lease_cache.py: a leased hit is answered without calling Python.
from limitkeeper.algorithms.claim cimport Claim, NamedLimit
from limitkeeper.decision cimport Decision, fresh, unshared
from limitkeeper.stores.leased.key_lease cimport Lease, LeaseTerms

cdef class LeaseCache:
    cdef readonly bint exact
    cdef readonly long long fixed_batch, life_us, max_keys, keys
    cdef public long long round_trip_us, clock_offset_us, generation
    cdef public object lock, due, checks, unspent, wake
    cdef readonly dict terms, rates
    cdef object read_clock, derated
    cdef long long system_offset_us
    cdef LeaseTerms last
    cdef NamedLimit last_named
    cdef Decision spare, other_spare
    cpdef long long now_us(self)
    cdef LeaseTerms terms_of(self, NamedLimit named)
    cdef Decision answer_one(self, NamedLimit named, str key, long long cost, long long max_wait_us, bint commit)
    cdef Decision spend_or_refuse(self, NamedLimit named, str key, long long cost, long long max_wait_us, bint commit)
    cdef Decision decision_of(self, LeaseTerms terms, Lease lease, long long now_us, long long until_us, long long more)
    cdef bint trusts_refusal(self, Lease lease, long long now_us)
    cdef Decision answer_all(self, list claims, bint may_wait, bint commit)

cdef inline Decision blank_leased(LeaseCache cache, LeaseTerms terms):
    """A Decision to be filled in, as `blank` in cell_store.pxd; its source is set once, when it is made."""
    cdef Decision decision = cache.spare
    if decision is None or not unshared(decision):
        decision = cache.other_spare
        if decision is None or not unshared(decision):
            decision = fresh(terms.name)
            decision.source = "lease"
            cache.other_spare = cache.spare
            cache.spare = decision
            return decision
    if decision.name is not terms.name:
        decision.name = terms.name
    return decision
