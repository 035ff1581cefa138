# C declarations of journal.py.
cdef class Journal:
    cdef object memory
    cdef long long* words
    cdef long long journal
    cdef int fd
    cdef int journal_words(self, long long at, long long count)
    cdef int change(self, long long at, long long value)
    cdef int commit(self)
    cdef long long roll_back(self)
    cdef int allocate(self, long long ready, long long number, long long base, long long size, long long room)

cdef class OwnerLock:
    cdef readonly str path
    cdef Journal table
    cdef public long long timeout_us
    cdef readonly bint atomic
    cdef long long owner, dead_owner, restored, stopped_owner
    cdef int fd
    cdef int acquire(self, long long deadline_us)
    cdef bint swap_in(self, bint check_owner)
    cdef int release(self)

# Atomic operations on words that other processes read; plain, `publish` in journal.py.
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
    static inline int limitkeeper_spin(long long* word, long long fresh, int turns) {
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
    static inline int limitkeeper_spin(long long* word, long long fresh, int turns) { return 0; }
    #endif
    #if defined(__linux__)
    #include <errno.h>
    #include <fcntl.h>
    static inline int limitkeeper_allocate(int fd, long long offset, long long size) {
        int error;
        do error = posix_fallocate(fd, offset, size); while (error == EINTR);
        return error == EOPNOTSUPP || error == EINVAL || error == ENOSYS ? 0 : error;
    }
    #else
    static inline int limitkeeper_allocate(int fd, long long offset, long long size) { return 0; }
    #endif
    """
    int allocate_space "limitkeeper_allocate"(int fd, long long offset, long long size) noexcept
    const bint HAS_ATOMICS "LIMITKEEPER_ATOMIC"
    bint swap_word "limitkeeper_swap"(long long* word, long long old, long long fresh) noexcept nogil
    void publish_word "limitkeeper_publish"(long long* word, long long value) noexcept nogil
    long long load_word "limitkeeper_load"(long long* word) noexcept nogil
    bint spin_for "limitkeeper_spin"(long long* word, long long fresh, int turns) noexcept nogil

cdef inline void publish(long long* words, long long at, long long value) noexcept:
    publish_word(words + at, value)
