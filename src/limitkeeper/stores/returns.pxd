# The C face of returns.py.
from limitkeeper.algorithms.claim cimport Claim
from limitkeeper.stores.near cimport Near, Place

cdef class Returns(Near):
    cdef int return_all(self, list claims, long long charged_at, long long now_us)
    cdef int return_one(self, Claim claim, long long charged_at, long long now_us)
    cdef int restore(self, Place place, str key, object state, long long now_us)
