"""Django's middleware: what a refusal does not reach, settling, exempt views, and the shared gate."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from collections.abc import Callable
from io import BytesIO
from typing import Any, ClassVar
from wsgiref.util import FileWrapper

import pytest
from app_under_test import Response
from asgi_loop import Exchange, scope_of
from asgi_loop import InProcess as Loop
from django.core.exceptions import PermissionDenied
from django.core.handlers.asgi import ASGIHandler
from django.core.handlers.wsgi import WSGIHandler
from django.http import FileResponse, Http404, HttpResponse, StreamingHttpResponse
from django.test import Client
from django.test.utils import override_settings
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from django_asgi import Urls
from django_site import OURS, handler
from wsgi_apps import InProcess, environ_of

from limitkeeper import ConfigurationError, MemoryStore
from limitkeeper.policy import Policy, WrittenRequest
from limitkeeper.policy.gate import Gate
from limitkeeper.web.django import exempt
from limitkeeper.web.django import gate as site_gate
from stand_ins import WrappedStore

ONE = "limits: [{name: api, key: ip, limit: token bucket 1/min burst 1}]"
BYTES = "limits: [{name: bytes, key: ip, limit: fixed window 1000/min, cost: {response: 1B, estimate: 1}}]"


@pytest.fixture
def gate(store: MemoryStore):
    return lambda policy=ONE, **more: Gate(Policy.read(policy), store=store, **more)


def left(gate: Gate) -> int:
    return gate.explain(WrittenRequest("GET", "/"))[0].decision.remaining


class Served:
    """Views behind the middleware, in one sync and async."""

    def __init__(self, colour: str) -> None:
        self.colour = colour
        self.running: list[Any] = []

    def __call__(self, urls: list[Any], gate: Any, *middleware: str, **limitkeeper: Any) -> Callable[..., Response]:
        kind, runner = (WSGIHandler, InProcess) if self.colour == "wsgi" else (ASGIHandler, Loop)
        served: Any = runner(handler(kind, urls, {"POLICY": gate, **limitkeeper}, middleware or (OURS,)), [])
        self.running.append(served)
        return lambda target="/", headers=(): served.request("GET", target, list(headers), b"", "127.0.0.1")


@pytest.fixture(params=["wsgi", "asgi"])
def serve(request):
    """`get = serve(urls, gate)`, then `get("/path")`."""
    served = Served(request.param)
    yield served
    for one in served.running:
        one.close()


class Connecting:
    """A middleware below the policy's that takes a connection for every request, as many do."""

    taken: ClassVar[list[sqlite3.Connection]] = []

    def __init__(self, get_response):
        self.get_response = get_response

    def __call__(self, request):
        connection = sqlite3.connect(":memory:", check_same_thread=False)
        self.taken.append(connection)
        request.rows = connection.execute("select 1").fetchall()
        return self.get_response(request)


def test_a_refusal_takes_no_connection(serve, gate):
    """A refused request reaches no middleware below, and no view: no connection is taken."""
    Connecting.taken.clear()
    get = serve([path("", lambda request: HttpResponse(str(request.rows)))], gate(), OURS, f"{__name__}.Connecting")
    assert [get().status for _ in range(5)] == [200, 429, 429, 429, 429]
    assert len(Connecting.taken) == 1
    Connecting.taken.pop().close()


def test_a_refusal_is_no_line_in_djangos_log(serve, gate, monkeypatch):
    """Django logs every 4xx, and mails every 5xx to the administrators; refusals of either sort cause neither."""
    written = []
    logger = logging.getLogger("django.request")
    monkeypatch.setattr(logger, "disabled", False)
    monkeypatch.setattr(logger, "level", logging.DEBUG)
    monkeypatch.setattr(logger, "handle", written.append)
    urls = [path("", lambda request: HttpResponse("hello")), path("missing", lambda request: HttpResponse(status=404))]
    get = serve(urls, gate(ONE.replace("burst 1", "burst 2, status: 503")))
    assert [get(target).status for target in ("/", "/missing", "/", "/")] == [200, 404, 503, 503]
    assert [record.status_code for record in written] == [404]


def test_the_decision_is_at_hand(serve, gate):
    """`request.limitkeeper` is the evaluation."""
    get = serve([path("", lambda request: HttpResponse(str(request.limitkeeper.decision.remaining)))], gate(BYTES))
    assert get().body == b"999"


async def async_pieces():
    for piece in ("four", b"four"):
        yield piece


