"""The suite's app once for each ASGI framework, every one minimal and real, behind the same middleware.

`build(gate, calls)` makes the app; `AsgiApp("starlette")` is what the suite plays with, `AsgiApp("starlette", Uvicorn)` the same
behind a real server. Frameworks read the annotations of their handlers, so these are evaluated where they stand.
"""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar
from urllib.parse import parse_qs

from asgi_loop import RAISED, InProcess

from limitkeeper.web.asgi import RateLimitMiddleware

METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE"]
JSON = (b"content-type", b"application/json")


def remaining(scope: Any) -> int | None:
    evaluation = scope.get("limitkeeper")
    return None if evaluation is None or evaluation.decision is None else evaluation.decision.remaining


async def pieces() -> AsyncIterator[bytes]:
    for piece in (b"one", b"two", b"three"):
        yield piece


def text_of(value: Any) -> bytes:
    return json.dumps(value).encode()


async def cached(scope: Any, receive: Any, send: Any) -> None:
    """The degrade handler: an ASGI app."""
    await send({"type": "http.response.start", "status": 200, "headers": [JSON]})
    await send({"type": "http.response.body", "body": b'{"cached": true}'})


# Plain ASGI ----------------------------------------------------------------------------------------------------------


def plain(gate: Any, calls: list[str]) -> Any:
    """No framework at all. It sends the same start message every time, as an app that saves allocations would."""
    start = {"type": "http.response.start", "status": 200, "headers": [JSON]}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for _ in range(2):
                await send({"type": (await receive())["type"] + ".complete"})
            return
        calls.append(f"{scope['method']} {scope['path']}")
        first, *rest = scope["path"].strip("/").split("/")
        if first == "raise":
            raise ValueError(RAISED)
        if first == "status":
            await send({"type": "http.response.start", "status": int(rest[0])})
            await send({"type": "http.response.body"})
            return
        await send(start)
        if first == "stream":
            async for piece in pieces():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body"})
            return
        if first == "big":
            body = b"x" * int(parse_qs(scope["query_string"].decode())["n"][0])
        elif first == "body":
            body = text_of({"length": len(await whole(receive))})
        else:
            body = text_of({"path": scope["path"], "remaining": remaining(scope)})
        await send({"type": "http.response.body", "body": body})

    return RateLimitMiddleware(app, policy=gate)


