"""A server without its sockets: uvicorn's own protocol gets the bytes of a request and writes the bytes of a response.

The cost of the network varies with the machine's load; the server's own work for a request (parsing, a task, the app, writing
every header field) does not. So this measures a middleware's share of a server's time more exactly than a load test.
"""

from __future__ import annotations

import asyncio
from typing import Any

from web_apps import limitkeeper, one_rule, starlette
from web_server import inline
from web_slices import Loop, clock

REQUEST = b"GET /products/17 HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Tenant: acme\r\nX-User: u42\r\n\r\n"
BARE, INLINE, FIELDS, OURS = (
    "bare app",
    "inline dict bucket",
    "inline dict bucket, the same fields",
    "limitkeeper, 1 rule, served",
)
NEAR = "limitkeeper, 1 rule, fields near the end"


class Wire(asyncio.Transport):
    """Counts the responses."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 40000), "sockname": ("127.0.0.1", 8000)})
        self.answers = 0

    def write(self, data: Any) -> None:
        self.answers += data.count(b"HTTP/1.1 200 OK\r\n")

    def is_closing(self) -> bool:
        return False

    def close(self) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


def spoken(app: Any) -> Loop:
    """A loop of requests on one connection, each answered before the next."""
    from uvicorn import Config
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    from uvicorn.server import ServerState

    config = Config(app, log_level="warning", access_log=False, http="httptools", lifespan="off")
    config.load()
    protocol = HttpToolsProtocol(config=config, server_state=ServerState(), app_state={})
    wire = Wire()
    protocol.connection_made(wire)

    async def loop(n: int) -> float:
        wanted, begun = wire.answers, clock()
        for _ in range(n):
            protocol.data_received(REQUEST)
            wanted += 1
            turns = 0
            while wire.answers < wanted:
                await asyncio.sleep(0)
                turns += 1
                if turns > 100:
                    raise RuntimeError("no answer came")
        return (clock() - begun) / n

    return loop


def loops() -> dict[str, Loop]:
    return {
        BARE: spoken(starlette()),
        INLINE: spoken(inline(False)),
        FIELDS: spoken(inline(True)),
        OURS: spoken(limitkeeper(one_rule())),
        NEAR: spoken(limitkeeper(one_rule(success="near"))),
    }
