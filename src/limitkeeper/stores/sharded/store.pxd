# C declarations of store.py.
from limitkeeper.algorithms.claim cimport Claim, NamedLimit
from limitkeeper.decision cimport Decision
from limitkeeper.stores.contract cimport Store
from limitkeeper.stores.sharded.router cimport Router, Shard
from limitkeeper.stores.wrapper_store cimport WrapperStore

cdef class ShardedStore(WrapperStore):
    cdef readonly Router router
    cdef readonly object membership
    cdef object _clock, _rng, _run_in_thread
    cdef dict _charges
    cdef set _tasks
    cdef object __weakref__
