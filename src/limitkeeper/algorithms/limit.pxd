# C declarations of limit.py: an algorithm is three function pointers on frozen integers.
ctypedef long long I64
ctypedef (I64, I64, I64) State
ctypedef (I64, I64, I64, I64, I64, I64, I64) Answer
ctypedef Answer (*Decide)(Limit, I64, I64, I64, I64, I64, I64, I64) noexcept nogil
ctypedef State (*GiveBack)(Limit, I64, I64, I64, I64, I64, I64, I64) noexcept nogil
ctypedef I64 (*Used)(Limit, I64, I64, I64, I64) noexcept nogil

cdef class Limit:
    cdef readonly long long count, period, capacity, tick, window, gain, unit, full, horizon, drained, initial, ramp
    cdef readonly bint reserves, logs, refunds, aligned, bounded, fine, even, sums_later_starts
    cdef readonly str text
    cdef readonly object rate
    cdef Decide rule
    cdef GiveBack undo
    cdef Used usage
    cdef State unseen(self, long long birth_us) noexcept nogil
