"""The sharding example prints what it promises: a fifth moves, no counter is lost, and a viral user harms no other."""

from __future__ import annotations

import re

import sharding


def test_a_fifth_moves_and_every_counter_is_kept():
    """A fifth shard takes about a fifth of the users, a removed shard moves only its own, and no counter starts anew."""
    lines = list(sharding.moving())
    moved = [re.search(r"moved +(\d+\.\d)%, all of them (to centre|from north)", line) for line in lines]
    found = [(float(match[1]), match[2]) for match in moved if match]
    assert [way for _, way in found] == ["to centre", "from north"]
    assert all(18 < share < 22 for share, _ in found)
    assert sum("10000 of 10000 unchanged" in line for line in lines) == 2


def test_the_viral_user_costs_its_home_a_tenth_of_an_operation_a_decision():
    """Pinned, every hit is a call of the home; leased, at most one in ten is, and no more is admitted."""
    hits, admitted, asked = sharding.viral(hot=False)
    assert asked == hits
    leased = sharding.viral(hot=True)
    assert leased[2] <= 0.1 * hits
    assert 0.9 * admitted <= leased[1] <= admitted


def test_neighbours_of_the_viral_user_are_unharmed():
    """The others' 99th percentile beside a leased viral user is what it is without that user; pinned, it is a thousandfold."""
    absent, pinned, leased = (sharding.neighbours(way, seconds=0.5) for way in ("absent", "pinned", "leased"))
    assert leased <= 1.25 * absent
    assert pinned > 100 * absent
