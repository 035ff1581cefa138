"""One small app for each framework, whose handlers answer with the name of their route, and hostile spellings of its paths.

`ASGI` and `WSGI` build the apps; `targets` gives request targets that a router may take for one of ROUTES.
"""

import random
from collections.abc import Iterator
from typing import Any

#: The paths of the rules, by the name of the rule and of the route.
ROUTES = {
    "root": "/",
    "checkout": "/checkout",
    "search": "/search/**",
    "tenant": "/t/{tenant}/x",
    "order": "/orders/{order}",
    "healthz": "/healthz",
}


def starlette() -> Any:
    from starlette.applications import Starlette
    from starlette.responses import PlainTextResponse
    from starlette.routing import Mount, Route

    def route(path: str, name: str) -> Any:
        return Route(path, lambda request: PlainTextResponse(f"route={name}"))

    mounted = Mount("/search", routes=[route("/{rest:path}", "search")])
    names = [("/", "root"), ("/checkout", "checkout"), ("/t/{tenant}/x", "tenant"), ("/orders/{order:int}", "order")]
    return Starlette(routes=[*[route(path, name) for path, name in names], mounted, route("/healthz", "healthz")])


def fastapi() -> Any:
    from fastapi import FastAPI
    from fastapi.responses import PlainTextResponse

    app = FastAPI()

    def add(path: str, name: str) -> None:
        @app.get(path)
        async def handler() -> PlainTextResponse:
            return PlainTextResponse(f"route={name}")

    for path, name in [("/", "root"), ("/checkout", "checkout"), ("/search/{rest:path}", "search"), ("/t/{tenant}/x", "tenant")]:
        add(path, name)

    @app.get("/orders/{order}")
    async def order(order: int) -> PlainTextResponse:
        return PlainTextResponse(f"route=order:{order}")

    add("/healthz", "healthz")
    return app


def litestar() -> Any:
    from litestar import Litestar, get

    def handler(path: str, name: str) -> Any:
        async def answer() -> str:
            return f"route={name}"

        return get(path)(answer)

    names = [("/", "root"), ("/checkout", "checkout"), ("/search/{rest:path}", "search"), ("/t/{tenant:str}/x", "tenant")]
    names += [("/orders/{order:int}", "order"), ("/healthz", "healthz")]
    return Litestar(route_handlers=[handler(path, name) for path, name in names])


def werkzeug_routes(app: Any, make: Any) -> Any:
    names = [("/", "root"), ("/checkout", "checkout"), ("/search/<path:rest>", "search"), ("/t/<tenant>/x", "tenant")]
    names += [("/orders/<int:order>", "order"), ("/healthz", "healthz")]
    for path, name in names:
        app.add_url_rule(path, name, make(name))
    return app


def quart() -> Any:
    from quart import Quart

    def make(name: str) -> Any:
        async def view(**_: object) -> str:
            return f"route={name}"

        return view

    return werkzeug_routes(Quart("routed"), make)


def flask() -> Any:
    from flask import Flask

    return werkzeug_routes(Flask("routed"), lambda name: lambda **_: f"route={name}")


class DjangoUrls:
    """Replaces the module of ROOT_URLCONF."""

    def __init__(self) -> None:
        from django.http import HttpResponse
        from django.urls import path

        names = [("", "root"), ("checkout", "checkout"), ("search/<path:rest>", "search"), ("t/<tenant>/x", "tenant")]
        names += [("orders/<int:order>", "order"), ("healthz", "healthz")]

        def view(name: str) -> Any:
            return lambda request, **_: HttpResponse(f"route={name}")

        self.urlpatterns = [path(route, view(name)) for route, name in names]


def django(asgi: bool) -> Any:
    from django.conf import settings
    from django.core.handlers.asgi import ASGIHandler, ASGIRequest
    from django.core.handlers.wsgi import WSGIHandler, WSGIRequest
    from django.test.utils import override_settings

    if not settings.configured:
        import django as package

        settings.configure(SECRET_KEY="of the tests", ALLOWED_HOSTS=["*"], ROOT_URLCONF="routed_apps", LOGGING_CONFIG=None)
        package.setup()
    kind: Any = ASGIHandler if asgi else WSGIHandler
    request: Any = ASGIRequest if asgi else WSGIRequest
    handler: Any = type("Handler", (kind,), {"request_class": type("Request", (request,), {"urlconf": DjangoUrls()})})
    with override_settings(MIDDLEWARE=[]):
        return handler()


