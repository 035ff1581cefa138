# The C face of memory.py: one decision without a detour through Python.
from limitkeeper.decision cimport Decision
from limitkeeper.stores.cells cimport Cells, Spot

cdef class MemoryStore(Cells):
    cdef Decision decide_quickly(self, Decision decision, Spot place, str key, long long cost, long long max_wait_us, bint commit, long long now_us)
    cdef Decision glance(self, Spot place, str key, long long cost, long long start, long long retry, long long now_us)
