# The C face of log_rings.py.
from limitkeeper.stores.shared.journal cimport Journal

cdef class LogRings(Journal):
    cdef long long logs, log_words, max_keys, cells_room
    cdef long long log_at(self, long long number)
    cdef long long log_of_cell(self, long long cell)
    cdef int copy_log(self, long long source, long long target)
    cdef int free_log(self, long long number)
    cdef int journal_log(self, long long number)
    cdef long long log_full_until(self, long long cell, long long moment, long long window, long long own, long long retry, long long now)
    cdef int add(self, long long cell, long long moment, long long cost, long long before, long long unseen)
    cdef int merge_entry(self, long long number, long long moment, long long cost)
    cdef int fill(self, long long cell, object entries)
