"""Consistent hashing: the home of each key, how even the shares are, and how little moves when a shard is added or removed."""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest

from limitkeeper import ConfigurationError
from limitkeeper.stores.sharded.slots import SLOTS, homes, slot_of

FAMILIES = {
    "numbers": [str(i) for i in range(50_000)],
    "users": [f"user:{i}" for i in range(50_000)],
    "padded": [f"tenant-{i:08d}" for i in range(50_000)],
    "addresses": [f"10.{i >> 16 & 255}.{i >> 8 & 255}.{i & 255}" for i in range(50_000)],
    "digests": [hashlib.md5(str(i).encode()).hexdigest() for i in range(50_000)],
    "every other": [f"{2 * i:x}" for i in range(50_000)],
}


def members(*names: str, **weights: float) -> tuple[tuple[str, float], ...]:
    return tuple((name, weights.get(name, 1.0)) for name in names)


def shares(keys: list[str], who: tuple[tuple[str, float], ...]) -> dict[str, float]:
    table = homes(who)
    return {name: count / len(keys) for name, count in Counter(table[slot_of(key)] for key in keys).items()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [2, 4, 10])
def test_shards_have_even_shares_of_any_kind_of_keys(family, size):
    """Whatever the form of the keys, every shard has its share of them within a tenth."""
    found = shares(FAMILIES[family], members(*[f"shard {i}" for i in range(size)]))
    assert len(found) == size
    assert all(0.9 / size < share < 1.1 / size for share in found.values()), found


@pytest.mark.parametrize("size", [1, 3, 4, 9])
def test_a_new_shard_takes_its_share_and_nothing_else_moves(size):
    """Adding one to n shards moves 1 / (n + 1) of the keys, all of them to the new shard."""
    old = members(*[f"shard {i}" for i in range(size)])
    before, after = homes(old), homes((*old, ("new", 1.0)))
    keys = FAMILIES["users"]
    moved = [key for key in keys if before[slot_of(key)] != after[slot_of(key)]]
    assert {after[slot_of(key)] for key in moved} == {"new"}
    assert 0.9 / (size + 1) < len(moved) / len(keys) < 1.1 / (size + 1)


@pytest.mark.parametrize("size", [2, 4, 10])
def test_a_shard_that_goes_leaves_its_share_to_the_others_evenly(size):
    """Removing one of n shards moves only its own keys, 1 / n of all, and no other shard gets all of them."""
    names = [f"shard {i}" for i in range(size)]
    before, after = homes(members(*names)), homes(members(*names[1:]))
    moved = [slot for slot in range(SLOTS) if before[slot] != after[slot]]
    assert moved == [slot for slot in range(SLOTS) if before[slot] == "shard 0"]
    assert 0.9 / size < len(moved) / SLOTS < 1.1 / size
    heirs = Counter(after[slot] for slot in moved)
    assert all(count > 0.7 * len(moved) / (size - 1) for count in heirs.values())
    assert len(heirs) == size - 1


def test_weights_are_shares():
    """A shard of weight 3 beside two of weight 1 has three fifths of the keys; taking it out moves only these."""
    found = shares(FAMILIES["digests"], members("small", "large", "other", large=3.0))
    assert found["large"] == pytest.approx(0.6, abs=0.03)
    assert found["small"] == pytest.approx(0.2, abs=0.02)
    before, after = homes(members("small", "large", "other", large=3.0)), homes(members("small", "other"))
    assert all(before[slot] == after[slot] for slot in range(SLOTS) if before[slot] != "large")


def test_the_order_of_the_shards_means_nothing():
    """A shard is identified by its name: in whatever order they are listed, keys live where they did."""
    assert homes(members("a", "b", "c")) == homes(members("c", "a", "b"))


def test_a_key_lives_where_it_did_in_any_process_and_version(python):
    """Homes are fixed for ever: these were recorded once, and another process with another hash seed agrees."""
    expected = {"user:42": 8829, "": 0, "é": 7438, "\ud800": 11431, "\0": 1315, "k" * 10_000: 11718}
    assert {key: slot_of(key) for key in expected} == expected
    known = [homes(members("a", "b", "c"))[slot] for slot in (0, 1, 2, 8191, 16383)]
    code = """
        from limitkeeper.stores.sharded.slots import homes, slot_of
        table = homes((("a", 1.0), ("b", 1.0), ("c", 1.0)))
        print(slot_of("user:42"), *[table[slot] for slot in (0, 1, 2, 8191, 16383)])
    """
    assert python(code).stdout.split() == ["8829", *known]
    assert known == ["a", "b", "c", "c", "b"]


def test_there_is_always_a_shard():
    """Without a member there is no home, which is an error."""
    with pytest.raises(ConfigurationError, match="at least one"):
        homes(())
