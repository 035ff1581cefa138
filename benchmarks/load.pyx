# cython: language_level=3
"""A load generator in C: connections that send a request and wait for its response, one after the other, from one thread.

A response is complete when it has as many line ends as the first one had, so it knows no protocol. With `rate`, requests begin
at that many per second over all connections, on whichever is idle; otherwise each connection sends as soon as it is answered.
"""

from libc.string cimport memchr
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec
from posix.unistd cimport read, write

cdef extern from "sys/epoll.h" nogil:
    ctypedef union epoll_data_t:
        int fd
        unsigned int u32
    cdef struct epoll_event:
        unsigned int events
        epoll_data_t data
    int EPOLLIN, EPOLL_CTL_ADD
    int epoll_create1(int flags)
    int epoll_ctl(int epoll, int operation, int fd, epoll_event* event)
    int epoll_wait(int epoll, epoll_event* events, int most, int timeout)

DEF MOST = 256


cdef double now() noexcept nogil:
    cdef timespec at
    clock_gettime(CLOCK_MONOTONIC, &at)
    return at.tv_sec + at.tv_nsec * 1e-9


cdef int lines(const char* data, Py_ssize_t size) noexcept nogil:
    cdef const char* at = data
    cdef const char* end = data + size
    cdef int found = 0
    while True:
        at = <const char*> memchr(at, 10, end - at)
        if at == NULL:
            return found
        found += 1
        at += 1


def run(list sockets, list requests, int expected, double seconds, double rate=0, list latencies=None):
    """How many responses came. `requests` are taken in turn; `latencies` gets the seconds that each of at most 200 000 took."""
    cdef int count = len(sockets), epoll = epoll_create1(0), ready, i, slot, idle = count
    cdef int fds[MOST]
    cdef int missing[MOST]
    cdef int idles[MOST]
    cdef double begun[MOST]
    cdef double times[200000]
    cdef epoll_event event
    cdef epoll_event events[MOST]
    cdef char buffer[262144]
    cdef Py_ssize_t total = len(requests), turn = 0, got
    cdef long long answered = 0, timed = 0
    cdef bytes request
    cdef double start = now(), end = start + seconds, moment, due = start
    if count > MOST:
        raise ValueError(f"expected at most {MOST} connections")
    for i in range(count):
        fds[i] = sockets[i].fileno()
        idles[i], missing[i] = i, 0
        event.events = EPOLLIN
        event.data.u32 = i
        epoll_ctl(epoll, EPOLL_CTL_ADD, fds[i], &event)
    while True:
        moment = now()
        while idle and moment < end and (rate == 0 or due <= moment):
            idle -= 1
            slot = idles[idle]
            request = requests[turn]
            turn = (turn + 1) % total
            begun[slot] = due if rate else moment
            missing[slot] = expected
            if rate:
                due += 1 / rate
            if write(fds[slot], <const char*> request, len(request)) != len(request):
                raise ConnectionError("a request was not sent whole")
        if moment >= end and idle == count:
            break
        if moment > end + 10:
            raise TimeoutError(f"{count - idle} of {count} requests were not answered")
        with nogil:
            ready = epoll_wait(epoll, events, MOST, 0 if rate else 1000)
        for i in range(ready):
            slot = events[i].data.u32
            got = read(fds[slot], buffer, sizeof(buffer))
            if got <= 0:
                raise ConnectionError("the server closed a connection")
            missing[slot] -= lines(buffer, got)
            if missing[slot] == 0:
                answered += 1
                if timed < 200000:
                    times[timed] = now() - begun[slot]
                    timed += 1
                idles[idle] = slot
                idle += 1
            elif missing[slot] < 0:
                raise ConnectionError("a response has more lines than the first one had")
    import os
    os.close(epoll)
    if latencies is not None:
        latencies.extend([times[i] for i in range(timed)])
    return answered, now() - start
