# The C face of sliding_log.py, for stores: how a log is written to.
cdef long long prune(long long* log, long long before) noexcept nogil
cdef void write(long long memory, long long before, long long at, long long cost) noexcept
