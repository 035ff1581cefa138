"""Limits of single views: functions, coroutines, and the methods of classes (through Django's `method_decorator`).

    @limit("5/s burst 10")
    def checkout(request): ...

    @method_decorator(limit("100/h", key=lambda request: request.user.pk), name="dispatch")
    class Report(View): ...

`method_decorator` decorates anew for every request, so what must last (the gate, and in it the state) is kept with the site,
under the decorator's own route.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import isawaitable
from typing import Any, TypeVar

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from ...policy.evaluation import Evaluation
from ...policy.gate import Gate
from ..response_settlement import let_go
from ..view_identity import Places, has_siblings
from ..view_limit import DEPTH, EXEMPT, Key, bound_to, fitting, name_of
from ..view_limit import told as told_together
from .responses import DjangoRequestContext, answered, failed, put, refusal, status_of
from .settings import site

V = TypeVar("V", bound=Callable[..., Any])

#: Not empty: some view is exempt, and the middleware must look which.
EXEMPTED: set[str] = set()


def limit(limit: Any, key: Key = "ip", name: str | None = None, **words: Any) -> Callable[[V], V]:
    """Limits one view, per client unless `key` says otherwise.

    `key` is a policy's words ("user | ip") or a callable given the request. Views that are limited under one `name` share that
    limit. Every other word of a rule may follow (cost=, message=, on_refusal=, …).
    """
    made: dict[str, Places] = {}

    def decorate(view: V) -> V:
        own = name or own_name(view)
        apart = name is None and has_siblings(view)
        places = made.get(own) or made.setdefault(own, Places(own, limit, key, words, apart))
        asking: Any = (awaited if is_awaited(view) else called)(view, places)
        setattr(asking, DEPTH, getattr(view, DEPTH, 0) + 1)
        return asking  # type: ignore[no-any-return]

    return decorate


def exempt(view: V) -> V:
    """Takes a view out of the policy. Limits of its own stay. For classes: `@method_decorator(exempt, name="dispatch")`."""
    EXEMPTED.add(name_of(view))
    setattr(view, EXEMPT, True)
    return view


def own_name(view: Any) -> str:
    """The view's name. A class that goes by another name than it was written under is one of many that were made in one place
    (Django REST framework's `api_view` makes one of every function): it goes by that, and shares with none of them."""
    kind = getattr(view, "view_class", None)
    if kind is None or kind.__qualname__.endswith(kind.__name__):
        return name_of(view)
    depth = getattr(view, DEPTH, 0) + 1
    return fitting(f"{kind.__module__}.{kind.__name__}" + (f".{depth}" if depth > 1 else ""))


def is_awaited(view: Any) -> bool:
    """Whether what a view returns is to be awaited: `dispatch` of a class with async methods is no coroutine, yet returns one."""
    return iscoroutinefunction(view) or bool(getattr(bound_to(view), "view_is_async", False))


def called(view: Any, places: Places) -> Any:
    @wraps(view)
    def asking(request: HttpRequest, *args: Any, **named: Any) -> HttpResponseBase:
        passage = came(request, gate_at(places, request).ask(DjangoRequestContext(request)))
        if not passage.allowed:
            return told(request, passage.degrade(request, *args, **named) if passage.degrade else refusal(passage, request))
        try:
            response = view(request, *args, **named)
        except BaseException as error:
            failed(passage, status_of(error)).settle()
            raise
        account = answered(passage, response, request)
        if account is not None:
            account.settle()
        return told(request, response)

    return asking


def awaited(view: Any, places: Places) -> Any:
    @wraps(view)
    async def asking(request: HttpRequest, *args: Any, **named: Any) -> HttpResponseBase:
        gate, facts = gate_at(places, request), DjangoRequestContext(request)
        passage = gate.ask_nowait(facts)
        passage = came(request, await gate.aask(facts) if passage is None else passage)
        if not passage.allowed:
            return told(request, await instead(passage, request, *args, **named))
        try:
            response = view(request, *args, **named)
            response = await response if isawaitable(response) else response
        except BaseException as error:
            await failed(passage, status_of(error)).asettle()
            raise
        account = answered(passage, response, request)
        if account is not None:
            await account.asettle()
        return told(request, response)

    return asking


def gate_at(places: Places, request: HttpRequest) -> Gate:
    """The gate of a view's limit: where views share a name, that of the pattern by which this one was found."""
    return site().gate_for(places.at(getattr(getattr(request, "resolver_match", None), "route", None)))


async def instead(passage: Evaluation, request: HttpRequest, *args: Any, **named: Any) -> HttpResponseBase:
    view: Any = passage.degrade
    if view is None:
        return refusal(passage, request)
    answer = view(request, *args, **named) if iscoroutinefunction(view) else sync_to_async(view)(request, *args, **named)
    return await answer


def came(request: HttpRequest, passage: Evaluation) -> Evaluation:
    """Keeps a passage with its request: all of them for the fields, the last one as `request.limitkeeper`."""
    policy = getattr(request, "limitkeeper", None)
    kept = getattr(request, "_limitkeeper", None)
    if kept is None:
        kept = request._limitkeeper = [] if policy is None else [policy]
    kept.append(passage)
    request.limitkeeper = let_go(passage, "HTTP_ORIGIN" in request.META)
    return passage


def told(request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
    """The fields of everything that was asked about this request; the innermost of several limits has put them there."""
    put(told_together(request._limitkeeper), response)
    return response
