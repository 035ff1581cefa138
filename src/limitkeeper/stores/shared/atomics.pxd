# Atomic operations on words that other processes read: the compiled twin of atomics.py.
cdef extern from *:
    """
    #if defined(__linux__) && (defined(__GNUC__) || defined(__clang__))
    #include <sched.h>
    #include <time.h>
    #define LIMITKEEPER_ATOMIC 1
    static inline int limitkeeper_swap(long long* word, long long old, long long fresh) {
        return __atomic_compare_exchange_n(word, &old, fresh, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
    }
    static inline void limitkeeper_publish(long long* word, long long value) {
        __atomic_store_n(word, value, __ATOMIC_RELEASE);
        __atomic_thread_fence(__ATOMIC_RELEASE);  /* and nothing that follows comes before it */
    }
    static inline long long limitkeeper_load(long long* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
    static inline void limitkeeper_pause(void) {
    #if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
    #endif
    }
    /* Tries for a while: most holders are gone within a microsecond. */
    static int limitkeeper_spin(long long* word, long long fresh, int turns) {
        while (turns-- > 0) {
            if (limitkeeper_load(word) == 0 && limitkeeper_swap(word, 0, fresh)) return 1;
            if ((turns & 63) == 0) sched_yield(); else limitkeeper_pause();
        }
        return 0;
    }
    #else
    #define LIMITKEEPER_ATOMIC 0
    static inline int limitkeeper_swap(long long* word, long long old, long long fresh) { return 0; }
    static inline void limitkeeper_publish(long long* word, long long value) { *(volatile long long*) word = value; }
    static inline long long limitkeeper_load(long long* word) { return *(volatile long long*) word; }
    static int limitkeeper_spin(long long* word, long long fresh, int turns) { return 0; }
    #endif
    """
    const bint HAS_ATOMICS "LIMITKEEPER_ATOMIC"
    bint swap_word "limitkeeper_swap"(long long* word, long long old, long long fresh) noexcept nogil
    void publish_word "limitkeeper_publish"(long long* word, long long value) noexcept nogil
    long long load_word "limitkeeper_load"(long long* word) noexcept nogil
    bint spin_for "limitkeeper_spin"(long long* word, long long fresh, int turns) noexcept nogil

cdef inline void publish(long long* words, long long at, long long value) noexcept:
    publish_word(words + at, value)
