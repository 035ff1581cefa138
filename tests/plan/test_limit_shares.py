"""Shares of a limit: their sum never exceeds it, except with a factor for over-subscription."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limitkeeper import ConfigurationError
from limitkeeper.plan import split

amounts = st.one_of(
    st.integers(1, 400).map(str),
    st.integers(1, 120).map(lambda n: f"{n}%"),
    st.just("rest"),
    st.decimals("0.01", "300", places=2).map(str),
)


@given(
    limit=st.integers(1, 500),
    shares=st.dictionaries(st.sampled_from("abcdef"), amounts, min_size=1),
    factor=st.integers(100, 300),
)
def test_shares_never_exceed_the_limit(limit, shares, factor):
    """Whatever the shares, they add up to at most the limit × the factor, or are refused; `rest` is all that is left."""
    factor = Fraction(factor, 100)
    try:
        found = split(limit, shares, factor)
    except ConfigurationError:
        return
    assert sum(share.rate for share in found.shares) <= limit * factor
    assert all(share.rate > 0 for share in found.shares)
    assert found.oversubscribed == (found.total > limit)
    assert sum(found.burst_of(share, 1000) for share in found.shares) <= 1000 + len(found.shares)
    if "rest" in shares.values():
        assert limit * factor - found.total < 1


def test_percentages_are_of_the_limit():
    """60 % of 350 are 210, and the rest is 140."""
    assert [share.rate for share in split(350, "a=60%,b=rest").shares] == [210, 140]


def test_an_unassigned_part_is_reported():
    """Shares may leave a part of the limit unassigned."""
    found = split(350, "a=100")
    assert found.unassigned == 250
    assert "250 RPS are assigned to no share." in found.reasons()


def test_oversubscription_is_explicit_and_named():
    """400 of 350 RPS are refused, and with a factor of 1.2 allowed and named."""
    with pytest.raises(ConfigurationError, match=r"add up to 400 RPS and exceed the limit of 350 RPS.*above 1\.14"):
        split(350, "a=200,b=200")
    found = split(350, "a=200,b=200", 1.2)
    assert found.oversubscribed
    assert "Over-subscribed on request: the shares add up to 400 RPS, 1.14 × the limit (at most 1.2 ×)" in " ".join(
        found.reasons()
    )


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ("", "expected shares"),
        ("a", "'a' is no share"),
        ("a=lots", "has no amount"),
        ("a=1,a=2", "given twice"),
        ("a=rest,b=rest", "both take the rest"),
        ("a=350,b=rest", "nothing is left for 'b'"),
        ("a=0", "must be greater than 0"),
        ("a=-5", "has no amount"),
        ("a=0.0001", "below one request per hour"),
    ],
)
def test_impossible_shares_are_refused_with_the_remedy(shares, message):
    """Each impossible split is an error with the mistake and the remedy."""
    with pytest.raises(ConfigurationError, match=message):
        split(350, shares)


def test_a_factor_below_one_is_no_oversubscription():
    """A sum below the limit is the purpose of the margin."""
    with pytest.raises(ConfigurationError, match="at least 1"):
        split(350, "a=rest", 0.5)
