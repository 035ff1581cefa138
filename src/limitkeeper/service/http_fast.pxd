# C declarations of http_fast.py.
from libc.string cimport memcpy

from limitkeeper.decision cimport Decision
from limitkeeper.policy.compiled_rule cimport CompiledRule
from limitkeeper.service.fast_connection cimport FastAnswers
from limitkeeper.service.resp_fast cimport put_bytes, put_digits

cdef bytes REQUEST, LENGTH, LIMIT, KEY, COST, CHECKS, NAME, READ
cdef Py_ssize_t MAX_RESPONSES, MAX_COUNT, LONGEST_SPECIAL
cdef int CR, LF, SPACE, QUOTE, COMMA, ZERO, NINE, COLON, BACKSLASH, OPEN, CLOSE, OPEN_LIST, CLOSE_LIST, DELETE

cdef class FastChecks(FastAnswers):
    cdef object encode, authorization
    cdef Py_ssize_t max_head, max_body, start, stop, size
    cdef bint authorized
    cdef CompiledRule rule
    cdef str key
    cdef long long cost
    cdef Py_ssize_t _head(self, bytes data, Py_ssize_t at)
    cdef bint _field(self, bytes data, Py_ssize_t first, Py_ssize_t colon, Py_ssize_t end)
    cdef bint _length(self, bytes data, Py_ssize_t at, Py_ssize_t end)
    cdef bint _check(self, bytes data, Py_ssize_t at, Py_ssize_t end, bytearray out, bytes date)
    cdef bint _checks(self, bytes data, Py_ssize_t at, Py_ssize_t end, bytearray out, bytes date)
    cdef int _decide_all(self, list hits, bytearray body)
    cdef Py_ssize_t _hit(self, bytes data, Py_ssize_t at, Py_ssize_t end)
    cdef Py_ssize_t _value(self, bytes data, Py_ssize_t at, Py_ssize_t end, bint text)

cdef Py_ssize_t skip_space(const unsigned char* p, Py_ssize_t at, Py_ssize_t end)
cdef long long decimal(const unsigned char* p, Py_ssize_t at, Py_ssize_t end)

cdef inline char* put_text(char* at, const char* text, Py_ssize_t size) noexcept:
    memcpy(at, text, size)
    return at + size

cdef inline char* put_json(char* at, long long limit, long long remaining, long long reset_us) noexcept:
    cdef long long digit = 100000
    at = put_text(at, b'{"allowed":true,"limit":', 24)
    at = put_text(put_digits(at, limit), b',"remaining":', 13)
    at = put_text(put_digits(at, remaining), b',"retry_after":0.0,"reset_after":', 33)
    at = put_digits(at, reset_us // 1000000)
    at[0] = c'.'
    at += 1
    while digit:
        at[0] = <char> (c'0' + reset_us // digit % 10)
        at += 1
        digit //= 10
    at[0] = c'}'
    return at + 1

cdef inline char* put_head(char* at, bytes date, Py_ssize_t size) noexcept:
    """The head of a response 200 with a body of JSON, and a line end after it."""
    at = put_text(at, b"HTTP/1.1 200 OK\r\ndate: ", 23)
    at = put_text(at, date, min(len(date), 64))
    at = put_digits(put_text(at, b"\r\ncontent-length: ", 18), size + 1)
    return put_text(at, b"\r\ncontent-type: application/json\r\n\r\n", 36)

cdef inline int put_allowed(bytearray out, long long limit, long long remaining, long long reset_us) except -1:
    """Appends the JSON of an allowed decision."""
    cdef char reply[192]
    return put_bytes(out, reply, put_json(reply, limit, remaining, reset_us) - reply)

cdef inline int put_response(bytearray out, bytes date, bytearray body) except -1:
    """Appends a response with a body of JSON."""
    cdef char reply[192]
    put_bytes(out, reply, put_head(reply, date, len(body)) - reply)
    put_bytes(out, body, len(body))
    return put_bytes(out, b"\n", 1)

cdef inline int put_allowed_response(bytearray out, bytes date, long long limit, long long remaining, long long reset_us) except -1:
    """Appends a response with an allowed decision."""
    cdef char reply[384]
    cdef char body[192]
    cdef Py_ssize_t size = put_json(body, limit, remaining, reset_us) - body
    cdef char* at = put_text(put_head(reply, date, size), body, size)
    at[0] = c'\n'
    return put_bytes(out, reply, at + 1 - reply)
