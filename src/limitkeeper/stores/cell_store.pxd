# C declarations of cell_store.py.
from limitkeeper.algorithms.claim cimport Claim, NamedLimit
from limitkeeper.clock cimport SystemClock
from limitkeeper.decision cimport Decision, Decisions, fresh, unshared
from limitkeeper.stores.several_rates_per_key cimport CellRates, LimitHandle

cdef class CellStore(CellRates):
    cdef SystemClock system
    cdef Decision spare, other
    cdef Decisions spare_joined, other_joined
    cdef object _clock, _lock
    cdef long long offset_us, last_us, shift_us, half
    cdef object __weakref__
    cdef long long now(self)
    cdef LimitHandle handle_of(self, NamedLimit named)
    cdef bint is_full(self, LimitHandle handle, str key, long long needed, long long now_us)
    cdef int hold_mapping(self, LimitHandle handle, str key, long long start_us, long long now_us, bint full)
    cdef bint is_before_reset(self, long long seen)
    cdef int begin(self)
    cdef int end(self)
    cdef int decide_cell(self, Decision decision, LimitHandle handle, str key, long long cost, long long max_wait_us, bint commit, long long now_us)
    cdef long long charge(self, list claims, long long max_wait_us, bint commit, long long now_us, long long not_before_us)
    cdef Decision decide_checked(self, list claims, tuple names, long long max_wait_us, bint commit, long long not_before_us)
    cdef bint has_full_log(self, list claims, long long max_wait_us, long long now_us)
    cdef int give_back_all(self, list claims, long long charged_at, long long now_us)
    cdef int give_back_one(self, Claim claim, long long charged_at, long long now_us)

cdef inline Decision blank(CellStore store, LimitHandle handle):
    """A Decision whose fields the store sets: one of the last two if its caller has released it, otherwise a new one. Allocating
    and freeing took a quarter of a hit; two, because many callers keep a Decision until they have the next."""
    cdef Decision decision = store.spare
    if decision is None or not unshared(decision):
        decision = store.other
        if decision is None or not unshared(decision):
            decision = fresh(handle.name)
            store.other = store.spare
            store.spare = decision
            return decision
    if decision.name is not handle.name:
        decision.name = handle.name
    return decision

cdef inline Decisions blank_joined(CellStore store, tuple names):
    """The same for several limits, with space for their fields; None for one limit."""
    cdef Decisions joined
    if len(names) == 1:
        return None
    joined = store.spare_joined
    if joined is None or not unshared(joined):
        joined = store.other_joined
        if joined is None or not unshared(joined):
            joined = Decisions.__new__(Decisions)
            store.other_joined = store.spare_joined
            store.spare_joined = joined
    joined.reserve(names)
    return joined
