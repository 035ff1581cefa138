# The C face of refunds.py.
from limitkeeper.algorithms.claim cimport Claim
from limitkeeper.stores.cell_store cimport CellStore, LimitHandle

cdef class RefundingStore(CellStore):
    cdef int return_all(self, list claims, long long charged_at, long long now_us)
    cdef int return_one(self, Claim claim, long long charged_at, long long now_us)
    cdef int restore(self, LimitHandle place, str key, object state, long long now_us)
