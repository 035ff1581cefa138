# The C face of memory.py: one decision without a detour through Python.
from headgate.algorithms.claim cimport Claim
from headgate.decision cimport Decision, fresh, unshared
from headgate.stores.cells cimport Cells, Place

cdef class MemoryStore(Cells):
    cdef Decision decide_one(self, Decision decision, Place place, str key, long long cost, long long max_wait_us, bint commit, long long now_us)
    cdef Decision glance(self, Place place, str key, long long cost, long long start, long long retry, long long now_us)
    cdef Decision decide_all(self, list claims, long long max_wait_us, bint commit, long long now_us)
    cdef int return_all(self, list claims, long long charged_at, long long now_us)
    cdef int restore(self, Place place, str key, object state, long long now_us)
    cdef int return_one(self, Claim claim, long long charged_at, long long now_us)

cdef inline Decision blank(MemoryStore store, Place place):
    """A Decision to be filled in: one of the last two, when its caller has let go of it (allocating and freeing one would
    be a quarter of a hit; two, because many keep an answer until they have the next), or a new one."""
    cdef Decision decision = store.spare
    if decision is None or not unshared(decision):
        decision = store.other
        if decision is None or not unshared(decision):
            decision = fresh(place.name)
            store.other = store.spare
            store.spare = decision
            return decision
    if decision.name is not place.name:
        decision.name = place.name
    return decision
