# The C face of headers.py.
from limitkeeper.policy.evaluation cimport Evaluation

cpdef list fields(Evaluation passage)
