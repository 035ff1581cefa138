"""One server of the benchmark: `web_server.py inline|limitkeeper|…` prints its port and serves until a signal."""

from __future__ import annotations

import socket
import sys
import time
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from web_apps import PATH, limitkeeper, one_rule, starlette

RATE, BURST = 1e6, 1000.0
#: limitkeeper's fields, for the inline bucket that is to send as much.
FIELDS = {
    "ratelimit-policy": '"api";q=1000;w=1',
}


def inline(fields: bool) -> Any:
    """A token bucket in a dict, in the handler itself: the minimum cost of a limit."""
    buckets: dict[str, tuple[float, float]] = {}

    async def product(request: Any) -> Any:
        who, now = request.client.host, time.monotonic()
        tokens, then = buckets.get(who, (BURST, now))
        tokens = min(BURST, tokens + (now - then) * RATE)
        if tokens < 1:
            return PlainTextResponse("slow down", 429, headers={"retry-after": "1"})
        buckets[who] = (tokens - 1, now)
        if not fields:
            return PlainTextResponse("ok")
        left = int(tokens - 1)
        received = {"x-ratelimit-limit": "1000", "x-ratelimit-remaining": str(left), "ratelimit": f'"api";r={left};t=1'}
        return PlainTextResponse("ok", headers=FIELDS | received)

    return Starlette(routes=[Route(PATH, product)])


def main() -> None:
    name = sys.argv[1]
    made = {
        "inline": lambda: inline(False),
        "inline, the same fields": lambda: inline(True),
        "limitkeeper": lambda: limitkeeper(one_rule()),
        "limitkeeper, fields near the end": lambda: limitkeeper(one_rule(success="near")),
        "bare": starlette,
    }
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.bind(("127.0.0.1", 0))
    sock.listen(128)
    print(sock.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(made[name](), log_level="warning", access_log=False)).run(sockets=[sock])


if __name__ == "__main__":
    main()
