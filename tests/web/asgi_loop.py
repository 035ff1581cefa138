"""An ASGI app in process, called as a server would call it: one loop in a thread of its own, the lifespan around it.

Requests come from any thread. An app that raises before it has answered is a 500, like everywhere.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import unquote

from app_under_test import Response


class Loop:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout: float = 90) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout)

    def close(self) -> None:
        self.run(self.loop.shutdown_asyncgens())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


class Lifespan:
    """The startup and the shutdown of an app, as a server requests them. An app without lifespan support goes without."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.said: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.received: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None
        self.state: dict[str, Any] = {}

    async def start(self) -> None:
        scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": self.state}
        self.task = asyncio.create_task(self.app(scope, self.said.get, self.received.put))
        await self._ask("lifespan.startup")

    async def _ask(self, kind: str) -> None:
        assert self.task is not None
        await self.said.put({"type": kind})
        answer = asyncio.create_task(self.received.get())
        await asyncio.wait({answer, self.task}, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            assert answer.result()["type"] == f"{kind}.complete", answer.result()
        else:
            answer.cancel()
            self.task.exception()  # the app has no lifespan, and raised

    async def stop(self) -> None:
        assert self.task is not None
        if not self.task.done():
            await self._ask("lifespan.shutdown")
            await asyncio.wait({self.task}, timeout=60)


def scope_of(method: str, target: str, headers: list[tuple[str, str]], peer: str, **more: Any) -> dict[str, Any]:
    """An HTTP scope as uvicorn makes it."""
    path, _, query = target.partition("?")
    fields = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    if not any(name == b"host" for name, _ in fields):
        fields.insert(0, (b"host", b"testserver"))
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query.encode(),
        "headers": fields,
        "client": (peer, 50000),
        "server": ("testserver", 80),
        **more,
    }


class Exchange:
    """One request to an app: `receive` gives the body in pieces and counts what was taken, `send` collects the response."""

    def __init__(self, body: bytes) -> None:
        pieces = [body[i : i + 16_384] for i in range(0, len(body), 16_384)] or [b""]
        self.pieces = pieces
        self.read = 0
        self.messages: list[dict[str, Any]] = []
        self.over = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        if not self.pieces:
            await self.over.wait()
            return {"type": "http.disconnect"}
        piece = self.pieces.pop(0)
        self.read += len(piece)
        return {"type": "http.request", "body": piece, "more_body": bool(self.pieces)}

    async def send(self, message: Any) -> None:
        self.messages.append(dict(message))
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.over.set()

    def response(self, method: str) -> Response:
        start = next((message for message in self.messages if message["type"] == "http.response.start"), None)
        if start is None:
            return Response(500, [], b"Internal Server Error", self.read)
        headers = [(bytes(name).decode("latin-1"), bytes(value).decode("latin-1")) for name, value in start.get("headers", ())]
        body = b"".join(message.get("body", b"") for message in self.messages if message["type"] == "http.response.body")
        return Response(start["status"], headers, b"" if method == "HEAD" else body, self.read)


class InProcess:
    """An app that runs here. `calls` is filled by its handlers."""

    def __init__(self, app: Any, calls: list[str]) -> None:
        self.app = app
        self.calls = calls
        self.loop = Loop()
        self.lifespan = self.loop.run(self._begin())

    async def _begin(self) -> Lifespan:
        lifespan = Lifespan(self.app)
        await lifespan.start()
        return lifespan

    def request(self, method: str, target: str, headers: list[tuple[str, str]], body: bytes, peer: str) -> Response:
        return self.loop.run(self._request(method, target, headers, body, peer))  # type: ignore[no-any-return]

    async def _request(self, method: str, target: str, headers: list[tuple[str, str]], body: bytes, peer: str) -> Response:
        exchange = Exchange(body)
        if body:
            headers = [*headers, ("content-length", str(len(body)))]
        scope = scope_of(method, target, headers, peer, state=dict(self.lifespan.state))
        try:
            await self.app(scope, exchange.receive, exchange.send)
        except Exception as error:
            if not is_the_handlers(error):
                raise
        return exchange.response(method)

    def close(self) -> None:
        self.loop.run(self.lifespan.stop())
        self.loop.close()


def is_the_handlers(error: BaseException) -> bool:
    """Whether it is the exception of /raise, or a group of nothing else."""
    if isinstance(error, BaseExceptionGroup):
        return all(is_the_handlers(one) for one in error.exceptions)
    return isinstance(error, ValueError) and str(error) == RAISED


#: The message of /raise.
RAISED = "the handler raised"
Handler = Callable[..., Any]


def used(gate: Any) -> int:
    """How much of the first rule's limit the suite's client has used."""
    entry = gate.compiled.rules[0].default_entries[0]
    decision = gate.store.decide_one(entry.named, "192.0.2.1", 0, 0, False)
    return decision.limit - decision.remaining
