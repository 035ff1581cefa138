"""The suite's app in Django's ASGI handler. It works however Django is configured in this process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import django
from asgi_apps import pieces, remaining
from asgi_loop import RAISED
from django.conf import settings
from django.core.handlers.asgi import ASGIHandler
from django.http import HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.test.utils import override_settings
from django.urls import path, re_path
from django.views.decorators.csrf import csrf_exempt

Noted = Callable[[HttpRequest], None]


def views(noted: Noted) -> list[Any]:
    async def status(request: HttpRequest, code: int) -> HttpResponse:
        noted(request)
        return HttpResponse(status=code)

    async def stream(request: HttpRequest) -> StreamingHttpResponse:
        noted(request)
        return StreamingHttpResponse(pieces())

    async def big(request: HttpRequest) -> HttpResponse:
        noted(request)
        return HttpResponse(b"x" * int(request.GET["n"]))

    async def raises(request: HttpRequest) -> HttpResponse:
        noted(request)
        raise ValueError(RAISED)

    def body(request: HttpRequest) -> HttpResponse:  # a plain view: it runs in a thread
        noted(request)
        return JsonResponse({"length": len(request.body)})

    async def anything(request: HttpRequest) -> HttpResponse:
        noted(request)
        return JsonResponse({"path": request.path, "remaining": remaining(request.scope)})  # type: ignore[attr-defined]

    return [
        path("status/<int:code>", csrf_exempt(status)),
        path("stream", stream),
        path("big", big),
        path("raise", raises),
        path("body", csrf_exempt(body)),
        re_path(r"^.*$", csrf_exempt(anything)),
    ]


class Urls:
    """A URL configuration that is no module."""

    def __init__(self, urlpatterns: list[Any]) -> None:
        self.urlpatterns = urlpatterns


class Handler(ASGIHandler):
    """Django's own handler, with these views whatever the settings are."""

    def __init__(self, urls: Urls) -> None:
        super().__init__()
        self.urls = urls

    def create_request(self, scope: Any, body_file: Any) -> Any:
        request, refused = super().create_request(scope, body_file)
        if request is not None:
            request.urlconf = self.urls
        return request, refused


def configure() -> None:
    """Once per process: no database, and only settings that a test can change."""
    if not settings.configured:
        settings.configure(SECRET_KEY="of the tests", ALLOWED_HOSTS=["*"], ROOT_URLCONF="django_asgi", LOGGING_CONFIG=None)
        logging.getLogger("django.request").disabled = True
        django.setup()


def build(calls: list[str]) -> Any:
    configure()
    with override_settings(MIDDLEWARE=[]):
        return Handler(Urls(views(lambda request: calls.append(f"{request.method} {request.path}"))))


#: What ROOT_URLCONF finds here.
urlpatterns: list[Any] = []
