# C declarations of event_loop.py.

cdef class Timeout:
    cdef public long long at_us
    cdef public object call

cdef class AwaitedReply(Timeout):
    cdef public object owner
    cpdef object reply(self, int status)

cdef class EventLoop:
    cdef public long long now, events
    cdef long long _number
    cdef list _heap
    cdef dict _timeouts
    cpdef object at(self, long long time_us, object call, object argument=*)
    cpdef object after(self, long long delay_us, object call, object argument=*)
    cpdef object start_timeout(self, long long delay_us, Timeout timeout)
