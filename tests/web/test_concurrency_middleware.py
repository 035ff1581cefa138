"""Middlewares that bound the requests in progress: ASGI and WSGI."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from wsgi_apps import environ_of

from limitkeeper import MemoryStore
from limitkeeper.concurrency import AIMD, AdaptiveBulkhead, Bulkhead, BulkheadFull, LoadShedder
from limitkeeper.errors import ConfigurationError
from limitkeeper.policy import Policy
from limitkeeper.policy.gate import Gate
from limitkeeper.policy.request_context import WrittenRequest
from limitkeeper.web.asgi import RateLimitMiddleware
from limitkeeper.web.concurrency_middleware import AsgiConcurrencyMiddleware, WsgiConcurrencyMiddleware, criticality_of
from limitkeeper.web.wsgi import RateLimitMiddleware as WsgiMiddleware


class Held:
    """An ASGI application whose responses end when `go` is set; `statuses` are those that clients got."""

    def __init__(self, status: int = 200) -> None:
        self.status, self.started, self.statuses = status, 0, []
        self.go = asyncio.Event()
        self.headers: list[dict[bytes, bytes]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.started += 1
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await self.go.wait()
        await send({"type": "http.response.body", "body": b""})

    async def request(self, app: Any, path: str = "/", method: str = "GET") -> bytes:
        sent = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b"", "client": ("10.0.0.1", 1)}
        await app(scope, None, send)
        self.statuses.append(sent[0]["status"])
        self.headers.append(dict(sent[0]["headers"]))
        return b"".join(one.get("body", b"") for one in sent[1:])


async def settle_loop() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_the_request_beyond_the_bulkhead_is_answered_503():
    """Without a call of the application, with Retry-After; the place is free again when a response has ended."""

    async def run() -> None:
        inner, bulkhead = Held(), Bulkhead(2, 0)
        app = AsgiConcurrencyMiddleware(inner, bulkhead, retry_after=3)
        first = [asyncio.create_task(inner.request(app)) for _ in range(2)]
        await settle_loop()
        content = await inner.request(app)
        assert (inner.statuses, inner.started) == ([503], 2)
        assert (inner.headers[0][b"retry-after"], inner.headers[0][b"cache-control"]) == (b"3", b"no-store")
        assert json.loads(content)["code"] == "OVERLOADED"
        assert await inner.request(app, method="HEAD") == b""
        inner.go.set()
        await asyncio.gather(*first)
        assert bulkhead.in_use == 0
        await inner.request(app)
        assert inner.statuses == [503, 503, 200, 200, 200]

    asyncio.run(run())


def test_a_background_task_after_a_response_holds_no_place(clock):
    """The application continues when its response has ended; its place is free, and its response time has been measured."""

    async def run() -> None:
        inner, ended, adaptive = Held(), asyncio.Event(), AdaptiveBulkhead(AIMD(1, 1, 1), clock=clock)
        inner.go.set()

        async def with_task(scope: Any, receive: Any, send: Any) -> None:
            await inner(scope, receive, send)
            await ended.wait()

        for app in (AsgiConcurrencyMiddleware(with_task, Bulkhead(1, 0)), AsgiConcurrencyMiddleware(with_task, adaptive)):
            tasks = [asyncio.create_task(inner.request(app)) for _ in range(2)]
            await settle_loop()
            ended.set()
            await asyncio.gather(*tasks)
            ended.clear()
        assert inner.statuses == [200] * 4
        assert adaptive.bulkhead.in_use == 0

    asyncio.run(run())


def test_a_waiting_request_runs_when_its_turn_comes_and_a_cancelled_one_leaves():
    """No place is lost."""

    async def run() -> None:
        inner, bulkhead = Held(), Bulkhead(1, 2)
        app = AsgiConcurrencyMiddleware(inner, bulkhead)
        tasks = [asyncio.create_task(inner.request(app)) for _ in range(3)]
        await settle_loop()
        tasks[1].cancel()
        inner.go.set()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(ended[1], asyncio.CancelledError)
        assert (inner.statuses, bulkhead.in_use) == ([200, 200], 0)

    asyncio.run(run())


@pytest.mark.parametrize(
    "make", [Bulkhead, lambda size: LoadShedder(Bulkhead(size)), lambda size: AdaptiveBulkhead(AIMD(size, 1, size), 9)]
)
def test_a_client_that_disconnects_while_it_waits_leaves_the_queue(make):
    """Its handler is not called, so requests that nobody waits for delay no others; what others have sent meanwhile is read."""

    async def run() -> None:
        limit, go, bodies = make(1), asyncio.Event(), []
        bulkhead = getattr(limit, "bulkhead", limit)

        async def shop(scope: Any, receive: Any, send: Any) -> None:
            bodies.append((await receive())["body"])
            await go.wait()

        app = AsgiConcurrencyMiddleware(shop, limit, **({"default": "critical"} if isinstance(limit, LoadShedder) else {}))

        async def request(*messages: dict[str, Any]) -> None:
            sent = list(messages)

            async def receive() -> dict[str, Any]:
                return sent.pop(0) if sent else await asyncio.Future()

            async def send(_: Any) -> None:
                raise AssertionError("nobody reads a response")

            await app({"type": "http", "method": "POST", "headers": []}, receive, send)

        first = asyncio.create_task(request({"type": "http.request", "body": b"first"}))
        await settle_loop()
        left = [
            asyncio.create_task(request({"type": "http.request", "body": b"left"}, {"type": "http.disconnect"})) for _ in range(3)
        ]
        last = asyncio.create_task(request({"type": "http.request", "body": b"last"}))
        await asyncio.wait_for(asyncio.gather(*left), 10)
        assert bulkhead.waiting == 1
        go.set()
        await asyncio.gather(first, last)
        assert (bodies, bulkhead.in_use) == ([b"first", b"last"], 0)

    asyncio.run(run())


def test_an_error_of_the_application_is_its_own():
    """Also a BulkheadFull that it raises: only the place of the request itself is answered here."""

    async def failing(scope: Any, receive: Any, send: Any) -> None:
        raise BulkheadFull("payment", 1, "is full")

    bulkhead = Bulkhead(1, 0)
    with pytest.raises(BulkheadFull, match="payment"):
        asyncio.run(Held().request(AsgiConcurrencyMiddleware(failing, bulkhead)))
    assert bulkhead.in_use == 0


def test_the_policy_names_the_criticality_of_a_request():
    """The least critical requests are shed first, and the most critical ones keep the reserve."""
    policy = Policy.read(
        """
