"""Headers: encodes an evaluation as RateLimit fields, merges them into a response's own; and reads those of ASGI requests.

    ratelimit-policy: "checkout";q=10;w=2      q: the quota, w: the seconds in which that much is refilled, rounded up
    ratelimit: "checkout";r=7;t=2              r: what remains, t: the seconds within which no more than r may be used

That is draft-11 (the bytes are those of drafts 8 to 11); drafts 7 and 6 are kept for older clients. `t` is the end of a fixed
window; for a bucket r / rate, so that r/t never promises more than the rate, and with nothing left the time to the next unit; for
the others the time until the key is as new. The `t` of a refusing limit is never later than Retry-After; where a bucket refuses
although something is left (the request costs more), both can't hold, and `t`, which is optional, is left out. A spread delays `t`
and the reset of refusing limits as it delays Retry-After, since some clients read only those.

`fields(evaluation)` is for ASGI: bytes, names in lower case. `text_fields` is for WSGI, Django and Flask. What never changes
about a limit is encoded once, in its FieldTemplate. Rejected: a general serialiser of structured fields (8 µs for two items).
No clock, no I/O.
"""

from __future__ import annotations

import hmac
from binascii import b2a_base64
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from functools import lru_cache
from math import gcd
from typing import Any, TypeVar

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.decision import Decision, Decisions
    from cython.cimports.limitkeeper.policy.compiled_rule import Entry
    from cython.cimports.limitkeeper.policy.evaluation import Evaluation
    from cython.cimports.limitkeeper.policy.request_context import RequestContext
else:
    from ..decision import Decision, Decisions
    from ..policy.compiled_rule import Entry
    from ..policy.evaluation import Evaluation
    from ..policy.request_context import RequestContext

from ..policy.identity.body import BODY, BodyNeeded
from ..policy.identity.paths import mounted_path
from ..policy.model import Headers
from ..policy.refusal import Refusal
from ..policy.request_context import NOTHING, USUAL, method_of, query_values
from .field_names import CUSTOM_NAMES, EXPOSE, FAMILIES, FAMILY, SPELLING, VARY, custom_names, rename
from .found_route import found_route
from .refusal_body import body

__all__ = ["body", "fields", "merge", "text_fields"]

#: A policy name is cut to this many characters.
MAX_LABEL = 120
#: A response names at most this many limits: the refusing ones and those with the smallest share left, in the policy's order.
MAX_LIMITS = 10
#: The largest integer of a structured field.
MAX_INTEGER = 999_999_999_999_999
#: The encoded small integers, and as the parameter `t`: most values are among them.
SMALL_INTEGERS = tuple([b"%d" % number for number in range(2048)])
SMALL_TIMES = tuple([b";t=%d" % number for number in range(2048)])
NO_DRAFT, DRAFT_6, DRAFT_7, DRAFT_11 = 0, 6, 7, 11
#: The policy's `wire` setting: the draft's number and its field names.
DRAFTS: dict[str, tuple[int, list[bytes]]] = {
    "draft-11": (DRAFT_11, [b"ratelimit-policy", b"ratelimit"]),
    "draft-7": (DRAFT_7, [b"ratelimit-policy", b"ratelimit"]),
    "draft-6": (DRAFT_6, [b"ratelimit-policy", b"ratelimit-limit", b"ratelimit-remaining", b"ratelimit-reset"]),
    "none": (NO_DRAFT, []),
}
BUCKETS = ("token bucket", "leaky bucket")
WINDOWS = ("fixed window", "sliding window log", "sliding window counter")

Fields = list[tuple[bytes, bytes]]
T = TypeVar("T", str, bytes)


@cython.cclass
class FieldStyle:
    """A policy's `headers` section, prepared. `expose…` are the Access-Control-Expose-Headers field of responses to pages, `vary`
    the field that tells caches so, on all responses; nothing where they are not exposed."""

    # fmt: off
    __slots__ = ("draft", "expose", "expose_refused", "expose_retry", "headers", "near", "never", "partition", "reset", "vary",
                 "x")
    # fmt: on

    def __init__(self, headers: Headers) -> None:
        self.headers = headers
        self.draft, names = DRAFTS[headers.wire]
        self.x = headers.x
        self.near = headers.success == "near"
        self.never = headers.success == "never"
        self.partition = headers.partition
        self.reset = headers.reset
        if headers.x:
            names = [*names, b"x-ratelimit-limit", b"x-ratelimit-remaining"]
        if headers.reset != "off":
            names = [*names, b"x-ratelimit-reset"]
        own = custom_names(headers) if headers.names else {}
        add_lengths(own.values())
        names, retry = [own.get(name, name) for name in names], own.get(b"retry-after", b"retry-after")
        self.expose = expose_field(names, headers.cors)
        self.expose_refused = expose_field([*names, retry], headers.cors)
        self.expose_retry = expose_field([retry], headers.cors)
        self.vary = ((b"vary", b"Origin"),) if headers.cors else ()


