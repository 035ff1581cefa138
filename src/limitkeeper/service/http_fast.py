"""The hot path of HTTP, compiled: `POST /v1/check` with a plain body, from the bytes to the response.

It recognises a strict subset of requests, whose meaning is not in doubt: HTTP/1.1, header fields of printable ASCII, one
Content-Length, a body of one object {"limit", "key", "cost"} or {"checks": [such objects]}, strings of ASCII without escapes.
It stops at the first request that is anything else, has a field that changes how it is read or answered (SPECIAL), is not
complete, or needs a store to be awaited; httptools and http_routes.py answer that one and the rest. Rejected: a second complete
parser, which would have to agree with httptools about every byte that a proxy may have read otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from hmac import compare_digest
from typing import TYPE_CHECKING

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.decision import Decision
    from cython.cimports.limitkeeper.policy.compiled_policy import CompiledPolicy
    from cython.cimports.limitkeeper.policy.compiled_rule import CompiledRule
    from cython.cimports.limitkeeper.service.fast_connection import FastAnswers
    from cython.cimports.limitkeeper.service.http_fast import put_allowed, put_allowed_response, put_response
else:
    from ..decision import Decision
    from ..policy.compiled_policy import CompiledPolicy
    from ..policy.compiled_rule import CompiledRule
    from .fast_connection import FastAnswers

    def put_allowed(out: bytearray, limit: int, remaining: int, reset_us: int) -> None:
        text = b'{"allowed":true,"limit":%d,"remaining":%d,"retry_after":0.0,"reset_after":%d.%06d}'
        out += text % (limit, remaining, reset_us // 1_000_000, reset_us % 1_000_000)

    def put_response(out: bytearray, date: bytes, body: bytearray) -> None:
        head = b"HTTP/1.1 200 OK\r\ndate: %b\r\ncontent-length: %d\r\ncontent-type: application/json\r\n\r\n%b\n"
        out += head % (date, len(body) + 1, body)

    def put_allowed_response(out: bytearray, date: bytes, limit: int, remaining: int, reset_us: int) -> None:
        body = bytearray()
        put_allowed(body, limit, remaining, reset_us)
        put_response(out, date, body)


from ..policy.identity.key_and_cache_bounds import hash_long
from .app import MAX_CHECKS, decision_of
from .http_routes import Response, decision_json, failure, shown

if TYPE_CHECKING:
    from .app import Application

#: Bytes of responses after which a call stops.
MAX_RESPONSES, MAX_COUNT = 65_536, MAX_CHECKS
REQUEST = b"POST /v1/check HTTP/1.1\r\n"
CR, LF, SPACE, QUOTE, COMMA, ZERO, NINE, COLON, BACKSLASH, OPEN, CLOSE, OPEN_LIST, CLOSE_LIST, DELETE = b'\r\n ",09:\\{}[]\x7f'
LENGTH = b"content-length"
LIMIT, KEY, COST, CHECKS = b'"limit"', b'"key"', b'"cost"', b'"checks"'
#: Header fields that a request answered here does not have.
SPECIAL = frozenset(
    {b"origin", b"expect", b"upgrade", b"transfer-encoding", b"x-limitkeeper-token", b"proxy-connection", b"http2-settings"}
)
#: By length and first letter of a header field's name, whether it has to be looked at; by character, whether a name may have it.
LOOKED_AT = {(len(name), name[0] & 31) for name in (*SPECIAL, b"connection", LENGTH, b"authorization")}
READ = bytes([(place // 32, place % 32) in LOOKED_AT for place in range(20 * 32)])
LONGEST_SPECIAL = 19
NAME = bytes([(chr(code).isalnum() and code < 128) or code in b"-_" for code in range(256)])


@cython.cclass
class FastChecks(FastAnswers):
    """Answers plain checks over an Application. `encode` makes the bytes of a Response and a date."""

    def __init__(
        self, app: Application, token: bytes | None, max_head: int, max_body: int, encode: Callable[[Response, bytes], bytes]
    ) -> None:
        super().__init__(app.gate)
        self.encode = encode
        self.authorization = None if token is None else b"Bearer " + token
        self.max_head, self.max_body = max_head, max_body
        self.start = self.stop = self.size = 0  # the value that was read last; the Content-Length of the request
        self.authorized = False
        self.rule: CompiledRule | None = None  # the hit that was read last
        self.key: str | None = None
        self.cost = 0

    @cython.cfunc
    def answer(self, data: bytes, out: bytearray, date: bytes) -> cython.Py_ssize_t:
        """Appends the responses to the requests at the beginning of `data`; returns how many bytes these requests have."""
        p: cython.p_uchar = data
        done: cython.Py_ssize_t = 0
        while len(out) < MAX_RESPONSES and not self.gate.compiled.remote and data.startswith(REQUEST, done):
            at: cython.Py_ssize_t = self._head(data, done + 25)
            if at < 0 or at - done > self.max_head or self.size > self.max_body or self.size > len(data) - at:
                break
            end: cython.Py_ssize_t = at + self.size
            at = skip_space(p, at, end)
            if not (self._check(data, at, end, out, date) or self._checks(data, at, end, out, date)):
                break
            done = end
        return done

    # Header ----------------------------------------------------------------------------------------------------

    @cython.cfunc
    def _head(self, data: bytes, at: cython.Py_ssize_t) -> cython.Py_ssize_t:
        """Reads the header fields; returns where the body begins, -1: they are not complete, or not plain."""
        p: cython.p_uchar = data
        names: cython.p_uchar = NAME
        read: cython.p_uchar = READ
        end: cython.Py_ssize_t = len(data) - 1  # of each line, two bytes are looked at
        self.size = -1
        self.authorized = self.authorization is None
        while at < end:
            if p[at] == CR:
                return at + 2 if p[at + 1] == LF and self.size >= 0 and self.authorized else -1
            first: cython.Py_ssize_t = at
            while at < end and names[p[at]]:
                at += 1
            colon: cython.Py_ssize_t = at
            if colon == first or p[colon] != COLON:
                return -1
            at += 1
            while at < end and SPACE <= p[at] < DELETE:
                at += 1
            if at >= end or p[at] != CR or p[at + 1] != LF:
                return -1
            looked_at: cython.bint = colon - first <= LONGEST_SPECIAL and read[(colon - first) * 32 + (p[first] & 31)]
            if looked_at and not self._field(data, first, colon, at):
                return -1
            at += 2
        return -1

    @cython.cfunc
    def _field(self, data: bytes, first: cython.Py_ssize_t, colon: cython.Py_ssize_t, end: cython.Py_ssize_t) -> cython.bint:
        """Reads a field that may change the meaning of the request; False: it does."""
        p: cython.p_uchar = data
        length: cython.p_uchar = LENGTH
        i: cython.Py_ssize_t = 0
        while i < 14 and i < colon - first and p[first + i] | 32 == length[i]:  # lower case
            i += 1
        if i == 14 and colon - first == 14:
            return self._length(data, colon + 1, end)
        name = data[first:colon].lower()
        value = data[colon + 1 : end].strip(b" ")
        if name == b"connection":
            return value.lower() == b"keep-alive"
        if name == b"authorization":
            if self.authorization is not None:
                self.authorized = compare_digest(value, self.authorization)
            return self.authorized
        return name not in SPECIAL

    @cython.cfunc
    def _length(self, data: bytes, at: cython.Py_ssize_t, end: cython.Py_ssize_t) -> cython.bint:
        """Reads a Content-Length, of which there may be one."""
        p: cython.p_uchar = data
        if self.size >= 0:
            return False
        self.size = decimal(p, skip_space(p, at, end), end)
        return self.size >= 0

    # Body ------------------------------------------------------------------------------------------------------

    @cython.cfunc
    def _check(self, data: bytes, at: cython.Py_ssize_t, end: cython.Py_ssize_t, out: bytearray, date: bytes) -> cython.bint:
        """Answers a body of one hit; False: it is something else, and nothing was done."""
        p: cython.p_uchar = data
        at = self._hit(data, at, end)
        if at < 0 or skip_space(p, at, end) != end:
            return False
        try:
            decision: Decision = self.hit(self.rule, self.key, self.cost)  # type: ignore[arg-type,assignment]
            if decision is None:
                out += self.encode(shown(self.gate.hit_rule_nowait(self.rule, self.key, self.cost)), date)
            else:
                put_allowed_response(out, date, decision.limit, decision.remaining, decision.reset_us)
        except Exception as error:
            out += self.encode(failure(error), date)
        return True

    @cython.cfunc
    def _checks(self, data: bytes, at: cython.Py_ssize_t, end: cython.Py_ssize_t, out: bytearray, date: bytes) -> cython.bint:
        """As `_check`, of {"checks": [...]}: all are read before one is charged."""
        p: cython.p_uchar = data
        hits: list = []  # type: ignore[type-arg]
        if at >= end or p[at] != OPEN:
            return False
        at = skip_space(p, at + 1, end)
        if not data.startswith(CHECKS, at):
            return False
        at = skip_space(p, at + 8, end)
        if at >= end or p[at] != COLON:
            return False
        at = skip_space(p, at + 1, end)
        if at >= end or p[at] != OPEN_LIST:
            return False
        while at < end and p[at] != CLOSE_LIST:  # at the bracket before the hits, or the comma before one
            at = self._hit(data, skip_space(p, at + 1, end), end)
            if at < 0 or len(hits) == 3 * MAX_COUNT:
                return False
            hits.append(self.rule)
            hits.append(self.key)
            hits.append(self.cost)
            at = skip_space(p, at, end)
            if at >= end or (p[at] != COMMA and p[at] != CLOSE_LIST):
                return False
        at = skip_space(p, at + 1, end)
        if at >= end or p[at] != CLOSE or skip_space(p, at + 1, end) != end:
            return False
        try:
            body = bytearray(b'{"decisions":[')
            self._decide_all(hits, body)
            put_response(out, date, body)
        except Exception as error:
            out += self.encode(failure(error), date)
        return True

    @cython.cfunc
    def _decide_all(self, hits: list, body: bytearray) -> cython.int:  # type: ignore[type-arg]
        i: cython.Py_ssize_t
        for i in range(0, len(hits), 3):
            rule: CompiledRule = hits[i]
            decision: Decision = self.hit(rule, hits[i + 1], hits[i + 2])  # type: ignore[assignment]
            if decision is None:
                body += decision_json(decision_of(self.gate.hit_rule_nowait(rule, hits[i + 1], hits[i + 2])))
            else:
                put_allowed(body, decision.limit, decision.remaining, decision.reset_us)
            body += b"," if i + 3 < len(hits) else b"]}"
        return 0

    @cython.cfunc
    def _hit(self, data: bytes, at: cython.Py_ssize_t, end: cython.Py_ssize_t) -> cython.Py_ssize_t:
        """Reads {"limit": "…", "key": "…", "cost": 1} into `rule`, `key` and `cost`; returns where it ends, -1: it is none."""
        p: cython.p_uchar = data
        compiled: CompiledPolicy = self.gate.compiled
        self.rule = self.key = None
        self.cost = -1
        if at >= end or p[at] != OPEN:
            return -1
        while at < end and p[at] != CLOSE:  # at the brace before the fields, or the comma before one
            at = skip_space(p, at + 1, end)
            if data.startswith(LIMIT, at) and self.rule is None:
                at = self._value(data, at + 7, end, True)
                self.rule = None if at < 0 else compiled.rules_by_name.get(data[self.start : self.stop].decode("ascii"))
                if self.rule is None:
                    return -1
            elif data.startswith(KEY, at) and self.key is None:
                at = self._value(data, at + 5, end, True)
                if at < 0:
                    return -1
                self.key = data[self.start : self.stop].decode("ascii")
                if len(self.key) > 64:
                    self.key = hash_long(self.key)
            elif data.startswith(COST, at) and self.cost < 0:
                at = self._value(data, at + 6, end, False)
                self.cost = -1 if at < 0 else decimal(p, self.start, self.stop)
                if self.cost < 0:
                    return -1
            else:
                return -1
            at = skip_space(p, at, end)
            if at >= end or (p[at] != COMMA and p[at] != CLOSE):
                return -1
        if self.rule is None or self.key is None:
            return -1
        self.cost = max(self.cost, 1) if self.cost != 0 else 0
        return at + 1

    @cython.cfunc
    def _value(self, data: bytes, at: cython.Py_ssize_t, end: cython.Py_ssize_t, text: cython.bint) -> cython.Py_ssize_t:
        """Reads a colon, and a string of ASCII without escapes (`text`) or digits into `start` and `stop`; returns where it
        ends, -1: it is something else."""
        p: cython.p_uchar = data
        at = skip_space(p, at, end)
        if at >= end or p[at] != COLON:
            return -1
        at = skip_space(p, at + 1, end)
        if text:
            if at >= end or p[at] != QUOTE:
                return -1
            at += 1
        self.start = at
        while at < end and SPACE <= p[at] < DELETE and p[at] != QUOTE and p[at] != BACKSLASH and (text or ZERO <= p[at] <= NINE):
            at += 1
        self.stop = at
        if not text:
            return at
        return at + 1 if at < end and p[at] == QUOTE else -1


@cython.cfunc
def skip_space(p: cython.p_uchar, at: cython.Py_ssize_t, end: cython.Py_ssize_t) -> cython.Py_ssize_t:
    while at < end and (p[at] == SPACE or (9 <= p[at] <= CR and p[at] != 11 and p[at] != 12)):
        at += 1
    return at


@cython.cfunc
def decimal(p: cython.p_uchar, at: cython.Py_ssize_t, end: cython.Py_ssize_t) -> cython.longlong:
    """The value of 1 to 15 digits without a zero before them; -1: it is something else."""
    found: cython.longlong = 0
    if not 0 < end - at <= 15 or (p[at] == ZERO and end - at > 1):
        return -1
    while at < end:
        if not ZERO <= p[at] <= NINE:
            return -1
        found = found * 10 + p[at] - ZERO
        at += 1
    return found
