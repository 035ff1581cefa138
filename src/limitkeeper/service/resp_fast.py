"""The hot path of the Redis protocol, compiled: `LK.HIT limit key [cost]` and `CL.THROTTLE …` from the bytes to the reply.

It reads the commands at the beginning of what was received, decides them, and appends their replies to one buffer. It stops at
the first command that is anything else, has an argument of 1000 bytes or more, is not complete, or needs a store to be awaited;
resp_parser.py and resp.py answer that one and the rest. So each command has one meaning, and errors are made in one place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.algorithms.claim import NamedLimit
    from cython.cimports.limitkeeper.decision import Decision
    from cython.cimports.limitkeeper.policy.compiled_policy import CompiledPolicy
    from cython.cimports.limitkeeper.policy.compiled_rule import CompiledRule
    from cython.cimports.limitkeeper.policy.evaluation import Evaluation, Evaluator
    from cython.cimports.limitkeeper.service.fast_connection import FastAnswers
    from cython.cimports.limitkeeper.service.resp_fast import put_five
else:
    from ..algorithms.claim import NamedLimit
    from ..decision import Decision
    from ..policy.compiled_policy import CompiledPolicy
    from ..policy.compiled_rule import CompiledRule
    from ..policy.evaluation import Evaluation, Evaluator
    from .fast_connection import FastAnswers

    def put_five(out: bytearray, a: int, b: int, c: int, d: int, e: int) -> None:
        out += b"*5\r\n:%d\r\n:%d\r\n:%d\r\n:%d\r\n:%d\r\n" % (a, b, c, d, e)


from ..errors import StoreUnavailable
from ..policy.identity.key_and_cache_bounds import hash_long

if TYPE_CHECKING:
    from .app import Application

#: Bytes of replies after which a call stops, and the most digits of an argument's length and of a number.
MAX_REPLIES, MAX_ARGUMENT, MAX_DIGITS = 65_536, 3, 15
DOLLAR, CR, LF, ZERO, NINE = 36, 13, 10, 48, 57
HIT, HIT_COST = b"*3\r\n$6\r\nLK.HIT\r\n", b"*4\r\n$6\r\nLK.HIT\r\n"
THROTTLE, THROTTLE_QUANTITY = b"*5\r\n$11\r\nCL.THROTTLE\r\n", b"*6\r\n$11\r\nCL.THROTTLE\r\n"


@cython.cclass
class FastHits(FastAnswers):
    """Answers plain hits over an Application. `encode` makes the reply of an Evaluation, `failed` that of an exception."""

    def __init__(self, app: Application, encode: Callable[[Evaluation], bytes], failed: Callable[[Exception], bytes]) -> None:
        super().__init__(app.gate)
        self.rates = app.rates
        self.encode, self.failed = encode, failed
        self.start = self.stop = self.number = 0  # the argument and the number that were read last

    @cython.cfunc
    def answer(self, data: bytes, out: bytearray, date: bytes) -> cython.Py_ssize_t:
        """Appends the replies to the commands at the beginning of `data` to `out`; returns how many bytes these commands have."""
        done: cython.Py_ssize_t = 0
        after: cython.Py_ssize_t
        while done < len(data) and len(out) < MAX_REPLIES:
            if data.startswith(HIT, done):
                after = self._hit(data, done + 16, False, out)
            elif data.startswith(HIT_COST, done):
                after = self._hit(data, done + 16, True, out)
            elif data.startswith(THROTTLE, done):
                after = self._throttle(data, done + 22, False, out)
            elif data.startswith(THROTTLE_QUANTITY, done):
                after = self._throttle(data, done + 22, True, out)
            else:
                break
            if after < 0:
                break
            done = after
        return done

    @cython.cfunc
    def _hit(self, data: bytes, at: cython.Py_ssize_t, with_cost: cython.bint, out: bytearray) -> cython.Py_ssize_t:
        """Where the command ends that has its first argument at `at`; -1: it is not answered here, and nothing was done."""
        gate: Evaluator = self.gate
        at = self._argument(data, at)
        if at < 0 or gate.compiled.remote:
            return -1
        compiled: CompiledPolicy = gate.compiled
        found = compiled.rules_by_name.get(data[self.start : self.stop].decode("utf-8", "surrogateescape"))
        at = self._argument(data, at)
        if at < 0 or found is None:
            return -1
        rule: CompiledRule = found
        key: str = data[self.start : self.stop].decode("utf-8", "surrogateescape")
        cost: cython.longlong = 1
        if with_cost:
            at = self._number(data, at)
            if at < 0:
                return -1
            cost = self.number
        if len(key) > 64:
            key = hash_long(key)
        try:
            decision: Decision = self.hit(rule, key, cost)  # type: ignore[assignment]
            if decision is None:
                out += self.encode(gate.hit_rule_nowait(rule, key, cost))
            else:
                put_five(out, 1, decision.limit, decision.remaining, 0, (decision.reset_us + 999) // 1000)
        except Exception as error:
            out += self.failed(error)
        return at

    @cython.cfunc
    def _throttle(self, data: bytes, at: cython.Py_ssize_t, with_quantity: cython.bint, out: bytearray) -> cython.Py_ssize_t:
        """As `_hit`, for a rate that has been used before."""
        at = self._argument(data, at)
        start: cython.Py_ssize_t = self.start
        stop: cython.Py_ssize_t = self.stop
        at = self._number(data, at)
        max_burst: cython.longlong = self.number
        at = self._number(data, at)
        count: cython.longlong = self.number
        at = self._number(data, at)
        period: cython.longlong = self.number
        quantity: cython.longlong = 1
        if with_quantity:
            at = self._number(data, at)
            quantity = self.number
        found = self.rates.get((max_burst, count, period)) if at >= 0 else None
        if found is None or self.gate.compiled.remote:
            return -1
        named: NamedLimit = found
        key = data[start:stop].decode("utf-8", "surrogateescape")
        try:
            self._put(out, self.gate.compiled.store.decide_one(named, hash_long(key), quantity, 0, quantity > 0))
        except Exception as error:
            out += self.failed(error)
        return at

    @cython.cfunc
    def _put(self, out: bytearray, decision: Decision) -> cython.int:
        """redis-cell's five integers; app.py explains that an answer without the store is none."""
        if decision.source != "store" and decision.source != "lease":
            raise StoreUnavailable("the store could not be asked; try again later")
        retry: cython.longlong = -1
        if not decision.allowed and decision.retry_us >= 0:
            retry = (decision.retry_us + 999_999) // 1_000_000
        put_five(out, not decision.allowed, decision.limit, decision.remaining, retry, (decision.reset_us + 999_999) // 1_000_000)
        return 0

    @cython.cfunc
    def _argument(self, data: bytes, at: cython.Py_ssize_t) -> cython.Py_ssize_t:
        """Where the argument at `at` ends, whose place is kept in `start` and `stop`; -1: it is long or not complete."""
        p: cython.p_uchar = data
        end: cython.Py_ssize_t = len(data)
        size: cython.Py_ssize_t = 0
        if at < 0 or at >= end or p[at] != DOLLAR:
            return -1
        first: cython.Py_ssize_t = at + 1
        at = first
        while at < end and at - first <= MAX_ARGUMENT and ZERO <= p[at] <= NINE:
            size = size * 10 + p[at] - ZERO
            at += 1
        if at == first or at - first > MAX_ARGUMENT or at + size + 4 > end or p[at] != CR or p[at + 1] != LF:
            return -1
        self.start = at + 2
        self.stop = self.start + size
        if p[self.stop] != CR or p[self.stop + 1] != LF:
            return -1
        return self.stop + 2

    @cython.cfunc
    def _number(self, data: bytes, at: cython.Py_ssize_t) -> cython.Py_ssize_t:
        """As `_argument`, of an argument that is a whole number; it is kept in `number`."""
        p: cython.p_uchar = data
        at = self._argument(data, at)
        i: cython.Py_ssize_t
        self.number = 0
        if at < 0 or not 0 < self.stop - self.start <= MAX_DIGITS:
            return -1
        for i in range(self.start, self.stop):
            if not ZERO <= p[i] <= NINE:
                return -1
            self.number = self.number * 10 + p[i] - ZERO
        return at
