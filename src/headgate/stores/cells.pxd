# The C face of cells.py.
cimport cython
from headgate.algorithms.claim cimport NamedLimit
from headgate.algorithms.limit cimport Limit, State
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
    cdef readonly long long since_us
    cdef readonly str name

cdef class Cells(Store):
    cdef readonly Room room
    cdef SystemClock system
    cdef Decision spare, other
    cdef object _clock, _tables, _lock
    cdef long long last_us, shift_us
    cdef unsigned long long calls, stamp
    cdef object __weakref__
    cdef long long now(self)
    cdef Place place_of(self, NamedLimit named)
    cdef bint is_full(self, Table table, long long needed, long long now_us)
    cdef CellPointer find(self, Place place, str key, long long now_us, bint full)
    cdef State read(self, Place place, str key, long long now_us, bint full)
    cdef int put(self, Place place, str key, long long a, long long b, long long c, long long now_us, bint full)
