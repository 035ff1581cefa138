# The C face of headers.py.
from limitkeeper.policy.passage cimport Passage

cpdef list fields(Passage passage)
