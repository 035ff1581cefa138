# C declarations of limit.py: an algorithm is two function pointers on frozen integers.
ctypedef (long long, long long, long long) State
ctypedef (long long, long long, long long, long long, long long, long long, long long) Answer
ctypedef Answer (*Decide)(Limit, long long, long long, long long, long long, long long, long long, long long) noexcept nogil
ctypedef State (*GiveBack)(Limit, long long, long long, long long, long long, long long, long long, long long) noexcept nogil

cdef class Limit:
    cdef readonly long long count, period, capacity, tick, window, gain, unit, full, horizon, drained, initial, ramp
    cdef readonly bint reserves, logs, refunds, aligned, bounded, fine, even
    cdef readonly str text
    cdef readonly object rate
    cdef Decide rule
    cdef GiveBack undo
    cdef State unseen(self, long long birth_us) noexcept nogil
    cpdef object convert(self, Limit old, object state, long long now_us)
