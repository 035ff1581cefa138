# C declarations of calls.py.

from .event_loop cimport AwaitedReply

cdef class CommittingReply(AwaitedReply):
    pass

cdef class Attempt:
    cdef public object call, request, done, bulkhead
    cdef public int pod, tries, in_flight
    cdef public long long sent_us
    cdef public bint probes
