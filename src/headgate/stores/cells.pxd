# The C face of cells.py.
cimport cython
from headgate.algorithms.claim cimport NamedLimit
from headgate.algorithms.limit cimport Limit
from headgate.clock cimport SystemClock
from headgate.decision cimport Decision
from headgate.stores.contract cimport Store
from headgate.stores.table cimport Cell, Room, Table

ctypedef Cell* CellPointer

@cython.final
cdef class Place:
    cdef readonly Cells store
    cdef readonly Table table
    cdef readonly Limit limit
    cdef readonly int unit
    cdef readonly str name

cdef class Cells(Store):
    cdef readonly Room room
    cdef SystemClock system
    cdef Decision spare
    cdef object _clock, _tables, _lock
    cdef long long last_us, shift_us
    cdef unsigned long long calls, stamp
    cdef object __weakref__
    cdef long long now(self)
    cdef Place place_of(self, NamedLimit named)
    cdef CellPointer locate(self, Place place, str key, long long now_us, long long needed)
    cdef CellPointer find(self, Place place, str key, long long now_us, long long needed)
    cdef int put(self, Place place, str key, long long a, long long b, long long c, long long now_us)
