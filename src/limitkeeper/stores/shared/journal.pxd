# The C face of journal.py.
cdef class Journal:
    cdef object memory
    cdef long long* words
    cdef long long journal
    cdef int note(self, long long at)
    cdef int note_state(self, long long at)
    cdef int change(self, long long at, long long value)
    cdef int commit(self)
    cdef long long roll_back(self)
