"""The web peers, each put in front of the same handler as in its own documentation, with a memory store, per address."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from web_apps import PATH, flask

HERE = Path(__file__).resolve().parent
#: asgi-ratelimit is imported as `ratelimit`, which is another package's name too: it has a folder, and a process, of its own.
APART = HERE.parent / "build" / "web-peers"
MANY, ONE = 10**9, 1


class Peer(NamedTuple):
    """`build(count)` makes the app that admits so many in an hour. `base` is the same app without the peer."""

    name: str
    base: str
    build: Callable[[int], Any]


def slowapi(middleware: str, headers: bool) -> Callable[[int], Any]:
    def build(count: int) -> Any:
        import slowapi.middleware
        from slowapi import Limiter, _rate_limit_exceeded_handler
        from slowapi.errors import RateLimitExceeded
        from slowapi.util import get_remote_address
        from web_apps import starlette

        app = starlette()
        app.state.limiter = Limiter(key_func=get_remote_address, default_limits=[f"{count}/hour"], headers_enabled=headers)
        app.add_exception_handler(RateLimitExceeded, _rate_limit_exceeded_handler)
        app.add_middleware(getattr(slowapi.middleware, middleware))
        return app

    return build


def fastapi(**options: Any) -> Any:
    from fastapi import FastAPI
    from fastapi.responses import PlainTextResponse

    app = FastAPI()

    @app.get(PATH, **options)
    async def product() -> PlainTextResponse:
        return PlainTextResponse("ok")

    return app


def fastapi_limiter(count: int) -> Any:
    from fastapi import Depends
    from fastapi_limiter.depends import RateLimiter
    from pyrate_limiter import Duration, Limiter, Rate

    return fastapi(dependencies=[Depends(RateLimiter(limiter=Limiter(Rate(count, Duration.HOUR))))])


def throttled(count: int) -> Any:
    from fastapi import FastAPI, Request
    from fastapi.responses import PlainTextResponse
    from throttled.asyncio.contrib.fastapi import (
        Limiter,
        RateLimitExceededError,
        RateLimitMiddleware,
        get_remote_address,
        rate_limit_exceeded_handler,
    )

    app = FastAPI()
    app.add_middleware(RateLimitMiddleware)
    app.add_exception_handler(RateLimitExceededError, rate_limit_exceeded_handler)
    limiter = Limiter(f"{count}/h", key_func=get_remote_address)

    async def product(request):  # type: ignore[no-untyped-def]
        return PlainTextResponse("ok")

    product.__annotations__ = {"request": Request}
    app.get(PATH)(limiter.limit()(product))
    return app


def flask_limiter(headers: bool) -> Callable[[int], Any]:
    def build(count: int) -> Any:
        from flask_limiter import Limiter
        from flask_limiter.util import get_remote_address

        app = flask()
        limits = [f"{count}/hour"]
        Limiter(get_remote_address, app=app, default_limits=limits, headers_enabled=headers, storage_uri="memory://")
        return app

    return build


def asgi_ratelimit(count: int) -> Any:
    from ratelimit import RateLimitMiddleware, Rule
    from ratelimit.backends.simple import MemoryBackend
    from web_apps import starlette

    async def who(scope: Any) -> tuple[str, str]:
        return scope["client"][0], "default"

    return RateLimitMiddleware(starlette(), who, MemoryBackend(), {r"^/products": [Rule(hour=count)]})


ASGI = (
    Peer("slowapi, BaseHTTPMiddleware, no headers", "starlette", slowapi("SlowAPIMiddleware", False)),
    Peer("slowapi, BaseHTTPMiddleware, headers", "starlette", slowapi("SlowAPIMiddleware", True)),
    Peer("slowapi, ASGI middleware, no headers", "starlette", slowapi("SlowAPIASGIMiddleware", False)),
    Peer("slowapi, ASGI middleware, headers", "starlette", slowapi("SlowAPIASGIMiddleware", True)),
    Peer("fastapi-limiter, Depends, no headers", "fastapi", fastapi_limiter),
    Peer("throttled-py, FastAPI, headers", "fastapi", throttled),
)
WSGI = (
    Peer("flask-limiter, no headers", "flask", flask_limiter(False)),
    Peer("flask-limiter, headers", "flask", flask_limiter(True)),
)
ALONE = Peer("asgi-ratelimit, no headers", "starlette", asgi_ratelimit)


def apart(quick: bool, failed: dict[str, str]) -> dict[str, float]:
    """The overhead of asgi-ratelimit on a request, and the cost of its refusal, measured in a process of its own."""
    try:
        if not (APART / "ratelimit").is_dir():
            install = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
            subprocess.run([*install, "--target", str(APART), "asgi-ratelimit"], check=True, capture_output=True, timeout=120)
        command = [sys.executable, str(HERE / "web_peers.py"), *(["--quick"] if quick else [])]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except Exception as error:
        failed[ALONE.name] = f"{type(error).__name__}: {error}"
        return {}


def main() -> None:
    """In the process of its own: prints one line of JSON."""
    import asyncio

    from timing import Effort, one_core
    from web_apps import starlette
    from web_slices import asgi, status_of, take

    async def measured() -> dict[str, float]:
        refusing = ALONE.build(ONE)
        seen = [await status_of(refusing) for _ in range(3)]
        if seen != [200, 429, 429]:
            raise RuntimeError(f"it answered {seen}")
        loops = {"base": asgi(starlette()), "peer": asgi(ALONE.build(MANY)), "refusing": asgi(refusing)}
        failed: dict[str, str] = {}
        taken = await take(loops, Effort("--quick" in sys.argv), lambda text: None, failed)
        return {"added": taken.added("peer", "base"), "refused": taken.total("refusing")}

    sys.path.insert(0, str(APART))
    with one_core():
        print(json.dumps(asyncio.run(measured())))


if __name__ == "__main__":
    main()
