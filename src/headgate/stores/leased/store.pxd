# The C face of leased.py.
from headgate.stores.leased.hands cimport Hands

cdef class LeasedStore(Hands):
    cdef readonly dict prices
    cdef readonly bint strict