def test_responses_cost_their_size(serve, gate):
    """A complete response is settled at once, a streamed one when it has been sent."""

    def stream(request):
        return StreamingHttpResponse(iter(["four", b"four"]) if serve.colour == "wsgi" else async_pieces())

    bytes_gate = gate(BYTES)
    get = serve([path("whole", lambda request: HttpResponse("x" * 10)), path("stream", stream)], bytes_gate)
    assert get("/whole").body == b"x" * 10
    assert left(bytes_gate) == 990
    assert get("/stream").body == b"fourfour"
    assert left(bytes_gate) == 982


def test_a_file_costs_its_length_and_stays_the_servers(gate):
    """A file is charged by its announced length, and is sent through the server's own wrapper."""
    bytes_gate = gate(BYTES)
    app = handler(WSGIHandler, [path("", lambda request: FileResponse(BytesIO(b"x" * 20)))], {"POLICY": bytes_gate})
    returned = app(environ_of("GET", "/", **{"wsgi.file_wrapper": FileWrapper}), lambda *said: None)
    assert isinstance(returned, FileWrapper)
    assert left(bytes_gate) == 980
    returned.close()


def test_a_stream_that_is_given_up_is_settled(gate):
    """A client that disconnects in the middle is charged for what it got."""
    bytes_gate = gate(BYTES)
    urls = [path("", lambda request: StreamingHttpResponse(iter([b"four", b"four"])))]
    returned = handler(WSGIHandler, urls, {"POLICY": bytes_gate})(environ_of("GET", "/"), lambda *said: None)
    assert next(iter(returned)) == b"four"
    returned.close()
    assert left(bytes_gate) == 996


