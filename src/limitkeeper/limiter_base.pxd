# C declarations of limiter_base.py.
from limitkeeper.algorithms.claim cimport NamedLimit
from limitkeeper.decision cimport Decision
from limitkeeper.stores.cell_store cimport CellStore, LimitHandle
from limitkeeper.stores.contract cimport Store
from limitkeeper.stores.memory cimport MemoryStore

cdef object ONE
cdef bint off

cpdef long long checked_cost(object cost)
cpdef str checked_key(object key)
cdef bint only_str(list keys)

cdef class LimiterBase:
    cdef readonly Store store
    cdef readonly dict limits
    cdef readonly str name
    cdef readonly tuple names, named
    cdef public bint reserves
    cdef public object _publisher
    cdef MemoryStore memory
    cdef LimitHandle place
    cdef CellStore cells
    cdef list own_claims
    cdef bint busy
    cdef readonly NamedLimit only
    cdef long long allowed_calls, refused_calls
    cdef object __weakref__
    cdef Decision ask(self, object key, object cost, long long max_wait_us, bint commit)
    cdef bint fill_claims(self, object key, object cost)
    cdef Decision decide_one(self, str key, object cost, long long max_wait_us, bint commit)
    cdef list many(self, list keys, object costs, object overflow)
    cdef list many_now(self, list keys, object costs, object overflow)
