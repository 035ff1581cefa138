# The C face of journal.py.
cdef class Journal:
    cdef object memory
    cdef long long* words
    cdef long long journal
    cdef int journal_word(self, long long at)
    cdef int journal_state(self, long long at)
    cdef int change(self, long long at, long long value)
    cdef int commit(self)
    cdef long long roll_back(self)
