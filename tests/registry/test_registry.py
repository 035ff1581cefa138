"""The registry: names, configurations, one store."""

import json

import pytest

from limitkeeper import AsyncLimiter, ConfigurationError, InvalidLimit, Limiter, MemoryStore, TokenBucket
from limitkeeper.registry import Registry
from limitkeeper.testing import ManualClock


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def registry(clock):
    return Registry("5/s", configurations={"slow": "1/s burst 2"}, store=MemoryStore(clock=clock))


def test_a_name_always_gives_the_same_limiter(registry):
    """Getting a name twice returns one object, whatever configuration the second call names."""
    assert registry.limiter("api") is registry.limiter("api", "slow") is registry["api"]


def test_the_default_configuration_is_used_without_a_name(registry):
    """Without a configuration the default one is used."""
    assert registry.limiter("api").limits == {"api": TokenBucket("5/s")}


def test_a_shared_configuration_is_used_by_its_name(registry):
    """Two limiters of one configuration have equal limits and separate states."""
    one, other = registry.limiter("mail", "slow"), registry.limiter("sms", "slow")
    assert str(one.limits["mail"]) == str(other.limits["sms"]) == "token bucket 1/s burst 2"
    assert [bool(one.hit("k")) for _ in range(3)] == [True, True, False]
    assert other.hit("k")


@pytest.mark.parametrize(
    "given",
    [TokenBucket("7/s"), "7/s", "token bucket 7/s", {"x": "7/s"}, ["7/s"], lambda: "7/s", lambda: TokenBucket("7/s")],
)
def test_limits_of_its_own_are_given_as_a_limiter_takes_them(registry, given):
    """A limit, a text, a mapping, a sequence, or a function that returns one of these."""
    assert [str(limit) for limit in registry.limiter("x", given).limits.values()] == ["token bucket 7/s burst 7"]


def test_a_function_for_the_limits_is_called_only_when_they_are_needed(registry):
    """For an existing name the function is not called again."""
    calls = []

    def limits():
        calls.append(1)
        return "7/s"

    for _ in range(3):
        registry.limiter("x", limits)
    assert calls == [1]


def test_an_unknown_configuration_lists_the_known_ones(registry):
    """A misspelt name lists the known ones, and makes nothing."""
    with pytest.raises(ConfigurationError, match=r"'slwo' \(known: slow, default\)"):
        registry.limiter("mail", "slwo")
    assert "mail" not in registry


def test_a_misspelt_limit_is_an_invalid_limit(registry):
    """A text that starts like a limit is read as one."""
    with pytest.raises(InvalidLimit, match="fortnight"):
        registry.limiter("mail", "5/fortnight")


def test_without_a_default_the_limits_are_required():
    """An empty registry requires a configuration."""
    with pytest.raises(ConfigurationError, match="'default'"):
        Registry().limiter("api")


def test_a_configuration_can_be_added_and_removed_at_any_time(registry):
    """A limiter made by a configuration stays when that changes or goes."""
    registry.add_configuration("fast", "100/s")
    made = registry.limiter("a", "fast")
    registry.add_configuration("fast", "200/s")
    assert registry.limiter("b", "fast").limits["b"].capacity == 200
    assert registry.remove_configuration("fast") == "200/s"
    assert registry.remove_configuration("fast") is None
    assert "fast" not in registry.configurations
    assert registry.limiter("a") is made
    assert made.limits["a"].capacity == 100


def test_the_default_can_be_set_by_its_name():
    """The default configuration is the one called "default"."""
    registry = Registry()
    registry.add_configuration("default", "9/s")
    assert registry.configuration() == "9/s"
    assert registry.limiter("api").limits["api"].capacity == 9


def test_the_default_is_said_once():
    """As an argument or by its name, not both."""
    with pytest.raises(ConfigurationError, match="twice"):
        Registry("5/s", configurations={"default": "6/s"})


@pytest.mark.parametrize("name", ["5/s", "token bucket 5", "9"])
def test_a_configuration_is_not_called_like_a_limit(registry, name):
    """Otherwise a name could not be distinguished from a limit."""
    with pytest.raises(ConfigurationError, match="reads as a limit"):
        registry.add_configuration(name, "5/s")


def test_a_wrong_configuration_is_found_when_it_is_added(registry):
    """When it is given, not at its first use."""
    with pytest.raises(InvalidLimit):
        registry.add_configuration("broken", "5/")
    with pytest.raises(ConfigurationError):
        registry.add_configuration("broken", 5)
    with pytest.raises(InvalidLimit):
        Registry("0/s")


@pytest.mark.parametrize("name", ["", None, 5])
def test_a_name_is_a_text(registry, name):
    """Names are texts that are not empty."""
    for ask in (
        registry.limiter,
        registry.remove,
        lambda n: registry.add(n, "5/s"),
        lambda n: registry.add_configuration(n, "5/s"),
    ):
        with pytest.raises(ConfigurationError, match="must be a non-empty string"):
            ask(name)


def test_all_limiters_share_one_store(registry):
    """A limiter made here keeps its state in the registry's store."""
    assert registry.limiter("a").store is registry.limiter("b", "slow").store is registry.store


def test_a_registry_opens_a_store_by_its_url_and_closes_it():
    """A store that the registry made is closed with it; one that it was given is not."""
    with Registry("5/s", store="memory://?max_keys=10") as registry:
        registry.limiter("a").hit("k")
        assert len(registry.store) == 1
    assert len(registry.store) == 0
    store = MemoryStore()
    with Registry("5/s", store=store) as registry:
        registry.limiter("a").hit("k")
    assert len(store) == 1


def test_a_store_is_a_store():
    """Anything else is refused where it is given."""
    with pytest.raises(ConfigurationError, match="store must be"):
        Registry("5/s", store=object())


