# C declarations of all_of.py.
from limitkeeper.algorithms.claim cimport Claim
from limitkeeper.algorithms.limit cimport Limit, State
from limitkeeper.decision cimport Decision, Decisions, Fields

cdef void decide_claim(Claim claim, long long now_us, long long at_us, long long max_wait_us) noexcept
cdef long long decide(list claims, long long now_us, long long not_before_us, long long max_wait_us) noexcept
cdef void peek_claim(Claim claim, long long now_us) noexcept
cdef long long retry_us(Limit limit, long long a, long long b, long long c, long long now_us, long long cost, long long max_wait_us) noexcept
cpdef State seeded(Limit limit, long long birth_us, long long now_us, long long amount) noexcept
cpdef State charged_too(Limit limit, long long a, long long b, long long c, long long now_us, long long start_us, long long cost) noexcept
cdef State given_back(Limit limit, State state, long long now_us, long long cost, long long charged, long long charged_at_us, long long before_until) noexcept
cdef Fields fields_of(Claim claim, long long now_us) noexcept
cdef tuple names_of(list claims)
cdef Decisions new_decisions(tuple names)
cdef Decision join_claims(list claims, long long now_us, long long start_us, Decisions joined)