limits:
  - {name: checkout, match: POST /checkout, limit: 1000/s, criticality: critical}
  - {name: reports, match: GET /reports, limit: 1000/s, criticality: background}
"""
    )

    async def run() -> list[int]:
        inner = Held()
        app = RateLimitMiddleware(
            AsgiConcurrencyMiddleware(inner, LoadShedder(Bulkhead(4, 0), reserve=0.5)), policy, store=MemoryStore()
        )
        tasks = []
        for method, path in [("GET", "/reports"), ("GET", "/"), ("GET", "/reports"), ("GET", "/"), ("POST", "/checkout")]:
            tasks.append(asyncio.create_task(inner.request(app, path, method)))
            await settle_loop()
        refused = list(inner.statuses)
        inner.go.set()
        await asyncio.gather(*tasks)
        return [*refused, inner.started]

    assert asyncio.run(run()) == [503, 503, 3]


def test_a_request_has_the_criticality_of_a_rule_that_charges_nothing(clock):
    """A repetition under an idempotency key, a capacity, and shadow mode: a client does not choose its class by them."""
    for options in ("limit: 9/h, once: Idempotency-Key", "capacity: 100/s", "limit: 9/h, on_refusal: shadow"):
        policy = Policy.read(
            f"""
            limits:
            - {{name: first, key: ip, {options}, criticality: background}}
            - {{name: second, key: ip, limit: 9/h, criticality: critical}}
            """
        )
        gate = Gate(policy, store=MemoryStore(clock=clock))
        asked = [gate.ask(WrittenRequest("POST", "/", headers={"Idempotency-Key": "k"})) for _ in range(3)]
        assert [criticality_of(evaluation) for evaluation in asked] == ["background"] * 3


def test_a_class_that_the_shedder_does_not_have_is_the_default_one(caplog, clock):
    """With one warning: a policy that is reloaded must not make requests fail."""
    policy = Policy.read("limits: [{name: all, key: ip, limit: 9/h, criticality: vital}]")

    async def main() -> None:
        held = Held()
        held.go.set()
        app = RateLimitMiddleware(
            AsgiConcurrencyMiddleware(held, LoadShedder(Bulkhead(9))), policy, store=MemoryStore(clock=clock)
        )
        for _ in range(2):
            await held.request(app)
        assert held.statuses == [200, 200]

    asyncio.run(main())
    assert [record.getMessage().startswith("unknown class 'vital'") for record in caplog.records] == [True]


def test_an_adaptive_limit_adapts_to_responses(clock):
    """503 and 504 are drops, other errors change nothing, and successes raise it."""

    async def run(status: int) -> int:
        inner = Held(status)
        inner.go.set()
        adaptive = AdaptiveBulkhead(AIMD(initial=2, minimum=1, maximum=10, backoff=0.5), clock=clock)
        app = AsgiConcurrencyMiddleware(inner, adaptive)
        await inner.request(app)
        return adaptive.bulkhead.max_concurrent

    assert [asyncio.run(run(status)) for status in (200, 404, 500, 503, 504)] == [3, 2, 2, 1, 1]


def test_clients_that_cancel_their_requests_do_not_lower_an_adaptive_limit(clock):
    """The clients decide when: a hostile one would bring it to its minimum for all."""

    async def main() -> None:
        adaptive = AdaptiveBulkhead(AIMD(100, 10, 200), clock=clock)
        held = Held()
        app = AsgiConcurrencyMiddleware(held, adaptive)
        for _ in range(20):
            task = asyncio.ensure_future(held.request(app))
            await settle_loop()
            task.cancel()
            await asyncio.wait({task})
        assert (held.started, adaptive.bulkhead.in_use, adaptive.bulkhead.max_concurrent) == (20, 0, 100)

    asyncio.run(main())


def test_a_response_without_an_end_is_no_sample(clock):
    """Frameworks return early where the client of a stream has disconnected: that is no fast response."""
    adaptive = AdaptiveBulkhead(AIMD(1, 1, 9), clock=clock)

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a part", "more_body": scope["path"] == "/left"})

    app = AsgiConcurrencyMiddleware(stream, adaptive)
    for path, size in (("/left", 1), ("/left", 1), ("/read", 2)):
        asyncio.run(Held().request(app, path))
        assert (adaptive.bulkhead.max_concurrent, adaptive.bulkhead.in_use) == (size, 0)


def test_websockets_and_the_lifespan_pass():
    """They hold no place."""
    seen = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    app = AsgiConcurrencyMiddleware(inner, Bulkhead(1, 0))
    for kind in ("websocket", "lifespan"):
        asyncio.run(app({"type": kind}, None, None))
    assert seen == ["websocket", "lifespan"]


def test_a_wsgi_response_holds_its_place_until_it_is_closed():
    """Also where its body raises: servers close it."""
    statuses, bulkhead = [], Bulkhead(1, 0)

    def inner(environ: Any, start_response: Any) -> Any:
        if environ["PATH_INFO"] == "/raise":
            raise ValueError("here")
        start_response("200 OK", [])
        yield b"x"

    def start(status: str, headers: Any, exc_info: Any = None) -> Any:
        statuses.append(status)

    app = WsgiConcurrencyMiddleware(inner, bulkhead)
    held = app(environ_of("GET", "/"), start)
    assert list(held) == [b"x"]
    refused = app(environ_of("GET", "/"), start)
    assert b"OVERLOADED" in b"".join(refused)
    held.close()
    failing = app(environ_of("GET", "/raise"), start)
    with pytest.raises(ValueError, match="here"):
        list(failing)
    failing.close()
    assert (statuses, bulkhead.in_use) == (["200 OK", "503 Service Unavailable"], 0)


def test_a_wsgi_application_that_raises_at_once_holds_nothing():
    """Its place is released with the exception."""
    bulkhead = Bulkhead(1, 0)

    def inner(environ: Any, start_response: Any) -> Any:
        raise ValueError("here")

    with pytest.raises(ValueError, match="here"):
        WsgiConcurrencyMiddleware(inner, bulkhead)(environ_of("GET", "/"), None)
    assert bulkhead.in_use == 0


def test_a_body_that_fails_before_it_is_returned_is_closed():
    """A policy that settles by outcome reads the first chunk of a generator itself: its place is released if that raises, and if
    the server does not take the response."""
    policy = Policy.read("limits: [{name: errors, key: ip, limit: 100/h, charge: {status: [5xx]}}]")
    bulkhead = Bulkhead(1, 0)

    def failing(environ: Any, start_response: Any) -> Any:
        raise ValueError("here")
        yield b""

    def answering(environ: Any, start_response: Any) -> Any:
        start_response("200 OK", [])
        yield b"x"

    def start(status: str, headers: Any, exc_info: Any = None) -> Any:
        raise ValueError("here")

    for inner in (failing, answering):
        app = WsgiMiddleware(WsgiConcurrencyMiddleware(inner, bulkhead), policy)
        with pytest.raises(ValueError, match="here"):
            app(environ_of("GET", "/"), start)
        assert bulkhead.in_use == 0


def test_bad_limits_are_named():
    """With the expected form, when the middleware is made."""
    with pytest.raises(ConfigurationError, match="expected a Bulkhead, an AdaptiveBulkhead or a LoadShedder, got int"):
        AsgiConcurrencyMiddleware(print, 40)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="unknown class 'usual'"):
        WsgiConcurrencyMiddleware(print, LoadShedder(Bulkhead(1)), default="usual")  # type: ignore[arg-type]
