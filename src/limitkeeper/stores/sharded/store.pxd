# C declarations of store.py.
from limitkeeper.stores.contract cimport Store
from limitkeeper.stores.sharded.router cimport Router

cdef class ShardedStore(Store):
    cdef readonly Router router
    cdef readonly object membership
    cdef object _clock
    cdef dict _charges
    cdef set _tasks
    cdef object __weakref__
