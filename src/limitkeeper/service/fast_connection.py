"""What a connection does for every read, compiled: plain requests are answered here, from the bytes to the socket.

The answers are sent without the transport (uvloop's queue costs 0.5 µs) where nothing is queued in it, and never over TLS. The
transport is open while it calls `data_received`, so the descriptor is the connection's.
"""

from __future__ import annotations

import socket
from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper import limiter_base
    from cython.cimports.limitkeeper.decision import Decision
    from cython.cimports.limitkeeper.monotonic import monotonic_us
    from cython.cimports.limitkeeper.policy.compiled_rule import CompiledRule, Entry
    from cython.cimports.limitkeeper.policy.evaluation import Evaluator
    from cython.cimports.limitkeeper.service.fast_connection import send_bytes
else:
    from .. import limiter_base
    from ..clock import monotonic_us
    from ..decision import Decision
    from ..policy.compiled_rule import CompiledRule, Entry
    from ..policy.evaluation import Evaluator

    def send_bytes(fd: int, data: bytearray) -> int:
        """How many bytes the socket has taken: here none, the transport sends all."""
        return 0


from ..errors import StoreError


@cython.cclass
class FastAnswers:
    """Answers the requests of a protocol that are plain, and need no waiting. A subclass defines `answer`."""

    def __init__(self, gate: Evaluator) -> None:
        self.gate = gate

    @cython.cfunc
    def answer(self, data: bytes, out: bytearray, date: bytes) -> cython.Py_ssize_t:
        """Appends the answers to the requests at the beginning of `data`; returns how many bytes these requests have."""
        return 0

    @cython.cfunc
    def hit(self, rule: CompiledRule, key: str, cost: cython.longlong) -> Decision | None:
        """The allowed hit of a rule that has one limit and no options, on a local store: decided and counted as
        `Evaluator.hit_rule_nowait` does, but nothing is allocated. None: nothing was charged or counted, and that answers."""
        gate: Evaluator = self.gate
        entries: tuple = rule.default_entries  # type: ignore[type-arg]
        if gate.compiled.remote or len(entries) != 1 or rule.shadow or rule.alert >= 0 or rule.varies():
            return None
        if gate._attempts is not None or limiter_base.off:
            return None
        began_us: cython.longlong = monotonic_us()
        entry: Entry = entries[0]
        decision: Decision
        try:
            decision = gate.compiled.store.decide_one(entry.named, key, cost, 0, True)
        except StoreError:
            return None
        if not decision.allowed:
            return None
        rule.passed += 1
        if decision.remaining * 5 < decision.limit:
            rule.near += 1
        gate._requests += 1
        gate._allowed += 1
        gate._count_latency(monotonic_us() - began_us)
        return decision


@cython.cclass
class FastConnection:
    """Base of Connection, whose attributes connections.py explains. `fast` is None while it must not be asked; `queued`: the
    transport may have bytes that are not sent; `fd` is -1 where only the transport can send."""

    def __init__(self, listener: Any) -> None:
        self.listener = listener
        self.transport: Any = None
        self.waiting: Any = None
        self.fast: FastAnswers | None = None
        self.partial = self.pending = self.unread = self.closing = self.queued = False
        self.since = listener.tick
        self.fd = -1

    def receive(self, data: bytes) -> None:
        """Takes what is not answered here."""
        raise NotImplementedError

    def data_received(self, data: bytes) -> None:
        if self.closing:
            return
        fast: FastAnswers | None = self.fast
        if fast is not None and not (self.partial or self.pending or self.unread or self.waiting):
            out: bytearray = bytearray()
            done: cython.Py_ssize_t = fast.answer(data, out, self.listener.date)
            if done:
                self.since = self.listener.tick
                self.send(out)
                if done == len(data):
                    return
                data = data[done:]
        self.receive(data)

    def sends_itself(self, transport: Any) -> None:
        """Finds the descriptor of a plain socket."""
        bound = transport.get_extra_info("socket")
        if transport.get_extra_info("sslcontext") is None and bound is not None and bound.type == socket.SOCK_STREAM:
            self.fd = bound.fileno()

    @cython.cfunc
    def send(self, data: bytearray) -> object:
        """Sends what the socket takes now, and leaves the rest to the transport. Only while bytes are received."""
        sent: cython.Py_ssize_t = 0
        if self.fd >= 0 and (not self.queued or self.transport.get_write_buffer_size() == 0):
            self.queued = False
            sent = send_bytes(self.fd, data)
        if sent < len(data):
            self.queued = True
            self.transport.write(data[sent:] if sent else data)
        return None
