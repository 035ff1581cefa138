# C declarations of wrapper_store.py.
from limitkeeper.algorithms.claim cimport Claim, NamedLimit
from limitkeeper.decision cimport Decision
from limitkeeper.stores.contract cimport Store

cdef class WrapperStore(Store):
    cdef readonly Store inner
    cpdef _decide(self, claims, max_wait_us, commit, remember, not_before_us)
