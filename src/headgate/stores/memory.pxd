# The C face of memory.py: one decision without a detour through Python.
cimport cython
from headgate.algorithms.claim cimport Claim, NamedLimit
from headgate.algorithms.limit cimport Limit, Answer
from headgate.clock cimport SystemClock
from headgate.decision cimport Decision, fresh, unshared
from headgate.stores.contract cimport Store
from headgate.stores.table cimport Cell, Room, Table

ctypedef Cell* CellPointer

@cython.final
cdef class Place:
    cdef readonly MemoryStore store
    cdef readonly Table table
    cdef readonly Limit limit
    cdef readonly int unit
    cdef readonly str name

@cython.final
cdef class MemoryStore(Store):
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
    cdef Decision decide_one(self, Decision decision, Place place, str key, long long cost, long long max_wait_us, bint commit, long long now_us)
    cdef Decision glance(self, Place place, str key, long long cost, long long start, long long retry, long long now_us)
    cdef Decision decide_all(self, list claims, long long max_wait_us, bint commit, long long now_us)
    cdef int return_all(self, list claims, long long charged_at, long long now_us)
    cdef int return_one(self, Claim claim, long long charged_at, long long now_us)

cdef inline Decision blank(MemoryStore store, Place place):
    """A Decision to be filled in: the last one, when its caller has let go of it (allocating and freeing one would be a
    fifth of a hit), or a new one."""
    cdef Decision decision = store.spare
    if decision is None or not unshared(decision):
        decision = fresh(place.name)
        store.spare = decision
    elif decision.name is not place.name:
        decision.name = place.name
    return decision
