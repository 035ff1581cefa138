# The C face of ratelimit_fields.py.
from limitkeeper.decision cimport Decision

cdef class Style:
    cdef readonly int wire
    cdef readonly bint x, near, never, partition
    cdef readonly str reset
    cdef readonly object headers
    cdef readonly tuple expose, expose_refused, expose_retry

cdef class FieldTemplate:
    cdef readonly bint bucket, wide
    cdef readonly long long quota, window, per, gain, rest_us
    cdef readonly bytes policy, begins, older
    cdef readonly tuple alone, limit
    cdef readonly Style style

cdef bytes digits(long long number)
cdef long long seconds(long long us) noexcept
cdef long long left(FieldTemplate posting, Decision part) noexcept
cdef long long within(FieldTemplate posting, Decision part, long long r)
cdef bytes item(FieldTemplate posting, Decision part)