def test_replacing_a_limiter_keeps_the_keys_state(registry):
    """Another rate under the same name starts with what is used now."""
    registry.limiter("api").hit("k", cost=4)
    before = registry.replace("api", "10/s")
    assert before.limits["api"].capacity == 5
    assert registry.limiter("api").peek("k").remaining == 6
    assert registry.limiter("api").peek("new").remaining == 10


def test_the_new_rate_fills_what_the_old_one_left(registry, clock):
    """A key's first use after replacing starts with what the old rate holds as used; from then on time counts at the new rate."""
    registry.limiter("api").hit("k", cost=5)
    registry.replace("api", TokenBucket("1/s burst 5"))
    clock.advance(0.4)
    assert registry.limiter("api").hit("k").remaining == 1
    clock.advance(2)
    assert registry.limiter("api").peek("k").remaining == 3


def test_replacing_takes_a_shared_configuration_too(registry):
    """A name of a configuration is enough."""
    registry.limiter("api")
    registry.replace("api", "slow")
    assert str(registry["api"].limits["api"]) == "token bucket 1/s burst 2"


def test_replacing_what_is_not_there_changes_nothing(registry):
    """Replace returns None, and adds nothing."""
    assert registry.replace("api", "10/s") is None
    assert "api" not in registry


def test_replacing_with_nonsense_changes_nothing(registry):
    """An error leaves the old limiter in place."""
    before = registry.limiter("api")
    with pytest.raises(InvalidLimit):
        registry.replace("api", "0/s")
    assert registry.limiter("api") is before


def test_a_finished_limiter_can_be_added_under_its_own_name(registry):
    """A limiter with a store of its own may join, and is then the one of that name."""
    own = Limiter("3/s", name="own")
    registry.add("own", own)
    assert registry.limiter("own") is own
    registry.add("more", "4/s")
    assert registry["more"].store is registry.store


def test_adding_under_a_taken_name_is_an_error(registry):
    """Add never overwrites."""
    registry.limiter("api")
    with pytest.raises(ConfigurationError, match="taken; use replace"):
        registry.add("api", "5/s")


def test_a_limiter_is_called_as_in_the_registry(registry):
    """Its state and its events carry that name, so another name is refused."""
    with pytest.raises(ConfigurationError, match="create it with name='api'"):
        registry.add("api", Limiter("5/s"))
    with pytest.raises(ConfigurationError, match="must return a Limiter"):
        registry.get_or_create("api", lambda: "5/s")


def test_removing_takes_the_limiter_and_leaves_the_state(registry):
    """A name that comes back has its earlier charges: removing does not evade a limit."""
    old = registry.limiter("api")
    old.hit("k", cost=5)
    assert registry.remove("api") is old
    assert registry.remove("api") is None
    assert registry.find("api") is None
    again = registry.limiter("api")
    assert again is not old
    assert not again.hit("k")


def test_find_answers_none_and_the_bracket_raises(registry):
    """As dict.get and dict[…] do."""
    assert registry.find("api") is None
    with pytest.raises(KeyError):
        registry["api"]


def test_iterating_while_others_change_does_no_harm(registry):
    """Iteration goes over the names that existed when it began, in order."""
    for name in ("a", "b", "c"):
        registry.limiter(name)
    seen = []
    for name in registry:
        seen.append(name)
        registry.limiter(name + name)
        registry.remove("b")
    assert seen == ["a", "b", "c"]
    assert list(registry.keys()) == ["a", "c", "aa", "bb", "cc"]
    assert len(registry) == 5


def test_a_registry_reads_like_a_mapping(registry):
    """Names, limiters, both, and as a dict."""
    a, b = registry.limiter("a"), registry.limiter("b")
    assert list(registry.values()) == [a, b]
    assert list(registry.items()) == [("a", a), ("b", b)]
    assert dict(registry) == {"a": a, "b": b}


def test_a_snapshot_is_plain_data(registry):
    """Limits as text and the counters, ready for JSON."""
    registry.limiter("api").hit("k", cost=5)
    registry.limiter("api").hit("k")
    registry.limiter("both", {"user": "5/s", "all": "fixed window 9/min"})
    shown = json.loads(json.dumps(registry.snapshot()))
    assert shown["api"]["limits"] == {"api": "token bucket 5/s burst 5"}
    assert shown["api"]["stats"] == {"allowed": 1, "refused": 1, "waiting": 0, "keys": 1, "overflow": 0}
    assert shown["both"]["limits"] == {"user": "token bucket 5/s burst 5", "all": "fixed window 9/min"}


def test_both_colours_are_there_and_a_name_is_of_one(registry):
    """Getting a name of the other kind (sync or async) is an error with the reason."""
    assert isinstance(registry.async_limiter("a"), AsyncLimiter)
    assert isinstance(registry.limiter("b"), Limiter)
    with pytest.raises(ConfigurationError, match=r"async_limiter\('a'\)"):
        registry.limiter("a")
    with pytest.raises(ConfigurationError, match=r"limiter\('b'\)"):
        registry.async_limiter("b")


def test_replacing_keeps_the_colour(registry):
    """An AsyncLimiter is replaced by an AsyncLimiter."""
    registry.async_limiter("a")
    registry.replace("a", "7/s")
    assert isinstance(registry["a"], AsyncLimiter)
    assert registry.async_limiter("a").limits["a"].capacity == 7


def test_two_registries_over_one_store_share_state_between_colours(registry):
    """The same name in another registry on the same store is the same state."""
    other = Registry("5/s", store=registry.store)
    registry.limiter("api").hit("k", cost=3)
    assert other.limiter("api").peek("k").remaining == 2
