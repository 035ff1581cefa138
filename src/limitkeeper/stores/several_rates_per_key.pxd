# C declarations of several_rates_per_key.py.
from limitkeeper.algorithms.claim cimport Claim, NamedLimit
from limitkeeper.algorithms.limit cimport Limit, State
from limitkeeper.stores.cell_table cimport Rates, Table
from limitkeeper.stores.contract cimport Store

cdef class LimitHandle:
    cdef readonly CellRates store
    cdef readonly Limit limit
    cdef readonly int unit
    cdef readonly long long birth_us, limit_id
    cdef readonly str name
    cdef readonly Table cells

cdef class CellRates(Store):
    cdef unsigned long long revision
    cdef Rates rates
    cdef long long seen_reset, unmarked_reset
    cdef bint is_first_use
    cdef State read(self, LimitHandle handle, str key, long long now_us, bint full)
    cdef int put(self, LimitHandle handle, str key, long long a, long long b, long long c, long long now_us, bint full)
    cdef int load_rates(self, LimitHandle handle, str key, long long now_us, bint full)
    cdef int fetch_rates(self, LimitHandle handle, str key, long long now_us, bint full)
    cdef int save_rates(self, LimitHandle handle, str key, long long now_us, bint full)
    cdef Limit limit_at(self, LimitHandle handle, long long unit)
    cdef State read_rates(self, LimitHandle handle, str key, long long now_us, bint full)
    cdef bint can_keep(self, LimitHandle handle, str key, long long now_us, bint full)
    cdef long long last_unmarked_reset(self, long long number)
    cdef int keep_seed(self, LimitHandle handle, str key, long long now_us, bint full)
    cdef int put_rate(self, LimitHandle handle, str key, long long a, long long b, long long c, long long now_us, bint full)
    cdef int set_rate(self, LimitHandle handle, long long a, long long b, long long c, long long now_us)
    cdef int least_needed(self, LimitHandle handle, long long now_us)
    cdef long long rate_used(self, LimitHandle handle, int i, long long now_us)
    cdef long long rate_left_us(self, LimitHandle handle, int i, long long now_us)
    cdef tuple charge_others(self, LimitHandle handle, str key, long long start_us, long long cost, long long now_us, bint full)
    cdef int give_back_others(self, LimitHandle handle, Claim claim, long long charged_at, long long now_us, bint full, bint known, bint untouched)
    cdef long long log_window(self, LimitHandle handle, str key, long long now_us, bint full, bint keep)
    cdef long long log_full_until(self, LimitHandle handle, str key, long long at, long long retry, long long now_us)
    cdef int expose(self, LimitHandle handle, str key, long long now_us, bint full)
    cdef int unsettle(self)
