"""What a Django view or middleware makes of a passage: facts of its request, fields on its response, the answer of a refusal."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation
from django.http import Http404, HttpRequest, HttpResponse, UnreadablePostError
from django.http.response import HttpResponseBase

from ...policy.evaluation import Evaluation
from ...policy.request_context import method_of
from ..headers import merge
from ..refusal_body import body
from ..response_settlement import UNKNOWN, AsyncBody, Body, Settlement, outcome
from ..wsgi_fast import NOTHING, WsgiRequestContext

#: What Django makes of the exceptions that it knows; a client that disconnects while it sends its body gets no response.
STATUSES: tuple[tuple[Any, int], ...] = (
    (Http404, 404),
    (PermissionDenied, 403),
    (BadRequest, 400),
    (SuspiciousOperation, 400),
    (UnreadablePostError, UNKNOWN),
)


class DjangoRequestContext(WsgiRequestContext):
    """Facts over `request.META`, which has an environ's names under ASGI too. `raw` is the request."""

    __slots__ = ()

    def __init__(self, request: HttpRequest) -> None:
        self.method = method_of(request.method or "GET")
        self.path = request.path
        self.raw = request
        self.environ = request.META
        self.identities = {}
        self.captured = NOTHING


def refusal(passage: Evaluation, request: HttpRequest) -> HttpResponse:
    """Why, and when to come back."""
    assert passage.refusal is not None
    kind, text = body(passage, request.META.get("HTTP_ACCEPT"))
    sent = b"" if request.method == "HEAD" else text
    response = HttpResponse(sent, content_type=kind.decode("ascii"), status=passage.refusal.status)
    response.headers["Content-Length"] = str(len(text))
    response._has_been_logged = True  # or Django writes a line for each, and mails the administrators each 503
    return response


def put(fields: list[tuple[str, str]], response: HttpResponseBase) -> None:
    """Adds header fields; what the view said of its quota itself stands."""
    own = list(response.items())
    for name, value in merge(own, fields):
        if response.headers.get(name) != value:
            response.headers[name] = value


def answered(passage: Evaluation, response: HttpResponseBase, request: HttpRequest) -> Settlement | None:
    """Counts a response. What is owed and known comes back, to be settled; what isn't is settled at the body's end."""
    passage.count_response(response.status_code)
    if not passage.needs_settlement:
        return None
    account = Settlement(passage, response.status_code, head=request.method == "HEAD")
    if not response.streaming:
        if not getattr(response, "is_rendered", True):
            response.add_post_render_callback(lambda rendered: settle_rendered(account, rendered))
            return None
        account.size = len(response.content)
    elif response.headers.get("Content-Length", "").isdecimal():
        account.size = int(response.headers["Content-Length"])  # a file, which the server may send in its own way
    else:
        chunks = response.streaming_content
        response.streaming_content = AsyncBody(chunks, account) if response.is_async else Body(chunks, account)
        return None
    return account


def settle_rendered(account: Settlement, response: Any) -> None:
    account.size = len(response.content)
    account.settle()


def status_of(error: BaseException) -> int:
    """What becomes of an exception. Django cancels a view whose client has disconnected."""
    return next((status for kind, status in STATUSES if isinstance(error, kind)), outcome(error))


def failed(passage: Evaluation, status: int) -> Settlement:
    """The account of a view that raised; an unknown outcome is counted when it is settled."""
    if status != UNKNOWN:
        passage.count_response(status)
    return Settlement(passage, status)
