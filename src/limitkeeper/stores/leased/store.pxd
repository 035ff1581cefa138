# C declarations of store.py.
from limitkeeper.algorithms.claim cimport Claim, NamedLimit
from limitkeeper.decision cimport Decision
from limitkeeper.stores.contract cimport Store
from limitkeeper.stores.leased.key_lease cimport Lease, LeaseTerms
from limitkeeper.stores.leased.lease_cache cimport LeaseCache
from limitkeeper.stores.wrapper_store cimport WrapperStore

cdef class LeasedStore(WrapperStore):
    cdef readonly Store parent
    cdef readonly LeaseCache cache
    cdef readonly object refill, maintenance, background, make_thread, sleeper
    cdef object derated
    cdef readonly bint parent_time
    cdef public long long budget_us
    cdef object __weakref__
