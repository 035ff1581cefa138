"""StaleCache: which responses are recorded, to which clients they are served, and for how long; the same in every framework."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import httpx
import pytest
from asgi_loop import Exchange, scope_of
from hypothesis import given
from hypothesis import strategies as st
from signed_tokens import SECRET, token

from limitkeeper import MemoryStore
from limitkeeper.errors import ConfigurationError
from limitkeeper.policy import Policy
from limitkeeper.policy.evaluation import Evaluation
from limitkeeper.policy.gate import Gate
from limitkeeper.policy.request_context import WrittenRequest
from limitkeeper.testing import ManualClock
from limitkeeper.web.asgi import RateLimitMiddleware
from limitkeeper.web.degrade import StaleCache, is_reduced
from limitkeeper.web.headers import AsgiRequestContext
from limitkeeper.web.wsgi import WsgiRequestContext

POLICY = """
identify: {user: {header: X-User}, tenant: {header: X-Tenant}, account: {body: email}}
limits: [{name: api, key: tenant, limit: fixed window 1/h align first, on_refusal: degrade cached}]
"""


class App:
    """An application that counts its calls, behind a policy with one call per tenant and hour, and a cache."""

    def __init__(self, clock: ManualClock, **options: Any) -> None:
        self.clock, self.calls = clock, 0
        self.headers: dict[str, str] = {}
        self.cache = StaleCache(clock=clock, **options)

    def gate(self, handler: Any) -> Gate:
        return Gate(Policy.read(POLICY), store=MemoryStore(clock=self.clock), handlers={"cached": handler})

    def answer(self, user: str | None) -> tuple[str, dict[str, str]]:
        self.calls += 1
        return f"{user} {self.calls}", {"Content-Type": "text/plain", **self.headers}


def asgi(app: App) -> Any:
    async def inner(scope: Any, receive: Any, send: Any) -> None:
        user = dict(scope["headers"]).get(b"x-user", b"").decode()
        text, headers = app.answer(user)
        lines = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": lines})
        await send({"type": "http.response.body", "body": text[:1].encode(), "more_body": True})
        await send({"type": "http.response.body", "body": text[1:].encode()})

    return RateLimitMiddleware(app.cache.asgi(inner), app.gate(app.cache.asgi_handler))


def wsgi(app: App) -> Any:
    from limitkeeper.web.wsgi import RateLimitMiddleware

    def inner(environ: Any, start_response: Any) -> Any:
        text, headers = app.answer(environ.get("HTTP_X_USER"))
        start_response("200 OK", list(headers.items()))
        yield text[:1].encode()
        yield text[1:].encode()

    return RateLimitMiddleware(app.cache.wsgi(inner), app.gate(app.cache.wsgi_handler))


def flask(app: App) -> Any:
    from flask import Flask, request

    from limitkeeper.web.degrade.flask_handlers import flask_cached
    from limitkeeper.web.flask import RateLimit

    made = Flask("cached")
    made.add_url_rule("/<path:_>", "any", lambda _: app.answer(request.headers.get("X-User")))
    made.wsgi_app = app.cache.wsgi(made.wsgi_app)  # type: ignore[method-assign]
    RateLimit(made, app.gate(flask_cached(app.cache)))
    return made


def django(app: App) -> Any:
    import django_site
    from django.core.handlers.wsgi import WSGIHandler
    from django.http import HttpResponse
    from django.urls import re_path

    from limitkeeper.web.degrade.django_handlers import django_cached, recorder

    def view(request: Any) -> HttpResponse:
        text, headers = app.answer(request.headers.get("X-User"))
        return HttpResponse(text, headers=headers)

    global record
    record = recorder(app.cache)
    gate = app.gate(django_cached(app.cache))
    middleware = (django_site.OURS, f"{__name__}.record")
    return django_site.handler(WSGIHandler, [re_path("^.*$", view)], {"POLICY": gate}, middleware)


record: Any = None
FRAMEWORKS: dict[str, Callable[[App], Any]] = {"asgi": asgi, "wsgi": wsgi, "flask": flask, "django": django}


class Client:
    """Sends requests to an application in this process, ASGI or WSGI."""

    def __init__(self, framework: str, app: App) -> None:
        self.made = FRAMEWORKS[framework](app)
        self.is_asgi = framework.startswith("asgi")

    def get(
        self, path: str = "/a", user: str = "ann", method: str = "GET", scheme: str = "http", **headers: str
    ) -> httpx.Response:
        sent = {"X-User": user, "X-Tenant": "acme", **{name.replace("_", "-"): value for name, value in headers.items()}}
        if not self.is_asgi:
            with httpx.Client(transport=httpx.WSGITransport(self.made), base_url=f"{scheme}://shop") as client:
                return client.request(method, path, headers=sent)
        import asyncio

        async def send() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(self.made), base_url=f"{scheme}://shop") as client:
                return await client.request(method, path, headers=sent)

        return asyncio.run(send())


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("other", ["/%fe", "/%ef%bf%bd"])
def test_paths_that_are_no_text_have_responses_of_their_own(clock, other):
    """Bytes that are no UTF-8 are one character of a decoded path; applications may distinguish them."""
    client = Client("asgi", App(clock))
    assert [client.get(path).status_code for path in ("/%ff", "/%ff", other)] == [200, 200, 429]

    cache, gate = StaleCache(clock=clock), Gate(Policy.read(POLICY), store=MemoryStore(clock=clock), handlers={"cached": print})
    environs = [{"REQUEST_METHOD": "GET", "PATH_INFO": unquote(path, "latin-1")} for path in ("/%ff", other)]
    keys = [cache.key_of(one, "", gate.ask(one)) for one in map(WsgiRequestContext, environs)]
    assert keys[0] != keys[1]


def test_a_response_over_http_does_not_answer_https(framework, clock):
    """Its links name the other scheme."""
    client = Client(framework, App(clock))
    assert [client.get(scheme=scheme).status_code for scheme in ("http", "http", "https")] == [200, 200, 429]


def test_a_refused_request_gets_the_last_response_to_the_same_request(framework, clock):
    """With its age, and without a call of the application; another path has none, and is refused with Retry-After."""
    app = App(clock)
    client = Client(framework, app)
    first = client.get()
    clock.advance(30)
    again, other = client.get(), client.get("/b")
    assert (first.status_code, first.text, app.calls) == (200, "ann 1", 1)
    assert (again.status_code, again.text, again.headers["Age"]) == (200, "ann 1", "30")
    assert again.headers["Cache-Status"] == "limitkeeper; hit; ttl=-30"
    assert again.headers["Content-Type"].startswith("text/plain")
    assert "Retry-After" not in again.headers
    assert (other.status_code, other.headers["Retry-After"], other.headers["Cache-Control"]) == (429, "3570", "no-store")
    assert (app.cache.hits, app.cache.misses) == (1, 1)


def test_no_client_gets_the_response_to_another(framework, clock):
    """The key holds every identity, though the rule is that of the tenant."""
    app = App(clock)
    client = Client(framework, app)
    client.get(user="ann")
    assert [client.get(user=user).status_code for user in ("ann", "bob", "")] == [200, 429, 429]


@pytest.mark.parametrize("header", ["Authorization", "Cookie", "X_Api_Key"])
def test_clients_that_share_an_address_do_not_share_responses(framework, header, clock):
    """The key holds the credentials by which the application may identify a client, though the policy has no identity of them."""
    client = Client(framework, App(clock))
    client.get(**{header: "ann's"})
    found = [client.get(**sent).status_code for sent in ({header: "ann's"}, {header: "bob's"}, {})]
    assert found == [200, 429, 429]


@pytest.mark.parametrize("header", ["X_Forwarded_Host", "X_Forwarded_Prefix", "X_Original_URL", "Origin", "Content_Length"])
def test_a_client_does_not_choose_the_shared_response(framework, header, clock):
    """By a header from which frameworks make links, routes or CORS fields, or by a body."""
    client = Client(framework, App(clock, shared=True))
    client.get(**{header: "5"})
    assert client.get(user="bob").status_code == 429


def test_an_identity_of_the_body_is_no_part_of_the_key(framework, clock):
    """A request that names the type of a body, and has none, is answered where the policy has an identity from the body."""
    client = Client(framework, App(clock))
    assert [client.get(Content_Type="application/json").status_code for _ in range(2)] == [200, 200]


def test_a_request_with_a_body_is_not_answered_from_the_cache(framework, clock):
    """The response may depend on it."""
    client = Client(framework, App(clock))
    client.get()
    assert [client.get(Content_Length=length).status_code for length in ("5", "0")] == [429, 200]


@pytest.mark.parametrize("framework", ["asgi", "django"])
def test_a_response_that_was_made_from_a_body_is_not_recorded(framework, clock):
    """HTTP/2 has bodies without a Content-Length: a client could choose the response that others get from a shared cache."""
    cache = StaleCache(shared=True, clock=clock)

    async def echo(scope: Any, receive: Any, send: Any) -> None:
        content = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"cache-control", b"public, max-age=60")]})
        await send({"type": "http.response.body", "body": content or b"nothing"})

    gate = Gate(Policy.read("limits: [{name: all, limit: 100/s}]"))
    app = RateLimitMiddleware(cache.asgi(echo), gate) if framework == "asgi" else echo_in_django(cache, gate)
    sizes = []
    for content in (b"chosen", b""):
        exchange = Exchange(content)
        asyncio.run(app(scope_of("GET", "/search", [], "192.0.2.1"), exchange.receive, exchange.send))
        sizes.append(len(cache._responses))
    assert sizes == [0, 1]


def echo_in_django(cache: StaleCache, gate: Gate) -> Any:
    import django_site
    from django.core.handlers.asgi import ASGIHandler
    from django.http import HttpResponse
    from django.urls import re_path

    from limitkeeper.web.degrade.django_handlers import recorder

    global record
    record = recorder(cache)
    urls = [re_path("^.*$", lambda request: HttpResponse(request.body or b"nothing"))]
    return django_site.handler(ASGIHandler, urls, {"POLICY": gate}, (django_site.OURS, f"{__name__}.record"))


def test_an_application_that_rewrites_the_path_does_not_change_the_key(clock):
    """A response is recorded under the path that the client requested."""
    from limitkeeper.web.wsgi import RateLimitMiddleware as WsgiMiddleware

    async def asgi_app(scope: Any, receive: Any, send: Any) -> None:
        scope["path"] = "/b"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a"})

    def wsgi_app(environ: Any, start_response: Any) -> Any:
        environ["PATH_INFO"] = "/b"
        start_response("200 OK", [])
        return [b"a"]

    for is_asgi in (True, False):
        client, app = Client("wsgi", App(clock)), App(clock)
        client.is_asgi, cache = is_asgi, app.cache
        outside = RateLimitMiddleware(cache.asgi(asgi_app), app.gate(cache.asgi_handler))
        client.made = outside if is_asgi else WsgiMiddleware(cache.wsgi(wsgi_app), app.gate(cache.wsgi_handler))
        assert [client.get(path).status_code for path in ("/a", "/a", "/b")] == [200, 200, 429]


def test_a_response_may_be_shared_or_kept_per_identity(framework, clock):
    """`shared=True` and `per=("tenant",)` declare it."""
    for options in ({"shared": True}, {"per": ("tenant",)}):
        client = Client(framework, App(clock, **options))
        client.get(user="ann")
        assert client.get(user="bob").text == "ann 1"


@pytest.mark.parametrize(("options", "header"), [({"per": ("user",)}, "Authorization"), ({}, "X-Token")])
@pytest.mark.parametrize("default", [None, "anonymous"])
def test_tokens_that_the_policy_can_not_verify_share_no_response(options, header, default, clock):
    """The application may verify them: its keys were changed before those of the policy."""
    verifier = {"claim": "sub", "key": SECRET, "algorithms": ["HS256"], "header": header}
    rule = {"name": "api", "key": "ip", "limit": "fixed window 1/h align first", "on_refusal": "degrade cached"}
    policy = Policy.of(identify={"user": {"jwt": verifier, "default": default}}, limits=[rule])
    app = App(clock, **options)
    app.gate = lambda handler: Gate(policy, store=MemoryStore(clock=clock), handlers={"cached": handler})  # type: ignore[method-assign]
    client = Client("asgi", app)
    new = {name: token("another secret that is long enough", sub=name)["Authorization"] for name in ("ann", "bob")}
    answers = [client.get(user=name, **{header.replace("-", "_"): new[name]}) for name in ("ann", "bob", "ann")]
    assert [(one.status_code, one.text[:3]) for one in answers] == [(200, "ann"), (429, '{"c'), (200, "ann")]


@pytest.mark.parametrize(("options", "user"), [({"per": ("user",)}, "cookie"), ({"per": ("user",)}, "header"), ({}, "header")])
def test_clients_with_several_values_of_an_identity_share_no_response(options, user, clock):
    """Such requests share one key of a limit; the application identifies each of them by one of the values."""
    policy = Policy.of(identify={"user": {user: "user"}}, limits=[{"name": "api", "limit": "1/h"}])
    made = Gate(policy, store=MemoryStore(clock=clock)).ask(WrittenRequest())
    ann, bob = (
        AsgiRequestContext(
            scope_of(
                "GET", "/", [("cookie", f"user={name}") if user == "cookie" else ("user", name) for name in names], "192.0.2.1"
            )
        )
        for names in (("old", "ann"), ("old", "bob"))
    )
    cache = StaleCache(clock=clock, **options)
    cache.keep(ann, "", made, [], b"of ann")
    assert (cache.find(ann, "", made) is None, cache.find(bob, "", made)) == (False, None)


def test_head_gets_the_headers_only(framework, clock):
    """Of the response to GET; a HEAD is not recorded itself."""
    client = Client(framework, App(clock))
    client.get()
    found = client.get(method="HEAD")
    assert (found.status_code, found.content, found.headers["Age"]) == (200, b"", "0")


@pytest.mark.parametrize(
    "header",
    [
        {"Set-Cookie": "session=1"},
        {"Cache-Control": "no-store"},
        {"Cache-Control": 'max-age=60, No-Cache="x"'},
        {"Vary": "Accept, *"},
    ],
    ids=str,
)
def test_responses_that_must_not_be_stored_are_not(framework, header, clock):
    """Set-Cookie, no-store, no-cache and `Vary: *`."""
    app = App(clock)
    app.headers = header
    client = Client(framework, app)
    client.get()
    assert (client.get().status_code, app.cache.stored_bytes) == (429, 0)


@pytest.mark.parametrize(
    "header", [{"Cache_Control": "no-cache"}, {"Cache_Control": "max-age=0"}, {"Range": "bytes=0-1"}], ids=str
)
def test_a_client_that_wants_a_new_response_is_refused(framework, header, clock):
    """Or a part of one."""
    client = Client(framework, App(clock))
    client.get()
    assert client.get(**header).status_code == 429


def test_the_age_is_bounded(framework, clock):
    """By `max_stale` after the response's own freshness; with must-revalidate by that alone."""
    for more, last in (("", 60 + 600), (", must-revalidate", 60)):
        app = App(clock)
        app.headers = {"Cache-Control": f"max-age=60{more}"}
        client = Client(framework, app)
        client.get()
        clock.advance(last)
        assert client.get().status_code == 200
        clock.advance(0.000001)
        assert client.get().status_code == 429


