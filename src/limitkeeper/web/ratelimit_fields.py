"""Encodes an evaluation as RateLimit response fields, and merges them into the fields that a response already has.

    ratelimit-policy: "checkout";q=10;w=2      q: the quota, w: the seconds in which that much is refilled, rounded up
    ratelimit: "checkout";r=7;t=2              r: what remains, t: the seconds within which no more than r may be used

That is draft-11 (the bytes are those of drafts 8 to 11); drafts 7 and 6 are kept for older clients. `t` is the end of a fixed
window; for a bucket r / rate, so that r/t never promises more than the rate, and with nothing left the time to the next unit; for
the others the time until the key is as new. The `t` of a refusing limit is never later than Retry-After; where a bucket refuses
although something is left (the request costs more), both can't hold, and `t`, which is optional, is left out.

`fields(evaluation)` is for ASGI: bytes, names in lower case. `text_fields` is for WSGI, Django and Flask. What never changes
about a limit is encoded once, in its FieldTemplate. Rejected: a general serialiser of structured fields (8 µs for two items).
No clock, no I/O.
"""

from __future__ import annotations

import hmac
from binascii import b2a_base64
from functools import lru_cache
from math import gcd
from typing import TypeVar

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.decision import Decision
    from cython.cimports.limitkeeper.policy.compiled_policy import Entry
    from cython.cimports.limitkeeper.policy.evaluation import Evaluation
else:
    from ..decision import Decision
    from ..policy.compiled_policy import Entry
    from ..policy.evaluation import Evaluation

from ..policy.model import Headers
from ..policy.refusal import Refusal

#: A policy name is cut to this many characters.
MAX_LABEL = 120
#: A response names at most this many limits: the refusing ones and those with the smallest share left, in the policy's order.
MAX_LIMITS = 10
#: The largest integer of a structured field.
MAX_INTEGER = 999_999_999_999_999
#: The encoded small integers: most values are among them.
SMALL_INTEGERS = tuple([b"%d" % number for number in range(2048)])
#: The conventional spelling of the field names.
SPELLING = {
    b"ratelimit": "RateLimit",
    b"ratelimit-policy": "RateLimit-Policy",
    b"ratelimit-limit": "RateLimit-Limit",
    b"ratelimit-remaining": "RateLimit-Remaining",
    b"ratelimit-reset": "RateLimit-Reset",
    b"x-ratelimit-limit": "X-RateLimit-Limit",
    b"x-ratelimit-remaining": "X-RateLimit-Remaining",
    b"x-ratelimit-reset": "X-RateLimit-Reset",
    b"retry-after": "Retry-After",
    b"cache-control": "Cache-Control",
    b"access-control-expose-headers": "Access-Control-Expose-Headers",
}
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


# Templates -------------------------------------------------------------------------------------------------------


@cython.cclass
class FieldStyle:
    """A policy's `headers` section, prepared; `expose…` are the Access-Control-Expose-Headers field, or nothing."""

    # fmt: off
    __slots__ = ("draft", "expose", "expose_refused", "expose_retry", "headers", "near", "never", "partition", "reset", "x")
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
        self.expose = expose_field(names, headers.cors)
        self.expose_refused = expose_field([*names, b"retry-after"], headers.cors)
        self.expose_retry = expose_field([b"retry-after"], headers.cors)


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
    __slots__ = ("bucket", "gain", "item_start", "limit_field", "older_policy", "per", "policy", "policy_field", "quota",
                 "rest_us", "style", "wide", "window")
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
        self.older_policy = b"%d;w=%d" % (quota, window)
        self.item_start = label + b";r="
        self.policy_field = (b"ratelimit-policy", self.policy)
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


# Values of one limit ---------------------------------------------------------------------------------------------


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
@cython.exceptval(check=False)
def remaining_of(template: FieldTemplate, part: Decision) -> cython.longlong:
    return part.remaining if part.remaining < template.quota else template.quota


@cython.cfunc
def seconds_of(template: FieldTemplate, part: Decision, r: cython.longlong) -> cython.longlong:
    """The parameter `t` that belongs to r; -1: no true value exists."""
    us: cython.longlong = part.reset_us
    t: cython.longlong
    if template.bucket:
        if r > 0:
            t = wide_seconds(template, r) if template.wide else (r * template.per + template.gain - 1) // template.gain
            return -1 if part.retry_us > 0 and t > ceil_seconds(part.retry_us) else t
        us -= template.rest_us
    if 0 < part.retry_us < us:
        us = part.retry_us
    return template.window if us <= 0 and r > 0 else ceil_seconds(us)


