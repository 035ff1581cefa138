# C declarations of store.py.
from limitkeeper.stores.contract cimport Store
from limitkeeper.stores.leased.lease cimport Lease, LeaseTerms
from limitkeeper.stores.leased.lease_cache cimport LeaseCache

cdef class LeasedStore(Store):
    cdef readonly Store parent
    cdef readonly LeaseCache cache
    cdef readonly object refill, maintenance, background, make_thread, sleeper
    cdef object derated
    cdef readonly bint parent_time
    cdef object __weakref__
