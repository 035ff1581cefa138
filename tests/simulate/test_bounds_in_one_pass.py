"""The bounds of histories are checked in one pass over time, and agree with the definition over all intervals."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from effort import effort
from limitkeeper import SlidingWindowLog, TokenBucket
from limitkeeper.testing.admission_bounds import between, check_bound, intervals

COSTS = st.lists(st.tuples(st.integers(0, 3_000_000), st.integers(1, 5)), max_size=12)


def holds(limit, admitted, returned, extra):
    try:
        check_bound(limit, admitted, returned, extra)
    except AssertionError:
        return False
    return True


@effort(200)
@given(admitted=COSTS, returned=COSTS, extra=st.integers(0, 3))
def test_a_bucket_is_checked_as_over_all_pairs_of_moments(admitted, returned, extra):
    """One pass fails exactly when some interval admits more than burst + rate · T + extra, net of refunds in it."""
    limit = TokenBucket("3/s burst 4")
    rate = Fraction(3, 1_000_000)
    most = max(
        (
            between(admitted, first, last) - between(returned, first, last) - rate * (last - first + bool(returned))
            for first, last in intervals(admitted)
        ),
        default=0,
    )
    assert holds(limit, admitted, returned, extra) == (most <= 4 + extra)


@effort(200)
@given(admitted=COSTS, returned=COSTS, extra=st.integers(0, 3))
def test_a_log_is_checked_as_over_all_windows(admitted, returned, extra):
    """One pass fails exactly when some window (t − W, t] admits more than the count and extra, net of refunds in it."""
    limit = SlidingWindowLog("4/s")
    windows = [(last - 999_999, last) for last, _ in admitted]
    most = max((between(admitted, *window) - between(returned, *window) for window in windows), default=0)
    assert holds(limit, admitted, returned, extra) == (most <= 4 + extra)
