"""Stores from configuration: every scheme, every option, every mistake with its remedy, and no password ever shown."""

from __future__ import annotations

import sys
import types
from contextlib import closing

import pytest

import limitkeeper
from limitkeeper import ConfigurationError, GuardedStore, Limiter, MemoryStore, store_from_url
from limitkeeper.stores import Store
from limitkeeper.stores.urls import SCHEMES, masked


class NotedStore(MemoryStore):
    """Replaces a store that needs a server, and records its arguments."""

    def __init__(self, *made_of, **options):
        super().__init__()
        self.made_of = made_of
        self.options = options
        self.closed = False

    def close(self):
        self.closed = True


@pytest.fixture
def noted(monkeypatch):
    """Replaces the modules of remote stores, so that the values from a URL can be read back."""
    for module, name in (("redis", "RedisStore"), ("leased", "LeasedStore"), ("sharded", "ShardedStore")):
        made = types.ModuleType(f"limitkeeper.stores.{module}")
        setattr(made, name, type(name, (NotedStore,), {}))
        monkeypatch.setitem(sys.modules, f"limitkeeper.stores.{module}", made)


def named(store: Store) -> str:
    return type(store).__name__


# Accepted URLs


def test_memory():
    """memory:// is a MemoryStore, with max_keys if given."""
    assert type(store_from_url("memory://")) is MemoryStore
    assert store_from_url("memory://?max_keys=50").capacity.max_keys == 50


def test_a_shared_file(tmp_path):
    """shared:///path is a SharedStore on that file, with its sizes; percent signs are read."""
    with store_from_url(f"shared://{tmp_path}/my%20limits?max_keys=100&log_entries=8") as store:
        assert named(store) == "SharedStore"
        assert Limiter("5/s", store=store).hit("a")
    assert (tmp_path / "my limits").exists()


@pytest.mark.parametrize(
    "url",
    [
        "redis://",
        "redis://host:6380/2",
        "rediss://user:secret@host/0?ssl_ca_certs=%2Fetc%2Fca.pem",
        "unix:///run/redis.sock?db=3",
        "redis+cluster://a:7000,b:7001",
        "redis+sentinel://a,b/mymaster?sentinel_password=x",
        "valkey://host?prefix=app%3A&timeout=0.2",
    ],
)
def test_redis_urls_are_the_redis_stores_own(noted, url):
    """Every option that is not a wrapper's goes to RedisStore unchanged."""
    store = store_from_url(url)
    assert (named(store), store.made_of, store.options) == ("RedisStore", (url,), {})


def test_a_guard_around_a_lease_around_redis(noted):
    """guard= and lease= wrap: the guard is outside, and the server's URL is passed on without them."""
    guard = store_from_url("redis://host/0?prefix=a&guard=local&share=1/4&budget=5ms&lease=50&life=200ms&strict=true")
    assert isinstance(guard, GuardedStore)
    assert (guard.on_failure, guard.budget_us) == ("local", 5_000)
    assert str(guard._fallback.share) == "1/4"
    leased = guard.inner
    assert (named(leased), leased.options) == ("LeasedStore", {"lease": 50, "life": "200ms", "strict": True})
    assert leased.made_of[0].made_of == ("redis://host/0?prefix=a",)


def test_a_lease_may_size_itself(noted):
    """lease=auto follows demand; durations may be seconds."""
    store = store_from_url("redis://host?lease=auto&life=0.1&strict=no")
    assert store.options == {"lease": None, "life": 0.1, "strict": False}


@pytest.mark.parametrize("url", ["memory://?guard=open", "memory://?guard=closed&budget=0.1&max_keys=9"])
def test_any_store_can_be_wrapped(url):
    """Wrappers go around memory:// too."""
    guard = store_from_url(url)
    assert isinstance(guard, GuardedStore)
    assert isinstance(guard.inner, MemoryStore)
    assert guard.budget_us == 100_000