ASGI = {
    "starlette": starlette,
    "fastapi": fastapi,
    "litestar": litestar,
    "quart": quart,
    "django": lambda: django(True),
}
WSGI = {"flask": flask, "django": lambda: django(False)}

BASES = [
    "/checkout",
    "/search/a",
    "/search/checkout",
    "/t/acme/x",
    "/orders/7",
    "/orders/x",
    "/healthz",
    "/",
    "/search/",
    "/t/healthz/x",
]
PREFIXES = [
    "http:",
    "http://h",
    "HTTP:",
    "x:",
    "http://h:80",
    "//h",
    "/",
    "//",
    "\\",
    "/.",
    "/..",
    "/%2e",
    "/%2f",
    "/healthz/..",
    "/search/..",
]
PREFIXES += [
    "/search/%2e%2e",
    "/t/../checkout/..",
    "%2f",
    "%68ttp:",
    "ht%09tp:",
    "*",
    "/;a",
    "/%00",
    "/%20",
    "%20",
    "/x/%2e%2e%2f",
    ":",
    "http:%2f",
]
SUFFIXES = [
    "/",
    "//",
    "/.",
    "/..",
    ";a",
    ";a=/x",
    "?",
    "?/../healthz",
    "#",
    "%00",
    "%20",
    "%0a",
    "%3f",
    "%23",
    "%3b",
    "%2f",
    "/%2e",
    ".",
    "%5c",
    "\\",
]
SUFFIXES += [
    "%",
    "%25",
    "%2",
    "/x/..",
    "%c3",
    "%ff",
    "%e2%80%8b",
    "+",
    "&a=1",
    ",",
    "/../checkout",
    "/..%2fcheckout",
    "%2e%2e%2fcheckout",
]
INNER = ["/", "//", "/./", "/x/../", "%2f", "%5c", "\\", "/;/", "/%2e/", "/%00/", "/%20/", "%252f"]
LETTERS = {
    "k": ["%E2%84%AA", "K", "%6b", "%256b", "%C4%B8"],
    "s": ["%C5%BF", "S", "%73"],
    "7": ["07", "+7", "7.0", "%EF%BC%97", "%D9%A7", "7_0", "%37", "-7"],
}


def mutated(path: str, draw: random.Random) -> str:
    kind = draw.randrange(6)
    if kind == 0:
        return draw.choice(PREFIXES) + path
    if kind == 1:
        return path + draw.choice(SUFFIXES)
    at = draw.randrange(len(path) + 1)
    if kind == 2:
        return path.replace("/", draw.choice(INNER), draw.choice([1, 2, 9]))
    if kind == 3:
        letter = draw.choice([letter for letter in LETTERS if letter in path] or ["/"])
        return path.replace(letter, draw.choice(LETTERS.get(letter, ["//"])), 1)
    if kind == 4 and at < len(path):
        code = f"%{ord(path[at]) % 256:02x}"
        return path[:at] + draw.choice([code, code.upper(), "%25" + code[1:], path[at].upper()]) + path[at + 1 :]
    return path[:at] + draw.choice(["%00", "%09", ";", "%0d", ".", "/", "%", "%ad", "\t"]) + path[at:]


def targets(number: int, seed: int) -> Iterator[str]:
    """Different targets, the plain ones first. None holds what ends a request line early."""
    draw = random.Random(seed)
    found = dict.fromkeys([*BASES, *(prefix + base for prefix in PREFIXES for base in BASES[:5])])
    while len(found) < number:
        path = draw.choice(BASES)
        for _ in range(draw.choice([1, 1, 2, 2, 3, 5])):
            path = mutated(path, draw)
        found[path] = None
    return iter(list(found)[:number])
