"""A shard that is lost without a plan: its keys fail, or start again on the next shard, and other keys are decided as usual."""

from __future__ import annotations

import pytest
from shards import FarShard, key_on

from limitkeeper import ConfigurationError, Limiter, StoreTimeout, StoreUnavailable
from limitkeeper.stores.sharded import ShardedStore

KEYS = [f"user:{i}" for i in range(300)]


@pytest.fixture
def shards(clock):
    return {name: FarShard(clock) for name in "abcd"}


def lives_on(sharded, name):
    return [key for key in KEYS if sharded.home_of(key) == name]


def test_the_keys_of_a_lost_shard_fail_and_no_others(make, shards):
    """By default a key whose shard can't be reached raises StoreUnavailable, which names the shard; all others are answered."""
    sharded = ShardedStore(shards, hot=False)
    limiter = make("5/h", store=sharded)
    lost = lives_on(sharded, "b")
    shards["b"].down = True
    for key in KEYS:
        if key in lost:
            with pytest.raises(StoreUnavailable, match=r"shard 'b': no answer .*rehash"):
                limiter.hit(key)
        else:
            assert limiter.hit(key)
    with pytest.raises(StoreUnavailable):
        limiter.hit_many(lost[:3])
    shards["b"].down = None
    assert all(limiter.hit(key).remaining == 4 for key in lost)


@pytest.mark.parametrize("verb", ["hit", "peek", "acquire", "reset", "refund", "hit_many"])
def test_every_verb_names_the_lost_shard(make, shards, verb):
    """Whatever the verb, the error is limitkeeper's own and names the shard."""
    sharded = ShardedStore(shards, hot=False)
    limiter = make("5/h", store=sharded)
    shards["c"].down = True
    key = key_on(sharded, "c")
    with pytest.raises(StoreUnavailable, match="shard 'c'"):
        getattr(limiter, verb)([key] if verb == "hit_many" else key)


def test_with_rehash_lost_keys_start_again_on_the_next_shard(make, shards):
    """on_loss="rehash": each key of a lost shard gets one more burst, once, on the next shards; all other keys stay."""
    sharded = ShardedStore(shards, on_loss="rehash", hot=False)
    limiter = make("fixed window 5/400d", store=sharded)
    homes = {key: sharded.home_of(key) for key in KEYS}
    assert all(limiter.hit(key, cost=5) for key in KEYS)
    shards["b"].down = True
    again = {key: sum(bool(limiter.hit(key)) for _ in range(7)) for key in KEYS}
    assert again == {key: 5 if homes[key] == "b" else 0 for key in KEYS}
    assert sharded.lost == ["b"]
    assert {sharded.home_of(key) for key in lives_on_before(homes, "b")} == {"a", "c", "d"}
    assert all(sharded.home_of(key) == homes[key] for key in KEYS if homes[key] != "b")


def lives_on_before(homes, name):
    return [key for key, home in homes.items() if home == name]


def test_a_lost_shard_is_not_called_any_more(make, shards):
    """A lost shard is not called until it is restored."""
    sharded = ShardedStore(shards, on_loss="rehash", hot=False)
    limiter = make("5/h", store=sharded)
    shards["b"].down = True
    for key in KEYS:
        limiter.hit(key)
    assert len(shards["b"].calls) == 1


def test_two_losses_are_two_bursts_at_most(make, shards):
    """The bound is per loss: a key whose next shard is lost too starts again once more, and no key more often than that."""
    sharded = ShardedStore(shards, on_loss="rehash", hot=False)
    limiter = make("fixed window 5/400d", store=sharded)
    admitted = {key: sum(bool(limiter.hit(key)) for _ in range(7)) for key in KEYS[:80]}
    for name in "bc":
        shards[name].down = True
        for key in admitted:
            admitted[key] += sum(bool(limiter.hit(key)) for _ in range(7))
    assert {*admitted.values()} == {5, 10, 15}
    assert max(admitted.values()) == 15