def test_shards_are_one_store_for_each_host(noted):
    """sharded+redis:// makes a RedisStore of each host, with the same credentials, database and options."""
    store = store_from_url("sharded+rediss://me:pw@one,two:6380,three/2?prefix=x&guard=closed").inner
    assert named(store) == "ShardedStore"
    (shards,) = store.made_of
    assert [shard.made_of[0] for shard in shards] == [
        "rediss://me:pw@one/2?prefix=x",
        "rediss://me:pw@two:6380/2?prefix=x",
        "rediss://me:pw@three/2?prefix=x",
    ]


def test_a_limiter_takes_a_wrapped_url():
    """`store=` accepts a URL from configuration."""
    with closing(Limiter("5/s", store="memory://?guard=local&share=2")) as limiter:
        assert limiter.hit("a").remaining == 4


def test_memory_imports_nothing_that_it_does_not_need(python):
    """A limiter in memory loads no other store, no network and no client library."""
    done = python(
        """
        import sys
        import limitkeeper
        limitkeeper.Limiter("5/s", store="memory://").hit("a")
        others = ("guarded", "shared", "leased", "sharded", "redis")
        print([name for name in others if f"limitkeeper.stores.{name}" in sys.modules], "redis" in sys.modules)
        """
    )
    assert done.stdout.strip() == "[] False", done.stderr


def test_stores_can_be_named_from_the_package():
    """limitkeeper.GuardedStore and limitkeeper.stores.GuardedStore are one class, imported when it is named."""
    assert limitkeeper.GuardedStore is limitkeeper.stores.GuardedStore is GuardedStore
    assert {"GuardedStore", "SharedStore"} <= set(dir(limitkeeper)) & set(dir(limitkeeper.stores))
    with pytest.raises(AttributeError, match="no attribute 'SqlStore'"):
        limitkeeper.SqlStore
    with pytest.raises(AttributeError, match="no attribute 'SqlStore'"):
        limitkeeper.stores.SqlStore


# Refused URLs


def test_a_class_as_a_store_is_refused_with_the_remedy():
    """`store=RedisStore`, without its parentheses, says what to write."""
    with pytest.raises(ConfigurationError, match=r"store must be a store or a URL .*; write MemoryStore\(…\)"):
        Limiter("5/s", store=MemoryStore)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "unknown scheme ''; expected one of memory://"),
        ("memory", r"did you mean memory://\?"),
        ("memroy://", r"unknown scheme 'memroy'; did you mean memory://\?"),
        ("reddis://host", r"did you mean redis://\?"),
        ("redis+clustre://host", r"did you mean redis\+cluster://\?"),
        ("http://example.com", "unknown scheme 'http'; .* write limitkeeper://host:7071"),
        ("/tmp/x", "did you mean 'shared:///tmp/x'"),
        ("localhost:6379", "did you mean 'redis://localhost:6379'"),
        ("limitkeeper://one,two", "several hosts need a sharded\\+limitkeeper:// URL"),
        ("limitkeeper://one/2", "no databases"),
        ("limitkeeper://one?prefix=x", "unknown option 'prefix'"),
        ("memory://host", "no host and no path"),
        ("memory://?max_kyes=5", r"unknown option 'max_kyes'; did you mean max_keys=\?"),
        ("memory://?colour=red", "expected one of max_keys=, guard="),
        ("memory://?max_keys=many", "max_keys must be a whole number"),
        ("memory://?max_keys=²", "max_keys must be a whole number"),
        ("memory://?max_keys=5&max_keys=6", "duplicate option max_keys="),
        ("shared://relative/path", "three slashes"),
        ("shared://", "three slashes"),
        ("shared:///tmp/x?log_entires=5", r"did you mean log_entries=\?"),
        ("memory://?guard=maybe", "'open', 'closed', 'local'"),
        ("memory://?guard=local", "share=4"),
        ("memory://?guard=local&share=lots", "is not a share"),
        ("memory://?guard=open&share=2", "belongs to on_failure='local'"),
        ("memory://?share=2", "share= requires guard="),
        ("memory://?life=2s", "life= requires lease="),
        ("memory://?guard=open&budget=soon", "budget must be a duration, got 'soon'; write it like budget=20ms"),
        ("memory://?guard=open&budget=0", "expected a duration above 0"),
        ("redis://[::1", "write it like redis://host"),
    ],
)
def test_a_mistake_names_the_part_and_the_remedy(url, said):
    """Each wrong part of a URL is a ConfigurationError that shows the URL and the right form."""
    with pytest.raises(ConfigurationError, match=said) as caught:
        store_from_url(url)
    assert repr(url) in str(caught.value)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://host?gaurd=local", r"did you mean guard=\?"),
        ("redis://host?laese=50", r"did you mean lease=\?"),
        ("redis://host?lease=some", "lease must be a whole number"),
        ("redis://host?lease=5&strict=perhaps", "strict must be true or false"),
        ("sharded+redis://only/0", "at least two hosts"),
    ],
)
def test_a_mistake_around_a_server_does_too(noted, url, said):
    """Wrappers are parsed before any server is called."""
    with pytest.raises(ConfigurationError, match=said):
        store_from_url(url)


