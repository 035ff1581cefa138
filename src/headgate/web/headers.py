"""Header fields of an answer: what is left, and when to come back, as bytes.

`fields(passage)` are the fields of one response, in lower case as ASGI wants them; `text_fields` the same as text for WSGI, Django and
Flask; `merge` puts them to those that a response has already. The syntax is that of draft-11 of the IETF's RateLimit header fields:

    ratelimit-policy: "checkout";q=10;w=2      q: the most at once, w: the seconds in which that much comes back (rounded up)
    ratelimit: "checkout";r=7;t=2              r: what is left, t: the seconds within which no more than r may be used

`t` is the end of a fixed window; for a bucket r / rate, so that r/t never promises more than the rate, and with nothing left the
time to the next unit; for the others the time until the key is as new. A refusing limit's `t` is never later than Retry-After; where
a bucket refuses although something is left (the request costs more), both can't hold, and `t`, which is optional, is left out.

What never changes about a limit is written down once, in `entry.posting`. Bytes are joined by hand: a general serialiser of structured
fields takes 8 µs for two items. No clock, no I/O.
"""

from __future__ import annotations

import hmac
from binascii import b2a_base64
from math import gcd
from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from headgate import _plain as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.headgate.decision import Decision
else:
    from ..decision import Decision

from ..policy.model import SHADOW

#: A response names at most so many limits: the refusing ones and those closest to their end, in the policy's order.
MOST = 10
#: A policy name is cut to this many characters.
LONGEST = 120
#: The largest integer of a structured field.
TOP = 999_999_999_999_999
#: The texts of small numbers, which most numbers are.
SMALL = tuple(b"%d" % number for number in range(2048))

RETRY, NO_STORE, EXPOSE = b"retry-after", (b"cache-control", b"no-store"), b"access-control-expose-headers"
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
#: The names that a wire generation uses; the draft's versions in between did not change the bytes.
WIRES: dict[str, tuple[bytes, ...]] = {
    "draft-11": (b"ratelimit-policy", b"ratelimit"),
    "draft-7": (b"ratelimit-policy", b"ratelimit"),
    "draft-6": (b"ratelimit-policy", b"ratelimit-limit", b"ratelimit-remaining", b"ratelimit-reset"),
    "none": (),
}
NONE, SIX, SEVEN, ELEVEN = 0, 6, 7, 11
WINDOW, BUCKET, OTHER = 0, 1, 2
SHAPES = {"fixed window": WINDOW, "token bucket": BUCKET, "leaky bucket": BUCKET}


@cython.cclass
class Style:
    """What a policy's `headers` say, read once."""

    wire: cython.int
    x: cython.bint
    near: cython.bint
    never: cython.bint
    partition: cython.bint
    reset: str
    headers: object
    expose: tuple  # type: ignore[type-arg]
    expose_refused: tuple  # type: ignore[type-arg]
    expose_retry: tuple  # type: ignore[type-arg]

    def __init__(self, headers: Any) -> None:
        self.headers = headers
        self.wire = {"draft-6": SIX, "draft-7": SEVEN, "none": NONE}.get(headers.wire, ELEVEN)
        self.x = headers.x
        self.near = headers.success == "near"
        self.never = headers.success == "never"
        self.partition = headers.partition
        self.reset = headers.reset
        names = [SPELT[name] for name in WIRES.get(headers.wire, WIRES["draft-11"])]
        if headers.x:
            names += ["X-RateLimit-Limit", "X-RateLimit-Remaining"]
        if headers.reset != "off":
            names.append("X-RateLimit-Reset")
        self.expose = exposing(names if headers.cors else [])
        self.expose_refused = exposing([*names, "Retry-After"] if headers.cors else [])
        self.expose_retry = exposing(["Retry-After"] if headers.cors else [])


def exposing(names: list[str]) -> tuple[tuple[bytes, bytes], ...]:
    return ((EXPOSE, ", ".join(names).encode()),) if names else ()


