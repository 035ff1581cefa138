# C declarations of tenant_fair_share.py.
from limitkeeper.decision cimport Decision
from limitkeeper.sharing.virtual_time_admission cimport Answer, FairAdmission

cdef class MemoryBackend:
    cdef readonly FairAdmission queue
    cdef object _now_us, _lock
    cdef bint _changing
    cdef long long _start_us
    cdef object __weakref__
    cdef double _elapsed(self)
    cpdef Answer decide(self, str tenant, long long cost, bint commit)

cdef class FairShare:
    cdef readonly object total, window_us, size
    cdef readonly dict guarantees, weights
    cdef readonly str name
    cdef readonly object _backend
    cdef MemoryBackend _memory
    cdef long long _limit
    cdef dict _limits
    cdef bint _owns_store
    cdef object __weakref__
    cdef Decision _quick_hit(self, str tenant)
