# C declarations of router.py.
from limitkeeper.algorithms.claim cimport Claim, NamedLimit
from limitkeeper.decision cimport Decision
from limitkeeper.stores.contract cimport Store
from limitkeeper.stores.sharded.hot_key_detector cimport HotKeys

cdef class Shard:
    cdef readonly int number
    cdef readonly str name
    cdef readonly double weight
    cdef readonly Store store
    cdef readonly HotKeys hot_keys
    cdef readonly object gate
    cdef public Shard leased, base

cdef class ShardLimits:
    cdef Router router
    cdef NamedLimit named
    cdef list limits

cdef class Router:
    cdef public list table
    cdef readonly int side
    cdef long long entered_0, entered_1
    cdef object _lock
    cdef tuple _visits
    cdef object __weakref__
    cpdef int enter(self)
    cpdef int leave(self, int side)
    cdef int count(self, int side, int change)
    cpdef Shard find(self, str key)
    cpdef NamedLimit limit_at(self, NamedLimit named, Shard shard)
    cpdef list copy_claims(self, list claims, Shard shard)
    cpdef int copy_states(self, list claims, list copies)
    cpdef Shard only_shard(self, list claims)
    cpdef Shard lease_of(self, Shard shard, str key)
    cpdef Shard lease_of_all(self, Shard shard, list claims)
    cpdef int count_hit(self, Shard shard, str key, Decision decision)

cdef int copy_state(Claim into, Claim claim)

cdef extern from *:
    """
    /* slots.slot_of for ASCII keys, without a bytes object and two Python calls (150 ns); -1 for any other key. */
    static uint32_t limitkeeper_crc_table[256];

    static void limitkeeper_crc_init(void) {
        for (uint32_t n = 0; n < 256; n++) {
            uint32_t c = n;
            for (int k = 0; k < 8; k++) c = c & 1 ? 0xEDB88320u ^ (c >> 1) : c >> 1;
            limitkeeper_crc_table[n] = c;
        }
    }

    static inline int limitkeeper_ascii_slot(PyObject* key) {
        if (!PyUnicode_IS_COMPACT_ASCII(key)) return -1;
        const unsigned char* text = (const unsigned char*) PyUnicode_1BYTE_DATA(key);
        const unsigned char* end = text + PyUnicode_GET_LENGTH(key);
        uint32_t crc = 0xFFFFFFFFu;
        if (!limitkeeper_crc_table[1]) limitkeeper_crc_init();
        while (text < end) crc = limitkeeper_crc_table[(crc ^ *text++) & 0xFF] ^ (crc >> 8);
        return (int) (((uint64_t) (crc ^ 0xFFFFFFFFu) * 0x9E3779B1u) >> 18 & 16383);
    }
    """
    int ascii_slot "limitkeeper_ascii_slot"(str key) noexcept
