# The C face of memory_cells.py.
cimport cython
from limitkeeper.algorithms.limit cimport Limit, State
from limitkeeper.stores.cell_store cimport LimitHandle
from limitkeeper.stores.refunds cimport RefundingStore
from limitkeeper.stores.cell_table cimport Cell, Capacity, Table

ctypedef Cell* CellPointer

@cython.final
cdef class TableHandle(LimitHandle):
    cdef readonly Table table

cdef class MemoryCells(RefundingStore):
    cdef readonly Capacity room
    cdef object _tables
    cdef unsigned long long calls
    cdef CellPointer find(self, LimitHandle place, str key, long long now_us, bint full)

cdef inline Table table_of(LimitHandle place):
    """A place's table."""
    return (<TableHandle> place).table
