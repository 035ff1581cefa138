# The monotonic clock in microseconds, read without a call into Python.
cdef extern from *:
    """
    #if defined(_WIN32)
    #include <windows.h>
    static long long limitkeeper_monotonic_us(void) {
        static LARGE_INTEGER frequency;
        LARGE_INTEGER count;
        if (!frequency.QuadPart) QueryPerformanceFrequency(&frequency);
        QueryPerformanceCounter(&count);
        return (count.QuadPart / frequency.QuadPart) * 1000000 + (count.QuadPart % frequency.QuadPart) * 1000000 / frequency.QuadPart;
    }
    #else
    #include <time.h>
    static inline long long limitkeeper_monotonic_us(void) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return now.tv_sec * 1000000LL + now.tv_nsec / 1000;
    }
    #endif
    """
    long long monotonic_us "limitkeeper_monotonic_us"() noexcept nogil
