# C declarations of fast_connection.py.
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE

from limitkeeper.decision cimport Decision
from limitkeeper.policy.compiled_rule cimport CompiledRule
from limitkeeper.policy.evaluation cimport Evaluator

cdef extern from *:
    """
    #if defined(_WIN32)
    static long limitkeeper_send(int fd, const char* data, size_t size) { return 0; }
    #else
    #include <sys/socket.h>
    #ifndef MSG_NOSIGNAL
    #define MSG_NOSIGNAL 0
    #endif
    static long limitkeeper_send(int fd, const char* data, size_t size) {
        return send(fd, data, size, MSG_DONTWAIT | MSG_NOSIGNAL);
    }
    #endif
    """
    long send_now "limitkeeper_send"(int fd, const char* data, size_t size) noexcept nogil

cdef class FastAnswers:
    cdef Evaluator gate
    cdef Decision hit(self, CompiledRule rule, str key, long long cost)
    cdef Py_ssize_t answer(self, bytes data, bytearray out, bytes date)

cdef class FastConnection:
    cdef public object listener, transport, waiting
    cdef public FastAnswers fast
    cdef public bint partial, pending, unread, closing, queued
    cdef public long long since
    cdef public int fd
    cdef object send(self, bytearray data)

cdef inline Py_ssize_t send_bytes(int fd, bytearray data) noexcept:
    """How many bytes the socket has taken; none also when it is broken."""
    cdef long sent = send_now(fd, PyByteArray_AS_STRING(data), PyByteArray_GET_SIZE(data))
    return 0 if sent < 0 else sent
