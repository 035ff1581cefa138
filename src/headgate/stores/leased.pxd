# The C face of leased.py.
from headgate.stores.hands cimport Hands

cdef class LeasedStore(Hands):
    cdef readonly dict prices
    cdef readonly bint strict