def test_an_async_stream_that_is_given_up_is_settled(gate):
    """The same under ASGI, where closing happens in a thread."""
    bytes_gate = gate(BYTES)
    endless = threading.Event()

    async def pieces():
        while True:
            yield b"four"
            endless.set()
            await asyncio.sleep(3600)

    app = handler(ASGIHandler, [path("", lambda request: StreamingHttpResponse(pieces()))], {"POLICY": bytes_gate})

    async def leave() -> None:
        gone = asyncio.Event()

        async def receive():
            if not receive.asked:
                receive.asked = True
                return {"type": "http.request", "body": b"", "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        receive.asked = False

        async def send(message):
            if message.get("body"):
                gone.set()

        await app(scope_of("GET", "/", [], "127.0.0.1"), receive, send)

    asyncio.run(leave())
    assert left(bytes_gate) == 996


def test_a_client_that_goes_before_its_answer_is_no_failure(gate):
    """Django cancels a view whose client has disconnected: counted as 499, not as a 500 of the service, and it stays charged."""
    failures = gate("limits: [{name: failures, key: ip, limit: fixed window 9/min, charge: {status: [5xx]}}]")

    async def slow(request):
        await asyncio.sleep(3600)

    app = handler(ASGIHandler, [path("", slow)], {"POLICY": failures})

    async def leave() -> None:
        came = [{"type": "http.request", "body": b"", "more_body": False}, {"type": "http.disconnect"}]

        async def receive():
            await asyncio.sleep(0.05)
            return came.pop(0)

        await app(scope_of("GET", "/", [], "127.0.0.1"), receive, None)

    asyncio.run(leave())
    rule = failures.snapshot().rules[0]
    assert (rule.statuses, rule.given_back) == ({"4xx": 1}, 0)


def test_a_view_that_raises_is_a_failure(serve, gate):
    """An exception is settled by Django's response to it: 404, 403, or 500."""

    def raises(request, name):
        raise {"missing": Http404, "denied": PermissionDenied, "broken": ValueError}[name]("raised")

    failures = gate("limits: [{name: failures, key: ip, limit: fixed window 9/min, charge: {status: [403, 5xx]}}]")
    get = serve([path("<name>", raises)], failures)
    assert [get(f"/{name}").status for name in ("missing", "denied", "broken", "missing")] == [404, 403, 500, 404]
    assert left(failures) == 7
    assert failures.snapshot().rules[0].statuses == {"4xx": 3, "5xx": 1}


def test_exempt_views_are_not_limited(serve, gate):
    """A function and a class that are exempt are outside of the policy, with None as the evaluation; all others are inside."""

    @exempt
    def free(request):
        return HttpResponse(str(request.limitkeeper))

    @method_decorator(exempt, name="dispatch")
    class Health(View):
        def get(self, request):
            return HttpResponse("ok")

    get = serve([path("free", free), path("health", Health.as_view()), path("", lambda request: HttpResponse())], gate())
    assert [get("/free").body for _ in range(3)] == [b"None"] * 3
    assert [get("/health").status for _ in range(3)] == [200] * 3
    assert [get("/").status for _ in range(2)] == [200, 429]
    assert get("/nowhere").status == 429


def test_identities_may_read_the_request(serve):
    """A callable gets facts whose `raw` is the HttpRequest, with the attributes set by the middlewares above."""
    policy = Policy.of(
        identify={"user": {"call": lambda facts: facts.raw.somebody}},
        limits=[{"name": "api", "key": "user", "limit": "token bucket 1/min burst 1"}],
    )
    get = serve([path("", lambda request: HttpResponse())], policy, f"{__name__}.Knowing", OURS)
    assert [get("/?user=1").status for _ in range(2)] == [200, 429]
    assert get("/?user=2").status == 200


class Knowing:
    """A middleware above the policy's that identifies the user."""

    def __init__(self, get_response):
        self.get_response = get_response

    def __call__(self, request):
        request.somebody = int(request.GET["user"])
        return self.get_response(request)


def test_a_far_store_never_blocks_the_loop():
    """Under ASGI a slow store is awaited, and the loop continues meanwhile."""
    entered, answered = threading.Event(), threading.Event()

    class SlowStore(WrappedStore):
        def decide(self, *asked: Any, **options: Any) -> Any:
            entered.set()
            assert answered.wait(60)
            return super().decide(*asked, **options)

    slow = SlowStore(MemoryStore(), local=False)
    gate = Gate(Policy.read("budget: 60s\n" + ONE), store=slow)
    app = handler(ASGIHandler, [path("", lambda request: HttpResponse())], {"POLICY": gate})

    async def both() -> int:
        exchange = Exchange(b"")
        first = asyncio.create_task(app(scope_of("GET", "/", [], "127.0.0.1"), exchange.receive, exchange.send))
        while not entered.is_set():
            await asyncio.sleep(0.001)
        assert not first.done()
        answered.set()
        await first
        return exchange.response("GET").status

    assert asyncio.run(both()) == 200
    gate.close()


# The site


@pytest.fixture
def settings_of():
    """Settings that last for a test."""
    overrides = []

    def put(**words):
        override = override_settings(**words)
        override.enable()
        overrides.append(override)

    yield put
    for override in reversed(overrides):
        override.disable()


def test_the_gate_is_one_per_process_and_follows_the_settings(settings_of, tmp_path):
    """Every caller gets the same gate, made from the file beside BASE_DIR; other settings make another one."""
    (tmp_path / "limitkeeper.yaml").write_text("name: shop\n" + ONE)
    settings_of(BASE_DIR=tmp_path, LIMITKEEPER={"POLICY": "limitkeeper.yaml", "STORE": "memory://"})
    first = site_gate()
    assert first is site_gate()
    assert first.policy.name == "shop"
    settings_of(LIMITKEEPER={"POLICY": Policy.read(ONE)})
    assert site_gate() is not first


def test_two_handlers_of_one_process_count_together(settings_of):
    """Django makes a chain of middlewares for every handler and test client: all of them use one gate."""
    settings_of(
        MIDDLEWARE=[OURS], LIMITKEEPER={"POLICY": Policy.read(ONE)}, ROOT_URLCONF=Urls([path("", lambda r: HttpResponse())])
    )
    assert [Client().get("/").status_code for _ in range(2)] == [200, 429]


@pytest.mark.parametrize(
    ("said", "received"),
    [({}, "no policy"), ({"POLICI": "x"}, "unknown key 'POLICI'"), ("limitkeeper.yaml", "expected LIMITKEEPER to be a dict")],
    ids=["none", "misspelt", "no-dict"],
)
def test_an_invalid_setting_is_an_error(settings_of, said, received):
    """An invalid setting is an error that names the right form."""
    settings_of(LIMITKEEPER=said)
    with pytest.raises(ConfigurationError, match=received):
        site_gate()


def test_without_a_policy_the_middleware_steps_aside(settings_of):
    """A site that limits only single views needs no policy: the middleware is not used."""
    settings_of(MIDDLEWARE=[OURS], LIMITKEEPER={}, ROOT_URLCONF=Urls([path("", lambda request: HttpResponse("x"))]))
    assert "X-RateLimit-Limit" not in Client().get("/").headers
