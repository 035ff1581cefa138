# C declarations of memory.py.
from limitkeeper.decision cimport Decision
from limitkeeper.stores.cell_store cimport CellStore, LimitHandle
from limitkeeper.stores.cell_table cimport Capacity, Cell

ctypedef Cell* CellPointer

cdef class MemoryStore(CellStore):
    cdef readonly Capacity capacity
    cdef object _tables
    cdef bint _own
    cdef unsigned long long calls
    cdef CellPointer find(self, LimitHandle handle, str key, long long now_us, bint full)
    cdef bint load_cells(self, list claims)
    cdef Decision decide_quickly(self, Decision decision, LimitHandle handle, str key, long long cost, long long max_wait_us, bint commit, long long now_us)
