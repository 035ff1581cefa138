# The C face of lease.py.
from limitkeeper.algorithms.claim cimport NamedLimit
from limitkeeper.algorithms.limit cimport Limit
from limitkeeper.stores.cell_store cimport LimitHandle

cdef class LeaseTerms(LimitHandle):
    cdef readonly NamedLimit named, theirs
    cdef readonly dict leases
    cdef readonly bint leased, paced, walled
    cdef readonly long long fair, fixed, most, life_us
    cdef readonly double tokens_us

cdef class Lease:
    cdef readonly LeaseTerms terms
    cdef readonly str key
    cdef public long long left, size, start_us, end_us, charged_at, since_us
    cdef public long long next_left, next_size, next_start_us, next_end_us, next_charged_at, next_since_us
    cdef public long long denied_least, denied_most, denied_until_us, denied_left, denials, trusted_until_us, reset_us
    cdef public long long age_us, low, used, seen_us, mark_us, share, spare, turns, watch_us
    cdef public double rate
    cdef public bint dry, queued, thrifty
    cdef public object flight
    cdef long long hand(self, long long now_us) noexcept nogil
    cdef bint take(self, long long now_us, long long cost) noexcept nogil
    cdef bint take_across(self, long long now_us, long long cost) noexcept nogil
    cdef void move_up(self) noexcept nogil
    cdef long long retry_us(self, long long now_us, long long cost) noexcept nogil
