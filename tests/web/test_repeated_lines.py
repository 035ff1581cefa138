"""Reading a header costs time and memory in proportion to its lines, in every framework.

Work is counted, not timed: bytes allocated while the lines are read (a copy of the lines read so far shows there, in the compiled
build too), and calls. Four times as many lines may do little more than four times the work.
"""

from __future__ import annotations

import asyncio
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from asgi_loop import Exchange, scope_of

from limitkeeper.policy.gate import Gate
from limitkeeper.policy.identity.client_ip import ClientIp
from limitkeeper.policy.identity.identify import Cookie, Header
from limitkeeper.policy.model import Policy
from limitkeeper.policy.request_context import RequestContext
from limitkeeper.web.asgi import AsgiRequestContext, RateLimitMiddleware
from limitkeeper.web.grpc.call import GrpcRequestContext
from limitkeeper.web.wsgi import WsgiRequestContext

LINES = 1000


class Work:
    """Counts bytes allocated between two readings, and calls."""

    def __init__(self) -> None:
        self.done = 0
        self._last = 0

    def look(self) -> None:
        current, peak = tracemalloc.get_traced_memory()
        self.done += max(0, peak - self._last)
        tracemalloc.reset_peak()
        self._last = current

    def call(self, frame: Any, event: str, argument: Any) -> None:
        self.done += 1

    def of(self, call: Callable[[], object]) -> int:
        tracemalloc.start()
        sys.setprofile(self.call)
        try:
            self.look()
            self.done = 0
            call()
            self.look()
        finally:
            sys.setprofile(None)
            tracemalloc.stop()
        return self.done


class Lines:
    """Header lines that record the work whenever one of them is read."""

    def __init__(self, work: Work, lines: list[tuple[Any, Any]]) -> None:
        self.work = work
        self.lines = lines

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for line in self.lines:
            self.work.look()
            yield line


class Context:
    """A servicer context, as far as metadata go."""

    def __init__(self, metadata: Any) -> None:
        self.metadata = metadata

    def invocation_metadata(self) -> Any:
        return self.metadata

    def peer(self) -> str:
        return "ipv4:10.0.0.1:1"


def asgi(work: Work, name: str, values: list[str]) -> RequestContext:
    lines = Lines(work, [(name.encode(), value.encode()) for value in values])
    return AsgiRequestContext({"type": "http", "method": "GET", "path": "/", "headers": lines, "client": ("10.0.0.1", 1)})


def grpc(work: Work, name: str, values: list[str]) -> RequestContext:
    return GrpcRequestContext("POST", "/s/m", Context(Lines(work, [(name, value) for value in values])))


def wsgi(work: Work, name: str, values: list[str]) -> RequestContext:
    key = "HTTP_" + name.upper().replace("-", "_")
    return WsgiRequestContext({"REQUEST_METHOD": "GET", "PATH_INFO": "/", "REMOTE_ADDR": "10.0.0.1", key: ",".join(values)})


PROXIES = ("10.0.0.0/8",)
READERS: dict[str, tuple[str, str, Callable[[RequestContext], object]]] = {
    "header": ("x-user", "1", lambda context: context.header("x-user")),
    "differs": ("x-user", "1", lambda context: context.differs("header", "x-user")),
    "identity": ("x-user", "1", Header("X-User").of),
    "cookie": ("cookie", 'sid="\\141%61"', Cookie("sid").of),
    "X-Forwarded-For": ("x-forwarded-for", "10.0.0.1", ClientIp(PROXIES).of),
    "Forwarded": ("forwarded", 'for="10.0.0.1"', ClientIp(PROXIES, "Forwarded").of),
    "X-Real-IP": ("x-real-ip", "10.0.0.1", ClientIp(PROXIES, "X-Real-IP").of),
    "host": ("host", "a", lambda context: context.host()),
}


@pytest.mark.parametrize("context_of", [asgi, wsgi, grpc])
@pytest.mark.parametrize("reader", READERS)
def test_four_times_the_lines_are_four_times_the_work(context_of: Callable[..., RequestContext], reader: str) -> None:
    """Every identity that reads a header, over ASGI, WSGI (whose servers join the lines) and gRPC."""
    name, value, read = READERS[reader]

    def work(lines: int) -> int:
        counted = Work()
        context = context_of(counted, name, [value] * lines)
        return counted.of(lambda: read(context))

    work(LINES)  # objects made at the first call
    assert work(4 * LINES) <= 5 * work(LINES) + 10_000


def test_a_refusal_reads_accept_in_one_pass() -> None:
    """A refused client's Accept lines are read when its body is chosen."""
    gate = Gate(Policy.of(limits=[{"name": "one", "key": "ip", "limit": "1/h"}]))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    guarded = RateLimitMiddleware(app, policy=gate)

    def work(lines: int) -> int:
        counted = Work()
        exchange = Exchange(b"")
        scope = scope_of("GET", "/", [], "192.0.2.1")
        scope["headers"] = Lines(counted, [(b"accept", b"application/json")] * lines)

        async def main() -> None:
            await guarded(scope, exchange.receive, exchange.send)

        done = counted.of(lambda: asyncio.run(main()))
        assert exchange.messages[0]["status"] == (429 if seen else 200)
        seen.append(done)
        return done

    seen: list[int] = []
    work(LINES)
    work(LINES)
    assert work(4 * LINES) <= 5 * work(LINES) + 10_000
