"""One limit in the bytes of the RateLimit fields: the only place that knows the wire generations.

    ratelimit-policy: "checkout";q=10;w=2      q: the most at once, w: the seconds in which that much comes back, rounded up
    ratelimit: "checkout";r=7;t=2              r: what is left, t: the seconds within which no more than r may be used

That is draft-11 (the bytes are those of drafts 8 to 11); 7 and 6 are kept for clients that are older. `t` is the end of a fixed
window; for a bucket r / rate, so that r/t never promises more than the rate, and with nothing left the time to the next unit; for
the others the time until the key is as new. A refusing limit's `t` is never later than Retry-After; where a bucket refuses
although something is left (the request costs more), both can't hold, and `t`, which is optional, is left out.

What never changes about a limit is written down once. The rest is joined by hand: a general serialiser of structured fields takes
8 µs for two items.
"""

from __future__ import annotations

import hmac
from binascii import b2a_base64
from math import gcd
from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.decision import Decision
else:
    from ..decision import Decision

#: A policy name is cut to this many characters.
LONGEST = 120
#: The largest integer of a structured field.
TOP = 999_999_999_999_999
#: The texts of small numbers, which most numbers are.
SMALL = tuple(b"%d" % number for number in range(2048))
#: The names of the fields, as people write them.
SPELT = {
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
NONE, SIX, SEVEN, ELEVEN = 0, 6, 7, 11
#: A policy's word for a generation: its number, and the names that it uses.
WIRES: dict[str, tuple[int, list[bytes]]] = {
    "draft-11": (ELEVEN, [b"ratelimit-policy", b"ratelimit"]),
    "draft-7": (SEVEN, [b"ratelimit-policy", b"ratelimit"]),
    "draft-6": (SIX, [b"ratelimit-policy", b"ratelimit-limit", b"ratelimit-remaining", b"ratelimit-reset"]),
    "none": (NONE, []),
}
BUCKETS = ("token bucket", "leaky bucket")
WINDOWS = ("fixed window", "sliding window log", "sliding window counter")


@cython.cclass
class Style:
    """What a policy's `headers` say, read once; `expose…` are Access-Control-Expose-Headers, or nothing."""

    # fmt: off
    __slots__ = ("expose", "expose_refused", "expose_retry", "headers", "near", "never", "partition", "reset", "wire", "x")
    # fmt: on

    def __init__(self, headers: Any) -> None:
        self.headers = headers
        self.wire, names = WIRES[headers.wire]
        self.x = headers.x
        self.near = headers.success == "near"
        self.never = headers.success == "never"
        self.partition = headers.partition
        self.reset = headers.reset
        if headers.x:
            names = [*names, b"x-ratelimit-limit", b"x-ratelimit-remaining"]
        if headers.reset != "off":
            names = [*names, b"x-ratelimit-reset"]
        self.expose = exposing(names, headers.cors)
        self.expose_refused = exposing([*names, b"retry-after"], headers.cors)
        self.expose_retry = exposing([b"retry-after"], headers.cors)


def exposing(names: list[bytes], cors: bool) -> tuple[tuple[bytes, bytes], ...]:
    words = ", ".join(SPELT[name] for name in names)
    return ((b"access-control-expose-headers", words.encode()),) if cors and words else ()


@cython.cclass
class FieldTemplate:
    """What never changes about one limit: its name, quota and window as bytes, and the numbers that `t` is made of.

    A bucket's r units take r · per / gain seconds; `rest_us` is what fills it but for one unit. `wide`: these leave 64 bits.
    """

    # fmt: off
    __slots__ = ("alone", "begins", "bucket", "gain", "limit", "older", "per", "policy", "quota", "rest_us", "style",
                 "wide", "window")
    # fmt: on

    def __init__(self, entry: Any, style: Style) -> None:
        limit: Any = entry.named.limit
        kind: Any = type(limit).kind
        self.style = style
        self.bucket = kind in BUCKETS
        count: Any = int(limit.count)
        period: Any = int(limit.period)
        most: Any = int(limit.capacity)
        quota: Any = most if kind in WINDOWS or kind in BUCKETS or limit.bounded else count  # a queue without end: its rate
        refill: Any = period if kind in WINDOWS else -(-quota * period // count)
        window: Any = min(TOP, max(1, -(-refill // 1_000_000)))
        shared: Any = gcd(period, count * 1_000_000)
        rest: Any = (most - 1) * period // count
        self.quota, self.window = quota, window
        self.per, self.gain = period // shared, count * 1_000_000 // shared
        self.wide = quota * period >= 1 << 62
        self.rest_us = min(1 << 62, rest)
        label: bytes = quoted(entry.label)
        self.policy = b"%b;q=%d;w=%d" % (label, quota, window)
        self.older = b"%d;w=%d" % (quota, window)
        self.begins = label + b";r="
        self.alone = (b"ratelimit-policy", self.policy)
        self.limit = (b"x-ratelimit-limit", b"%d" % quota)


def quoted(label: str) -> bytes:
    """A structured field's string: printable ASCII, quotes and backslashes escaped."""
    shown = "".join(letter if " " <= letter <= "~" else "?" for letter in label[:LONGEST])
    return b'"%b"' % shown.replace("\\", "\\\\").replace('"', '\\"').encode("ascii")


def partition(secret: bytes, key: str) -> bytes:
    """A key as others may see it: a keyed hash."""
    digest = hmac.digest(secret, key.encode("utf-8", "surrogatepass"), "sha256")
    return b";pk=:" + b2a_base64(digest[:12], newline=False) + b":"


@cython.cfunc
def digits(number: cython.longlong) -> bytes:
    if 0 <= number < 2048:
        text: bytes = SMALL[number]
        return text
    return b"%d" % number


@cython.cfunc
@cython.exceptval(check=False)
def seconds(us: cython.longlong) -> cython.longlong:
    """Whole seconds, rounded up."""
    return (us + 999_999) // 1_000_000 if us > 0 else 0


@cython.cfunc
@cython.exceptval(check=False)
def left(posting: FieldTemplate, part: Decision) -> cython.longlong:
    return part.remaining if part.remaining < posting.quota else posting.quota


@cython.cfunc
def within(posting: FieldTemplate, part: Decision, r: cython.longlong) -> cython.longlong:
    """The seconds `t` that belong to what is left; -1: none that would be true."""
    us: cython.longlong = part.reset_us
    t: cython.longlong
    if posting.bucket:
        if r > 0:
            t = at_the_rate(posting, r) if posting.wide else (r * posting.per + posting.gain - 1) // posting.gain
            return -1 if part.retry_us > 0 and t > seconds(part.retry_us) else t
        us -= posting.rest_us
    if 0 < part.retry_us < us:
        us = part.retry_us
    return posting.window if us <= 0 and r > 0 else seconds(us)


def at_the_rate(posting: FieldTemplate, r: Any) -> Any:
    """The seconds that r units take, in Python's integers."""
    per: Any = int(posting.per)
    return min(TOP, -(-int(r) * per // int(posting.gain)))


@cython.cfunc
def item(posting: FieldTemplate, part: Decision) -> bytes:
    """One member of RateLimit."""
    r: cython.longlong = left(posting, part)
    t: cython.longlong = within(posting, part, r)
    if t < 0:
        return posting.begins + digits(r)
    return posting.begins + digits(r) + b";t=" + digits(t)


def older_fields(posting: FieldTemplate, part: Decision) -> list[tuple[bytes, bytes]]:
    """Drafts 6 and 7 tell of one limit, the one that speaks, and can't leave the reset out."""
    r: cython.longlong = left(posting, part)
    t: cython.longlong = within(posting, part, r)
    if t < 0:
        t = seconds(part.retry_us)
    if posting.style.wire == SEVEN:
        return [(b"ratelimit", b"limit=%d, remaining=%d, reset=%d" % (posting.quota, r, t))]
    return [(b"ratelimit-limit", digits(posting.quota)), (b"ratelimit-remaining", digits(r)), (b"ratelimit-reset", digits(t))]


def reset_of(style: Style, decision: Decision) -> bytes:
    """X-RateLimit-Reset: seconds until the limit is as new, or the moment when it is, in seconds since 1970."""
    start_us: cython.longlong = decision.start_us - decision.wait_us if style.reset == "epoch" else 0
    return digits(seconds(start_us + decision.reset_us))
