# C declarations of clients.py.

from limitkeeper.policy.request_context cimport RequestContext
from .event_loop cimport EventLoop

cdef class SimulatedRequest(RequestContext):
    cdef public object headers

cdef class Request:
    cdef public Client client
    cdef public object context, endpoint, rule
    cdef public long long began_us, retry_us
    cdef public int tries, commits, user
    cdef public bint failed

cdef class Client:
    cdef public object settings, rng, send, record
    cdef public EventLoop loop
    cdef object _users, _endpoints, _arrivals, _lines, _varying, _headers
    cdef long long _idempotency
