# C declarations of decision.py: six integers, a name and a source.
from libc.stdlib cimport free, malloc

# The result of one limit: allowed, limit, remaining, retry_us, reset_us, wait_us.
ctypedef (bint, long long, long long, long long, long long, long long) Fields

cdef class Decision:
    cdef readonly bint allowed
    cdef readonly long long limit, remaining
    cdef readonly long long retry_us, reset_us, wait_us, start_us
    cdef readonly str name, source

cdef class Decisions(Decision):
    cdef tuple _parts, names
    cdef Fields* fields
    cdef Py_ssize_t room

    cdef inline int reserve(self, tuple names) except -1:
        """Allocates the fields of these limits, before any state is read."""
        cdef Py_ssize_t n = len(names)
        if n > self.room:
            free(self.fields)
            self.fields = <Fields*> malloc(n * sizeof(Fields))
            self.room = 0 if self.fields == NULL else n
            if self.fields == NULL:
                raise MemoryError
        if self.names is not names:
            self.names = names
        if self._parts is not None:
            self._parts = None
        return 0

    cdef inline tuple parts_of(self):
        """The Decision of each limit, created on first use."""
        cdef long long now_us = self.start_us - self.wait_us
        cdef Py_ssize_t i
        cdef list found
        cdef Decision part
        if self._parts is None:
            found = []
            for i in range(len(self.names)):
                part = filled(self.names[i], self.fields[i], now_us)
                part.source = self.source
                found.append(part)
            self._parts = tuple(found)
        return self._parts

    cdef inline Fields part_at(self, Py_ssize_t i):
        """The fields of one limit; creates no Decision."""
        cdef Decision part
        if self._parts is None:
            return self.fields[i]
        part = self._parts[i]
        return (part.allowed, part.limit, part.remaining, part.retry_us, part.reset_us, part.wait_us)

cdef Decision fresh(str name)
cdef Decision filled(str name, Fields fields, long long now_us)
cdef bint is_deciding(bint allowed, long long limit, long long remaining, long long retry_us, long long other_limit, long long other_remaining, long long other_retry_us) noexcept

cdef extern from *:
    """
    /* Whether the only references are the one that the store keeps and the local one. */
    static inline int limitkeeper_unshared(void* object) {
    #ifdef Py_GIL_DISABLED
        return 0;
    #else
        return Py_REFCNT((PyObject*) object) == 2;
    #endif
    }
    """
    bint unshared "limitkeeper_unshared"(Decision decision) noexcept nogil
