# C declarations of resp_fast.py.
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE, PyByteArray_Resize
from libc.string cimport memcpy

from limitkeeper.decision cimport Decision
from limitkeeper.service.fast_connection cimport FastAnswers

cdef bytes HIT, HIT_COST, THROTTLE, THROTTLE_QUANTITY
cdef Py_ssize_t MAX_REPLIES, MAX_ARGUMENT, MAX_DIGITS
cdef int DOLLAR, CR, LF, ZERO, NINE

cdef class FastHits(FastAnswers):
    cdef dict rates
    cdef object encode, failed
    cdef Py_ssize_t start, stop
    cdef long long number
    cdef Py_ssize_t _hit(self, bytes data, Py_ssize_t at, bint with_cost, bytearray out)
    cdef Py_ssize_t _throttle(self, bytes data, Py_ssize_t at, bint with_quantity, bytearray out)
    cdef int _put(self, bytearray out, Decision decision)
    cdef Py_ssize_t _argument(self, bytes data, Py_ssize_t at)
    cdef Py_ssize_t _number(self, bytes data, Py_ssize_t at)

cdef inline int put_bytes(bytearray out, const char* data, Py_ssize_t size) except -1:
    """Appends bytes."""
    cdef Py_ssize_t before = PyByteArray_GET_SIZE(out)
    PyByteArray_Resize(out, before + size)
    memcpy(PyByteArray_AS_STRING(out) + before, data, size)
    return 0

cdef inline char* put_digits(char* at, long long value) noexcept:
    """Writes a number in decimal digits; returns where they end."""
    cdef char digits[20]
    cdef int n = 0
    cdef unsigned long long rest = <unsigned long long> value
    if value < 0:
        at[0] = c'-'
        at += 1
        rest = 0 - rest
    while True:
        digits[n] = <char> (c'0' + rest % 10)
        n += 1
        rest //= 10
        if rest == 0:
            break
    while n:
        n -= 1
        at[0] = digits[n]
        at += 1
    return at

cdef inline char* put_line(char* at, long long value) noexcept:
    at[0] = c':'
    at = put_digits(at + 1, value)
    at[0] = c'\r'
    at[1] = c'\n'
    return at + 2

cdef inline int put_five(bytearray out, long long a, long long b, long long c, long long d, long long e) except -1:
    """Appends an array of five integers."""
    cdef char reply[128]
    memcpy(reply, b"*5\r\n", 4)
    cdef char* at = put_line(put_line(put_line(put_line(put_line(reply + 4, a), b), c), d), e)
    return put_bytes(out, reply, at - reply)
