"""Django middleware: evaluates the policy of a site before the view and before every middleware below it.

Place. Above everything expensive, below what the policy's identities need: a policy that identifies clients by address, header or
token stands at the top; one whose callables read `request.user` stands below AuthenticationMiddleware. Under ASGI nothing blocks:
decisions of remote stores are awaited. `respond` and `arespond` serve the decorator of a view (view_decorators.py) too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from inspect import isawaitable
from io import SEEK_END
from typing import Any, ParamSpec, TypeVar

from asgiref.sync import async_to_sync, iscoroutinefunction, markcoroutinefunction, sync_to_async
from django.conf import settings
from django.conf.urls.i18n import is_language_prefix_patterns_used
from django.core.exceptions import (
    BadRequest,
    MiddlewareNotUsed,
    PermissionDenied,
    RequestDataTooBig,
    SuspiciousOperation,
    SynchronousOnlyOperation,
)
from django.http import Http404, HttpRequest, HttpResponse, RawPostDataException, UnreadablePostError
from django.http.response import HttpResponseBase
from django.urls import Resolver404, ResolverMatch, get_resolver, resolve
from django.utils.translation import get_language, get_language_from_path, get_language_from_request, override

from ...errors import ConfigurationError
from ...policy.compiled_rule import key_of
from ...policy.evaluation import Evaluation
from ...policy.gate import Gate
from ...policy.identity.body import MAX_BODY, announced_size
from ...policy.request_context import NOTHING, method_of
from ..degrade.reduced_response import server_values
from ..handler_limit import EXEMPT, Handler, combined_fields, has_own_limit
from ..headers import body, merge
from ..response_settlement import (
    DEGRADED,
    GONE,
    NOT_SENT,
    UNKNOWN,
    AsyncSettlingBody,
    ClosingBody,
    Settlement,
    SettlingBody,
    current_task,
    detach_request,
    is_cancelled,
    outcome_of,
)
from ..wsgi import WsgiRequestContext, has_disconnected, mount_is_sent
from .settings import site_gates

P = ParamSpec("P")
T = TypeVar("T")

#: The statuses of exceptions that Django handles. A client that disconnects while it sends its body gets no response.
STATUSES: tuple[tuple[type[BaseException], int], ...] = (
    (Http404, 404),
    (PermissionDenied, 403),
    (BadRequest, 400),
    (SuspiciousOperation, 400),
    (UnreadablePostError, UNKNOWN),
)
#: The names of exempt views. Where there are none, the middleware resolves no views.
EXEMPTED: set[str] = set()


class RateLimitMiddleware:
    """For MIDDLEWARE. `request.limitkeeper` is the evaluation; None where the view is exempt."""

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase | Awaitable[HttpResponseBase]]) -> None:
        self.get_response = get_response
        self.gates = site_gates()
        self.gate = self.gates.gate
        if self.gate is None and self.gates.default is None:
            raise MiddlewareNotUsed('LIMITKEEPER names no policy and no default: {"POLICY": "limitkeeper.yaml"}')
        self._views_loaded = False
        self._is_async = iscoroutinefunction(get_response)
        if self._is_async:
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> HttpResponseBase | Awaitable[HttpResponseBase]:
        if self.is_exempt(request):
            request.limitkeeper = None
            return self.get_response(request)
        if self._is_async:
            return self.arespond(request)
        default = self.default_gate(request)
        view = self.get_response if default is None else partial(respond, default, self.get_response)
        return view(request) if self.gate is None else respond(self.gate, view, request)

    async def arespond(self, request: HttpRequest) -> HttpResponseBase:
        default = await in_loop_or_thread(self.default_gate, request)
        view = self.get_response if default is None else partial(arespond, default, self.get_response)
        return await (view(request) if self.gate is None else arespond(self.gate, view, request))

    def process_exception(self, request: HttpRequest, exception: Exception) -> None:
        """Notes that the client disconnected while it sent its body; Django answers that with a 500."""
        request._limitkeeper_gone = isinstance(exception, UnreadablePostError)

    def default_gate(self, request: HttpRequest) -> Gate | None:
        """The gate of the default limit; None: there is none, no view is found, or it has a limit of its own."""
        limit = self.gates.default
        found = None if limit is None else find_view(request)
        if limit is None or found is None or has_own_limit(found.func, request.method):
            return None
        return self.gates.gate_for(limit, limit.name_at(location_of(request, found)), request)

    def is_exempt(self, request: HttpRequest) -> bool:
        """Whether the view is exempt. The views are loaded first, since loading them marks the exempt ones."""
        if not self._views_loaded:
            self._views_loaded = get_resolver(getattr(request, "urlconf", None)).url_patterns is not None
        found = find_view(request) if EXEMPTED else None
        return found is not None and bool(getattr(found.func, EXEMPT, False))


def find_view(request: HttpRequest) -> ResolverMatch | None:
    """The view of a request; None: there is none. URL patterns may depend on the language (`i18n_patterns`), which a middleware
    below sets: that of the path, a cookie or a header, or the site's own. What is active here may be that of another request."""
    languages = [get_language()]
    if settings.USE_I18N:
        languages += [get_language_from_request(request, check_path=True), settings.LANGUAGE_CODE]
    for language in dict.fromkeys(languages):
        with suppress(Resolver404), override(language):
            return resolve(request.path_info, getattr(request, "urlconf", None))
    return None


