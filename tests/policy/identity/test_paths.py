"""Path normalization: all encodings of a path have one canonical form, and any input has one."""

from __future__ import annotations

import re
import sys
import time
from string import ascii_lowercase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import effort
from limitkeeper.policy.identity.paths import normalize_path, readings

STEADY = effort(300)

ENCODINGS = [
    ("/checkout", "/checkout"),
    ("/Checkout", "/checkout"),
    ("//checkout", "/checkout"),
    ("///checkout//", "/checkout"),
    ("/checkout/", "/checkout"),
    ("/./checkout/.", "/checkout"),
    ("/shop/../checkout", "/checkout"),
    ("/../../checkout", "/checkout"),
    ("%2Fcheckout", "/checkout"),
    ("/%2Fcheckout", "/checkout"),
    ("/%63heckout", "/checkout"),
    ("/%2563heckout", "/checkout"),
    ("/%252563heckout", "/checkout"),
    ("/%25252525252525252563heckout", "/checkout"),
    ("/%%36%33heckout", "/checkout"),
    ("/" + "%" * 3 + "33%36%%33%33heckout", "/checkout"),
    ("/" + "%" * 4 + "33%33%%33%36%%%33%33%%33%33heckout", "/63heckout"),
    ("/check%00out", "/checkout"),
    ("/checkout\x00", "/checkout"),
    ("/check\r\nout", "/checkout"),
    ("/%\x006\x003heckout", "/checkout"),
    ("/checkout%20", "/checkout"),
    ("\\checkout", "/checkout"),
    ("/shop\\..\\checkout", "/checkout"),
    ("/shop/..%5ccheckout", "/checkout"),
    ("/shop/..;/checkout", "/checkout"),
    ("/checkout;jsessionid=1", "/checkout"),
    ("/;x=1/checkout", "/checkout"),
    ("/checkout%3Fa=1", "/checkout"),
    ("/checkout%23top", "/checkout"),
    ("/chec\u212aout", "/checkout"),
    ("http://shop.example.com/checkout", "/checkout"),
    ("checkout", "/checkout"),
    ("", "/"),
    ("/", "/"),
    ("//", "/"),
    ("/..", "/"),
    ("*", "/*"),
    ("/caf%C3%A9", "/café"),
    ("/CAFÉ", "/café"),
    ("/.well-known/x", "/.well-known/x"),
    ("/a.b/c..d/...", "/a.b/c..d/..."),
    ("/100%", "/100%"),
    ("/50%25", "/50%"),
    ("/shop.Orders/Place", "/shop.orders/place"),
]


@pytest.mark.parametrize(("sent", "normalized"), ENCODINGS)
def test_a_path_is_normalized(sent, normalized):
    """Each encoding has the canonical form, which is also its first reading."""
    assert normalize_path(sent) == normalized
    assert readings(sent)[0] == normalized


def encoded(character: str, depth: int) -> str:
    for _ in range(depth):
        character = "".join(f"%{byte:02X}" if at == 0 else chr(byte) for at, byte in enumerate(character.encode()))
    return character


nothing = st.sampled_from(["/", "//", "/./", "/%2e/", "/x/../", "/x/%2E%2e/", "/x/..;a/", "\\", "%2F", "%252f", "%5C", "/;v=1/"])


def spelt(character: str, upper: bool, depth: int) -> str:
    return encoded(character.upper() if upper else character, depth)


@STEADY
@given(
    st.lists(nothing, min_size=1, max_size=5),
    st.lists(st.tuples(st.booleans(), st.integers(0, 4), st.sampled_from(["", "", "\x00", "\n", "%00"])), min_size=8, max_size=8),
    st.sampled_from(["", "/", "//", "/.", ";a=b", "%20", "%3Fq", "/x/..", "/%2e/"]),
)
def test_every_encoding_of_a_path_is_that_path(before, letters, after):
    """Slashes, dots, cases, control characters and encodings of any depth, in any mixture: it is /checkout."""
    word = "".join(
        spelt(character, upper, depth) + junk for character, (upper, depth, junk) in zip("checkout", letters, strict=True)
    )
    assert normalize_path("".join(before) + word + after) == "/checkout"


fragments = st.lists(st.one_of(st.sampled_from(list("/\\%.;?# 2f5cE\x00\n:")), st.text(max_size=3), st.characters()), max_size=40)


@STEADY
@given(fragments.map("".join))
def test_normalizing_is_idempotent(path):
    """For any input the result is a path, and normalizing it again changes nothing."""
    once = normalize_path(path)
    assert once == "/" or (once.startswith("/") and not once.endswith("/") and "//" not in once)
    assert not {".", ".."} & set(once.split("/"))
    assert normalize_path(once) == once
    assert readings(path)[0] == once


def test_every_character_has_one_spelling():
    """Each character of Unicode, alone in a segment, is normalized idempotently."""
    for first in range(0, sys.maxunicode + 1, 1024):
        once = normalize_path("".join(f"/a{chr(number)}" for number in range(first, first + 1024) if chr(number) not in "?#"))
        assert normalize_path(once) == once


def test_case_is_folded_as_by_regular_expressions():
    """Whatever a pattern that ignores case (a route of Django) takes for an ASCII letter is that letter."""
    matches = re.compile("[a-z]", re.I).fullmatch
    for letter in filter(matches, map(chr, range(sys.maxunicode + 1))):
        taken = [one for one in ascii_lowercase if re.fullmatch(one, letter, re.I)]
        assert [normalize_path(f"/x{letter}")[2:]] == taken


@pytest.mark.parametrize(
    ("sent", "taken"),
    [
        ("/checkout", {"/checkout"}),
        ("/Checkout/", {"/checkout"}),
        ("/search/../checkout", {"/checkout", "/search/../checkout"}),
        ("/search/%2e%2e/checkout", {"/checkout", "/search/../checkout", "/search/%2e%2e/checkout"}),
        ("/a%2Fb", {"/a/b", "/a%2fb"}),
        ("/healthz;/../checkout", {"/checkout", "/healthz/../checkout", "/healthz;/../checkout"}),
    ],
)
def test_a_path_that_can_be_read_in_several_ways_is(sent, taken):
    """An application may not resolve what a gateway does: rules are matched against every reading."""
    assert set(readings(sent)) == taken


@pytest.mark.parametrize(
    "segment", ["", ";", ";a", "%20", "%3f", "?", "%23x", "%2e%2e%2e", "%01", "\\", "a\\b", "%252e%252e", "%25", "%00"]
)
@pytest.mark.parametrize("before", ["/checkout/{}/..", "/static/{}/../../checkout", "/checkout/x/{}/../.."])
def test_dots_may_be_resolved_before_anything_is_removed(before, segment):
    """nginx resolves dots where every segment counts, and calls with the target as it was sent: what it serves is a reading."""
    assert "/checkout" in readings(before.format(segment))


@pytest.mark.parametrize(
    "path",
    [
        "/" + "a" * 100_000,
        "/a/.." * 20_000,
        "%" * 100_000,
        "%25" * 33_000 + "63heckout",
        "%" + "25" * 50_000 + "2F",
        "%" * 50_000 + "41" * 25_000,
        "%2" * 50_000,
        "/" * 100_000,
        "\\" * 50_000 + "%5c" * 16_000,
        "é" * 50_000,
        ";" * 100_000,
        "/%C3" * 25_000,
    ],
    ids=range(12),
)
def test_a_long_path_takes_bounded_time(path):
    """A path of 100 kB is normalized in milliseconds."""
    began = time.process_time()
    once = normalize_path(path)
    took = time.process_time() - began
    assert normalize_path(once) == once
    assert took < 0.5
