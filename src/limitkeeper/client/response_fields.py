"""Reads what a server says about its quota: Retry-After and the rate-limit fields of every generation.

    RateLimit: "burst";r=50;t=30             drafts 8 to 11 (also `a` and `w`, and names as tokens)
    RateLimit: limit=100, remaining=50, reset=5                                          draft 7
    RateLimit-Limit, -Remaining, -Reset      drafts 0 to 6; X-RateLimit-*, X-Rate-Limit-* before them
    x-ratelimit-remaining-tokens, anthropic-ratelimit-tokens-remaining                   one quota for each unit

A reset is a number of seconds, a Unix time in seconds or milliseconds, an RFC 3339 date, an HTTP-date or a duration such as
"6m0s". Absolute times are compared with the response's own `Date`, so that a wrong clock on either side has no effect.

Servers are not trusted: at most MAX_FIELDS fields of MAX_LENGTH characters and MAX_ITEMS items are read, in linear time; what is
malformed, negative or too long is ignored. Rejected: http-sf, which parses drafts 8 to 11 only and takes 12 µs a field; tests
compare with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import NamedTuple

MAX_FIELDS = 32
MAX_LENGTH = 2048
MAX_ITEMS = 16
#: Longer waits are read as this: 400 days.
MAX_DELAY_US = 400 * 86_400 * 10**6
#: Numbers above these are Unix times, in seconds and in milliseconds; below, they are seconds from now.
UNIX_S, UNIX_MS = 10**9, 10**12

_VALUE = re.compile(r'[ \t]*(?:"((?:[^"\\]|\\["\\])*)"|:([\w+/=]*):|([^\s,;="]+))[ \t]*')
_NUMBER = re.compile(r"\d{1,15}(?:\.\d{1,15})?")
_DURATION = re.compile(r"(?:\d{1,9}(?:\.\d{1,9})?(?:h|ms|m|s|us|µs)){1,6}")
_PART = re.compile(r"([\d.]+)([a-zµ]+)")
_PART_US = {"h": 3_600_000_000, "m": 60_000_000, "s": 1_000_000, "ms": 1_000, "us": 1, "µs": 1}
#: "x-ratelimit-remaining-tokens", "anthropic-ratelimit-tokens-remaining"
_OLDER = re.compile(r"(?:x-)?rate-?limit-(limit|remaining|reset-after|reset)(?:-([a-z-]{1,40}))?")
_VENDOR = re.compile(r"[a-z]{1,20}-ratelimit-([a-z-]{1,40})-(limit|remaining|reset)")
_WINDOW_US = {"second": 10**6, "minute": 60 * 10**6, "hour": 3600 * 10**6, "day": 86_400 * 10**6}


class Quota(NamedTuple):
    """One quota of a server, as far as it is known.

    Attributes:
        name: the name that the server gives it.
        remaining: what is left of it.
        limit: its size.
        reset_us: microseconds from now until it is full again.
        window_us: the length of its window in microseconds.
        unit: what it counts.
    """

    name: str
    remaining: int | None = None
    limit: int | None = None
    reset_us: int | None = None
    window_us: int | None = None
    unit: str = "requests"


class ServerHints(NamedTuple):
    """What one response says: how long to stay away, and the quotas."""

    retry_after_us: int | None = None
    quotas: tuple[Quota, ...] = ()

    @property
    def exhausted_us(self) -> int | None:
        """The wait that the server asks for: Retry-After, otherwise the latest reset of an exhausted quota."""
        if self.retry_after_us is not None:
            return self.retry_after_us
        resets = [one.reset_us for one in self.quotas if one.remaining == 0 and one.reset_us is not None]
        return max(resets, default=None)


NO_HINTS = ServerHints()


def relevant_fields(raw: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    """The fields of a response that `read_hints` reads, names in lower case, repeated ones joined; empty when it says nothing."""
    names = b"\n".join([name for name, _ in raw]).lower()
    if b"limit" not in names and b"retry-after" not in names:
        return {}
    found: dict[str, str] = {}
    others: dict[str, str] = {}
    for name, value in raw:
        small = name.lower()
        if b"ratelimit" in small or b"retry-after" in small or b"rate-limit" in small:
            if len(found) < MAX_FIELDS and len(value) <= MAX_LENGTH:
                text, key = value.decode("latin-1"), small.decode("latin-1")
                found[key] = f"{found[key]}, {text}"[: MAX_LENGTH + 1] if key in found else text
        elif small == b"date" or small == b"age":
            others[small.decode()] = value[:64].decode("latin-1")
    return {**others, **found} if found else found


def read_hints(fields: Mapping[str, str], now_us: int) -> ServerHints:
    """What the fields say, at `now_us` of our clock. Quota fields of a response from a cache are ignored."""
    if not fields:
        return NO_HINTS
    try:
        date = fields.get("date")
        server_us = now_us if date is None else _http_date_us(date)
    except ValueError:
        server_us = now_us
    cached = fields.get("age", "0").strip() not in ("", "0")
    return ServerHints(_retry_after(fields, server_us), () if cached else tuple(_quotas(fields, server_us)))


def _retry_after(fields: Mapping[str, str], server_us: int) -> int | None:
    for name in ("retry-after-ms", "x-ms-retry-after-ms"):
        text = fields.get(name, "").strip()
        if _NUMBER.fullmatch(text):
            return min(MAX_DELAY_US, round(float(text) * 1e3))
    text = fields.get("retry-after", "").strip()
    if _NUMBER.fullmatch(text):
        return min(MAX_DELAY_US, round(float(text) * 1e6))
    return parse_reset(text, server_us) if text[:1].isalpha() else None


def parse_reset(text: str, server_us: int) -> int | None:
    """Microseconds from the server's now to a reset, 0 for one in the past; None when it is malformed."""
    text = text.strip()
    if _NUMBER.fullmatch(text):
        number = float(text)
        if number < UNIX_S:
            return min(MAX_DELAY_US, round(number * 1e6))
        at_us = round(number * (1e3 if number >= UNIX_MS else 1e6))
    elif _DURATION.fullmatch(text):
        return min(MAX_DELAY_US, round(sum(float(amount) * _PART_US[unit] for amount, unit in _PART.findall(text))))
    else:
        try:
            at_us = _http_date_us(text) if text[:1].isalpha() else _microseconds(datetime.fromisoformat(text[:40]))
        except ValueError:
            return None
    return max(0, min(MAX_DELAY_US, at_us - server_us))


