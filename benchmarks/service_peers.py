"""Servers beside the service: `service_peers.py asgi` (uvicorn and a bare app that sends the bytes of a check), or `grpc` (a
grpcio.aio method that returns a constant). Prints its port, and serves until a signal."""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any

BODY = b'{"allowed":true,"limit":1000000,"remaining":999999,"retry_after":0.0,"reset_after":0.000001}\n'
METHOD = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Reads the body and answers: the minimum of an ASGI application."""
    await receive()
    headers = [(b"content-length", b"%d" % len(BODY)), (b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": BODY})


def serve_asgi() -> None:
    import uvicorn

    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.bind(("127.0.0.1", 0))
    sock.listen(128)
    print(sock.getsockname()[1], flush=True)
    options: dict[str, Any] = {"log_level": "warning", "access_log": False, "lifespan": "off", "server_header": False}
    uvicorn.Server(uvicorn.Config(app, loop="uvloop", http="httptools", **options)).run(sockets=[sock])


async def serve_grpc() -> None:
    import grpc

    async def hello(request: bytes, context: Any) -> bytes:
        return b"\x08\x01"

    service, name = METHOD[1:].split("/")
    server = grpc.aio.server()
    handlers = {name: grpc.unary_unary_rpc_method_handler(hello)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    if sys.argv[1] == "asgi":
        serve_asgi()
    else:
        import uvloop

        asyncio.run(serve_grpc(), loop_factory=uvloop.new_event_loop) if sys.version_info >= (3, 12) else uvloop.run(serve_grpc())
