# The C face of all_of.py.
from headgate.algorithms.claim cimport Claim
from headgate.decision cimport Decision

cdef void ask(Claim claim, long long now_us, long long at_us, long long max_wait_us) noexcept
cdef long long decide(list claims, long long now_us, long long max_wait_us) noexcept
cdef void look(Claim claim, long long now_us) noexcept