def expose_field(names: list[bytes], cors: bool) -> tuple[tuple[bytes, bytes], ...]:
    value = ", ".join([SPELLING[name] for name in names])
    return ((b"access-control-expose-headers", value.encode()),) if cors and value else ()


@lru_cache(64)
def style_of(headers: Headers) -> FieldStyle:
    return FieldStyle(headers)


@cython.cclass
class FieldTemplate:
    """The constant parts of one limit's fields: its label, quota and window as bytes, and the numbers from which `t` is computed.

    A bucket's r units take r · per / gain seconds; `rest_us` fills all of it but one unit. `wide`: these products exceed 64 bits.
    """

    # fmt: off
    __slots__ = ("bucket", "gain", "group", "item_start", "limit_field", "next_item_start", "older_policy", "per", "policy",
                 "policy_field", "quota", "rest_us", "style", "wide", "window")
    # fmt: on

    def __init__(self, entry: Entry, style: FieldStyle) -> None:
        limit = entry.named.limit
        kind = type(limit).kind
        self.style = style
        self.bucket = kind in BUCKETS
        count: int = int(limit.count)
        period: int = int(limit.period)
        most: int = int(limit.capacity)
        quota: int = most if kind in WINDOWS or kind in BUCKETS or limit.bounded else count  # an unbounded queue: its rate
        refill: int = period if kind in WINDOWS else -(-quota * period // count)
        window: int = min(MAX_INTEGER, max(1, -(-refill // 1_000_000)))
        divisor: int = gcd(period, count * 1_000_000)
        rest: int = (most - 1) * period // count
        self.quota, self.window = quota, window
        self.per, self.gain = period // divisor, count * 1_000_000 // divisor
        self.wide = quota * period >= 1 << 62
        self.rest_us = min(1 << 62, rest)
        label: bytes = quote_label(entry.label)
        self.policy = b"%b;q=%d;w=%d" % (label, quota, window)
        if entry.rule.concurrent is not None and limit is entry.rule.concurrent:  # a place is free when a request ends: no time
            self.policy, self.window = b'%b;q=%d;qu="concurrent-requests"' % (label, quota), 0
        self.older_policy = b"%d;w=%d" % (quota, window)
        self.item_start = label + b";r="
        self.next_item_start = b", " + self.item_start
        self.policy_field = (b"ratelimit-policy", self.policy)
        self.group: tuple[list[Entry], tuple[bytes, bytes] | None] = ([], None)
        self.limit_field = (b"x-ratelimit-limit", b"%d" % quota)


def quote_label(label: str) -> bytes:
    """A structured field's string: printable ASCII, quotes and backslashes escaped."""
    printable = "".join([letter if " " <= letter <= "~" else "?" for letter in label[:MAX_LABEL]])
    return b'"%b"' % printable.replace("\\", "\\\\").replace('"', '\\"').encode("ascii")


@cython.cfunc
def template_of(entry: Entry, headers: Headers) -> FieldTemplate:
    """The template of a limit; made again when a reload changed the policy's `headers`."""
    if entry.field_template is not None:
        known: FieldTemplate = entry.field_template
        if known.style.headers is headers:
            return known
    template: FieldTemplate = FieldTemplate(entry, FieldStyle(headers))  # not `style_of`: that may hold another, equal object
    entry.field_template = template
    return template


def partition_key(secret: bytes, key: str) -> bytes:
    """The `pk` parameter: a keyed hash of a key."""
    digest = hmac.digest(secret, key.encode("utf-8", "surrogatepass"), "sha256")
    return b";pk=:" + b2a_base64(digest[:12], newline=False) + b":"


@cython.cfunc
def encode_integer(number: cython.longlong) -> bytes:
    if 0 <= number < 2048:
        text: bytes = SMALL_INTEGERS[number]
        return text
    return b"%d" % number


@cython.cfunc
@cython.exceptval(check=False)
def ceil_seconds(us: cython.longlong) -> cython.longlong:
    return (us + 999_999) // 1_000_000 if us > 0 else 0


@cython.cfunc
def seconds_of(
    template: FieldTemplate, r: cython.longlong, retry_us: cython.longlong, reset_us: cython.longlong
) -> cython.longlong:
    """The parameter `t` that belongs to r; -1: no true value exists."""
    t: cython.longlong
    if template.window == 0:
        return -1
    if template.bucket:
        if r > 0:
            t = wide_seconds(template, r) if template.wide else (r * template.per + template.gain - 1) // template.gain
            return -1 if retry_us > 0 and t > ceil_seconds(retry_us) else t
        reset_us -= template.rest_us
    if 0 < retry_us < reset_us:
        reset_us = retry_us
    return template.window if reset_us <= 0 and r > 0 else ceil_seconds(reset_us)


def wide_seconds(template: FieldTemplate, r: object) -> int:
    """The seconds that r units of a bucket take, in Python's integers."""
    units: int = int(r)  # type: ignore[call-overload]
    per: int = int(template.per)
    return min(MAX_INTEGER, -(-units * per // int(template.gain)))


def older_fields(template: FieldTemplate, decision: Decision, policies: list[bytes], spread_s: int) -> Fields:
    """The fields of drafts 6 and 7: they describe one limit, the deciding one, and can't leave the reset out."""
    r: cython.longlong = min(decision.remaining, template.quota)
    t: cython.longlong = seconds_of(template, r, decision.retry_us, decision.reset_us)
    if t < 0:
        t = ceil_seconds(decision.retry_us)
    t += spread_s
    policy = (b"ratelimit-policy", b", ".join(policies))
    if template.style.draft == DRAFT_7:
        return [policy, (b"ratelimit", b"limit=%d, remaining=%d, reset=%d" % (template.quota, r, t))]
    values = (template.quota, r, t)
    return [policy, *[(name, b"%d" % value) for name, value in zip(DRAFTS["draft-6"][1][1:], values, strict=True)]]


@cython.ccall
def fields(evaluation: Evaluation) -> list:  # type: ignore[type-arg]  # as in the .pxd
    """The fields of a response, allowed or refused. None where no limit applies, or on a success where the policy says so."""
    decision: Decision = evaluation.decision  # type: ignore[assignment]
    headers = evaluation.compiled.policy.headers
    if decision is None or not evaluation.entries:
        return [] if evaluation.allowed else add_refusal(evaluation, [], style_of(headers), style_of(headers).expose_retry)
    template: FieldTemplate = template_of(evaluation.entries[0], headers)
    style: FieldStyle = template.style
    if evaluation.allowed and (style.never or (style.near and decision.remaining * 5 >= decision.limit)):
        return []
    found: list[tuple[bytes, bytes]] = []
    template = add_limits(found, evaluation, headers, decision, template)
    if style.x:
        found.append(template.limit_field)
        found.append((b"x-ratelimit-remaining", encode_integer(min(decision.remaining, template.quota))))
    if style.reset != "off":  # the seconds until the limit is as new, or that moment in seconds since 1970
        start_us: cython.longlong = decision.start_us - decision.wait_us if style.reset == "epoch" else 0
        if not evaluation.allowed:
            start_us += evaluation.refusal.spread_s * 1_000_000  # type: ignore[union-attr]
        found.append((b"x-ratelimit-reset", encode_integer(ceil_seconds(start_us + decision.reset_us))))
    if not evaluation.allowed:
        return add_refusal(evaluation, found, style, style.expose_refused)
    if found:
        found.extend(style.vary)
        if evaluation.origin:
            found.extend(style.expose)
    return rename(found, headers) if CUSTOM_NAMES else found


def add_refusal(evaluation: Evaluation, found: Fields, style: FieldStyle, expose: tuple[tuple[bytes, bytes], ...]) -> Fields:
    """Adds Retry-After and Cache-Control; neither where a degrade handler answers, whose response is no refusal."""
    refusal: Refusal = evaluation.refusal  # type: ignore[assignment]
    if evaluation.degrade is None:
        if refusal.retry_after is not None:
            found.append((b"retry-after", b"%d" % refusal.retry_after))
        found.append((b"cache-control", b"no-store"))
    found.extend(style.vary)
    if evaluation.origin:
        found.extend(expose)
    return rename(found, style.headers) if CUSTOM_NAMES else found


@cython.cfunc
def add_limits(
    found: list[tuple[bytes, bytes]], evaluation: Evaluation, headers: Headers, decision: Decision, first: FieldTemplate
) -> FieldTemplate:
    """Adds the fields of the policy's draft: draft-11 lists all limits, the others the deciding one. Returns its template.

    Compiled, the results of several limits are read from C integers (`part_at`): no Decision is created for each.
    """
    deciding: FieldTemplate = first
    style: FieldStyle = first.style
    joined: Decisions | None = decision if isinstance(decision, Decisions) else None
    n: cython.Py_ssize_t = 1 if joined is None else len(evaluation.entries)
    shown: object = tightest_limits(decision.decisions) if n > MAX_LIMITS else None
    policies: list[bytes] | None = [] if shown is not None or style.partition or style.draft != DRAFT_11 else None
    pieces: list[bytes] = []
    i: cython.Py_ssize_t
    r: cython.longlong = decision.remaining
    t: cython.longlong
    retry_us: cython.longlong = decision.retry_us
    reset_us: cython.longlong = decision.reset_us
    spread_s: cython.longlong = 0 if evaluation.allowed else evaluation.refusal.spread_s  # type: ignore[union-attr]
    for i in range(n):
        if shown is not None and i not in shown:  # type: ignore[operator]
            continue
        entry: Entry = evaluation.entries[i]
        template: FieldTemplate = template_of(entry, headers)
        if n > 1 and entry.named.name == decision.name:
            deciding = template
        if style.draft != DRAFT_11:
            policies.append(template.older_policy)  # type: ignore[union-attr]
            continue
        if joined is not None:
            if cython.compiled:
                r = joined.part_at(i)[2]  # type: ignore[attr-defined]
                retry_us = joined.part_at(i)[3]  # type: ignore[attr-defined]
                reset_us = joined.part_at(i)[4]  # type: ignore[attr-defined]
            else:
                r, retry_us, reset_us = joined.decisions[i].remaining, joined.decisions[i].retry_us, joined.decisions[i].reset_us
        r = min(r, template.quota)
        t = seconds_of(template, r, retry_us, reset_us)
        pieces.append(template.next_item_start if pieces else template.item_start)
        pieces.append(encode_integer(r))
        if t >= 0:
            if spread_s and retry_us > 0:
                t += spread_s
            pieces.append(SMALL_TIMES[t] if t < 2048 else b";t=%d" % t)
        if policies is not None:
            pk: bytes = partition_key(evaluation.gate.secret, evaluation.keys[i]) if style.partition else b""
            pieces.append(pk)
            policies.append(template.policy + pk)
    if pieces:
        if policies is not None:
            found.append((b"ratelimit-policy", b", ".join(policies)))
        else:
            found.append(deciding.policy_field if n == 1 else policies_field(first, evaluation.entries))
        found.append((b"ratelimit", b"".join(pieces)))
    elif style.draft != NO_DRAFT:
        found.extend(older_fields(deciding, decision, policies, spread_s))  # type: ignore[arg-type]
    return deciding


@cython.cfunc
def policies_field(first: FieldTemplate, entries: list[Entry]) -> tuple[bytes, bytes]:
    """The RateLimit-Policy field of several limits; kept with the first of them, for the next request that has the same ones."""
    i: cython.Py_ssize_t
    group: tuple = first.group  # type: ignore[type-arg]  # in one object, so that threads see the two together
    known: list[Entry] = group[0]
    same: cython.bint = len(known) == len(entries)
    for i in range(len(entries)):
        same = same and known[i] is entries[i]
    if not same:
        field = (b"ratelimit-policy", b", ".join([entry.field_template.policy for entry in entries]))
        group = first.group = (list(entries), field)
    return group[1]  # type: ignore[no-any-return]


def tightest_limits(parts: tuple[Decision, ...]) -> list[int]:
    """The indexes of the limits to name where there are too many: refusing ones, then the smallest share left."""
    by_need = sorted(range(len(parts)), key=lambda i: (parts[i].allowed, parts[i].remaining / max(1.0, parts[i].limit)))
    return by_need[:MAX_LIMITS]


def text_fields(evaluation: Evaluation) -> list[tuple[str, str]]:
    """The same fields as text, in their conventional spelling."""
    return [(SPELLING[name], value.decode("ascii")) for name, value in fields(evaluation)]


# Merging ---------------------------------------------------------------------------------------------------------

BYTES, TEXT = (b",", b"*", b", "), (",", "*", ", ")
#: The lengths of our field names, as bits: a response whose names have other lengths has none of them.
NAME_LENGTHS = 0
for _name in FAMILIES:
    NAME_LENGTHS |= 1 << len(_name)


def add_lengths(names: Iterable[bytes]) -> None:
    global NAME_LENGTHS
    for name in names:
        NAME_LENGTHS |= 1 << len(name)


@cython.ccall
def append_fields(own: list, added: list) -> list:  # type: ignore[type-arg]  # as in the .pxd
    """The response's fields and ours; merged only where one of its names may be one of ours."""
    length: cython.Py_ssize_t
    for field in own:
        length = len(field[0])
        if length < 63 and NAME_LENGTHS >> length & 1:
            return merge(own, added)
    return own + added


def merge(own: list[tuple[T, T]], added: list[tuple[T, T]]) -> list[tuple[T, T]]:
    """The response's own fields and ours, as bytes or as text, without duplicates.

    What the handler says about its quota stays, since it (or an inner gate) knows more. Access-Control-Expose-Headers and Vary,
    which are lists, are joined.
    """
    present: cython.int = 0
    for name, _ in own:
        present |= FAMILY.get(name.lower(), 0)
    if present == 0:
        return own + added
    kept = [field for field in added if not FAMILY.get(field[0].lower(), 0) & present & (EXPOSE - 1)]
    merged = join_lists(own + kept, EXPOSE) if present & EXPOSE else own + kept
    return join_lists(merged, VARY) if present & VARY else merged


def join_lists(merged: list[tuple[T, T]], family: int) -> list[tuple[T, T]]:
    """All fields of a family in one, the response's own members first; "*" includes ours too."""
    lines = [field for field in merged if FAMILY.get(field[0].lower()) == family]
    comma, star, separator = BYTES if isinstance(lines[0][1], bytes) else TEXT
    members: dict[T, T] = {}
    for _, line in lines:
        for word in line.split(comma):
            if word.strip() and star not in members:
                members.setdefault(word.strip().lower(), word.strip())
    rest = [field for field in merged if FAMILY.get(field[0].lower()) != family]
    return rest + [(lines[0][0], separator.join(members.values()))]  # noqa: RUF005  # mypy: T


# ASGI: the headers of a scope, and of a response's start ---------------------------------------------------------------

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

#: Requests with more header lines are indexed by name.
MANY_LINES = 100


@cython.cclass
class AsgiRequestContext(RequestContext):
    """The context of an ASGI scope: a request, a websocket's handshake, or (method MESSAGE) one of its messages."""

    __slots__ = ("_by_name", "scope")

    def __init__(self, scope: Scope, method: str | None = None) -> None:
        known: dict[str, Any] = scope if type(scope) is dict else dict(scope)
        path = known["path"]
        root = known.get("root_path")
        self.routed = None
        if root:
            path, self.routed = mounted_path(path, root)
        if method is None:
            method = known.get("method", "GET")
            if method not in USUAL:
                method = method_of(method)
        self.method = method
        self.path = path
        self.raw = scope
        self.scope = scope
        self._by_name: dict[bytes, list[Any]] | None = None
        self.identities = {}
        self.captured = NOTHING

    def header(self, name: str) -> str | None:
        wanted = name.encode("latin-1")
        first: bytes | None = None
        several: list[bytes] | None = None
        for field in self._lines(wanted):  # type: ignore[attr-defined]
            if field[0] == wanted:
                if first is None:
                    first = field[1]
                elif several is not None:
                    several.append(field[1])
                elif field[1] != first:  # a line that is repeated says nothing new: it makes no other value
                    several = [first, field[1]]
        if several is not None:
            first = (b"; " if wanted == b"cookie" else b", ").join(several)
        return None if first is None else first.decode("latin-1")

    def _query_text(self) -> str:
        return self.scope.get("query_string", b"").decode("latin-1")  # type: ignore[no-any-return]

    def query(self, name: str) -> str | None:
        return query_values(self._query_text(), name)[0]

    def differs(self, kind: str, name: str) -> bool:
        if kind == "query":
            return query_values(self._query_text(), name)[1]
        wanted = name.encode("latin-1")
        return len({value for field, value in self._lines(wanted) if field == wanted}) > 1  # type: ignore[attr-defined]

    @cython.cfunc
    def _lines(self, name: bytes) -> object:
        """The header lines, or those of one name where there are many, so that each of many rules need not read all of them."""
        lines = self.scope["headers"]
        if type(lines) is not list or len(lines) <= MANY_LINES:
            return lines
        if self._by_name is None:
            self._by_name = {}
            for line in lines:
                self._by_name.setdefault(line[0], []).append(line)
        return self._by_name.get(name, ())

    def route(self) -> str | None:
        return getattr(found_route(self.scope), "path", None)

    def may_have_body(self) -> bool:
        """HTTP/2 and 3 need not announce a body: there it is read."""
        if RequestContext.may_have_body(self) or self.header("content-length") is not None:
            return RequestContext.may_have_body(self)
        return str(self.scope.get("http_version", "")) >= "2" and self.body() != b""

    def body(self) -> bytes | None:
        """The body that `read_body` has left in the scope."""
        if self.scope["type"] != "http":
            return b""
        if BODY not in self.scope:
            raise BodyNeeded
        found: bytes | None = self.scope[BODY]
        return found

    def peer(self) -> str | None:
        client = self.scope.get("client")
        return (client[0] or None) if client else None

    def certificate(self) -> Mapping[str, Any] | None:
        tls = (self.scope.get("extensions") or {}).get("tls")
        if not tls or tls.get("client_cert_error") or not tls.get("client_cert_name"):
            return None
        return {"subject": tls["client_cert_name"], "san": list(tls.get("client_cert_san") or ())}


def admit(ask_nowait: Callable[[RequestContext], Evaluation | None], scope: Scope, send: Send) -> HeaderSend | None:
    """Evaluates a request. Returns the `send` for its response when it is allowed and needs no settlement; otherwise None, and
    `scope["limitkeeper"]` is the evaluation (None: the gate has to be awaited, nothing was charged)."""
    found = ask_nowait(AsgiRequestContext(scope))
    scope["limitkeeper"] = found
    if found is None:
        return None
    evaluation: Evaluation = found
    evaluation.origin = has_origin(scope)
    if not evaluation.allowed or evaluation.needs_settlement:
        return None
    evaluation.context = None  # the context holds the scope, which holds the evaluation: no reference cycle is left
    return HeaderSend(evaluation, send)


@cython.ccall
def has_origin(scope: Scope) -> cython.bint:
    """Whether a page sent this request (browsers add Origin): only pages need Access-Control-Expose-Headers."""
    for field in scope["headers"]:
        if len(field[0]) == 6 and field[0] == b"origin":
            return True
    return False


@cython.cclass
class HeaderSend:
    """A `send` that adds the fields of an evaluation to the start of the response, and reports its status to the gate; once.

    It returns the awaitable of the server's `send`, so that a message needs no coroutine of its own.
    """

    __slots__ = ("_evaluation", "_send")

    def __init__(self, evaluation: Evaluation, send: Send) -> None:
        self._evaluation: Evaluation | None = evaluation
        self._send = send

    def __call__(self, message: Message) -> Awaitable[None]:
        if self._evaluation is not None and message["type"] == "http.response.start":
            evaluation: Evaluation = self._evaluation
            self._evaluation = None
            if evaluation.allowed:
                evaluation.count_response(message["status"])
            message = add_fields(message, fields(evaluation))
        return self._send(message)

    def ended(self, status: int) -> None:
        """The app has returned or raised: reports this status unless the response had begun."""
        if self._evaluation is not None:
            evaluation: Evaluation = self._evaluation
            self._evaluation = None
            if evaluation.allowed:
                evaluation.count_response(status)


@cython.ccall
def add_fields(message: Message, added: list[tuple[bytes, bytes]]) -> Message:
    """A copy of a start message with these fields added: messages and header lists belong to the app, which may reuse them."""
    if added:
        given: Iterable[tuple[bytes, bytes]] | None = message.get("headers")
        own: list[tuple[bytes, bytes]] = given if type(given) is list else list(given or ())
        message = dict(message)
        message["headers"] = append_fields(own, added)
    return message
