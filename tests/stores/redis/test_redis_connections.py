"""Connections of a RedisStore: logins, UNIX sockets, TLS, ready clients, URLs; threads, forks, and one key for all."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio

import limitkeeper
from limitkeeper import AsyncLimiter, ConfigurationError, Limiter, StoreUnavailable, TokenBucket
from limitkeeper.stores.redis import RedisStore
from limitkeeper.stores.redis.address import Login, Tls, read_url
from servers.tls import TlsFront
from servers.valkey import Valkey
from stand_ins import driven

TEN = TokenBucket("1/h", burst=10)


def works(store: RedisStore) -> None:
    """Ten hits pass sync and async together, and no more."""
    with store:
        sync, tasks = Limiter(TEN, store=store), AsyncLimiter(TEN, store=store)
        assert [bool(sync.hit("k")) for _ in range(5)] == [True] * 5
        assert [bool(driven(tasks.hit("k"))) for _ in range(6)] == [True] * 5 + [False]
        assert not sync.hit("k")


# Logins


@pytest.fixture(scope="module")
def locked() -> Iterator[Valkey]:
    with Valkey("--requirepass", "s3cret/:@") as server:
        with server.client(password="s3cret/:@") as client:
            client.execute_command("ACL", "SETUSER", "ann", "on", ">pässword", "~*", "+@all")
        yield server


@pytest.mark.parametrize("login", [":s3cret%2F%3A%40@", "default:s3cret%2F%3A%40@", "ann:p%C3%A4ssword@"])
def test_a_password_opens(locked: Valkey, login: str) -> None:
    """A password, or a user and a password, escaped in the URL as URLs are."""
    works(RedisStore(f"redis://{login}127.0.0.1:{locked.port}", prefix=f"login {login[:4]}", timeout="60s"))


@pytest.mark.parametrize(("login", "remedy"), [("", "requires a password"), (":wrong@", "rejects this user or password")])
def test_a_wrong_password_is_reported_with_its_remedy(locked: Valkey, login: str, remedy: str) -> None:
    """Sync and async errors name the remedy, and never the password."""
    with RedisStore(f"redis://{login}127.0.0.1:{locked.port}", timeout="60s") as store:
        for call in (lambda: Limiter(TEN, store=store).hit("k"), lambda: driven(AsyncLimiter(TEN, store=store).hit("k"))):
            with pytest.raises(StoreUnavailable, match=remedy) as result:
                call()
            assert "wrong" not in str(result.value).replace("WRONGPASS", "")


@pytest.fixture
def permitted(valkey: Valkey) -> Iterator[Callable[..., RedisStore]]:
    """Makes a store whose user has the permissions that the page lists, and others."""
    page = (Path(__file__).parents[3] / "docs/stores/redis.md").read_text()
    (listed,) = re.findall(r"^ACL SETUSER limits on >password (.*)$", page, re.MULTILINE)
    with valkey.client() as client:

        def make(*others: str) -> RedisStore:
            client.execute_command("ACL", "SETUSER", "limits", "reset", "on", ">password", *listed.split(), *others)
            return RedisStore(f"redis://limits:password@127.0.0.1:{valkey.port}", timeout="60s")

        yield make
        client.execute_command("ACL", "DELUSER", "limits")


RULES = ["5/s", "fixed window 5/s", "sliding window log 5/s", "sliding window counter 5/s", "leaky bucket queue 5/s capacity 50"]


@pytest.mark.parametrize("rule", RULES)
def test_the_listed_permissions_are_enough(permitted: Callable[..., RedisStore], rule: str) -> None:
    """Every operation on one and on several limits, several rates of a name, and waiters of different costs that leave."""

    async def waiters(limiter: AsyncLimiter) -> None:
        tasks = [asyncio.create_task(limiter.acquire("waits", cost=1 + i % 2)) for i in range(12)]
        await limiter.peek("waits")
        tasks[6].cancel()
        await asyncio.wait(tasks[6:7])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    failed: list[object] = []
    with permitted("+hset", "+hdel") as store:
        limiter = Limiter(rule, store=store, name="one")
        both = Limiter({"one": rule, "two": "100/min"}, store=store, name="both")
        for one in (limiter, both, Limiter(rule.replace("5", "6"), store=store, name="one")):
            one.hit("u")
            one.peek("u")
            one.hit_many(["a", "b"])
            one.reserve("v").cancel()
            one.reset("u")
        tasks = AsyncLimiter(rule, store=store, name="one")
        tasks.events.on("give back failed", failed.append)
        driven(waiters(tasks))
        items = store.items(limiter.named[0])
        store.load(limiter.named[0], items)
        store.forget(limiter.claims("a"))
        overrides = store.open_hash("overrides:shop")
        assert overrides is not None
        overrides.write("field", "value")
        assert overrides.read() == {"field": "value"}
        overrides.write("field", None)
    assert failed == []


def test_a_permission_that_a_script_lacks_is_reported_with_the_remedy(permitted: Callable[..., RedisStore]) -> None:
    """Where a script lacks one, the server's error begins as any error of a script does."""
    with permitted("-mget") as store, pytest.raises(StoreUnavailable, match="the user lacks a permission"):
        Limiter({"one": "5/s", "two": "100/min"}, store=store).hit("u")