def location_of(request: HttpRequest, found: ResolverMatch | None) -> str | None:
    """The URL pattern of a view, the same in every language: otherwise a client would have a count for each."""
    if found is None:
        return None
    prefixed, _ = is_language_prefix_patterns_used(getattr(request, "urlconf", settings.ROOT_URLCONF))
    route: str = found.route
    return route.removeprefix(f"{get_language_from_path(request.path_info)}/") if prefixed else route


class DjangoRequestContext(WsgiRequestContext):
    """The context of `request.META`, which has an environ's names under ASGI too. `raw` is the request."""

    __slots__ = ()

    def __init__(self, request: HttpRequest) -> None:
        self.method = method_of(request.method or "GET")
        self.path = request.path
        chosen = request.path[:1] != "/" or mount_is_sent(request.META)  # see `path_after_word`
        self.routed = request.path_info if request.path_info != request.path and chosen else None
        self.raw = request
        self.environ = request.META
        self.identities = {}
        found = request.resolver_match  # in a view's limit: the parameters as Django has converted them
        self.captured = NOTHING if found is None else {name: str(value) for name, value in found.kwargs.items()}

    def route(self) -> str | None:
        return getattr(self.raw.resolver_match, "route", None)

    def may_have_body(self) -> bool:
        """HTTP/2 need not announce a body. Under ASGI Django has read it into a file before."""
        if "wsgi.input" in self.environ or self.environ.get("CONTENT_LENGTH"):
            return super().may_have_body()
        stream = getattr(self.raw, "_request", self.raw)._stream  # of Django's request, where a framework has wrapped it
        try:
            position = stream.tell()
            end: int = stream.seek(0, SEEK_END)
            stream.seek(position)
        except ValueError:  # it was read, and closed
            return True
        return end > 0

    def body(self) -> bytes | None:
        """Django keeps a body that was read for the view. Without a length an ASGI server may send any number of bytes."""
        length = self.environ.get("CONTENT_LENGTH") or ""
        if not length.isdecimal():
            return b"" if "wsgi.input" in self.environ else None
        try:
            found: bytes | None = self.raw.body if announced_size(length) <= MAX_BODY else None
        except (RawPostDataException, RequestDataTooBig, UnreadablePostError):
            return None
        return found


class AsyncRequestContext(DjangoRequestContext):
    """The context of a request in an event loop, where Django lets no function of the application load `request.user` from the
    database: it raises SynchronousOnlyOperation."""

    __slots__ = ("in_loop", "results")

    def __init__(self, request: HttpRequest) -> None:
        super().__init__(request)
        self.in_loop = True
        self.results: dict[int, Any] = {}

    def call(self, function: Callable[[Any], Any]) -> Any:
        """Keeps what was loaded in a thread for the evaluation in the event loop that may follow."""
        if id(function) not in self.results:
            self.results[id(function)] = function(self)
        return self.results[id(function)]

    def passes_on(self, error: Exception) -> bool:
        return self.in_loop and isinstance(error, SynchronousOnlyOperation)


