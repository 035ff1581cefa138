# The floors: what no limiter can go below. A: an empty compiled method that takes a key, and a cost that defaults to one.
# B: the same, reading the monotonic clock and returning a fresh Decision with every field set. Both are methods of a compiled
# class, called as `hit` is called, and built for each run against the Decision that is installed.
from limitkeeper.decision cimport Decision

cdef extern from *:
    """
    #if defined(_WIN32)
    #include <windows.h>
    static long long floor_clock_us(void) {
        static LARGE_INTEGER frequency;
        LARGE_INTEGER count;
        if (!frequency.QuadPart) QueryPerformanceFrequency(&frequency);
        QueryPerformanceCounter(&count);
        return count.QuadPart * 1000000 / frequency.QuadPart;
    }
    #else
    #include <time.h>
    static long long floor_clock_us(void) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return now.tv_sec * 1000000LL + now.tv_nsec / 1000;
    }
    #endif
    """
    long long floor_clock_us() noexcept nogil


cdef class Floors:
    cdef str name

    def __init__(self):
        self.name = "floor"

    def empty(self, key, cost=1):
        return None

    def clock(self, key, cost=1):
        return None if floor_clock_us() else key

    def fresh(self, key, cost=1):
        cdef long long now_us = floor_clock_us()
        cdef Decision decision = Decision.__new__(Decision)
        decision.allowed = True
        decision.limit = 10
        decision.remaining = 9
        decision.retry_us = 0
        decision.reset_us = 1
        decision.wait_us = 0
        decision.start_us = now_us
        decision.name = self.name
        return decision