def wide_seconds(template: FieldTemplate, r: object) -> int:
    """The seconds that r units of a bucket take, in Python's integers."""
    units: int = int(r)  # type: ignore[call-overload]
    per: int = int(template.per)
    return min(MAX_INTEGER, -(-units * per // int(template.gain)))


@cython.cfunc
def add_item(pieces: list[bytes], template: FieldTemplate, part: Decision) -> cython.int:
    """Adds the bytes of one member of the RateLimit field."""
    r: cython.longlong = remaining_of(template, part)
    t: cython.longlong = seconds_of(template, part, r)
    pieces.append(template.item_start)
    pieces.append(encode_integer(r))
    if t >= 0:
        pieces.append(b";t=")
        pieces.append(encode_integer(t))
    return 0


def older_fields(template: FieldTemplate, part: Decision) -> Fields:
    """The fields of drafts 6 and 7: they describe one limit, the deciding one, and can't leave the reset out."""
    r: cython.longlong = remaining_of(template, part)
    t: cython.longlong = seconds_of(template, part, r)
    if t < 0:
        t = ceil_seconds(part.retry_us)
    if template.style.draft == DRAFT_7:
        return [(b"ratelimit", b"limit=%d, remaining=%d, reset=%d" % (template.quota, r, t))]
    quota = encode_integer(template.quota)
    return [(b"ratelimit-limit", quota), (b"ratelimit-remaining", encode_integer(r)), (b"ratelimit-reset", encode_integer(t))]


def encode_reset(style: FieldStyle, decision: Decision) -> bytes:
    """X-RateLimit-Reset: seconds until the limit is as new, or that moment in seconds since 1970."""
    start_us: cython.longlong = decision.start_us - decision.wait_us if style.reset == "epoch" else 0
    return encode_integer(ceil_seconds(start_us + decision.reset_us))


# Fields of a response --------------------------------------------------------------------------------------------


@cython.ccall
def fields(evaluation: Evaluation) -> list:  # type: ignore[type-arg]  # as in the .pxd
    """The fields of a response, allowed or refused. None where no limit applies, or on a success where the policy says so."""
    decision: Decision = evaluation.decision  # type: ignore[assignment]
    entries: list[Entry] = evaluation.entries
    headers = evaluation.compiled.policy.headers
    if decision is None or not entries:
        return [] if evaluation.allowed else add_refusal(evaluation, [], style_of(headers).expose_retry)
    template: FieldTemplate = template_of(entries[0], headers)
    style: FieldStyle = template.style
    if evaluation.allowed and (style.never or (style.near and decision.remaining * 5 >= decision.limit)):
        return []
    found: list[tuple[bytes, bytes]] = []
    if len(entries) > 1:
        add_limits(found, evaluation, headers, decision, entries)
    else:
        add_limit(found, evaluation, template, decision)
    if style.reset != "off":
        found.append((b"x-ratelimit-reset", encode_reset(style, decision)))
    if not evaluation.allowed:
        return add_refusal(evaluation, found, style.expose_refused)
    if evaluation.origin:
        found.extend(style.expose)
    return found


def add_refusal(evaluation: Evaluation, found: Fields, expose: tuple[tuple[bytes, bytes], ...]) -> Fields:
    """Adds Retry-After and Cache-Control; neither where a degrade handler answers, whose response is no refusal."""
    refusal: Refusal = evaluation.refusal  # type: ignore[assignment]
    if evaluation.degrade is None:
        if refusal.retry_after is not None:
            found.append((b"retry-after", b"%d" % refusal.retry_after))
        found.append((b"cache-control", b"no-store"))
    if evaluation.origin:
        found.extend(expose)
    return found


@cython.cfunc
def add_limit(found: list[tuple[bytes, bytes]], evaluation: Evaluation, template: FieldTemplate, part: Decision) -> cython.int:
    """Adds the fields of the only limit."""
    style: FieldStyle = template.style
    if style.draft == DRAFT_11:
        pieces: list[bytes] = []
        add_item(pieces, template, part)
        if style.partition:
            pk: bytes = partition_key(evaluation.gate.secret, evaluation.keys[0])
            found.append((b"ratelimit-policy", template.policy + pk))
            pieces.append(pk)
        else:
            found.append(template.policy_field)
        found.append((b"ratelimit", b"".join(pieces)))
    elif style.draft != NO_DRAFT:
        found.append((b"ratelimit-policy", template.older_policy))
        found.extend(older_fields(template, part))
    if style.x:
        found.append(template.limit_field)
        found.append((b"x-ratelimit-remaining", encode_integer(remaining_of(template, part))))
    return 0


@cython.cfunc
def add_limits(
    found: list[tuple[bytes, bytes]], evaluation: Evaluation, headers: Headers, decision: Decision, entries: list[Entry]
) -> cython.int:
    """Adds the fields of several limits: draft-11 lists them all, the other fields describe the deciding one."""
    parts: tuple[Decision, ...] = decision.decisions
    policies: list[bytes] = []
    pieces: list[bytes] = []
    template: FieldTemplate
    part: Decision
    deciding: FieldTemplate = template_of(entries[0], headers)
    deciding_part: Decision = decision
    style: FieldStyle = deciding.style
    pk: bytes
    i: cython.Py_ssize_t
    for i in tightest_limits(parts) if len(parts) > MAX_LIMITS else range(len(parts)):
        template = template_of(entries[i], headers)
        part = parts[i]
        if part.name == decision.name:
            deciding = template
            deciding_part = part
        if style.draft == DRAFT_11:
            if pieces:
                pieces.append(b", ")
            add_item(pieces, template, part)
            if style.partition:
                pk = partition_key(evaluation.gate.secret, evaluation.keys[i])
                policies.append(template.policy + pk)
                pieces.append(pk)
            else:
                policies.append(template.policy)
        elif style.draft != NO_DRAFT:
            policies.append(template.older_policy)
    if policies:
        found.append((b"ratelimit-policy", b", ".join(policies)))
        if pieces:
            found.append((b"ratelimit", b"".join(pieces)))
        else:
            found.extend(older_fields(deciding, deciding_part))
    if style.x:
        found.append(deciding.limit_field)
        found.append((b"x-ratelimit-remaining", encode_integer(remaining_of(deciding, deciding_part))))
    return 0


def tightest_limits(parts: tuple[Decision, ...]) -> list[int]:
    """The indexes of the limits to name where there are too many: refusing ones, then the smallest share left; in order."""
    by_need = sorted(range(len(parts)), key=lambda i: (parts[i].allowed, parts[i].remaining / max(1.0, parts[i].limit)))
    return sorted(by_need[:MAX_LIMITS])


def text_fields(evaluation: Evaluation) -> list[tuple[str, str]]:
    """The same fields as text, in their conventional spelling."""
    return [(SPELLING[name], value.decode("ascii")) for name, value in fields(evaluation)]


# Merging ---------------------------------------------------------------------------------------------------------

#: Families of fields, as bits. A response that has a field of a family keeps it, and gets none of that family from us.
EXPOSE = 16
BYTES, TEXT = (b",", b"*", b", "), (",", "*", ", ")
FAMILIES = {b"retry-after": 4, b"cache-control": 8, b"access-control-expose-headers": EXPOSE}
FAMILIES |= {name: 1 if name.startswith(b"r") else 2 for name in SPELLING if name not in FAMILIES}
FAMILY: dict[str | bytes, int] = {key: family for name, family in FAMILIES.items() for key in (name, name.decode())}
#: The lengths of our field names, as bits: a response whose names have other lengths has none of them.
NAME_LENGTHS = 0
for _name in FAMILIES:
    NAME_LENGTHS |= 1 << len(_name)


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

    What the handler says about its quota stays, since it (or an inner gate) knows more. Access-Control-Expose-Headers is joined.
    """
    present: cython.int = 0
    for name, _ in own:
        present |= FAMILY.get(name.lower(), 0)
    if present == 0:
        return own + added
    kept = [field for field in added if not FAMILY.get(field[0].lower(), 0) & present & (EXPOSE - 1)]
    return join_exposed(own + kept) if present & EXPOSE else own + kept


def join_exposed(merged: list[tuple[T, T]]) -> list[tuple[T, T]]:
    """All Access-Control-Expose-Headers fields in one, the response's own names first; "*" exposes ours too."""
    lines = [field for field in merged if FAMILY.get(field[0].lower()) == EXPOSE]
    comma, star, separator = BYTES if isinstance(lines[0][1], bytes) else TEXT
    exposed: dict[T, T] = {}
    for _, line in lines:
        for word in line.split(comma):
            if word.strip() and star not in exposed:
                exposed.setdefault(word.strip().lower(), word.strip())
    rest = [field for field in merged if FAMILY.get(field[0].lower()) != EXPOSE]
    return rest + [(lines[0][0], separator.join(exposed.values()))]  # noqa: RUF005  # mypy: T
