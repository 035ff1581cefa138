# C declarations of limiter_base.py.
from limitkeeper.algorithms.claim cimport NamedLimit
from limitkeeper.decision cimport Decision
from limitkeeper.stores.several_rates_per_key cimport LimitHandle
from limitkeeper.stores.cell_store cimport CellStore
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
    cdef public bint _reserves
    cdef public object _publisher
    cdef MemoryStore _memory
    cdef LimitHandle _handle
    cdef CellStore _cell_store
    cdef list _own_claims
    cdef bint _busy
    cdef readonly NamedLimit _single
    cdef long long _allowed, _refused
    cdef object __weakref__
    cdef Decision _decide_any(self, object key, object cost, long long max_wait_us, bint commit)
    cdef bint _fill_claims(self, object key, object cost)
    cdef list _hit_many_in_memory(self, list keys, object costs, object overflow)
