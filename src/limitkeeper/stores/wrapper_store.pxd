# C declarations of wrapper_store.py.
from limitkeeper.stores.contract cimport PlannedStore, Store

cdef class WrapperStore(PlannedStore):
    cdef readonly Store inner
