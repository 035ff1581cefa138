# C declarations of virtual_time_admission.py.
from libc.math cimport ceil

# allowed, remaining, retry_us, reset_us.
ctypedef (bint, long long, long long, long long) Answer

cdef long long NEVER
cdef double LATEST

cdef class Tenant:
    cdef readonly str name
    cdef readonly long long weight
    cdef readonly double guarantee
    cdef public double finish, full_at
    cdef public Py_ssize_t place

cdef class FairAdmission:
    cdef public double rate, size, window, rounding, now, virtual, backlog
    cdef public long long weight
    cdef public Py_ssize_t left
    cdef public dict weights, guarantees, tenants
    cdef public list heap, guaranteed, ahead
    cdef tuple saved
    cdef bint collecting
    cpdef int advance(self, double now)
    cdef double _rate_now(self) noexcept
    cdef double _until(self, double until) noexcept
    cdef int _serve(self, double until, double rate)
    cdef double _first(self)
    cdef Tenant _pop(self)
    cdef int _remove(self, Tenant tenant)
    cdef Py_ssize_t _sink(self, Tenant tenant, Py_ssize_t place)
    cdef int _rise(self, Tenant tenant, Py_ssize_t place)
    cdef int _look_ahead(self)
    cdef int _look_back(self)
    cpdef Answer decide(self, str name, long long cost, double now, bint commit=*)
    cdef Answer _answer(self, str name, long long cost, bint commit)
    cdef double _queued(self, Tenant tenant) noexcept
    cdef double _free(self, double queued) noexcept
    cdef int _charge(self, Tenant tenant, str name, long long weight, long long cost)
    cpdef int refund(self, str name, double cost, double now)
    cdef long long _retry(self, Tenant tenant, long long weight, long long cost, double full_at, double guarantee)
    cdef double _share_at(self, Tenant tenant, long long weight, long long cost, double before)
    cdef double _wait(self, double queued, long long weight, long long cost, double rate) noexcept

cdef long long whole(double value) noexcept