def test_a_response_is_served_to_requests_that_it_does_not_vary_by(framework, clock):
    """Vary names the headers that have to be the same."""
    app = App(clock)
    app.headers = {"Vary": "X-Currency"}
    client = Client(framework, app)
    client.get(X_Currency="EUR")
    assert [client.get(X_Currency=currency).status_code for currency in ("EUR", "USD")] == [200, 429]


# Rules of the cache itself -------------------------------------------------------------------------------------------


def evaluation(allowed: bool = True) -> Evaluation:
    made = Gate(Policy.read(POLICY), store=MemoryStore(), handlers={"cached": print}).ask(WrittenRequest())
    made.allowed = allowed
    return made


def kept(cache: StaleCache, path: str = "/", content: bytes = b"x", sent: dict[str, str] = {}, **headers: str) -> bool:  # noqa: B006
    """Whether a response is served again to the same request."""
    request = WrittenRequest(path=path, headers=sent)
    cache.keep(request, "", evaluation(), [(name.replace("_", "-"), value) for name, value in headers.items()], content)
    return cache.find(request, "", evaluation(False)) is not None


def test_a_shared_cache_does_not_store_what_is_one_clients():
    """`private`, and responses to requests with Authorization unless they are declared public (RFC 9111)."""
    token = {"Authorization": "Bearer 1"}
    cache = StaleCache(shared=True)
    assert not kept(cache, "/1", Cache_Control="private, max-age=5")
    assert not kept(cache, "/2", sent=token)
    assert kept(cache, "/3", sent=token, Cache_Control="public")
    assert kept(StaleCache(), "/4", sent=token, Cache_Control="private")
    assert [kept(StaleCache(per=("tenant",)), "/5", Cache_Control=text) for text in ("private", "max-age=5")] == [False, True]


