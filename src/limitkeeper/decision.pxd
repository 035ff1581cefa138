# The C face of decision.py: six integers and a name.
cdef class Decision:
    cdef readonly bint allowed
    cdef readonly long long limit, remaining
    cdef readonly long long retry_us, reset_us, wait_us, start_us
    cdef readonly str name, source

cdef class Decisions(Decision):
    cdef readonly tuple parts

cdef Decision fresh(str name)

cdef extern from *:
    """
    /* Whether nobody but the one reference that the caller keeps (and its own local one) knows the object. */
    static inline int limitkeeper_unshared(PyObject* object) {
    #ifdef Py_GIL_DISABLED
        return 0;
    #else
        return Py_REFCNT(object) == 2;
    #endif
    }
    """
    bint unshared "limitkeeper_unshared"(Decision decision) noexcept nogil