async def whole(receive: Any) -> bytes:
    """A request's body."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    return body


# Starlette -----------------------------------------------------------------------------------------------------------


def starlette(gate: Any, calls: list[str]) -> Any:
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Mount, Route

    def noted(request: Request) -> None:
        calls.append(f"{request.method} {request.url.path}")

    async def status(request: Request) -> Response:
        noted(request)
        return Response(status_code=request.path_params["code"])

    async def stream(request: Request) -> Response:
        noted(request)
        return StreamingResponse(pieces())

    async def big(request: Request) -> Response:
        noted(request)
        return Response(b"x" * int(request.query_params["n"]))

    async def raises(request: Request) -> Response:
        noted(request)
        raise ValueError(RAISED)

    async def body(request: Request) -> Response:
        noted(request)
        return JSONResponse({"length": len(await request.body())})

    async def anything(request: Request) -> Response:
        noted(request)
        return JSONResponse({"path": request.scope["path"], "remaining": remaining(request.scope)})

    routes = [
        Route("/status/{code:int}", status, methods=METHODS),
        Route("/stream", stream),
        Route("/big", big),
        Route("/raise", raises),
        Route("/body", body, methods=["POST"]),
        Mount("/admin", routes=[Route("/{rest:path}", anything, methods=METHODS)]),
        Route("/{rest:path}", anything, methods=METHODS),
    ]
    return Starlette(routes=routes, middleware=[Middleware(RateLimitMiddleware, policy=gate)])


# FastAPI -------------------------------------------------------------------------------------------------------------


def fastapi(gate: Any, calls: list[str]) -> Any:
    from fastapi import FastAPI, Request, Response
    from fastapi.responses import StreamingResponse

    app = FastAPI()
    app.add_middleware(RateLimitMiddleware, policy=gate)

    def noted(request: Request) -> None:
        calls.append(f"{request.method} {request.url.path}")

    @app.api_route("/status/{code}", methods=METHODS)
    async def status(request: Request, code: int) -> Response:
        noted(request)
        return Response(status_code=code)

    @app.get("/stream")
    async def stream(request: Request) -> StreamingResponse:
        noted(request)
        return StreamingResponse(pieces())

    @app.get("/big")
    def big(request: Request, n: int) -> Response:  # a plain function: it runs in a thread
        noted(request)
        return Response(b"x" * n)

    @app.get("/raise")
    async def raises(request: Request) -> None:
        noted(request)
        raise ValueError(RAISED)

    @app.post("/body")
    async def body(request: Request) -> dict[str, int]:
        noted(request)
        return {"length": len(await request.body())}

    @app.api_route("/{rest:path}", methods=METHODS)
    async def anything(request: Request, rest: str) -> dict[str, Any]:
        noted(request)
        return {"path": request.url.path, "remaining": remaining(request.scope)}

    return app


# Litestar ------------------------------------------------------------------------------------------------------------


def litestar(gate: Any, calls: list[str]) -> Any:
    from litestar import Litestar, Request, Response, route
    from litestar.enums import HttpMethod
    from litestar.middleware import DefineMiddleware
    from litestar.response import Stream

    every = [HttpMethod.GET, HttpMethod.HEAD, HttpMethod.POST, HttpMethod.PUT, HttpMethod.DELETE]

    def noted(request: Any) -> None:
        calls.append(f"{request.method} {request.scope['path']}")

    @route("/status/{code:int}", http_method=every)
    async def status(request: Request) -> Response[bytes]:
        noted(request)
        return Response(b"", status_code=request.path_params["code"])

    @route("/stream", http_method=every)
    async def stream(request: Request) -> Stream:
        noted(request)
        return Stream(pieces(), status_code=200)

    @route("/big", http_method=every)
    async def big(request: Request) -> Response[bytes]:
        noted(request)
        return Response(b"x" * int(request.query_params["n"]), status_code=200)

    @route("/raise", http_method=every)
    async def raises(request: Request) -> None:
        noted(request)
        raise ValueError(RAISED)

    @route("/body", http_method=every)
    async def body(request: Request) -> Response[dict[str, int]]:
        noted(request)
        return Response({"length": len(await request.body())}, status_code=200)

    @route(["/", "/{rest:path}"], http_method=every)
    async def anything(request: Request) -> Response[dict[str, Any]]:
        noted(request)
        return Response({"path": request.scope["path"], "remaining": remaining(request.scope)}, status_code=200)

    return Litestar(
        [status, stream, big, raises, body, anything],
        middleware=[DefineMiddleware(RateLimitMiddleware, policy=gate)],
        openapi_config=None,
        logging_config=None,
    )


# Quart ---------------------------------------------------------------------------------------------------------------


def quart(gate: Any, calls: list[str]) -> Any:
    from quart import Quart, request
    from quart import Response as QuartResponse

    app = Quart(__name__)
    app.logger.disabled = True

    def noted() -> None:
        calls.append(f"{request.method} {request.path}")

    @app.route("/status/<int:code>", methods=METHODS)
    async def status(code: int) -> Any:
        noted()
        return "", code

    @app.route("/stream")
    async def stream() -> Any:
        noted()
        return QuartResponse(pieces())

    @app.route("/big")
    async def big() -> Any:
        noted()
        return "x" * int(request.args["n"])

    @app.route("/raise")
    async def raises() -> Any:
        noted()
        raise ValueError(RAISED)

    @app.route("/body", methods=["POST"])
    async def body() -> Any:
        noted()
        return {"length": len(await request.get_data())}

    @app.route("/", defaults={"rest": ""}, methods=METHODS)
    @app.route("/<path:rest>", methods=METHODS)
    async def anything(rest: str) -> Any:
        noted()
        return {"path": request.path, "remaining": remaining(request.scope)}

    app.asgi_app = RateLimitMiddleware(app.asgi_app, policy=gate)  # type: ignore[method-assign]
    return app


def django(gate: Any, calls: list[str]) -> Any:
    from django_asgi import build

    return RateLimitMiddleware(build(calls), policy=gate)


BUILDERS: dict[str, Callable[[Any, list[str]], Any]] = {
    "plain": plain,
    "starlette": starlette,
    "fastapi": fastapi,
    "litestar": litestar,
    "quart": quart,
    "django": django,
}


class AsgiApp:
    """One of them, in process or behind a server (`server(app, calls)` makes it)."""

    kinds = frozenset({"http", "asgi"})
    handlers: ClassVar[dict[str, Any]] = {"cached": cached}

    def __init__(self, framework: str, server: Callable[[Any, list[str]], Any] = InProcess) -> None:
        self.build = BUILDERS[framework]
        self.server = server

    def make(self, gate: Any) -> Any:
        calls: list[str] = []
        return self.server(self.build(gate, calls), calls)