def test_refused_requests_are_not_recorded():
    """Nor requests that no policy has evaluated."""
    cache, request = StaleCache(), WrittenRequest()
    for made in (evaluation(False), None):
        cache.keep(request, "", made, [], b"x")
    assert cache.stored_bytes == 0


def test_memory_is_bounded_and_the_least_recently_used_goes_first():
    """A response that was served stays."""
    cache = StaleCache(max_bytes=10_000, max_body=4000)
    assert not kept(cache, "/big", b"x" * 4001)
    assert all(kept(cache, path, b"x" * 4000) for path in ("/a", "/b"))
    cache.find(WrittenRequest(path="/a"), "", evaluation(False))
    assert kept(cache, "/c", b"x" * 4000)
    found = [cache.find(WrittenRequest(path=path), "", evaluation(False)) is not None for path in ("/a", "/b", "/c")]
    assert found == [True, False, True]
    assert cache.stored_bytes <= 10_000
    cache.clear()
    assert cache.stored_bytes == 0


def test_what_a_response_varies_by_takes_memory():
    """Clients choose the length of a header that the application names in Vary."""
    cache = StaleCache(max_bytes=10_000, max_body=4000)
    for number in range(20):
        kept(cache, f"/{number}", sent={"X-Choice": "x" * 4000}, Vary="X-Choice")
    assert len(cache._responses) == 2


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3000)), max_size=60))
def test_the_count_of_bytes_is_that_of_the_responses(steps):
    """Whatever is stored, replaced and dropped."""
    cache = StaleCache(max_bytes=9000, max_body=3000)
    for path, size in steps:
        kept(cache, f"/{path}", b"x" * size)
        assert cache.stored_bytes == sum(one.size for one in cache._responses.values()) <= 9000


@given(st.text(max_size=40))
def test_any_cache_control_is_read(text):
    """Nothing that a client or an application writes in it raises."""
    kept(StaleCache(), sent={"Cache-Control": text}, Cache_Control=text)


def test_bad_options_are_named():
    """With the expected form."""
    for options, message in (
        ({"shared": True, "per": ("user",)}, "shared=True or per="),
        ({"per": "user"}, r"write \('user',\)"),
        ({"max_body": 0}, "max_body"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            StaleCache(**options)
    with pytest.raises(ConfigurationError, match="no identity 'nobody'; it has account, ip, tenant, user"):
        kept(StaleCache(per=("nobody",)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_starts_empty():
    """And has a lock of its own."""
    cache = StaleCache()
    kept(cache)
    with cache._lock:
        pid = os.fork()
        if pid == 0:
            os._exit(0 if cache.stored_bytes == 0 and kept(cache) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_is_reduced_without_a_policy():
    """False for requests that no policy has evaluated."""
    assert not any(is_reduced(one) for one in ({}, object(), WrittenRequest()))
