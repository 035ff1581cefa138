"""Decorators of single views: functions, coroutines, and the methods of classes (through Django's `method_decorator`).

    @limit("5/s burst 10")
    def checkout(request): ...

    @method_decorator(limit("100/h", key=lambda request: request.user.pk), name="dispatch")
    class Report(View): ...

`method_decorator` decorates again for every request, so the limit is kept by the decorator, and its gate and state with the site.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar, Unpack, cast

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from ...policy.gate import Gate
from ..handler_limit import (
    DEPTH,
    EXEMPT,
    Handler,
    HandlerLimit,
    Key,
    LimitSource,
    RuleOptions,
    bound_instance,
    handler_name,
    rule_name,
    shares_name,
)
from .middleware import EXEMPTED, arespond, in_loop_or_thread, location_of, respond
from .settings import site_gates

V = TypeVar("V", bound=Handler)


def limit(limit: LimitSource, key: Key = "ip", name: str | None = None, **options: Unpack[RuleOptions]) -> Callable[[V], V]:
    """Limits one view, per client address unless `key` is given.

    `key` is an expression of identities ("user | ip") or a callable that is given the request. Views with limits of one `name`
    share them. All other fields of a rule are options (cost=, message=, on_refusal=, …).
    """
    declared: dict[str, HandlerLimit] = {}

    def decorate(view: V) -> V:
        own = name or view_name(view)
        per_location = name is None and shares_name(view)
        known = declared.get(own) or declared.setdefault(own, HandlerLimit(own, limit, key, options, per_location))
        limited = limit_async(view, known) if returns_awaitable(view) else limit_sync(view, known)
        setattr(limited, DEPTH, getattr(view, DEPTH, 0) + 1)
        return cast(V, limited)

    return decorate


def exempt(view: V) -> V:
    """Exempts a view from the policy. Limits of its own stay. For classes: `@method_decorator(exempt, name="dispatch")`."""
    EXEMPTED.add(handler_name(view))
    setattr(view, EXEMPT, True)
    return view


def view_name(view: Handler) -> str:
    """The view's name. A class whose name differs from where it was defined is one of many made in one place (Django REST
    framework's `api_view` makes one of every function): its own name identifies it."""
    kind = getattr(view, "view_class", None)
    if kind is None or kind.__qualname__.endswith(kind.__name__):
        return handler_name(view)
    return rule_name(kind.__name__, kind.__module__, getattr(view, DEPTH, 0) + 1)


def returns_awaitable(view: Handler) -> bool:
    """Whether the result must be awaited: `dispatch` of a class with async methods is no coroutine function, yet returns one."""
    return iscoroutinefunction(view) or bool(getattr(bound_instance(view), "view_is_async", False))


def limit_sync(view: Handler, limit: HandlerLimit) -> Handler:
    @wraps(view)
    def limited(request: HttpRequest, *args: object, **named: object) -> HttpResponseBase:
        return respond(gate_for(limit, request), view, request, *args, **named)

    return limited


def limit_async(view: Handler, limit: HandlerLimit) -> Handler:
    @wraps(view)
    async def limited(request: HttpRequest, *args: object, **named: object) -> HttpResponseBase:
        return await arespond(await in_loop_or_thread(gate_for, limit, request), view, request, *args, **named)

    return limited


def gate_for(limit: HandlerLimit, request: HttpRequest) -> Gate:
    """The gate of a view's limit; where views share a name, of the URL pattern that matched this request."""
    location = location_of(request, getattr(request, "resolver_match", None))
    return site_gates().gate_for(limit, limit.name_at(location), request)
