# C declarations of ratelimit_fields.py.
from limitkeeper.decision cimport Decision
from limitkeeper.policy.compiled_policy cimport Entry
from limitkeeper.policy.evaluation cimport Evaluation

cdef class FieldStyle:
    cdef readonly int draft
    cdef readonly bint x, near, never, partition
    cdef readonly str reset
    cdef readonly object headers
    cdef readonly tuple expose, expose_refused, expose_retry

cdef class FieldTemplate:
    cdef readonly bint bucket, wide
    cdef readonly long long quota, window, per, gain, rest_us
    cdef readonly bytes policy, item_start, older_policy
    cdef readonly tuple policy_field, limit_field
    cdef readonly FieldStyle style

cdef long long NAME_LENGTHS

cdef bytes encode_integer(long long number)
cdef long long ceil_seconds(long long us) noexcept
cdef long long remaining_of(FieldTemplate template, Decision part) noexcept
cdef long long seconds_of(FieldTemplate template, Decision part, long long r)
cpdef list fields(Evaluation evaluation)
cpdef list append_fields(list own, list added)
