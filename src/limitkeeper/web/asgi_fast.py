"""What of ASGI is on the way of every request: a scope as facts, and the `send` that puts the fields on a response.

Nothing of a scope is read before a policy asks for it. `Sending` is called where a server's `send` would be and hands out that
one's awaitable, so that a message costs no coroutine of its own. Messages and header lists belong to the app (some send the same
ones every time), so the start of a response is copied, never changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.policy.evaluate import Evaluator
    from cython.cimports.limitkeeper.policy.evaluation import Evaluation
    from cython.cimports.limitkeeper.policy.request_context import RequestContext
    from cython.cimports.limitkeeper.web.headers import fields
else:
    from ..policy.evaluation import Evaluation
    from ..policy.request_context import RequestContext
    from .headers import fields

from ..policy.request_context import NOTHING, PARAMETERS, USUAL, differing, method_of
from .headers import FAMILY, merge

#: The lengths of the names of our fields, as bits: a response whose names have other lengths has none of them.
LENGTHS = 0
for _name in FAMILY:
    LENGTHS |= 1 << len(_name)
START = "http.response.start"


@cython.cclass
class AsgiRequestContext(RequestContext):
    """What a policy may ask about an ASGI scope, of a request, of a websocket's handshake or (MESSAGE) of one of its messages."""

    __slots__ = ("_query", "scope")

    def __init__(self, scope: Any, method: str | None = None) -> None:
        known: dict = scope if type(scope) is dict else dict(scope)  # type: ignore[type-arg]
        path = known["path"]
        root = known.get("root_path")
        if root and not below(path, root):
            path = root + path
        if method is None:
            method = known.get("method", "GET")
            if method not in USUAL:
                method = method_of(method)
        self.method = method
        self.path = path
        self.raw = scope
        self.scope = scope
        self.found = {}
        self.captured = NOTHING
        self._query: Any = None

    def header(self, name: str) -> str | None:
        wanted = name.encode("latin-1")
        first: Any = None
        more: Any = None
        for field in self.scope["headers"]:
            if field[0] == wanted:
                if first is None:
                    first = field[1]
                elif more is None:
                    more = [first, field[1]]
                else:
                    more.append(field[1])
        if more is not None:
            first = (b"; " if wanted == b"cookie" else b", ").join(more)
        return None if first is None else first.decode("latin-1")

    def query(self, name: str) -> str | None:
        if self._query is None:
            self._query = parsed(self.scope.get("query_string", b""))
        return self._query.get(name)  # type: ignore[no-any-return]

    def differs(self, kind: str, name: str) -> bool:
        if kind == "query":
            return differing(self.scope.get("query_string", b"").decode("latin-1"), name)
        wanted = name.encode("latin-1")
        return len({value for field, value in self.scope["headers"] if field == wanted}) > 1

    def peer(self) -> str | None:
        client = self.scope.get("client")
        return (client[0] or None) if client else None

    def certificate(self) -> Mapping[str, Any] | None:
        told = (self.scope.get("extensions") or {}).get("tls")
        if not told or told.get("client_cert_error") or not told.get("client_cert_name"):
            return None
        return {"subject": told["client_cert_name"], "san": list(told.get("client_cert_san") or ())}


def below(path: str, root: str) -> bool:
    """Whether a path has its mount point in front already; servers and frameworks differ in that."""
    root = root.rstrip("/")
    return path.startswith(root) and path[len(root) : len(root) + 1] in ("", "/")


def parsed(query: bytes) -> dict[str, str]:
    """The first value of every parameter."""
    text = query.decode("latin-1")
    if text.count("&") >= PARAMETERS:
        text = "&".join(text.split("&", PARAMETERS)[:PARAMETERS])
    found: dict[str, str] = {}
    for name, value in parse_qsl(text, keep_blank_values=True):
        found.setdefault(name, value)
    return found


def admitted(quick: Any, scope: Any, send: Any) -> Any:
    """The way of most requests, in one step: asked, let pass, nothing owed. The `send` for its response, or None: something is
    out of the ordinary, and `scope["limitkeeper"]` is what was decided (None: nothing was done yet)."""
    told = quick(AsgiRequestContext(scope))
    scope["limitkeeper"] = told
    if told is None:
        return None
    passage: Evaluation = told
    passage.origin = has_origin(scope)
    if not passage.allowed or passage.owes:
        return None
    passage.facts = None  # they hold the scope, which holds the passage: a circle would wait for the garbage collector
    return HeaderSend(passage, send)


@cython.ccall
def has_origin(scope: Any) -> cython.bint:
    """Whether a page made this request, which browsers say in Origin; most requests are spared the field that only pages need."""
    for field in scope["headers"]:
        if len(field[0]) == 6 and field[0] == b"origin":
            return True
    return False


@cython.cclass
class HeaderSend:
    """A `send` that adds a passage's fields to the start of the response, and tells the gate of it; once."""

    __slots__ = ("_passage", "_send")

    def __init__(self, passage: Evaluation, send: Any) -> None:
        self._passage: Evaluation | None = passage
        self._send = send

    def __call__(self, message: Any) -> Any:
        if self._passage is not None and message["type"] == START:
            passage: Evaluation = self._passage
            self._passage = None
            message = begun(passage, message)
        return self._send(message)

    def ended(self, status: int) -> None:
        """The handler is done: unless its response had begun, this is what became of it."""
        if self._passage is not None:
            passage: Evaluation = self._passage
            self._passage = None
            if passage.allowed:
                passage.responded(status)


@cython.ccall
def begun(passage: Evaluation, message: Any) -> Any:
    """The start of a response, with the fields of its passage."""
    if passage.allowed:
        if cython.compiled and isinstance(passage.gate, Evaluator):
            gate: Evaluator = passage.gate
            gate.count_response(passage, message["status"])
        else:
            passage.gate.count_response(passage, message["status"])
    added: list = fields(passage)  # type: ignore[type-arg]
    if added:
        message = dict(message)
        message["headers"] = together(message.get("headers"), added)
    return message


@cython.cfunc
def together(given: Any, added: list) -> list:  # type: ignore[type-arg]
    """A response's own fields and ours; looked at closely only where a name of ours may be among them."""
    own: list = given if type(given) is list else list(given or ())  # type: ignore[type-arg]
    length: cython.Py_ssize_t
    for field in own:
        length = len(field[0])
        if length < 63 and LENGTHS >> length & 1:
            return merge(own, added)
    return own + added