def test_a_needless_password_is_reported(valkey: Valkey) -> None:
    """A server without a password refuses one, and the error is passed on."""
    with (
        RedisStore(f"redis://:needless@127.0.0.1:{valkey.port}", timeout="60s") as store,
        pytest.raises(StoreUnavailable, match="leave it out"),
    ):
        Limiter(TEN, store=store).hit("k")


@pytest.mark.parametrize(
    ("scheme", "remedy"),
    [("redis+cluster", "cluster support disabled; use redis://"), ("redis+sentinel", "is no Sentinel: give the Sentinels' port")],
)
def test_a_single_server_under_another_scheme_is_reported_with_the_remedy(valkey: Valkey, scheme: str, remedy: str) -> None:
    """The URL of a Cluster or of Sentinels with the port of a single server: the error says which URL to write."""
    url = valkey.url.replace("redis", scheme) + ("/shop" if scheme == "redis+sentinel" else "")
    with RedisStore(url, timeout="60s") as store, pytest.raises(StoreUnavailable, match=remedy):
        Limiter("5/s", store=store).hit("u")


def test_databases_are_apart(valkey: Valkey) -> None:
    """`/1` is another database than `/0`, sync and async."""
    for number in (0, 1):
        works(RedisStore(f"{valkey.url}/{number}", prefix="database", timeout="60s"))
        with valkey.client(db=number) as client:
            assert client.exists(*client.keys("database:*")) >= 1
    with RedisStore(f"{valkey.url}/99", timeout="60s") as store, pytest.raises(StoreUnavailable, match="no such database"):
        Limiter(TEN, store=store).hit("k")


# UNIX sockets, TLS


