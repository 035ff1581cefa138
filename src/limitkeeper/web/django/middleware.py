"""Django middleware: evaluates the policy of a site before the view and before every middleware below it.

Place. Above everything expensive, below what the policy's identities need: a policy that identifies clients by address, header or
token stands at the top; one whose callables read `request.user` stands below AuthenticationMiddleware. Under ASGI nothing blocks:
decisions of remote stores are awaited.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.core.exceptions import MiddlewareNotUsed
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.urls import Resolver404, get_resolver, resolve

from ..handler_limit import EXEMPT
from .request_cycle import arespond, respond
from .settings import site_gates
from .views import EXEMPTED


class RateLimitMiddleware:
    """For MIDDLEWARE. `request.limitkeeper` is the evaluation; None where the view is exempt."""

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase | Awaitable[HttpResponseBase]]) -> None:
        self.get_response = get_response
        gate = site_gates().gate
        if gate is None:
            raise MiddlewareNotUsed('LIMITKEEPER names no policy: {"POLICY": "limitkeeper.yaml"}')
        self.gate = gate
        self._views_loaded = False
        self._respond = respond
        if iscoroutinefunction(get_response):
            markcoroutinefunction(self)
            self._respond = arespond

    def __call__(self, request: HttpRequest) -> HttpResponseBase | Awaitable[HttpResponseBase]:
        if self.is_exempt(request):
            request.limitkeeper = None
            return self.get_response(request)
        return self._respond(self.gate, self.get_response, request)

    def is_exempt(self, request: HttpRequest) -> bool:
        """Whether the view is exempt. The views are loaded first, since loading them marks the exempt ones."""
        urls = getattr(request, "urlconf", None)
        if not self._views_loaded:
            self._views_loaded = get_resolver(urls).url_patterns is not None
        if not EXEMPTED:
            return False
        try:
            return bool(getattr(resolve(request.path_info, urls).func, EXEMPT, False))
        except Resolver404:
            return False