@cython.cclass
class Posting:
    """What never changes about one limit: its name, quota and window as bytes, and the numbers that `t` is made of."""

    shape: cython.int
    hidden: cython.bint
    wide: cython.bint
    quota: cython.longlong
    window: cython.longlong
    per: cython.longlong  # a bucket's r units take r · per / gain seconds, rounded up
    gain: cython.longlong
    rest_us: cython.longlong  # a bucket that is empty but for one unit takes so long to be full
    policy: bytes
    begins: bytes
    plain: bytes
    alone: tuple  # type: ignore[type-arg]
    limit: tuple  # type: ignore[type-arg]
    style: Style

    def __init__(self, entry: Any, style: Style) -> None:
        limit = entry.named.limit
        self.style = style
        self.shape = SHAPES.get(type(limit).kind, OTHER)
        self.hidden = entry.rule is not None and entry.rule.on_refusal.action == SHADOW
        endless: Any = type(limit).kind == "leaky bucket queue" and not limit.bounded
        # Python's integers: products of absurd limits leave 64 bits.
        count: Any = int(limit.count)
        period: Any = int(limit.period)
        quota: Any = count if endless else int(limit.capacity)
        seconds: Any = period if type(limit).kind in WINDOWS else -(-quota * period // count)
        window: Any = min(TOP, max(1, -(-seconds // 1_000_000)))
        shared: Any = gcd(period, count * 1_000_000)
        self.per, self.gain = period // shared, count * 1_000_000 // shared
        self.wide = quota * period >= 1 << 62
        rest: Any = (int(limit.capacity) - 1) * period // count
        self.rest_us = min(1 << 62, rest)
        self.quota, self.window = quota, window
        label = quoted(entry.label)
        self.policy = b"%b;q=%d;w=%d" % (label, quota, window)
        self.plain = b"%d;w=%d" % (quota, window)
        self.begins = label + b";r="
        self.alone = (b"ratelimit-policy", self.policy)
        self.limit = (b"x-ratelimit-limit", b"%d" % int(limit.capacity))


WINDOWS = ("fixed window", "sliding window log", "sliding window counter")


def quoted(label: str) -> bytes:
    """A structured field's string: printable ASCII, quotes and backslashes escaped."""
    shown = "".join(letter if " " <= letter <= "~" else "?" for letter in label[:LONGEST])
    return b'"%b"' % shown.replace("\\", "\\\\").replace('"', '\\"').encode("ascii")


def partition(secret: bytes, key: str) -> bytes:
    """A key as others may see it: a keyed hash."""
    digest = hmac.digest(secret, key.encode("utf-8", "surrogatepass"), "sha256")
    return b";pk=:" + b2a_base64(digest[:12], newline=False) + b":"


# Numbers ---------------------------------------------------------------------------------------------------------


@cython.cfunc
@cython.inline
def digits(number: cython.longlong) -> bytes:
    if 0 <= number < 2048:
        return SMALL[number]
    return b"%d" % number


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def seconds(us: cython.longlong) -> cython.longlong:
    return (us + 999_999) // 1_000_000 if us > 0 else 0


@cython.cfunc
def left(posting: Posting, part: Decision) -> cython.longlong:
    return part.remaining if part.remaining < posting.quota else posting.quota


@cython.cfunc
def within(posting: Posting, part: Decision, r: cython.longlong) -> cython.longlong:
    """The seconds `t` that belong to what is left; -1: none that would be true."""
    us: cython.longlong = part.reset_us
    t: cython.longlong
    if posting.shape == BUCKET:
        if r > 0:
            t = at_the_rate(posting, r) if posting.wide else (r * posting.per + posting.gain - 1) // posting.gain
            return -1 if part.retry_us > 0 and t > seconds(part.retry_us) else t
        us -= posting.rest_us
    if 0 < part.retry_us < us:
        us = part.retry_us
    return posting.window if us <= 0 and r > 0 else seconds(us)


def at_the_rate(posting: Posting, r: Any) -> Any:
    """The same beyond 64 bits."""
    per: Any = int(posting.per)
    return min(TOP, -(-int(r) * per // int(posting.gain)))


# Fields ----------------------------------------------------------------------------------------------------------


@cython.cfunc
def posted(entry: Any, headers: Any) -> Posting:
    """What is written down about a limit; anew when the policy's headers are others than then."""
    posting = entry.posting
    if isinstance(posting, Posting):
        known: Posting = posting
        if known.style.headers is headers:
            return known
    made = Posting(entry, Style(headers))
    entry.posting = made
    return made


def fields(passage: Any) -> list[tuple[bytes, bytes]]:
    """What a response tells, allowed or refused. None of it on a success where the policy says so, or where nothing limits."""
    decision: Decision = passage.decision
    entries: list = passage.entries  # type: ignore[type-arg]
    headers = passage.policy.headers
    if decision is None or not entries:
        return [] if passage.allowed else refused_fields(passage, [], Style(headers).expose_retry)
    posting: Posting = posted(entries[0], headers)
    style: Style = posting.style
    if passage.allowed and (style.never or (style.near and decision.remaining * 5 >= decision.limit)):
        return []
    found: list = []  # type: ignore[type-arg]
    if len(entries) == 1:
        if posting.hidden:
            return found
        one_limit(found, passage, posting, decision)
    else:
        several_limits(found, passage, headers, decision, entries)
    if style.reset != "off":
        found.append((b"x-ratelimit-reset", reset_of(style, decision)))
    if not passage.allowed:
        return refused_fields(passage, found, style.expose_refused)
    if found:
        found.extend(style.expose)
    return found


def refused_fields(passage: Any, found: list[tuple[bytes, bytes]], expose: Any) -> list[tuple[bytes, bytes]]:
    """Adds when to come back, and that nobody keeps this answer. A handler that answers instead is no refusal."""
    if passage.degrade is None:
        if passage.refusal.retry_after is not None:
            found.append((RETRY, b"%d" % passage.refusal.retry_after))
        found.append(NO_STORE)
    found.extend(expose)
    return found


@cython.cfunc
def one_limit(found: list, passage: Any, posting: Posting, part: Decision) -> cython.void:  # type: ignore[type-arg]
    style: Style = posting.style
    r: cython.longlong = left(posting, part)
    if style.wire == ELEVEN:
        if style.partition:
            pk = partition(passage.gate.secret, passage.keys[0])
            found.append((b"ratelimit-policy", posting.policy + pk))
            found.append((b"ratelimit", item(posting, part) + pk))
        else:
            found.append(posting.alone)
            found.append((b"ratelimit", item(posting, part)))
    elif style.wire != NONE:
        found.append((b"ratelimit-policy", posting.plain))
        older_fields(found, posting, part)
    if style.x:
        found.append(posting.limit)
        found.append((b"x-ratelimit-remaining", digits(r)))


@cython.cfunc
def several_limits(
    found: list,  # type: ignore[type-arg]
    passage: Any,
    headers: Any,
    decision: Decision,
    entries: list,  # type: ignore[type-arg]
) -> cython.void:
    parts: tuple = decision.decisions  # type: ignore[type-arg]
    shown: list = closest(parts) if len(entries) > MOST else list(range(len(entries)))  # type: ignore[type-arg]
    policies: list = []  # type: ignore[type-arg]
    items: list = []  # type: ignore[type-arg]
    speaker: Posting = posted(entries[0], headers)
    spoken: Decision = parts[0]
    style: Style = speaker.style
    i: cython.Py_ssize_t
    for i in shown:
        posting: Posting = posted(entries[i], headers)
        part: Decision = parts[i]
        if posting.hidden:
            continue
        if part.name == decision.name:
            speaker = posting
            spoken = part
        if style.wire == ELEVEN:
            pk = partition(passage.gate.secret, passage.keys[i]) if style.partition else b""
            policies.append(posting.policy + pk)
            items.append(item(posting, part) + pk)
        elif style.wire != NONE:
            policies.append(posting.plain)
    if policies:
        found.append((b"ratelimit-policy", b", ".join(policies)))
        if items:
            found.append((b"ratelimit", b", ".join(items)))
        else:
            older_fields(found, speaker, spoken)
    if style.x:
        found.append((b"x-ratelimit-limit", digits(decision.limit)))
        found.append((b"x-ratelimit-remaining", digits(decision.remaining)))


def closest(parts: tuple[Decision, ...]) -> list[int]:
    """The limits to name where there are too many: who refuses first, then who has the smallest part left; in their order."""
    by_need = sorted(range(len(parts)), key=lambda i: (parts[i].allowed, parts[i].remaining / max(1, parts[i].limit)))
    return sorted(by_need[:MOST])


# The serialiser: the only place that knows the bytes of the wire generations -----------------------------------------


@cython.cfunc
def item(posting: Posting, part: Decision) -> bytes:
    """One member of RateLimit."""
    r: cython.longlong = left(posting, part)
    t: cython.longlong = within(posting, part, r)
    if t < 0:
        return posting.begins + digits(r)
    return posting.begins + digits(r) + b";t=" + digits(t)


@cython.cfunc
def older_fields(found: list, posting: Posting, part: Decision) -> cython.void:  # type: ignore[type-arg]
    """Drafts 6 and 7 know one limit: the one that speaks. They have no way to leave the reset out."""
    r: cython.longlong = left(posting, part)
    t: cython.longlong = within(posting, part, r)
    if t < 0:
        t = seconds(part.retry_us)
    if posting.style.wire == SEVEN:
        found.append((b"ratelimit", b"limit=%d, remaining=%d, reset=%d" % (posting.quota, r, t)))
    else:
        found.append((b"ratelimit-limit", digits(posting.quota)))
        found.append((b"ratelimit-remaining", digits(r)))
        found.append((b"ratelimit-reset", digits(t)))


def reset_of(style: Style, decision: Decision) -> bytes:
    """X-RateLimit-Reset: seconds until the limit is as new, or the moment (in seconds since 1970) when it is."""
    if style.reset == "epoch":
        return b"%d" % seconds(decision.start_us - decision.wait_us + decision.reset_us)
    return b"%d" % seconds(decision.reset_us)


# Responses -----------------------------------------------------------------------------------------------------------

#: Families of fields. A response that has one of a family keeps what it says, and gets none of that family from us.
FAMILIES = {b"retry-after": 4, b"cache-control": 8, EXPOSE: 16}
FAMILIES |= {name: 1 if name.startswith(b"r") else 2 for name in SPELT if name not in FAMILIES}
FAMILY: dict[Any, int] = {**FAMILIES, **{name.decode(): family for name, family in FAMILIES.items()}}


def text_fields(passage: Any) -> list[tuple[str, str]]:
    """The same fields as text, names as people write them."""
    return [(SPELT[name], value.decode("ascii")) for name, value in fields(passage)]


def merge(own: list[Any], added: list[Any]) -> list[Any]:
    """A response's own fields and ours, as bytes or as text; never two lines of a kind.

    What the handler says of its quota stands: it (or a gate further in) knows more. Access-Control-Expose-Headers is joined.
    """
    there: cython.int = 0
    for name, _ in own:
        there |= FAMILY.get(name.lower(), 0)
    if there == 0:
        return own + added
    kept = [field for field in added if not FAMILY[field[0].lower()] & there & 15]
    return joined(own, kept) if there & 16 else own + kept


def joined(own: list[Any], added: list[Any]) -> list[Any]:
    """The names that the response exposes and ours in one line, its first; "*" exposes ours too."""
    ours = [field for field in added if FAMILY[field[0].lower()] == 16]
    if not ours:
        return own + added
    line = ours[0][1]
    comma, star = (b",", b"*") if isinstance(line, bytes) else (",", "*")
    seen: dict[Any, Any] = {}
    for name, value in own:
        if FAMILY.get(name.lower()) == 16:
            seen |= {word.strip().lower(): word.strip() for word in value.split(comma) if word.strip()}
    if star not in seen:
        seen |= {word.strip().lower(): word.strip() for word in line.split(comma) if word.strip().lower() not in seen}
    space = comma + (b" " if isinstance(line, bytes) else " ")
    rest = [field for field in own if FAMILY.get(field[0].lower()) != 16]
    return [*rest, *(field for field in added if field is not ours[0]), (ours[0][0], space.join(seen.values()))]


from .answers import body  # noqa: E402 — the other half of an answer, under one name for the middlewares

__all__ = ["body", "fields", "merge", "text_fields"]
