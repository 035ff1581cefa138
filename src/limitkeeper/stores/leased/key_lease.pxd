# C declarations of key_lease.py.
from limitkeeper.algorithms.claim cimport NamedLimit
from limitkeeper.algorithms.limit cimport Limit

cdef class LeaseTerms:
    cdef readonly NamedLimit named, parent_limit
    cdef readonly Limit limit
    cdef readonly str name
    cdef readonly dict leases
    cdef readonly bint leasable, continuous, windowed, dated, follows_demand
    cdef public bint has_siblings
    cdef public long long users
    cdef readonly long long scarce_batch, fixed_batch, max_batch, life_us
    cdef readonly double tokens_per_us

cdef class Lease:
    cdef readonly LeaseTerms terms
    cdef readonly str key
    cdef public long long left, size, start_us, end_us, charged_at, source, requested_us
    cdef public long long next_left, next_size, next_start_us, next_end_us, next_charged_at, next_source, next_requested_us
    cdef public long long refused_min, refused_max, refused_until_us, refused_left, refused_held, refusals, trusted_us, recheck_us
    cdef public long long promised_us, reset_us
    cdef public long long observed_us, low_mark, used, last_used_us, measured_us, scarce_size, parent_left, generation, resets, reset_id, check_us
    cdef public double rate
    cdef public bint scarce, queued, oversized
    cdef public object pending
    cdef long long held(self, long long now_us) noexcept nogil
    cdef bint take(self, long long now_us, long long cost) noexcept nogil
    cdef bint take_from_both(self, long long now_us, long long cost) noexcept nogil
    cdef long long most_at_once(self, long long now_us) noexcept nogil
    cdef void swap(self) noexcept nogil
    cdef void promote_next(self) noexcept nogil
    cdef long long refused_until(self, long long now_us, long long cost, bint fresh) noexcept nogil
    cdef list take_parts(self, long long first, long long second)
