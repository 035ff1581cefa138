# The C face of lease_cache.py: a leased hit without a detour through Python.
from limitkeeper.algorithms.claim cimport NamedLimit
from limitkeeper.decision cimport Decision
from limitkeeper.stores.contract cimport Store
from limitkeeper.stores.leased.lease cimport Lease, LeaseTerms
from limitkeeper.stores.cell_store cimport CellStore

cdef class LeaseCache(CellStore):
    cdef readonly Store store
    cdef readonly bint controlled, exact
    cdef readonly long long lease, life_us, max_keys
    cdef public long long trip_us, apart_us, keys, asked, failures, backoff_us, quiet_until_us
    cdef public object due, watched, spoiled, attendant
    cdef public dict terms
    cdef LeaseTerms last
    cdef NamedLimit last_named
    cdef long long now(self)
    cdef LeaseTerms terms_of(self, NamedLimit named)
    cdef Decision from_hand(self, NamedLimit named, str key, long long cost, long long max_wait_us, bint commit)
    cdef Decision spent(self, LeaseTerms terms, Lease lease, long long now_us, long long more)
    cdef Decision refused(self, LeaseTerms terms, Lease lease, long long now_us)
    cdef bint believes(self, Lease lease, long long now_us)
    cdef Decision from_hands(self, list claims, bint commit)