async def in_loop_or_thread(function: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """Calls what may call functions of the application: here, or in a thread where one of them may not run in an event loop."""
    try:
        return function(*args, **named)
    except SynchronousOnlyOperation:
        calling = asyncio.ensure_future(sync_to_async(function)(*args, **named))
    try:
        return await asyncio.shield(calling)
    except asyncio.CancelledError:  # the thread goes on, and may still charge the request
        calling.add_done_callback(settle_cancelled)
        raise


def settle_cancelled(calling: asyncio.Future[Any]) -> None:
    """Settles the evaluation of a request that was cancelled meanwhile: no view is called for it."""
    if not calling.cancelled() and calling.exception() is None and isinstance(calling.result(), Evaluation):
        calling.result().settle(UNKNOWN)


def ask_nowait(gate: Gate, context: DjangoRequestContext) -> Evaluation | None:
    """As the gate's; identities of attempts, which it computes last, are computed before anything is charged."""
    if gate.policy.retry_amplification is not None:
        gate.compiled.match(context)
        key_of(gate.compiled.identities, context, gate.policy.retry_amplification.key)
    return gate.ask_nowait(context)


async def evaluate(gate: Gate, request: HttpRequest) -> Evaluation:
    """Evaluates a request without blocking."""
    context = AsyncRequestContext(request)
    evaluation = await in_loop_or_thread(ask_nowait, gate, context)
    context.in_loop = False  # the identities are known, and loaded objects kept by the request
    return await gate.aask(context) if evaluation is None else evaluation


def respond(gate: Gate, view: Handler, request: HttpRequest, *args: object, **named: object) -> HttpResponseBase:
    """Evaluates the request, calls the view or refuses, and settles. Where a degrade handler returns None, the view answers."""
    evaluation = record(request, gate.ask(DjangoRequestContext(request)))
    if evaluation.wait_us > 0 and has_disconnected(request.META):
        evaluation.settle(UNKNOWN)
        return HttpResponse(status=GONE)
    if not evaluation.allowed:
        handler = evaluation.degrade
        if handler is None:
            return add_fields(request, refusal_response(evaluation, request))
        call = async_to_sync(handler) if iscoroutinefunction(handler) else handler
        request._limitkeeper_view = partial(view, request, *args, **named)
        server_values(request)[DEGRADED] = True
        degraded = call(request, *args, **named)
        return add_fields(request, view(request, *args, **named) if degraded is None else degraded)
    try:
        response = view(request, *args, **named)
        settlement = settlement_of(evaluation, response, request)
    except BaseException as error:
        settlement_of_error(evaluation, error).settle()
        raise
    refusing = settlement.afford(settlement.size)
    if refusing is None and settlement.holds_place:
        settlement = settle_streamed(settlement, response)
    settlement.settle()
    return add_fields(request, response if refusing is None else refusal_instead_of(response, refusing, request))


async def arespond(gate: Gate, view: Handler, request: HttpRequest, *args: object, **named: object) -> HttpResponseBase:
    """The same without blocking."""
    evaluation = record(request, await evaluate(gate, request))
    if not evaluation.allowed:
        handler = evaluation.degrade
        if handler is None:
            return add_fields(request, refusal_response(evaluation, request))
        call = handler if iscoroutinefunction(handler) else sync_to_async(handler)
        request._limitkeeper_view = partial(view, request, *args, **named)
        server_values(request)[DEGRADED] = True
        degraded = await call(request, *args, **named)
        if degraded is None:
            answered = view(request, *args, **named)
            degraded = await answered if isawaitable(answered) else answered
        return add_fields(request, degraded)
    try:
        response = view(request, *args, **named)
        response = await response if isawaitable(response) else response
        settlement = settlement_of(evaluation, response, request)
    except BaseException as error:
        await settlement_of_error(evaluation, error).asettle()
        raise
    try:
        refusing = await settlement.aafford(settlement.size)
    except BaseException:  # cancelled, and not sent: its request has ended
        settlement.size = NOT_SENT
        await settlement.asettle()
        raise
    if refusing is None and settlement.holds_place:
        settlement = settle_streamed(settlement, response)
    await settlement.asettle()
    return add_fields(request, response if refusing is None else refusal_instead_of(response, refusing, request))


def record(request: HttpRequest, evaluation: Evaluation) -> Evaluation:
    """Keeps an evaluation with its request: all of them for the fields, the last one as `request.limitkeeper`."""
    if not hasattr(request, "_limitkeeper"):
        request._limitkeeper = []
    request._limitkeeper.append(evaluation)
    request.limitkeeper = detach_request(evaluation, "HTTP_ORIGIN" in request.META)
    return evaluation


def add_fields(request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
    """Adds the fields of all evaluations so far; fields that are present stay, so that the innermost limit's are kept."""
    for name, value in merge(list(response.items()), combined_fields(request._limitkeeper)):
        if response.headers.get(name) != value:
            response.headers[name] = value
    return response


def refusal_response(evaluation: Evaluation, request: HttpRequest) -> HttpResponse:
    assert evaluation.refusal is not None
    evaluation.declined = True
    kind, content = body(evaluation, request.META.get("HTTP_ACCEPT"))
    sent = b"" if request.method == "HEAD" else content
    response = HttpResponse(sent, content_type=kind.decode("ascii"), status=evaluation.refusal.status)
    response.headers["Content-Length"] = str(len(content))
    response._has_been_logged = True  # otherwise Django logs each refusal, and mails each 503 to the administrators
    return response


def refusal_instead_of(response: HttpResponseBase, evaluation: Evaluation, request: HttpRequest) -> HttpResponse:
    """The refusal of a response that is not sent. What that one closes (files, streams) is closed with it: its own `close` would
    report the end of the request too early."""
    refusal = refusal_response(evaluation, request)
    refusal._resource_closers.extend(response._resource_closers)
    return refusal


def settlement_of(evaluation: Evaluation, response: HttpResponseBase, request: HttpRequest) -> Settlement:
    """Counts a response. Returns its settlement if the size is known; otherwise an empty one: it is settled when it is."""
    if not isinstance(response, HttpResponseBase):
        raise ConfigurationError(f"expected an HttpResponse from a view under @limit, got {type(response).__name__}")
    evaluation.count_response(response.status_code)
    settlement = Settlement([evaluation], response.status_code, head=request.method == "HEAD")
    settlement.gone = getattr(request, "_limitkeeper_gone", False) or is_cancelled()
    if not evaluation.needs_settlement:
        return Settlement(())
    if not response.streaming:
        if not getattr(response, "is_rendered", True):
            settlement.status = UNKNOWN
            dropped = ClosingBody((), settlement)
            response.render = partial(render_and_settle, settlement, response, request, response.render, dropped)
            return Settlement(())
        settlement.size = len(response.content)
    elif response.headers.get("Content-Length", "").isdecimal():
        settlement.size = int(response.headers["Content-Length"])  # a file, which the server may send itself
    else:
        return settle_streamed(settlement, response)
    return settlement


def settle_streamed(settlement: Settlement, response: HttpResponseBase) -> Settlement:
    """Leaves a settlement to the end of a streamed body, and returns an empty one for now. Under ASGI this task sends the
    response: where the server's `send` raises, since the client has disconnected, Django closes no response."""
    if not response.streaming:
        return settlement
    settlement.size = 0
    kind = AsyncSettlingBody if response.is_async else SettlingBody
    response.streaming_content = kind(response.streaming_content, settlement)
    task = current_task()
    if task is not None:
        task.add_done_callback(settlement.drop_with)
    return Settlement(())


def render_and_settle(
    settlement: Settlement, response: HttpResponse, request: HttpRequest, render: Callable[[], HttpResponse], _: ClosingBody
) -> HttpResponseBase:
    """Renders a TemplateResponse, and settles with its size, or returns the refusal of it. Where its template fails, the outcome
    is that of a view's error; a ClosingBody settles a response that is dropped before."""
    vars(response).pop("render", None)  # a cache pickles the response afterwards
    try:
        rendered = render()
    except BaseException:
        settlement.settle()
        raise
    settlement.status, settlement.size = rendered.status_code, len(rendered.content)
    before = dict(combined_fields(request._limitkeeper))
    refusing = settlement.afford(settlement.size)
    settlement.settle()
    if refusing is not None:
        return add_fields(request, refusal_instead_of(rendered, refusing, request))
    for name, value in combined_fields(request._limitkeeper):
        if rendered.headers.get(name) == before.get(name):  # not one of the view's own
            rendered.headers[name] = value
    return rendered


def settlement_of_error(evaluation: Evaluation, error: BaseException) -> Settlement:
    """The settlement of a view that raised. Django cancels a view whose client has disconnected: its outcome is unknown. So is
    that of other exceptions, of which another middleware may make any response."""
    settlement = Settlement([evaluation])
    settlement.gone = is_cancelled()
    status = next((status for kind, status in STATUSES if isinstance(error, kind)), UNKNOWN)
    evaluation.count_response(status or outcome_of(error) or GONE)
    settlement.status, settlement.counted, settlement.size = status, True, NOT_SENT
    return settlement
