# A hash of a string under two secrets that all processes of a host agree on: without them, keys that share a chain or an overflow
# cell can't be chosen. The width of its characters counts, since the same bytes may be another string. The plain build uses keyed
# BLAKE2b.
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
        uint64_t a0 = (uint32_t) a, a1 = a >> 32, b0 = (uint32_t) b, b1 = b >> 32;
        uint64_t low = a0 * b0, middle = a1 * b0 + (low >> 32), other = a0 * b1 + (uint32_t) middle;
        return ((other << 32) | (uint32_t) low) ^ (a1 * b1 + (middle >> 32) + (other >> 32));
    }
    #endif
    /* Eight bytes at a time, each folded into what came before by a full multiplication with a secret. */
    static inline int64_t limitkeeper_hash(const void* data, size_t size, uint64_t width, uint64_t secret, uint64_t other, uint64_t salt) {
        const unsigned char* at = (const unsigned char*) data;
        uint64_t word, state = secret ^ (salt * 0xC2B2AE3D27D4EB4FULL);
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
        return (int64_t) limitkeeper_fold(state ^ (uint64_t) size ^ ((width - 1) << 40), secret | 1);
    }
    """
    long long hash_bytes "limitkeeper_hash"(const void* data, size_t size, unsigned long long width, unsigned long long secret, unsigned long long other, unsigned long long salt) noexcept nogil
