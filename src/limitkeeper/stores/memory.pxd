# The C face of memory.py: decide_one decision without a detour through Python.
from limitkeeper.decision cimport Decision
from limitkeeper.stores.memory_cells cimport MemoryCells, TableHandle

cdef class MemoryStore(MemoryCells):
    cdef Decision decide_quickly(self, Decision decision, TableHandle place, str key, long long cost, long long max_wait_us, bint commit, long long now_us)
    cdef Decision glance(self, TableHandle place, str key, long long cost, long long start, long long retry, long long now_us)