@pytest.mark.parametrize("scheme", ["unix", "redis+unix"])
def test_a_unix_socket_is_as_good_as_a_port(scheme: str) -> None:
    """`unix:///path` and `redis+unix:///path`."""
    folder = tempfile.mkdtemp()
    path = os.path.join(folder, "s")
    try:
        with Valkey("--unixsocket", path, "--unixsocketperm", "700"):
            until = time.monotonic() + 60
            while not os.path.exists(path) and time.monotonic() < until:  # its port may be open before its socket exists
                time.sleep(0.01)
            works(RedisStore(f"{scheme}://{path}?db=2", timeout="60s"))
            with redis.Redis(unix_socket_path=path, db=2) as client:
                works(RedisStore(client, prefix="client", timeout="60s"))
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def certificates() -> Iterator[Path]:
    """An authority of our own, and what it signed: made by openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not there to make certificates with")
    folder = Path(tempfile.mkdtemp())
    plain = {"check": True, "capture_output": True, "cwd": folder}
    new = ["openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-batch"]
    basic = "basicConstraints=critical,CA:TRUE"
    subprocess.run(
        [*new, "-x509", "-days", "2", "-subj", "/CN=ca", "-keyout", "ca.key", "-out", "ca.pem", "-addext", basic], **plain
    )
    subprocess.run([*new, "-subj", "/CN=127.0.0.1", "-keyout", "server.key", "-out", "server.csr"], **plain)
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    sign = ["openssl", "x509", "-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2"]
    subprocess.run([*sign, "-extfile", "names", "-out", "server.pem"], **plain)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def tls(certificates: Path, valkey: Valkey) -> Iterator[TlsFront]:
    with TlsFront(valkey.port, certificates) as front:
        yield front


def test_tls(tls: TlsFront, certificates: Path) -> None:
    """`rediss://` verifies the server with the given authority, and shows a certificate when it has one."""
    ca = f"ssl_ca_certs={certificates}/ca.pem"
    works(RedisStore(f"rediss://127.0.0.1:{tls.port}?{ca}", prefix="tls", timeout="60s"))
    works(RedisStore(f"rediss://127.0.0.1:{tls.port}/1?ssl_cert_reqs=none", prefix="trusting", timeout="60s"))
    with redis.Redis(port=tls.port, host="127.0.0.1", ssl=True, ssl_ca_certs=str(certificates / "ca.pem")) as client:
        works(RedisStore(client, prefix="tls client", timeout="60s"))
    assert tls.shown == []
    shown = f"ssl_certfile={certificates}/server.pem&ssl_keyfile={certificates}/server.key"
    works(RedisStore(f"rediss://127.0.0.1:{tls.port}?{ca}&{shown}", prefix="mutual", timeout="60s"))
    assert set(tls.shown) == {"127.0.0.1"}


def test_a_long_answer_over_tls(tls: TlsFront, certificates: Path) -> None:
    """More than one record of TLS, in both directions."""
    with RedisStore(f"rediss://127.0.0.1:{tls.port}?ssl_ca_certs={certificates}/ca.pem", prefix="long", timeout="60s") as store:
        limiter = Limiter(TEN, store=store)
        keys = [f"{number:0100d}" for number in range(1000)]
        assert all(limiter.hit_many(keys))
        assert len(list(store.items(limiter.named[0]))) == 1000
        assert all(driven(AsyncLimiter(TEN, store=store).hit_many(keys)))


def test_a_server_without_a_trusted_certificate_is_refused(tls: TlsFront, certificates: Path) -> None:
    """A certificate without its authority is refused, and so is one for another name."""
    for url in (f"rediss://127.0.0.1:{tls.port}", f"rediss://localhost:{tls.port}?ssl_ca_certs={certificates}/ca.pem"):
        with RedisStore(url, timeout="60s") as store:
            for call in (lambda: Limiter(TEN, store=store).hit("k"), lambda: driven(AsyncLimiter(TEN, store=store).hit("k"))):
                with pytest.raises(StoreUnavailable, match=r"(?i)certificate"):
                    call()


# Ready clients


def test_a_ready_client_serves_both_modes(valkey: Valkey) -> None:
    """The settings of a redis-py client, sync or asyncio, are used for connections of our own."""
    with valkey.client() as client:
        works(RedisStore(client, prefix="ready sync", timeout="60s"))

    async def with_async_client() -> None:
        async with (
            redis.asyncio.Redis(port=valkey.port) as other,
            RedisStore(other, prefix="ready async", timeout="60s") as store,
        ):
            found = [bool(await AsyncLimiter(TEN, store=store).hit("k")) for _ in range(11)]
            assert found == [True] * 10 + [False]

    driven(with_async_client())


class MyConnection(redis.Connection):
    """A connection class of the user."""


class MyAsyncConnection(redis.asyncio.Connection):
    """The same for asyncio."""


def test_a_client_of_somebodys_own_kind_is_called_through(valkey: Valkey) -> None:
    """Where the settings can't be read, the client itself is called, in its own mode; the other mode is an error that names what
    is missing.
    """
    pool = redis.ConnectionPool(connection_class=MyConnection, port=valkey.port, decode_responses=True)
    with redis.Redis(connection_pool=pool) as client, RedisStore(client, prefix="through", timeout="60s") as store:
        limiter = Limiter(TEN, store=store)
        assert [bool(limiter.hit("k")) for _ in range(11)] == [True] * 10 + [False]
        client.script_flush()
        assert not limiter.hit("k")
        assert not store.answers_within(20_000)
        with pytest.raises(ConfigurationError, match=r"sync client.*asyncio"):
            driven(AsyncLimiter(TEN, store=store).hit("k"))
    pool.disconnect()


def test_an_async_client_of_somebodys_own_kind_is_called_through(valkey: Valkey) -> None:
    """The same for asyncio."""

    async def run() -> None:
        pool = redis.asyncio.ConnectionPool(connection_class=MyAsyncConnection, port=valkey.port)
        async with redis.asyncio.Redis(connection_pool=pool) as client:
            store = RedisStore(client, prefix="through async", timeout="60s")
            limiter = AsyncLimiter(TEN, store=store)
            assert [bool(await limiter.hit("k")) for _ in range(11)] == [True] * 10 + [False]
            with pytest.raises(ConfigurationError, match=r"asyncio client.*sync"):
                Limiter(TEN, store=store).hit("k")
            await store.aclose()
        await pool.disconnect()

    driven(run())


@pytest.mark.parametrize("kind", [redis.Sentinel, redis.asyncio.Sentinel])
def test_sentinels_of_a_ready_client_have_a_login_of_their_own(kind: type, certificates: Path) -> None:
    """The TLS and the password of `sentinel_kwargs` are for the sentinels, those of the client for the primary."""
    ca = str(certificates / "ca.pem")
    sentinels = kind([("s1", 1)], sentinel_kwargs={"ssl": True, "ssl_ca_certs": ca, "password": "theirs"}, password="ours")
    with RedisStore(sentinels.master_for("service")) as store:
        assert store.address.sentinels == Login(password="theirs", tls=Tls(ca))
        assert store.address.login == Login(password="ours")


def test_sentinels_whose_login_cant_be_read_are_refused() -> None:
    """Without the credentials that a provider gives, the login to them would fail."""
    provider = redis.UsernamePasswordCredentialProvider("ann", "theirs")
    sentinels = redis.Sentinel([("s1", 1)], sentinel_kwargs={"credential_provider": provider})
    with pytest.raises(ConfigurationError, match="Sentinel"):
        RedisStore(sentinels.master_for("service"))


def test_what_is_no_server_is_refused() -> None:
    """Anything but a URL or a client is an error that names the right form."""
    with pytest.raises(ConfigurationError, match="redis://localhost"):
        RedisStore(7)


# URLs


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://x", "unknown scheme"),
        ("localhost", "did you mean 'redis://localhost'"),
        ("me:hunter2@localhost:6379", "^'…@localhost:6379': expected a URL; did you mean 'redis://…@localhost:6379'"),
        ("redis://h?speed=9", "'speed'"),
        ("redis://h/zero", "expected a number"),
        ("redis://h:port", "expected a number from 1"),
        ("redis://a,b", r"redis\+cluster"),
        ("redis://h?ssl_ca_certs=x", "rediss://"),
        ("redis+sentinel://h", "name the service"),
        ("redis+cluster://h/3", "database 0 only"),
        ("unix://run/x", "three slashes"),
        ("rediss://h?ssl_cert_reqs=maybe", "required, optional or none"),
    ],
)
def test_a_wrong_url_names_the_right_form(url: str, words: str) -> None:
    """An invalid URL is an error when the store is made."""
    with pytest.raises(ConfigurationError, match=words):
        RedisStore(url, timeout="60s")


def test_an_error_never_shows_a_password() -> None:
    """Neither the URL in an error nor the repr of a store has it."""
    with pytest.raises(ConfigurationError) as result:
        RedisStore("redis://ann:hunter2@h/x")
    assert "hunter2" not in str(result.value)
    with RedisStore("redis://ann:hunter2@h") as store:
        assert "hunter2" not in repr(store) + repr(store.address)


def test_urls_are_read() -> None:
    """Hosts, ports, IPv6, several hosts, services and databases."""
    assert [str(place) for place in read_url("redis+cluster://a:1,[::1]:2,c").endpoints] == ["a:1", "::1:2", "c:6379"]
    watched = read_url("redis+sentinel://:pw@a,b:9/main?db=3&sentinel_password=sp")
    assert (watched.service, watched.login.db, watched.login.password, watched.sentinels.password) == ("main", 3, "pw", "sp")
    assert [place.port for place in watched.endpoints] == [26379, 9]


def test_the_url_may_set_budget_and_prefix(valkey: Valkey) -> None:
    """`?timeout=250ms&prefix=app` are the store's own options."""
    with RedisStore(f"{valkey.url}?timeout=250ms&prefix=app") as store:
        assert (store.timeout_us, store.names.prefix) == (250_000, "app")


