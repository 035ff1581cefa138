# Keys as bytes in words, and a hash that all processes of a host agree on: the compiled twin of key_codec.py.
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.unicode cimport PyUnicode_DATA, PyUnicode_FromKindAndData, PyUnicode_GET_LENGTH, PyUnicode_KIND
from libc.string cimport memcmp, memcpy

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>
    #if defined(__SIZEOF_INT128__)
    static inline uint64_t limitkeeper_fold(uint64_t a, uint64_t b) {
        unsigned __int128 product = (unsigned __int128) a * b;
        return (uint64_t) product ^ (uint64_t) (product >> 64);
    }
    #else
    static inline uint64_t limitkeeper_fold(uint64_t a, uint64_t b) {
        uint64_t mixed = (a ^ (b >> 32)) * 0x9E3779B97F4A7C15ULL;
        return mixed ^ (mixed >> 29) ^ b;
    }
    #endif
    /* Eight bytes at a time, each folded into what came before by a full multiplication with a secret. */
    static inline int64_t limitkeeper_hash(const void* data, size_t size, uint64_t secret, uint64_t other, uint64_t limit_id) {
        const unsigned char* at = (const unsigned char*) data;
        uint64_t word, state = secret ^ (limit_id * 0xC2B2AE3D27D4EB4FULL);
        size_t left = size;
        while (left >= 8) {
            memcpy(&word, at, 8);
            state = limitkeeper_fold(state ^ word, other | 1);
            at += 8;
            left -= 8;
        }
        word = 0;
        memcpy(&word, at, left);
        state = limitkeeper_fold(state ^ word, other | 1);
        return (int64_t) limitkeeper_fold(state ^ (uint64_t) size, secret | 1);
    }
    """
    long long hash_bytes "limitkeeper_hash"(const void* data, size_t size, unsigned long long secret, unsigned long long other, unsigned long long limit_id) noexcept nogil

cdef inline long long kind_of(str key) noexcept:
    return PyUnicode_KIND(key)

cdef inline long long size_of(str key) noexcept:
    return PyUnicode_GET_LENGTH(key) * PyUnicode_KIND(key)

cdef inline long long hashed(str key, long long secret, long long other, long long limit_id) noexcept:
    return hash_bytes(PyUnicode_DATA(key), PyUnicode_GET_LENGTH(key) * PyUnicode_KIND(key), secret, other, limit_id)

cdef inline void copy_in(long long* words, long long at, str key, long long offset, long long size) noexcept:
    memcpy(words + at, <const char*> PyUnicode_DATA(key) + offset, size)

cdef inline bint same_at(long long* words, long long at, str key, long long offset, long long size) noexcept:
    return memcmp(words + at, <const char*> PyUnicode_DATA(key) + offset, size) == 0

cdef inline bytes copy_out(long long* words, long long at, long long size):
    return PyBytes_FromStringAndSize(<const char*> (words + at), size)

cdef inline str text_of(long long kind, bytes data):
    return PyUnicode_FromKindAndData(<int> kind, <const char*> data, len(data) // kind)
