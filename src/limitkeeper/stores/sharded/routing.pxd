# The C face of routing.py.
from limitkeeper.algorithms.claim cimport Claim, NamedLimit
from limitkeeper.decision cimport Decision
from limitkeeper.stores.contract cimport Store
from limitkeeper.stores.sharded.hot_keys cimport HotKeys
from limitkeeper.stores.memory cimport MemoryStore

cdef class Shard:
    cdef readonly int number
    cdef readonly str name
    cdef readonly double weight
    cdef readonly Store store
    cdef readonly MemoryStore memory
    cdef readonly HotKeys heavy
    cdef public Shard leasing, base
    cdef public object gate
    cdef readonly NamedLimit pacer
    cdef readonly bint open

cdef class Spread:
    cdef object owner
    cdef NamedLimit named
    cdef list parts
    cdef NamedLimit at(self, Shard shard)

cdef class Routed(Store):
    cdef public list table
    cdef readonly int side
    cdef long long inside_0, inside_1
    cdef object _count
    cdef object __weakref__
    cdef int enter(self)
    cdef int leave(self, int side)
    cdef Shard find(self, str key)
    cdef Spread spread(self, NamedLimit named)
    cpdef NamedLimit at(self, NamedLimit named, Shard shard)
    cdef Shard together(self, list claims)
    cdef list copies(self, list claims, Shard shard)
    cdef int keep(self, list claims, list copies)
    cpdef Decision straight(self, list claims, object max_wait_us, object commit)
    cdef Shard through(self, Shard shard, list claims)
    cdef int count(self, Shard shard, list claims, Decision decision)
    cdef Decision asked(self, Shard shard, NamedLimit named, str key, long long cost, long long max_wait_us, bint commit)

cdef Claim another(Claim claim, NamedLimit named)
cdef int remember(Claim into, Claim of)
