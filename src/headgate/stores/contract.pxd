cdef class Store:
    pass
