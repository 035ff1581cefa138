"""The quota fields of servers, in every generation, malformed ones included."""

from __future__ import annotations

import http_sf
import pytest
from evaluations import RequestSequence
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import scaled
from limitkeeper import FixedWindow
from limitkeeper.client.response_fields import (
    MAX_DELAY_US,
    MAX_FIELDS,
    MAX_LENGTH,
    Quota,
    ServerHints,
    parse_items,
    parse_reset,
    read_hints,
    relevant_fields,
)
from limitkeeper.policy.model import Headers
from limitkeeper.web.headers import text_fields
from stand_ins import NOON

NOW_US = int(NOON * 1e6)
S = 1_000_000


def hints(**fields: str) -> ServerHints:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in fields.items()]
    return read_hints(relevant_fields(raw), NOW_US)


GENERATIONS = {
    "draft 8 to 11": (
        {"RateLimit-Policy": '"burst";q=100;w=60, "daily";q=1000;w=86400', "RateLimit": '"burst";r=50;t=30, "daily";r=7;t=900'},
        [Quota("burst", 50, 100, 30 * S, 60 * S), Quota("daily", 7, 1000, 900 * S, 86400 * S)],
    ),
    "units": (
        {"RateLimit-Policy": '"slots";q=20;qu="content-bytes";w=1', "RateLimit": '"slots";r=3;t=1;pk=:cHM=:'},
        [Quota("slots", 3, 20, S, S, "content-bytes")],
    ),
    "proposed renaming": ({"RateLimit": "burst;a=80;w=45"}, [Quota("burst", 80, None, 45 * S, None)]),
    "draft 7": (
        {"RateLimit": "limit=100, remaining=50, reset=5", "RateLimit-Policy": "100;w=60"},
        [Quota("", 50, 100, 5 * S, 60 * S)],
    ),
    "draft 6": (
        {"RateLimit-Limit": "100", "RateLimit-Remaining": "50", "RateLimit-Reset": "5", "RateLimit-Policy": "100;w=60"},
        [Quota("", 50, 100, 5 * S, 60 * S)],
    ),
    "draft 3": (
        {"X-RateLimit-Limit": '10, 10;w=1;name="per-ip", 1000;w=3600', "X-RateLimit-Remaining": "9", "X-RateLimit-Reset": "1"},
        [Quota("", 9, 10, S, None)],
    ),
    "Unix time": (
        {"X-RateLimit-Limit": "60", "X-RateLimit-Remaining": "5", "X-RateLimit-Reset": str(NOW_US // S + 30)},
        [Quota("", 5, 60, 30 * S, None)],
    ),
    "milliseconds": (
        {"X-Rate-Limit-Limit": "60", "X-Rate-Limit-Remaining": "5", "X-Rate-Limit-Reset": str(NOW_US // 1000 + 250)},
        [Quota("", 5, 60, 250_000, None)],
    ),
    "date": (
        {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "2026-01-10T12:00:30Z"},
        [Quota("", 0, None, 30 * S, None)],
    ),
    "float": (
        {"X-RateLimit-Limit": "5", "X-RateLimit-Remaining": "0", "X-RateLimit-Reset-After": "1.25"},
        [Quota("", 0, 5, 1_250_000, None)],
    ),
    "by unit of time": (
        {"X-RateLimit-Limit-Minute": "20", "X-RateLimit-Remaining-Minute": "3"},
        [Quota("minute", 3, 20, 60 * S, 60 * S)],
    ),
    "OpenAI": (
        {
            "x-ratelimit-limit-requests": "60",
            "x-ratelimit-limit-tokens": "150000",
            "x-ratelimit-remaining-requests": "59",
            "x-ratelimit-remaining-tokens": "149984",
            "x-ratelimit-reset-requests": "1s",
            "x-ratelimit-reset-tokens": "6m0s",
        },
        [Quota("requests", 59, 60, S, None), Quota("tokens", 149984, 150000, 360 * S, None, "tokens")],
    ),
    "Anthropic": (
        {
            "anthropic-ratelimit-requests-limit": "50",
            "anthropic-ratelimit-requests-remaining": "49",
            "anthropic-ratelimit-requests-reset": "2026-01-10T12:00:02Z",
            "anthropic-ratelimit-input-tokens-limit": "40000",
            "anthropic-ratelimit-input-tokens-remaining": "39000",
            "anthropic-ratelimit-input-tokens-reset": "2026-01-10T12:00:01.5Z",
        },
        [Quota("requests", 49, 50, 2 * S, None), Quota("input-tokens", 39000, 40000, 1_500_000, None, "input_tokens")],
    ),
}


@pytest.mark.parametrize(("fields", "expected"), GENERATIONS.values(), ids=GENERATIONS)
def test_generations(fields, expected):
    """Each generation of quota fields is read into the same values."""
    assert hints(**fields) == ServerHints(None, tuple(expected))


@pytest.mark.parametrize("draft", ["draft-11", "draft-7", "draft-6"])
def test_what_our_own_middlewares_write(draft):
    """The fields that limitkeeper's middlewares write are read back with the same numbers."""
    evaluation = RequestSequence(FixedWindow("10/min"), headers=Headers(wire=draft)).after(4)
    (quota,) = hints(**dict(text_fields(evaluation))).quotas
    assert (quota.remaining, quota.limit, quota.reset_us, quota.window_us) == (6, 10, 60 * S, 60 * S)


@pytest.mark.parametrize(
    "fields",
    [
        {"RateLimit": '"burst'},
        {"RateLimit": '"burst";r=-1;t=-1'},
        {"RateLimit": '"burst";r;t'},
        {"RateLimit": ";;;===,,,"},
        {"RateLimit": '"b";r=99999999999999999999;t=1'},
        {"RateLimit": "\x00\xff"},
        {"RateLimit": "(" * 1000},
        {"RateLimit": ", ".join(['"a";r=0;t=9'] * 17)},
        {"RateLimit": '"a";r=0;t=9' + " " * MAX_LENGTH},
        {"X-RateLimit-Remaining": "-1", "X-RateLimit-Reset": "-60"},
        {"X-RateLimit-Remaining": "none", "X-RateLimit-Reset": "NaN"},
        {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "inf"},
        {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "2026-13-45T99:00:00Z"},
        {"Retry-After": "-1"},
        {"Retry-After": "1e9"},
        {"Retry-After": "Mon, 99 Foo 9999 99:99:99 GMT"},
        {"Retry-After": "x" * 5000},
    ],
)
def test_malformed_fields_have_no_wait(fields):
    """Fields that are malformed, negative or too long give no wait."""
    assert hints(**fields).exhausted_us is None


def test_huge_values_are_clamped():
    """The longest wait that is read is 400 days, in every form."""
    assert hints(Retry_After="999999999999999").retry_after_us == MAX_DELAY_US
    assert hints(Retry_After="Fri, 31 Dec 9999 23:59:59 GMT").retry_after_us == MAX_DELAY_US
    for text in ("999999999", "99999999999999", "999999999h", "9999-12-31T23:59:59Z"):
        assert parse_reset(text, NOW_US) == MAX_DELAY_US


@pytest.mark.parametrize(
    "text", ["Sat, 10 Jan 2026 12:00:09 GMT", "Saturday, 10-Jan-26 12:00:09 GMT", "Sat Jan 10 12:00:09 2026"]
)
def test_the_three_forms_of_an_http_date(text):
    """Retry-After is read in every form of an HTTP-date, and a date in the past is no wait."""
    assert hints(Retry_After=text).retry_after_us == 9 * S
    assert hints(Retry_After=text.replace("2026", "2025").replace("-26", "-25")).retry_after_us == 0


def test_fields_of_a_cached_response():
    """The quota of a response from a cache belongs to another client and is old; its Retry-After still counts."""
    assert hints(RateLimit='"a";r=0;t=9', Age="30", Retry_After="2") == ServerHints(2 * S, ())
    assert hints(RateLimit='"a";r=0;t=9', Age="0").quotas != ()


def test_no_more_fields_than_a_bound():
    """At most MAX_FIELDS fields are kept, and a response without any costs no dictionary."""
    raw = [(f"x-ratelimit-limit-{'a' * (i % 30)}{i}".encode(), b"1") for i in range(1000)]
    assert len(relevant_fields(raw)) == MAX_FIELDS
    assert relevant_fields([(b"Date", b"x"), (b"Content-Type", b"text/plain")]) == {}


tokens = st.from_regex(r"[a-z][a-z0-9_-]{0,8}", fullmatch=True)
strings = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=12)
numbers = st.integers(0, 10**12)


@settings(max_examples=scaled(60))
@given(st.lists(st.tuples(strings, st.dictionaries(tokens, st.one_of(numbers, strings), max_size=3)), min_size=1, max_size=4))
def test_structured_fields_are_read_as_http_sf_reads_them(items):
    """Every list of strings with parameters that http-sf serialises is parsed to the same names and values."""
    text = http_sf.ser([(name, parameters) for name, parameters in items])
    if len(text) <= MAX_LENGTH:
        found = [(one.value, one.parameters) for one in parse_items(text)]
        assert found == [(name, {key: str(value) for key, value in parameters.items()}) for name, parameters in items]


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_any_bytes_are_survived(first, second):
    """Whatever bytes a server sends in its fields, parsing them raises nothing, and no wait is negative."""
    raw = [(b"RateLimit", first), (b"ratelimit-policy", second), (b"x-ratelimit-reset", first), (b"x-ratelimit-remaining", b"0")]
    found = read_hints(relevant_fields([*raw, (b"Retry-After", second), (b"Date", first)]), NOW_US)
    assert found.exhausted_us is None or 0 <= found.exhausted_us <= MAX_DELAY_US
