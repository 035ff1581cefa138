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

cdef FieldTemplate template_of(Entry entry, object headers)
cdef bytes encode_integer(long long number)
cdef long long ceil_seconds(long long us) noexcept
cdef long long remaining_of(FieldTemplate template, Decision part) noexcept
cdef long long seconds_of(FieldTemplate template, Decision part, long long r)
cdef int add_item(list pieces, FieldTemplate template, Decision part) except -1
cpdef list fields(Evaluation evaluation)
cdef int add_limit(list found, Evaluation evaluation, FieldTemplate template, Decision part) except -1
cdef int add_limits(list found, Evaluation evaluation, object headers, Decision decision, list entries) except -1
cpdef list append_fields(list own, list added)