# Threads and processes


def test_threads_share_what_there_is(valkey: Valkey) -> None:
    """Eight threads admit exactly the limit, on no more connections than threads."""
    with RedisStore(valkey.url, prefix="threads", timeout="60s") as store, valkey.client() as client:
        before = client.info("clients")["connected_clients"]
        limiter = Limiter(TokenBucket("1/h", burst=100), store=store)
        admitted: list[int] = []
        threads = [
            threading.Thread(target=lambda: admitted.append(sum(map(bool, (limiter.hit("k") for _ in range(40))))))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(admitted) == 100
        assert client.info("clients")["connected_clients"] - before <= 8


def test_four_processes_of_eight_threads_admit_exactly_the_limit(valkey: Valkey) -> None:
    """Law 7 across processes: 4 × 8 callers on one key are admitted exactly the limit."""
    code = """
        import sys, threading
        from limitkeeper import Limiter, TokenBucket
        from limitkeeper.stores.redis import RedisStore
        with RedisStore(sys.argv[1], prefix="processes", timeout="60s") as store:
            limiter = Limiter(TokenBucket("1/h", burst=1000), store=store)
            admitted = []
            def work():
                admitted.append(sum(bool(limiter.hit("k")) for _ in range(50)))
            threads = [threading.Thread(target=work) for _ in range(8)]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
            print(sum(admitted))
    """
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(limitkeeper.__path__[0])}
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code), valkey.url]
    started = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert sum(int(process.communicate(timeout=120)[0]) for process in started) == 1000


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_child_never_uses_its_parents_connections(valkey: Valkey, python: Any) -> None:
    """After a fork both continue, each on connections of its own, sync and async."""
    done = python(f"""
        import asyncio, os, sys
        from limitkeeper import AsyncLimiter, Limiter, TokenBucket
        from limitkeeper.stores.redis import RedisStore
        store = RedisStore({valkey.url!r}, prefix="fork", timeout="60s")
        limiter, tasks = (kind(TokenBucket("1/h", burst=1000), store=store) for kind in (Limiter, AsyncLimiter))
        limiter.hit("k"), asyncio.run(tasks.hit("k"))
        mine = store.pool.idle(store.route.direct, store.route.login)[0]._sock.getsockname()
        child = os.fork()
        for _ in range(200):
            assert limiter.hit("k")
        assert asyncio.run(tasks.hit("k"))
        there = store.pool.idle(store.route.direct, store.route.login)[0]._sock.getsockname()
        assert (there == mine) is (child != 0)
        store.close()
        if child:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            print(limiter.peek("k").remaining)
            store.close()
    """)
    assert (done.stdout.strip(), done.stderr) == (str(1000 - 2 - 2 * 201), "")


def test_without_hiredis_the_name_can_be_imported_and_the_extra_is_named(python) -> None:
    """`from limitkeeper import *` works where hiredis is not installed; the error of making a RedisStore names the extra."""
    done = python(
        """
        import sys
        sys.modules["hiredis"] = None
        from limitkeeper import *
        try:
            RedisStore("redis://localhost")
        except ModuleNotFoundError as error:
            print(error)
        """
    )
    assert done.stdout == "RedisStore needs hiredis: pip install 'limitkeeper[redis]'\n", done.stderr
