# C declarations of store.py.
from limitkeeper.algorithms.claim cimport Claim, NamedLimit
from limitkeeper.decision cimport Decision
from limitkeeper.stores.contract cimport Store
from limitkeeper.stores.wrapper_store cimport WrapperStore

cdef class GuardedStore(WrapperStore):
    cdef readonly long long budget_us
    cdef readonly str on_failure
    cdef readonly Store _store
    cdef readonly object _breaker, _health, _fallback
    cdef list _unregistered
    cdef bint _own_rng
    cdef long long _degraded, _dropped
    cdef object __weakref__
    cdef Decision _answered(self, Decision decision)
