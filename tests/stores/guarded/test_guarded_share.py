"""Shares: a part of a limit that a node may admit by itself."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limitkeeper import ConfigurationError
from limitkeeper.algorithms.limit_parser import named_limits
from limitkeeper.stores.guarded.share import parse_share, shared_limit
from limitkeeper.testing.strategies import limits


def part_of(text: str, share: object) -> str:
    (limit,) = named_limits(text, None).values()
    return str(shared_limit(limit, parse_share(share)))


@pytest.mark.parametrize(
    ("limit", "share", "expected"),
    [
        ("token bucket 100/s burst 200", 4, "token bucket 25/s burst 50"),
        ("token bucket 5/s burst 10", 4, "token bucket 5/4s burst 2"),
        ("token bucket 5/s burst 10 initial 3", 2, "token bucket 5/2s burst 5 initial 1"),
        ("token bucket 1/h burst 1", 4, "token bucket 1/4h burst 1"),
        ("leaky bucket 5/s capacity 10", "1/4", "leaky bucket 5/4s capacity 2"),
        ("leaky bucket queue 5/s capacity 10", 0.5, "leaky bucket queue 5/2s capacity 5"),
        ("leaky bucket queue 5/s", 2, "leaky bucket queue 5/2s"),
        ("fixed window 100/min", 4, "fixed window 25/min"),
        ("fixed window 10/min", 4, "fixed window 2/min"),
        ("fixed window 2/min", 4, "fixed window 1/2min"),
        ("fixed window 100/min align first", 3, "fixed window 33/min align first"),
        ("sliding window log 7/s", Fraction(2, 3), "sliding window log 4/s"),
        ("sliding window counter 100/h", "0.1", "sliding window counter 10/h"),
        ("token bucket 5/s burst 10", 1, "token bucket 5/s burst 10"),
        ("token bucket 1/400d burst 5", 4, "token bucket 1/400d burst 1"),
    ],
)
def test_a_part_of_a_limit(limit, share, expected):
    """Rates are divided exactly, sizes are rounded down and at least 1; the rule and its alignment stay."""
    assert part_of(limit, share) == expected


@pytest.mark.parametrize("share", [4, "4", "1/4", 0.25, "0.25", Fraction(1, 4), " 1/4 "])
def test_a_share_may_be_said_in_many_ways(share):
    """A number of nodes, a fraction, a decimal: all the same quarter."""
    assert parse_share(share) == Fraction(1, 4)


@pytest.mark.parametrize("share", [0, -1, 1.5, "5/4", "0", "a quarter", "1/0", None, True, [4], float("nan"), float("inf")])
def test_an_invalid_share_names_the_right_form(share):
    """Nothing, more than everything, and other types are errors that show a valid share."""
    with pytest.raises(ConfigurationError, match="share=4"):
        parse_share(share)


@given(limits(), st.integers(2, 50))
def test_no_share_is_more_than_its_part(limit, nodes):
    """A share's long-run rate is at most its part of the limit's, and its size too, or else one."""
    part = shared_limit(limit, Fraction(1, nodes))
    if limit.period * nodes <= 400 * 86_400 * 10**6:
        assert Fraction(part.count, part.period) * nodes <= Fraction(limit.count, limit.period)
    if limit.bounded or limit.capacity < 10**9:
        assert part.capacity <= max(1, limit.capacity // nodes) or "queue" in str(limit)
