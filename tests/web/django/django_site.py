"""The suite's app in Django, sync under WSGI and async under ASGI, behind `RateLimitMiddleware` in MIDDLEWARE.

Django is configured once per process, here or elsewhere: nothing depends on how. Each app has its views and its gate of its own.
"""

from __future__ import annotations

from typing import Any

from asgi_apps import pieces
from asgi_loop import RAISED
from django.core.handlers.asgi import ASGIHandler
from django.core.handlers.wsgi import WSGIHandler, WSGIRequest
from django.http import HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.test.utils import override_settings
from django.urls import path, re_path
from django.views.decorators.csrf import csrf_exempt
from django_asgi import Handler, Urls, configure
from wsgi_apps import PIECES, remaining

OURS = "limitkeeper.web.django.RateLimitMiddleware"


def views(calls: list[str]) -> list[Any]:
    def noted(request: HttpRequest) -> None:
        calls.append(f"{request.method} {request.path}")

    def status(request: HttpRequest, code: int) -> HttpResponse:
        noted(request)
        return HttpResponse(status=code)

    def stream(request: HttpRequest) -> StreamingHttpResponse:
        noted(request)
        return StreamingHttpResponse(iter(PIECES))

    def big(request: HttpRequest) -> HttpResponse:
        noted(request)
        return HttpResponse(b"x" * int(request.GET["n"]))

    def raises(request: HttpRequest) -> HttpResponse:
        noted(request)
        raise ValueError(RAISED)

    def body(request: HttpRequest) -> HttpResponse:
        noted(request)
        return JsonResponse({"length": len(request.body)})

    def anything(request: HttpRequest) -> HttpResponse:
        noted(request)
        return JsonResponse({"path": request.path, "remaining": remaining(request.limitkeeper)})

    return listed(status, stream, big, raises, body, anything)


def async_views(calls: list[str]) -> list[Any]:
    def noted(request: HttpRequest) -> None:
        calls.append(f"{request.method} {request.path}")

    async def status(request: HttpRequest, code: int) -> HttpResponse:
        noted(request)
        return HttpResponse(status=code)

    async def stream(request: HttpRequest) -> StreamingHttpResponse:
        noted(request)
        return StreamingHttpResponse(pieces())

    def big(request: HttpRequest) -> HttpResponse:  # a plain view: it runs in a thread
        noted(request)
        return HttpResponse(b"x" * int(request.GET["n"]))

    async def raises(request: HttpRequest) -> HttpResponse:
        noted(request)
        raise ValueError(RAISED)

    async def body(request: HttpRequest) -> HttpResponse:
        noted(request)
        return JsonResponse({"length": len(request.body)})

    async def anything(request: HttpRequest) -> HttpResponse:
        noted(request)
        return JsonResponse({"path": request.path, "remaining": remaining(request.limitkeeper)})

    return listed(status, stream, big, raises, body, anything)


def listed(status: Any, stream: Any, big: Any, raises: Any, body: Any, anything: Any) -> list[Any]:
    return [
        path("status/<int:code>", csrf_exempt(status)),
        path("stream", stream),
        path("big", big),
        path("raise", raises),
        path("body", csrf_exempt(body)),
        re_path(r"^.*$", csrf_exempt(anything)),
    ]


def handler(kind: type[Any], urls: list[Any], limitkeeper: dict[str, Any], middleware: tuple[str, ...] = (OURS,)) -> Any:
    """A Django handler with these views and this LIMITKEEPER, whatever else is configured in this process."""
    configure()
    with override_settings(MIDDLEWARE=list(middleware), LIMITKEEPER=limitkeeper):
        if kind is ASGIHandler:
            return Handler(Urls(urls))
        made = WSGIHandler()
        made.request_class = type("Request", (WSGIRequest,), {"urlconf": Urls(urls)})
        return made


def wsgi(gate: Any, calls: list[str]) -> Any:
    return handler(WSGIHandler, views(calls), {"POLICY": gate})


def asgi(gate: Any, calls: list[str]) -> Any:
    return handler(ASGIHandler, async_views(calls), {"POLICY": gate})
