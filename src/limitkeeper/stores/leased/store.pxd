# The C face of leased.py.
from limitkeeper.stores.leased.hands cimport Hands

cdef class LeasedStore(Hands):
    cdef readonly dict prices
    cdef readonly bint strict
