"""The policy of a Django site, asked before the view (and before every middleware below it) does anything.

Place. Above whatever costs something, below what the policy's identities need: a policy that knows clients by address, header or
token stands at the top; one whose callables read `request.user` stands below AuthenticationMiddleware. Under ASGI nothing blocks:
what this process can't answer alone is awaited.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asgiref.sync import async_to_sync, iscoroutinefunction, markcoroutinefunction, sync_to_async
from django.core.exceptions import MiddlewareNotUsed
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.urls import Resolver404, get_resolver, resolve

from ...policy.evaluation import Evaluation
from ..headers import text_fields
from ..response_settlement import let_go
from ..view_limit import EXEMPT
from .responses import DjangoRequestContext, answered, failed, put, refusal, status_of
from .settings import site
from .views import EXEMPTED


class RateLimitMiddleware:
    """For MIDDLEWARE. `request.limitkeeper` is what was decided; None where the view is exempt."""

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
        self.get_response = get_response
        gate = site().gate
        if gate is None:
            raise MiddlewareNotUsed('LIMITKEEPER names no policy: {"POLICY": "limitkeeper.yaml"}')
        self.gate = gate
        self._looked = False
        self._asynchronous = iscoroutinefunction(get_response)
        if self._asynchronous:
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> Any:
        if self._asynchronous:
            return self.acall(request)
        if self.is_exempt(request):
            request.limitkeeper = None
            return self.get_response(request)
        passage = request.limitkeeper = let_go(self.gate.ask(DjangoRequestContext(request)), "HTTP_ORIGIN" in request.META)
        if not passage.allowed:
            return told(passage, self.refuse(passage, request))
        try:
            response = self.get_response(request)
        except BaseException as error:
            failed(passage, status_of(error)).settle()
            raise
        account = answered(passage, response, request)
        if account is not None:
            account.settle()
        return told(passage, response)

    async def acall(self, request: HttpRequest) -> HttpResponseBase:
        """The same, where nothing may block."""
        if self.is_exempt(request):
            request.limitkeeper = None
            return await self.get_response(request)
        facts = DjangoRequestContext(request)
        passage = self.gate.ask_nowait(facts)
        if passage is None:
            passage = await self.gate.aask(facts)
        request.limitkeeper = let_go(passage, "HTTP_ORIGIN" in request.META)
        if not passage.allowed:
            return told(passage, await self.arefuse(passage, request))
        try:
            response = await self.get_response(request)
        except BaseException as error:
            await failed(passage, status_of(error)).asettle()
            raise
        account = answered(passage, response, request)
        if account is not None:
            await account.asettle()
        return told(passage, response)

    def refuse(self, passage: Evaluation, request: HttpRequest) -> HttpResponseBase:
        """The rule's own view, or a few bytes."""
        view: Any = passage.degrade
        if view is None:
            return refusal(passage, request)
        return async_to_sync(view)(request) if iscoroutinefunction(view) else view(request)

    async def arefuse(self, passage: Evaluation, request: HttpRequest) -> HttpResponseBase:
        view: Any = passage.degrade
        if view is None:
            return refusal(passage, request)
        return await (view(request) if iscoroutinefunction(view) else sync_to_async(view)(request))

    def is_exempt(self, request: HttpRequest) -> bool:
        """Whether the view is; looked up only where some view is. The views are loaded first: they say so when they are."""
        urls = getattr(request, "urlconf", None)
        if not self._looked:
            self._looked = get_resolver(urls).url_patterns is not None
        if not EXEMPTED:
            return False
        try:
            return bool(getattr(resolve(request.path_info, urls).func, EXEMPT, False))
        except Resolver404:
            return False


def told(passage: Evaluation, response: HttpResponseBase) -> HttpResponseBase:
    fields = text_fields(passage)
    if fields:
        put(fields, response)
    return response