def test_a_store_whose_wrapper_is_wrong_is_closed_again(noted, monkeypatch):
    """Nothing is left open by a URL that fails half way."""
    made = []
    kind = sys.modules["limitkeeper.stores.redis"].RedisStore
    monkeypatch.setattr(kind, "__init__", lambda self, url: (NotedStore.__init__(self, url), made.append(self))[0])
    with pytest.raises(ConfigurationError):
        store_from_url("redis://host?guard=local")
    assert [store.closed for store in made] == [True]


@pytest.mark.parametrize(
    "url",
    [
        "redsi://me:hunter2@host/0",
        "redis://me:hunter2@host?guard=local",
        "redis://me:hunter2@host?gaurd=local",
        "redis://me:hun@ter2@host?share=3",
        "redis://host?password=hunter2&share=3",
        "redis://me:hunter2@[::1",
        "limitkeeper://me:hunter2@host/x?colour=red",
        "memory://me:hunter2@host",
    ],
)
def test_a_password_is_never_shown(noted, url):
    """Whatever is wrong with a URL, its password stays out of the message."""
    with pytest.raises(ConfigurationError) as caught:
        store_from_url(url)
    assert "hunter2" not in str(caught.value)
    assert "ter2" not in str(caught.value)


@pytest.mark.parametrize("between", ["/", "?", "#"])
@pytest.mark.parametrize("password", ["hunter2{}x", "12{}hunter2", "{}hunter2"])
@pytest.mark.parametrize("scheme", ["redis", "redis+cluster", "limitkeeper", "sharded+redis"])
def test_a_password_that_is_not_encoded_is_not_shown(scheme, password, between):
    """A slash ends the address, so a part of the password stands in the place of a port or a database; the remedy is named."""
    with pytest.raises(ConfigurationError, match=f"%{ord(between):X}") as caught:
        store_from_url(f"{scheme}://me:{password.format(between)}@one,two")
    assert "hunter2" not in str(caught.value)


def test_what_is_missing_names_the_way_to_get_it(monkeypatch):
    """A store whose module or client library is missing is an error that names what to install."""
    for module in ("redis", "leased", "sharded"):
        monkeypatch.setitem(sys.modules, f"limitkeeper.stores.{module}", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'limitkeeper\[redis\]'"):
        store_from_url("redis://host")
    with pytest.raises(ConfigurationError, match="can't import LeasedStore"):
        store_from_url("memory://?lease=5")
    with pytest.raises(ConfigurationError, match="can't import ShardedStore"):
        store_from_url("sharded+redis://a,b")


def test_every_scheme_is_listed_once():
    """The schemes listed in an error are all there are."""
    assert len(SCHEMES) == len(set(SCHEMES))
    assert masked("memory://") == "'memory://'"


def test_a_password_is_hidden_where_the_scheme_is_missing():
    """A URL without its scheme is shown without its password, and so is the remedy."""
    with pytest.raises(ConfigurationError, match=r"^'…@limits:6379': unknown scheme 'me'; did you mean 'redis://…@limits:6379'"):
        store_from_url("me:hunter2@limits:6379")
