"""RateLimiterRegistry: RateLimiters under names."""

import threading

import pytest

from limitkeeper import ConfigurationError, MemoryStore
from limitkeeper.registry import Registry
from limitkeeper.resilience4j import RateLimiter, RateLimiterConfig, RateLimiterRegistry
from limitkeeper.testing import ManualClock

SLOW = RateLimiterConfig(1, "1s", 0)
FAST = RateLimiterConfig(100, "1s", 0)


@pytest.fixture
def registry():
    return RateLimiterRegistry.of({"default": SLOW, "fast": FAST}, store=MemoryStore(clock=ManualClock()))


def test_a_registry_of_defaults_has_resilience4js_config():
    """Without a configuration the defaults are those of RateLimiterConfig."""
    assert RateLimiterRegistry.of_defaults().rate_limiter("a").config == RateLimiterConfig()


def test_a_registry_of_one_config_uses_it_for_all():
    """The one configuration is the default."""
    registry = RateLimiterRegistry.of(SLOW)
    assert registry.default_config == registry.rate_limiter("a").config == SLOW


def test_a_mapping_without_a_default_has_the_defaults():
    """Named configurations do not change the default."""
    assert RateLimiterRegistry.of({"slow": SLOW}).default_config == RateLimiterConfig()


def test_a_rate_limiter_is_made_by_a_config_a_name_or_a_function(registry):
    """And an existing name is returned as it is."""
    assert registry.rate_limiter("a").config == SLOW
    assert registry.rate_limiter("b", "fast").config == FAST
    assert registry.rate_limiter("c", FAST).config == FAST
    assert registry.rate_limiter("d", lambda: FAST).config == FAST
    assert registry.rate_limiter("a", "fast") is registry.rate_limiter("a") is registry.find("a")
    assert [limiter.name for limiter in registry.all_rate_limiters()] == ["a", "b", "c", "d"]


def test_an_unknown_config_name_lists_the_known_ones(registry):
    """And makes nothing."""
    with pytest.raises(ConfigurationError, match=r"'fats' \(known: default, fast\)"):
        registry.rate_limiter("a", "fats")
    assert registry.find("a") is None


def test_fifty_threads_get_one_rate_limiter_and_the_supplier_runs_once(registry):
    """Get-or-create is atomic for a name."""
    calls, got, ready = [], [], threading.Barrier(50)

    def supply():
        calls.append(1)
        return FAST

    def ask():
        ready.wait(60)
        got.append(registry.rate_limiter("a", supply))

    threads = [threading.Thread(target=ask) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert calls == [1]
    assert len(got) == 50
    assert len(set(map(id, got))) == 1


def test_the_default_is_given_when_the_registry_is_made(registry):
    """Its name can be neither added nor removed later."""
    with pytest.raises(ConfigurationError, match="'default'"):
        registry.add_configuration("default", FAST)
    with pytest.raises(ConfigurationError, match="'default'"):
        registry.remove_configuration("default")
    assert registry.default_config == SLOW


def test_configurations_come_and_go(registry):
    """Add, look up, remove; what was made stays."""
    registry.add_configuration("new", FAST)
    made = registry.rate_limiter("a", "new")
    assert registry.configuration("new") == registry.configurations["new"] == FAST
    assert registry.remove_configuration("new") == FAST
    assert registry.remove_configuration("new") is None
    assert registry.rate_limiter("a") is made
    with pytest.raises(ConfigurationError):
        registry.rate_limiter("b", "new")


@pytest.mark.parametrize("wrong", ["5/s", None, {"limit_for_period": 5}])
def test_a_configuration_is_a_config(registry, wrong):
    """Anything else is refused where it is given."""
    with pytest.raises(ConfigurationError, match="expected a RateLimiterConfig"):
        registry.add_configuration("new", wrong)


def test_a_supplier_must_supply_a_config(registry):
    """And the name stays free when it does not."""
    with pytest.raises(ConfigurationError, match="expected a RateLimiterConfig"):
        registry.rate_limiter("a", lambda: "fast")
    assert registry.find("a") is None


def test_replace_and_remove_answer_with_what_was_there(registry):
    """None when there was nothing, and then nothing changes."""
    other = RateLimiter("a", FAST, store=registry.store)
    assert registry.replace("a", other) is None
    assert registry.find("a") is None
    first = registry.rate_limiter("a")
    assert registry.replace("a", other) is first
    assert registry.rate_limiter("a") is other
    assert registry.remove("a") is other
    assert registry.remove("a") is None


def test_a_replacement_on_the_same_store_keeps_the_permissions(registry):
    """State belongs to the name: 60 taken of 100 are 60 missing of 200."""
    registry.rate_limiter("a", "fast").acquire_permission(60)
    registry.replace("a", RateLimiter("a", FAST.replace(limit_for_period=200), store=registry.store))
    assert registry.rate_limiter("a").metrics.available_permissions == 140


def test_an_entry_is_a_rate_limiter_of_that_name(registry):
    """A RateLimiter of another kind is refused."""
    registry.rate_limiter("a")
    with pytest.raises(ConfigurationError, match="called 'a', got 'b'"):
        registry.replace("a", RateLimiter("b", FAST))
    with pytest.raises(ConfigurationError, match="expected a RateLimiter"):
        registry.add("c", Registry("5/s").limiter("c"))


def test_changes_are_events_for_the_registrys_consumers(registry):
    """Added, replaced and removed, with the RateLimiters themselves; a failing consumer breaks nothing."""
    received = []

    def broken(change):
        raise RuntimeError

    publisher = registry.event_publisher
    publisher.on_entry_added(broken)
    publisher.on_entry_added(received.append).on_entry_replaced(received.append).on_entry_removed(received.append)
    first = registry.rate_limiter("a")
    second = RateLimiter("a", FAST)
    registry.replace("a", second)
    registry.remove("a")
    assert [(c.kind, c.limiter, c.entry, c.replaced) for c in received] == [
        ("added", "a", first, None),
        ("replaced", "a", second, first),
        ("removed", "a", second, None),
    ]


def test_tags_of_the_registry_and_of_the_limiter_are_joined():
    """The limiter's own win."""
    registry = RateLimiterRegistry(SLOW, tags={"team": "a", "zone": "x"})
    assert registry.rate_limiter("a", tags={"team": "b"}).tags == {"team": "b", "zone": "x"}
    assert registry.rate_limiter("c").tags == {"team": "a", "zone": "x"}
    with pytest.raises(TypeError):
        registry.rate_limiter("c").tags["team"] = "z"


def test_all_share_the_registrys_store(registry):
    """One store, one key for each."""
    registry.rate_limiter("a").acquire_permission()
    registry.rate_limiter("b", "fast").acquire_permission()
    assert registry.rate_limiter("a").store is registry.store
    assert len(registry.store) == 2
