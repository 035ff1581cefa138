# C declarations of services.py.

from .event_loop cimport EventLoop

cdef class Pod:
    cdef public int in_use, number
    cdef public object queue

cdef class Work:
    cdef public Service service
    cdef public Pod pod
    cdef public object request, reply
    cdef public int step
    cpdef object answered(self, int status)

cdef class Service:
    cdef public str name
    cdef public EventLoop loop
    cdef public object rng, draw
    cdef public list pods, calls
    cdef public long long concurrency, max_queue, in_use, waiting, most_in_use, requests, rejected, failed
    cdef public double contention, coherency
    cdef public bint slows
    cdef int _next_pod
    cpdef object submit(self, object request, object reply)
    cdef object _begin(self, Work work)
    cpdef object proceed(self, Work work)
    cpdef object end(self, Work work, int status)