def test_a_restored_shard_gets_its_keys_back_with_what_they_used_elsewhere(make, shards):
    """restore() hands over from the replacing shards: coming back is no second burst."""
    sharded = ShardedStore(shards, on_loss="rehash", hot=False)
    limiter = make("fixed window 5/400d", store=sharded)
    key = key_on(sharded, "b")
    shards["b"].down = True
    assert limiter.hit(key, cost=4)
    shards["b"].down = None
    sharded.restore("b")
    assert (sharded.home_of(key), sharded.lost) == ("b", [])
    assert [bool(limiter.hit(key)) for _ in range(2)] == [True, False]


def test_decisions_on_several_shards_survive_a_loss(make, shards):
    """A decision of which one shard is lost is repeated on the remaining ones, all or nothing."""
    sharded = ShardedStore(shards, on_loss="rehash", hot=False)
    limiter = make({"user": "5/h", "tenant": "5/h"}, store=sharded)
    keys = {"user": key_on(sharded, "a"), "tenant": key_on(sharded, "b")}
    shards["b"].down = True
    assert limiter.hit(keys)
    assert [part.remaining for part in limiter.peek(keys).decisions] == [4, 4]
    assert all(limiter.hit_many([{"user": key, "tenant": key} for key in KEYS]))


def test_many_keys_with_a_loss_are_decided_once_each(make, shards):
    """hit_many over a lost shard: keys that the others have decided are not charged a second time."""
    sharded = ShardedStore(shards, on_loss="rehash", hot=False)
    limiter = make("5/h", store=sharded)
    shards["b"].down = True
    assert {one.remaining for one in limiter.hit_many(KEYS)} == {4}
    assert {limiter.peek(key).remaining for key in KEYS} == {4}


def test_the_loss_of_all_shards_is_an_error(make, shards):
    """The last shard lost is the end: StoreUnavailable, not a loop."""
    sharded = ShardedStore(shards, on_loss="rehash", hot=False)
    limiter = make("5/h", store=sharded)
    for shard in shards.values():
        shard.down = True
    with pytest.raises(StoreUnavailable, match="every shard is lost"):
        limiter.hit("user:1")


def test_a_slow_shard_is_not_lost(make, shards):
    """StoreTimeout goes to the caller: a shard that is late may have charged, and its keys stay."""
    sharded = ShardedStore(shards, on_loss="rehash", hot=False)
    limiter = make("5/h", store=sharded)
    key = key_on(sharded, "b")
    shards["b"].down = "slow"
    with pytest.raises(StoreTimeout):
        limiter.hit(key)
    assert (sharded.lost, sharded.home_of(key)) == ([], "b")


def test_a_lost_shard_can_be_removed_for_good(shards, clock):
    """A shard that will not come back is removed without a call of it."""
    sharded = ShardedStore(shards, on_loss="rehash", hot=False)
    limiter = Limiter("5/h", store=sharded)
    shards["b"].down = True
    limiter.hit_many(KEYS)
    asked = len(shards["b"].calls)
    sharded.remove("b")
    assert (sharded.lost, sorted(sharded.shards), len(shards["b"].calls)) == ([], ["a", "c", "d"], asked)


def test_on_loss_has_two_values(shards):
    """`on_loss` is one of two values."""
    with pytest.raises(ConfigurationError, match="'fail' or 'rehash'"):
        ShardedStore(shards, on_loss="open")


@pytest.mark.parametrize("verb", ["cancel", "refund"])
def test_what_gave_back_does_so_once_when_another_shard_is_lost_meanwhile(make, shards, verb):
    """A charge on two shards, of which one is lost as it is given back, gives 3 back on the other, not 6."""
    sharded = ShardedStore(shards, on_loss="rehash", hot=False)
    limiter = make({"user": "token bucket 1/h burst 10", "tenant": "token bucket 1/h burst 10"}, store=sharded)
    key = {"user": key_on(sharded, "a"), "tenant": key_on(sharded, "b")}
    limiter.hit(key, 5)
    reservation = limiter.reserve(key, 3)
    shards["b"].failing.add("give_back")
    reservation.cancel() if verb == "cancel" else limiter.refund(key, 3)
    assert sharded.lost == ["b"]
    assert limiter.peek({**key, "tenant": None}).remaining == 5
