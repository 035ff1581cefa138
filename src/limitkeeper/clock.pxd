cdef class SystemClock:
    cdef readonly long long offset_us
