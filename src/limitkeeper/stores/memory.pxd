# C declarations of memory.py.
from limitkeeper.decision cimport Decision
from limitkeeper.stores.several_rates_per_key cimport LimitHandle
from limitkeeper.stores.cell_store cimport CellStore
from limitkeeper.stores.cell_table cimport Capacity, Cell

ctypedef Cell* CellPointer

cdef class MemoryStore(CellStore):
    cdef readonly Capacity capacity
    cdef readonly object _tables
    cdef object _users, _unused
    cdef list rotation
    cdef Py_ssize_t turn
    cdef bint _own
    cdef unsigned long long calls
    cdef CellPointer find(self, LimitHandle handle, str key, long long now_us, bint full)
    cdef CellPointer cell_to_write(self, LimitHandle handle, str key, long long now_us, bint full, bint copy)
    cdef int sweep_some(self, Py_ssize_t budget, long long now_us)
    cdef bint load_cells(self, list claims)
    cdef Decision decide_quickly(self, Decision decision, LimitHandle handle, str key, long long cost, long long max_wait_us, bint commit, long long now_us)
