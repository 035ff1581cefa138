# C declarations of hot_key_detector.py.
cdef class HotKeys:
    cdef readonly long long rate, counters, window_us, since_us
    cdef long long skip, random
    cdef readonly dict counts
    cdef public dict hot
    cpdef bint hit(self, str key, long long now_us)
    cdef bint sample(self, str key, long long now_us)
    cdef long long increment(self, str key)
