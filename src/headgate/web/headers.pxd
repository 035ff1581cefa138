# The C face of headers.py.
from headgate.policy.passage cimport Passage

cpdef list fields(Passage passage)
