# The C face of hot_keys.py.
cdef class HotKeys:
    cdef readonly long long rate, counters, window_us, since_us
    cdef long long skip, chance
    cdef readonly dict counts
    cdef public dict hot
    cpdef bint hit(self, str key, long long now_us)
    cdef bint look(self, str key, long long now_us)
    cdef long long counted(self, str key)
