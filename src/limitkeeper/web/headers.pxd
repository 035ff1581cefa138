# C declarations of headers.py.
from limitkeeper.decision cimport Decision
from limitkeeper.policy.compiled_rule cimport Entry
from limitkeeper.policy.evaluation cimport Evaluation
from limitkeeper.policy.request_context cimport RequestContext

cdef class FieldStyle:
    cdef readonly int draft
    cdef readonly bint x, near, never, partition
    cdef readonly str reset
    cdef readonly object headers
    cdef readonly tuple expose, expose_refused, expose_retry, vary

cdef class FieldTemplate:
    cdef readonly bint bucket, wide
    cdef readonly long long quota, window, per, gain, rest_us
    cdef readonly bytes policy, item_start, next_item_start, older_policy
    cdef readonly tuple policy_field, limit_field, group
    cdef readonly FieldStyle style

cdef long long NAME_LENGTHS

cdef bytes encode_integer(long long number)
cdef long long ceil_seconds(long long us) noexcept
cdef long long seconds_of(FieldTemplate template, long long r, long long retry_us, long long reset_us)
cpdef list fields(Evaluation evaluation)
cpdef list append_fields(list own, list added)

cdef class AsgiRequestContext(RequestContext):
    cdef readonly object scope
    cdef dict _by_name
    cdef object _lines(self, bytes name)

cdef class HeaderSend:
    cdef Evaluation _evaluation
    cdef object _send

cpdef bint has_origin(object scope)