def _http_date_us(text: str) -> int:
    """An HTTP-date in any of its three forms; ValueError for anything else."""
    if len(text) > 64:
        raise ValueError(text[:64])
    try:
        return _microseconds(parsedate_to_datetime(text))
    except (TypeError, IndexError, OverflowError) as error:
        raise ValueError(text) from error


def _microseconds(moment: datetime) -> int:
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return round(aware.timestamp() * 1e6)


class Item(NamedTuple):
    """A member of a list or dictionary of structured fields."""

    value: str
    assigned: str | None
    parameters: dict[str, str]


@lru_cache(256)
def parse_items(text: str) -> list[Item]:
    """The members of a structured field (RFC 9651, without inner lists), as strings; ValueError when it is malformed."""
    found: list[Item] = []
    position = 0
    while len(found) < MAX_ITEMS and len(text) <= MAX_LENGTH:
        value, position = _value(text, position)
        assigned, position = _assigned(text, position)
        parameters: dict[str, str] = {}
        while text[position : position + 1] == ";":
            key, position = _value(text, position + 1)
            parameter, position = _assigned(text, position)
            parameters[key.lower()] = "?1" if parameter is None else parameter
        found.append(Item(value, assigned, parameters))
        if position == len(text):
            return found
        if text[position] != ",":
            break
        position += 1
    raise ValueError(f"not a structured field: {text[:80]!r}")


def _value(text: str, position: int) -> tuple[str, int]:
    found = _VALUE.match(text, position)
    if found is None:
        raise ValueError(f"expected a value at {position} of {text[:80]!r}")
    text = found[1]
    if text is None:
        return found[2] or found[3] or "", found.end()
    return re.sub(r"\\(.)", r"\1", text) if "\\" in text else text, found.end()


def _assigned(text: str, position: int) -> tuple[str | None, int]:
    return _value(text, position + 1) if text[position : position + 1] == "=" else (None, position)


def _items(fields: Mapping[str, str], name: str) -> list[Item]:
    try:
        return parse_items(fields[name]) if name in fields else []
    except ValueError:
        return []


def _whole(text: str | None) -> int | None:
    """A count; fractions, which some servers send, are rounded down."""
    return int(text.partition(".")[0]) if text is not None and _NUMBER.fullmatch(text) else None


def _seconds(text: str | None) -> int | None:
    number = _whole(text)
    return None if number is None else min(MAX_DELAY_US, number * 10**6)


def _quotas(fields: Mapping[str, str], server_us: int) -> Iterable[Quota]:
    policies = {one.value: one for one in _items(fields, "ratelimit-policy")}
    items = _items(fields, "ratelimit")
    if any(one.assigned is not None for one in items):
        draft_7 = {one.value.lower(): one.assigned for one in items}
        limit = _whole(draft_7.get("limit"))
        yield Quota("", _whole(draft_7.get("remaining")), limit, _seconds(draft_7.get("reset")), _window(policies, limit))
        return
    for one in items:
        asked, policy = one.parameters, policies.get(one.value, Item("", None, {})).parameters
        remaining, reset = _whole(asked.get("r", asked.get("a"))), _seconds(asked.get("t", asked.get("w")))
        window, unit = _seconds(policy.get("w")), policy.get("qu", "requests")
        yield Quota(one.value, remaining, _whole(policy.get("q")), reset, window, unit)
    if not items:
        yield from _older_quotas(fields, policies, server_us)


def _window(policies: Mapping[str, Item], limit: int | None) -> int | None:
    """The window of a policy of drafts 4 to 7, whose name is its limit: `100;w=60`."""
    return _seconds(policies[str(limit)].parameters.get("w")) if str(limit) in policies else None


def _older_quotas(fields: Mapping[str, str], policies: Mapping[str, Item], server_us: int) -> Iterable[Quota]:
    by_name: dict[str, dict[str, str]] = {}
    for field, text in fields.items():
        if found := _OLDER.fullmatch(field):
            by_name.setdefault(found[2] or "", {})[found[1]] = text
        elif found := _VENDOR.fullmatch(field):
            by_name.setdefault(found[1], {})[found[2]] = text
    for name, said in by_name.items():
        limit = _whole(said.get("limit", "").partition(",")[0].strip())  # "10, 10;w=1;name=…" of early drafts
        reset = said.get("reset-after", said.get("reset"))
        window = _WINDOW_US.get(name, _window(policies, limit))
        reset_us = _WINDOW_US.get(name) if reset is None else parse_reset(reset, server_us)
        unit = name.replace("-", "_") if "tokens" in name else "requests"
        yield Quota(name, _whole(said.get("remaining", "").strip()), limit, reset_us, window, unit)
