# The C face of cells.py.
cimport cython
from limitkeeper.algorithms.limit cimport Limit, State
from limitkeeper.stores.near cimport Place
from limitkeeper.stores.returns cimport Returns
from limitkeeper.stores.table cimport Cell, Room, Table

ctypedef Cell* CellPointer

@cython.final
cdef class Spot(Place):
    cdef readonly Table table

cdef class Cells(Returns):
    cdef readonly Room room
    cdef object _tables
    cdef unsigned long long calls
    cdef CellPointer find(self, Place place, str key, long long now_us, bint full)

cdef inline Table table_of(Place place):
    """A place's table."""
    return (<Spot> place).table
