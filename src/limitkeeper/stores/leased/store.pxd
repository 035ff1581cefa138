# The C face of leased.py.
from limitkeeper.stores.leased.lease_cache cimport LeaseCache

cdef class LeasedStore(LeaseCache):
    cdef readonly dict prices
    cdef readonly bint strict
