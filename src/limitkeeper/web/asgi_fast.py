"""ASGI hot path: the scope as a RequestContext, and the `send` that adds the fields to a response.

Nothing of a scope is read before a policy needs it. `HeaderSend` returns the awaitable of the server's `send`, so that a message
needs no coroutine of its own. Messages and header lists belong to the app (some send the same ones every time), so the start of a
response is copied, never changed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any
from urllib.parse import parse_qsl

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.policy.evaluation import Evaluation
    from cython.cimports.limitkeeper.policy.request_context import RequestContext
    from cython.cimports.limitkeeper.web.ratelimit_fields import append_fields, fields
else:
    from ..policy.evaluation import Evaluation
    from ..policy.request_context import RequestContext
    from .ratelimit_fields import append_fields, fields

from ..policy.request_context import NOTHING, PARAMETERS, USUAL, differing, method_of

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

START = "http.response.start"


@cython.cclass
class AsgiRequestContext(RequestContext):
    """The context of an ASGI scope: a request, a websocket's handshake, or (method MESSAGE) one of its messages."""

    __slots__ = ("_query", "scope")

    def __init__(self, scope: Scope, method: str | None = None) -> None:
        known: dict[str, Any] = scope if type(scope) is dict else dict(scope)
        path = known["path"]
        root = known.get("root_path")
        if root and not is_below(path, root):
            path = root + path
        if method is None:
            method = known.get("method", "GET")
            if method not in USUAL:
                method = method_of(method)
        self.method = method
        self.path = path
        self.raw = scope
        self.scope = scope
        self.identities = {}
        self.captured = NOTHING
        self._query: dict[str, str] | None = None

    def header(self, name: str) -> str | None:
        wanted = name.encode("latin-1")
        first: bytes | None = None
        several: list[bytes] | None = None
        for field in self.scope["headers"]:
            if field[0] == wanted:
                if first is None:
                    first = field[1]
                elif several is None:
                    several = [first, field[1]]
                else:
                    several.append(field[1])
        if several is not None:
            first = (b"; " if wanted == b"cookie" else b", ").join(several)
        return None if first is None else first.decode("latin-1")

    def query(self, name: str) -> str | None:
        if self._query is None:
            self._query = parse_query(self.scope.get("query_string", b"").decode("latin-1"))
        return self._query.get(name)

    def differs(self, kind: str, name: str) -> bool:
        if kind == "query":
            return differing(self.scope.get("query_string", b"").decode("latin-1"), name)
        wanted = name.encode("latin-1")
        return len({value for field, value in self.scope["headers"] if field == wanted}) > 1

    def peer(self) -> str | None:
        client = self.scope.get("client")
        return (client[0] or None) if client else None

    def certificate(self) -> Mapping[str, Any] | None:
        tls = (self.scope.get("extensions") or {}).get("tls")
        if not tls or tls.get("client_cert_error") or not tls.get("client_cert_name"):
            return None
        return {"subject": tls["client_cert_name"], "san": list(tls.get("client_cert_san") or ())}


def is_below(path: str, root: str) -> bool:
    """Whether a path already starts with its mount point; servers and frameworks differ in that."""
    root = root.rstrip("/")
    return path.startswith(root) and path[len(root) : len(root) + 1] in ("", "/")


def parse_query(query: str) -> dict[str, str]:
    """The first value of each of the first PARAMETERS parameters."""
    if query.count("&") >= PARAMETERS:
        query = "&".join(query.split("&", PARAMETERS)[:PARAMETERS])
    found: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True, errors="replace"):
        found.setdefault(name, value)
    return found


def admit(ask_nowait: Callable[[RequestContext], Evaluation | None], scope: Scope, send: Send) -> HeaderSend | None:
    """Evaluates a request. Returns the `send` for its response when it is allowed and needs no settlement; otherwise None, and
    `scope["limitkeeper"]` is the evaluation (None: the gate has to be awaited, nothing was charged)."""
    found = ask_nowait(AsgiRequestContext(scope))
    scope["limitkeeper"] = found
    if found is None:
        return None
    evaluation: Evaluation = found
    evaluation.origin = has_origin(scope)
    if not evaluation.allowed or evaluation.needs_settlement:
        return None
    evaluation.context = None  # the context holds the scope, which holds the evaluation: no reference cycle is left
    return HeaderSend(evaluation, send)


@cython.ccall
def has_origin(scope: Scope) -> cython.bint:
    """Whether a page sent this request (browsers add Origin): only pages need Access-Control-Expose-Headers."""
    for field in scope["headers"]:
        if len(field[0]) == 6 and field[0] == b"origin":
            return True
    return False


@cython.cclass
class HeaderSend:
    """A `send` that adds the fields of an evaluation to the start of the response, and reports its status to the gate; once."""

    __slots__ = ("_evaluation", "_send")

    def __init__(self, evaluation: Evaluation, send: Send) -> None:
        self._evaluation: Evaluation | None = evaluation
        self._send = send

    def __call__(self, message: Message) -> Awaitable[None]:
        if self._evaluation is not None and message["type"] == START:
            evaluation: Evaluation = self._evaluation
            self._evaluation = None
            message = start_response(evaluation, message)
        return self._send(message)

    def ended(self, status: int) -> None:
        """The app has returned or raised: reports this status unless the response had begun."""
        if self._evaluation is not None:
            evaluation: Evaluation = self._evaluation
            self._evaluation = None
            if evaluation.allowed:
                evaluation.count_response(status)


@cython.ccall
def start_response(evaluation: Evaluation, message: Message) -> Message:
    """Counts the response, and returns its start message with the fields of its evaluation."""
    if evaluation.allowed:
        evaluation.count_response(message["status"])
    return add_fields(message, fields(evaluation))


@cython.ccall
def add_fields(message: Message, added: list[tuple[bytes, bytes]]) -> Message:
    """A copy of a start message with these fields added."""
    if added:
        given: Iterable[tuple[bytes, bytes]] | None = message.get("headers")
        own: list[tuple[bytes, bytes]] = given if type(given) is list else list(given or ())
        message = dict(message)
        message["headers"] = append_fields(own, added)
    return message
