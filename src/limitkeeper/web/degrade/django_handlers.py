"""Degrade handlers of Django, and the middleware that records responses.

CACHE = StaleCache()                                                     # mysite/limits.py
cached = django_cached(CACHE)

MIDDLEWARE = ["limitkeeper.web.django.RateLimitMiddleware", "mysite.limits.record", …]     # record = recorder(CACHE)
LIMITKEEPER = {"POLICY": "limitkeeper.yaml", "HANDLERS": {"cached": "mysite.limits.cached"}}
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from inspect import isawaitable
from typing import Any, cast

from asgiref.sync import async_to_sync, iscoroutinefunction
from django.core.exceptions import RequestDataTooBig
from django.http import HttpRequest, HttpResponse, RawPostDataException, UnreadablePostError
from django.http.response import HttpResponseBase
from django.utils.decorators import sync_and_async_middleware

from ..django.middleware import DjangoRequestContext, refusal_response
from ..response_settlement import DEFERRED
from .deferred_requests import DeferredRequests, TooLarge, client_of, environ_size
from .reduced_response import is_reduced, server_values
from .stale_cache import Response, StaleCache

GetResponse = Callable[[HttpRequest], HttpResponseBase | Awaitable[HttpResponseBase]]


def django_cached(cache: StaleCache) -> Callable[..., HttpResponse]:
    """The handler that answers from a cache, or refuses as the policy does."""

    def cached(request: HttpRequest, *args: object, **named: object) -> HttpResponse:
        evaluation = request.limitkeeper
        found = cache.find(DjangoRequestContext(request), request.META.get("QUERY_STRING") or "", evaluation)
        if found is None:
            evaluation.declined = True
            return refusal_response(evaluation, request)
        response = HttpResponse(b"" if request.method == "HEAD" else found.body)
        for name, value in found.served_headers(cache.now_us()):
            response.headers[name] = value
        return response

    return cached


def django_deferred(deferred: DeferredRequests) -> Callable[..., HttpResponse]:
    """The handler that defers a request, or refuses as the policy does. `deferred_status(deferred)` is the middleware of its
    status path."""

    def later(request: HttpRequest, *args: object, **named: object) -> HttpResponse:
        view = request._limitkeeper_view
        length = request.META.get("CONTENT_LENGTH") or "0"
        accepted = None
        short = length.isdecimal() and len(length) < 12 and int(length) <= deferred.max_body
        if short and not deferred.has_status(request.path_info):
            content = body_of(request)  # read now: the connection is not there later
            if content is not None and int(length) <= len(content) <= deferred.max_body:
                run = lambda: call_view(request, view, deferred.max_body)  # noqa: E731
                size = environ_size(request.META) + len(content)
                entry = deferred.reserve(size, client_of(request.limitkeeper, DjangoRequestContext(request)))
                mount = request.path.removesuffix(request.path_info)
                accepted = None if entry is None else deferred.accept(entry, run, size, mount)
        if accepted is None:
            request.limitkeeper.declined = True
            return refusal_response(request.limitkeeper, request)
        return as_django(accepted, request)

    return later


def body_of(request: HttpRequest) -> bytes | None:
    """The body of a request; None: Django will not read it, or other code has read it (a form with files, for its CSRF token)."""
    try:
        found: bytes = request.body
    except (RawPostDataException, RequestDataTooBig, UnreadablePostError):
        return None
    return found


def call_view(request: HttpRequest, view: Callable[[], Any], most: int) -> Response:
    """The response of the rest of the site, in a thread of the shaper. It is closed there, which ends a request for Django: files
    and connections to the database are closed too."""
    content = bytearray()

    def add(chunk: bytes) -> None:
        content.extend(chunk)
        if len(content) > most:
            raise TooLarge

    async def wait(found: Any) -> Any:
        """Awaits a response, and reads a stream of an async view in the same event loop."""
        response = await found if isawaitable(found) else found
        ending.callback(response.close)
        if getattr(response, "is_async", False):
            async for chunk in response.streaming_content:
                add(chunk)
        return response

    server_values(request)[DEFERRED] = True
    with ExitStack() as ending:
        response = async_to_sync(wait)(view())
        if not getattr(response, "is_async", False):
            for chunk in response.streaming_content if response.streaming else [response.content]:
                add(chunk)
    cookies = [("Set-Cookie", cookie.OutputString()) for cookie in response.cookies.values()]
    return response.status_code, [*response.items(), *cookies], bytes(content)


def as_django(response: Response, request: HttpRequest) -> HttpResponse:
    status, lines, content = response
    made = HttpResponse(b"" if request.method == "HEAD" else content, status=status)
    for name, value in lines:
        if name == "Set-Cookie":
            made.cookies.load(value)
        else:
            made.headers[name] = value
    return made


def deferred_status(deferred: DeferredRequests) -> Callable[[GetResponse], GetResponse]:
    """A middleware that answers the status path; it goes below `RateLimitMiddleware`."""

    @sync_and_async_middleware  # type: ignore[untyped-decorator]
    def middleware(get_response: GetResponse) -> GetResponse:
        def find(request: HttpRequest) -> HttpResponse | None:
            found = deferred.find(request.path_info) if request.method in ("GET", "HEAD") else None
            return None if found is None else as_django(found, request)

        if iscoroutinefunction(get_response):

            async def astatus(request: HttpRequest) -> HttpResponseBase:
                return find(request) or await cast(Awaitable[HttpResponseBase], get_response(request))

            return astatus
        return lambda request: find(request) or get_response(request)

    return cast(Callable[[GetResponse], GetResponse], middleware)


def recorder(cache: StaleCache) -> Callable[[GetResponse], GetResponse]:
    """A middleware that records responses; it goes below `RateLimitMiddleware`."""

    @sync_and_async_middleware  # type: ignore[untyped-decorator]
    def middleware(get_response: GetResponse) -> GetResponse:
        if iscoroutinefunction(get_response):

            async def arecord(request: HttpRequest) -> HttpResponseBase:
                return record(cache, request, await cast(Awaitable[HttpResponseBase], get_response(request)))

            return arecord
        return lambda request: record(cache, request, cast(HttpResponseBase, get_response(request)))

    return cast(Callable[[GetResponse], GetResponse], middleware)


def record(cache: StaleCache, request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
    whole = response.status_code == 200 and not is_reduced(request)
    if request.method == "GET" and whole and not response.streaming and not response.cookies:
        content = cast(HttpResponse, response).content
        context, evaluation = DjangoRequestContext(request), getattr(request, "limitkeeper", None)
        cache.keep(context, request.META.get("QUERY_STRING") or "", evaluation, list(response.items()), content)
    return response


def reduced(request: HttpRequest, *args: object, **named: object) -> None:
    """The handler that has the view itself answer; it reads `is_reduced(request)`."""
