"""Evaluates a Django request and returns its response: the view's with the fields added, or the refusal.

`respond` and `arespond` are shared by the middleware (where the view is all that stands below it) and the decorator of a view.
"""

from __future__ import annotations

from inspect import isawaitable

from asgiref.sync import async_to_sync, iscoroutinefunction, sync_to_async
from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation
from django.http import Http404, HttpRequest, HttpResponse, UnreadablePostError
from django.http.response import HttpResponseBase

from ...policy.evaluation import Evaluation
from ...policy.gate import Gate
from ...policy.request_context import NOTHING, method_of
from ..handler_limit import Handler, combined_fields
from ..ratelimit_fields import merge
from ..refusal_body import body
from ..response_settlement import UNKNOWN, AsyncSettlingBody, Settlement, SettlingBody, detach_request, outcome_of
from ..wsgi_fast import WsgiRequestContext

#: The statuses of exceptions that Django handles. A client that disconnects while it sends its body gets no response.
STATUSES: tuple[tuple[type[BaseException], int], ...] = (
    (Http404, 404),
    (PermissionDenied, 403),
    (BadRequest, 400),
    (SuspiciousOperation, 400),
    (UnreadablePostError, UNKNOWN),
)


class DjangoRequestContext(WsgiRequestContext):
    """The context of `request.META`, which has an environ's names under ASGI too. `raw` is the request."""

    __slots__ = ()

    def __init__(self, request: HttpRequest) -> None:
        self.method = method_of(request.method or "GET")
        self.path = request.path
        self.raw = request
        self.environ = request.META
        self.identities = {}
        self.captured = NOTHING


def respond(gate: Gate, view: Handler, request: HttpRequest, *args: object, **named: object) -> HttpResponseBase:
    """Evaluates the request, calls the view or refuses, and settles."""
    evaluation = record(request, gate.ask(DjangoRequestContext(request)))
    if not evaluation.allowed:
        handler = evaluation.degrade
        if handler is None:
            return add_fields(request, refusal_response(evaluation, request))
        call = async_to_sync(handler) if iscoroutinefunction(handler) else handler
        return add_fields(request, call(request, *args, **named))
    try:
        response = view(request, *args, **named)
    except BaseException as error:
        settlement_of_error(evaluation, error).settle()
        raise
    settlement = settlement_of(evaluation, response, request)
    if settlement is not None:
        settlement.settle()
    return add_fields(request, response)


async def arespond(gate: Gate, view: Handler, request: HttpRequest, *args: object, **named: object) -> HttpResponseBase:
    """The same without blocking."""
    context = DjangoRequestContext(request)
    evaluation = gate.ask_nowait(context)
    evaluation = record(request, await gate.aask(context) if evaluation is None else evaluation)
    if not evaluation.allowed:
        handler = evaluation.degrade
        if handler is None:
            return add_fields(request, refusal_response(evaluation, request))
        call = handler if iscoroutinefunction(handler) else sync_to_async(handler)
        return add_fields(request, await call(request, *args, **named))
    try:
        response = view(request, *args, **named)
        response = await response if isawaitable(response) else response
    except BaseException as error:
        await settlement_of_error(evaluation, error).asettle()
        raise
    settlement = settlement_of(evaluation, response, request)
    if settlement is not None:
        await settlement.asettle()
    return add_fields(request, response)


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
    kind, content = body(evaluation, request.META.get("HTTP_ACCEPT"))
    sent = b"" if request.method == "HEAD" else content
    response = HttpResponse(sent, content_type=kind.decode("ascii"), status=evaluation.refusal.status)
    response.headers["Content-Length"] = str(len(content))
    response._has_been_logged = True  # otherwise Django logs each refusal, and mails each 503 to the administrators
    return response


def settlement_of(evaluation: Evaluation, response: HttpResponseBase, request: HttpRequest) -> Settlement | None:
    """Counts a response. Returns the settlement if the size is known; otherwise it is settled at the end of the body."""
    evaluation.count_response(response.status_code)
    if not evaluation.needs_settlement:
        return None
    settlement = Settlement([evaluation], response.status_code, head=request.method == "HEAD")
    if not response.streaming:
        if not getattr(response, "is_rendered", True):
            response.add_post_render_callback(lambda rendered: settle_rendered(settlement, rendered))
            return None
        settlement.size = len(response.content)
    elif response.headers.get("Content-Length", "").isdecimal():
        settlement.size = int(response.headers["Content-Length"])  # a file, which the server may send itself
    else:
        chunks = response.streaming_content
        response.streaming_content = (AsyncSettlingBody if response.is_async else SettlingBody)(chunks, settlement)
        return None
    return settlement


def settle_rendered(settlement: Settlement, response: HttpResponse) -> None:
    settlement.size = len(response.content)
    settlement.settle()


def settlement_of_error(evaluation: Evaluation, error: BaseException) -> Settlement:
    """The settlement of a view that raised. Django cancels a view whose client has disconnected: its outcome is unknown."""
    settlement = Settlement([evaluation])
    settlement.respond(next((status for kind, status in STATUSES if isinstance(error, kind)), outcome_of(error)))
    return settlement
