"""Retry amplification: attempts per distinct request, counted in bounded memory by HyperLogLog with the HIP estimator.

A request is (client, method, path). In each window a sketch of `REGISTERS` registers tells new requests from repeated ones: a
keyed hash selects a register and a rank (the zero bits before the first one bit, plus 1), of which the register keeps the
largest. A new request changes the sketch with the probability

    p = Σ 2^−register / REGISTERS

so every change counts as 1/p distinct requests, and repeated requests never change it (Cohen, 2014; Ting, 2014). The sum only
grows, as a Prometheus counter must. It is unbiased; its standard error in one window is 0.83/√REGISTERS = 1.3 %, for any number
of requests. Rejected: a set of hashes (unbounded), a Bloom filter (a flood of made-up paths fills it, and then looks like
retries), the usual estimator of HyperLogLog (it does not count up, and is biased for few requests).
"""

from __future__ import annotations

import hmac
import threading

from ..clock import Clock
from ..fork import reset_after_fork
from .compiled_policy import CompiledPolicy
from .compiled_rule import join_key, key_of
from .model import Policy, RetryAmplification
from .path_matcher import MESSAGE
from .request_context import RequestContext

REGISTERS = 4096


class AttemptCounter:
    """Counts attempts, and those that are distinct within a window. It continues from the counter of an earlier version."""

    @staticmethod
    def of(policy: Policy, secret: bytes, clock: Clock, before: AttemptCounter | None) -> AttemptCounter | None:
        """The counter that a policy asks for; None: it asks for none."""
        config = policy.retry_amplification
        return None if config is None else AttemptCounter(config, secret, clock, before)

    def __init__(self, config: RetryAmplification, secret: bytes, clock: Clock, before: AttemptCounter | None) -> None:
        self.attempts: int = 0 if before is None else before.attempts
        self.distinct: float = 0.0 if before is None else before.distinct
        self._config, self._secret, self._clock = config, secret, clock
        self._window = -1
        self._reset_after_fork()
        reset_after_fork(self)

    def _reset_after_fork(self) -> None:
        """Creates the lock again."""
        self._lock = threading.Lock()

    def count(self, compiled: CompiledPolicy, context: RequestContext | None) -> None:
        """Counts a request, unless no part of the client's key is present. Messages of a websocket are no retries, and a hit of a
        single rule, which has no context, is no request."""
        if context is None:
            return
        client = key_of(compiled.identities, context, self._config.key)
        if client is None or context.method == MESSAGE:
            return
        text = join_key([client, context.method, context.path])
        number = int.from_bytes(hmac.digest(self._secret, text.encode("utf-8", "surrogatepass"), "sha512")[:8], "big")
        window = self._clock.now_us() // self._config.window_us
        with self._lock:
            if window != self._window:
                self._window, self._registers, self._change = window, bytearray(REGISTERS), 1.0
            self.attempts += 1
            self._add(number % REGISTERS, 53 - (number // REGISTERS).bit_length())

    def _add(self, register: int, rank: int) -> None:
        before = self._registers[register]
        if rank > before:
            self.distinct += 1 / self._change
            self._change -= (0.5**before - 0.5**rank) / REGISTERS
            self._registers[register] = rank
