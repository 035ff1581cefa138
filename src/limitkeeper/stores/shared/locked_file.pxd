# The C face of locked_file.py.
from limitkeeper.stores.cell_store cimport CellStore, LimitHandle
from limitkeeper.stores.shared.cell_table cimport SharedCellTable

cdef class RowHandle(LimitHandle):
    cdef readonly long long table, birth_us

cdef class LockedFile(CellStore):
    cdef SharedCellTable sheet
    cdef readonly str path
    cdef object _mapped, _tables, _units, _since, _known
    cdef int _lock_fd, depth
    cdef bint atomic, closing
    cdef long long me, timeout_us, seen_table, seen_cell, dead, undone
    cdef object seen
    cdef int take(self)
    cdef int leave(self)
