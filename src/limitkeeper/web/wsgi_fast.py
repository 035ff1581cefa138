"""WSGI hot path: the environ as a RequestContext, and the `start_response` that adds the fields to a response.

Flask has an environ too, and so does Django (`request.META` has the same names, also under ASGI). Two spellings of a header,
`X-Tenant` and `X_Tenant`, are one key there, HTTP_X_TENANT, so that a client that sends both could hide one behind the other.
Servers that drop names with an underscore (waitress always, gunicorn by default, nginx too) prevent that; behind other servers
the two can't be told apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
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
from .ratelimit_fields import SPELLING

Environ = dict[str, Any]
ExcInfo = tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]
Write = Callable[[bytes], object]
#: (status, headers, exc_info=None); `wsgiref.types.StartResponse` as a plain callable, since servers' own types differ.
StartResponse = Callable[..., Write]
Application = Callable[[Environ, StartResponse], Iterable[bytes]]

#: The environ key of a request's evaluation.
EVALUATION = "limitkeeper.evaluation"
#: What waitress, wsgiref and werkzeug call the peer of a UNIX socket, which has no address. Taken for an address, all clients
#: behind it would share one key.
SOCKETS = frozenset({"localhost", "<local>", "unix", "unix:"})
#: The text of fields whose value is constant for a limit; and the names of such fields.
CONSTANT: dict[tuple[bytes, bytes], tuple[str, str]] = {}
CONSTANT_NAMES = frozenset({b"ratelimit-policy", b"x-ratelimit-limit", b"access-control-expose-headers"})
#: The environ keys of header names that policies read.
KEYS: dict[str, str] = {"content-type": "CONTENT_TYPE", "content-length": "CONTENT_LENGTH"}
MAX_KEYS = 1000


def environ_key(name: str) -> str:
    """`x-tenant` is HTTP_X_TENANT; cached."""
    key = "HTTP_" + name.upper().replace("-", "_")
    if len(KEYS) < MAX_KEYS:
        KEYS[name] = key
    return key


def decode_path(path: str) -> str:
    """The UTF-8 text of a path whose bytes the server decoded as latin-1; invalid bytes become replacement characters."""
    return path.encode("latin-1", "replace").decode("utf-8", "replace")


def first_value(query: str, name: str) -> str | None:
    """The first value of a query parameter."""
    if query.count("&") >= PARAMETERS:
        query = "&".join(query.split("&", PARAMETERS)[:PARAMETERS])
    for found, value in parse_qsl(query, keep_blank_values=True, errors="replace"):
        if found == name:
            return value
    return None


@cython.cclass
class WsgiRequestContext(RequestContext):
    """The context of an environ. Nothing is read before a policy needs it, and never the body."""

    __slots__ = ("environ",)

    def __init__(self, environ: dict[str, Any]) -> None:
        self.environ = environ
        read_environ(self, environ)

    def header(self, name: str) -> str | None:
        value: str | None = self.environ.get(KEYS.get(name) or environ_key(name))
        return value

    def query(self, name: str) -> str | None:
        query = self.environ.get("QUERY_STRING")
        return first_value(query, name) if query else None

    def differs(self, kind: str, name: str) -> bool:
        """The server has joined repeated lines of a header: the application sees the same value."""
        return kind == "query" and differing(self.environ.get("QUERY_STRING") or "", name)

    def peer(self) -> str | None:
        peer = self.environ.get("REMOTE_ADDR")
        return peer if peer and peer not in SOCKETS else None

    def certificate(self) -> Mapping[str, Any] | None:
        """The certificate that the server verified (names of mod_ssl and uWSGI). Clients can't set these: headers are HTTP_*."""
        subject = self.environ.get("SSL_CLIENT_S_DN")
        if not subject or self.environ.get("SSL_CLIENT_VERIFY") != "SUCCESS":
            return None
        names = [f"SSL_CLIENT_SAN_{kind}_{number}" for kind in ("URI", "DNS", "Email") for number in range(10)]
        return {"subject": subject, "san": [self.environ[name] for name in names if self.environ.get(name)]}


@cython.cclass
class HeaderStartResponse:
    """A `start_response` that adds the fields of an evaluation. A second call (with exc_info) replaces the first.

    `status` is the latest status, 0 before the first call.
    """

    __slots__ = ("evaluation", "start_response", "status")

    def __init__(self, start_response: StartResponse, evaluation: Evaluation) -> None:
        self.start_response = start_response
        self.evaluation = evaluation
        self.status = 0

    def __call__(self, status: str, headers: list[tuple[str, str]], exc_info: ExcInfo | None = None) -> Write:
        evaluation: Evaluation = self.evaluation
        code = 200 if status == "200 OK" else int(status[:3])
        if self.status == 0 and evaluation.allowed:
            evaluation.count_response(code)
        self.status = code
        merged = append_fields(headers, spell(fields(evaluation)))
        if exc_info is None:
            return self.start_response(status, merged)
        return self.start_response(status, merged, exc_info)


@cython.cfunc
def spell(found: list[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """Fields as text in their conventional spelling; constant ones are cached."""
    result: list[tuple[str, str]] = []
    name: bytes
    value: bytes
    for field in found:
        known = CONSTANT.get(field)
        if known is None:
            name, value = field
            known = (SPELLING[name], value.decode("ascii"))
            if name in CONSTANT_NAMES and len(CONSTANT) < MAX_KEYS:
                CONSTANT[field] = known
        result.append(known)
    return result


@cython.cclass
class WsgiApp:
    """Evaluates a request and calls the application. Subclasses add the rare paths: refusals and settlement."""

    __slots__ = ("app", "ask")

    def __init__(self, app: Application, ask: Callable[[RequestContext], Evaluation]) -> None:
        self.app = app
        self.ask = ask

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        context: WsgiRequestContext = WsgiRequestContext.__new__(WsgiRequestContext)
        read_environ(context, environ)
        evaluation: Evaluation = self.ask(context)
        environ[EVALUATION] = evaluation
        evaluation.origin = "HTTP_ORIGIN" in environ
        if evaluation.needs_settlement and evaluation.allowed:
            return self.run_and_settle(evaluation, environ, start_response)
        evaluation.context = None  # the context holds the environ, which holds the evaluation: no reference cycle is left
        if not evaluation.allowed:
            return self.refuse(evaluation, environ, start_response)
        start: HeaderStartResponse = HeaderStartResponse.__new__(HeaderStartResponse)
        start.start_response = start_response
        start.evaluation = evaluation
        start.status = 0
        try:
            return self.app(environ, start)
        except BaseException:
            if start.status == 0:
                evaluation.count_response(500)
            raise

    def refuse(self, evaluation: Evaluation, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        raise NotImplementedError

    def run_and_settle(self, evaluation: Evaluation, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        raise NotImplementedError


@cython.cfunc
def read_environ(context: WsgiRequestContext, environ: dict[str, Any]) -> cython.int:
    path: str = environ.get("PATH_INFO", "")
    mount: str = environ.get("SCRIPT_NAME", "")
    if mount:
        path = mount + path
    method: str = environ["REQUEST_METHOD"]
    context.method = method if method in USUAL else method_of(method)
    context.path = path if path.isascii() else decode_path(path)
    context.raw = environ
    context.environ = environ
    context.identities = {}
    context.captured = NOTHING
    return 0
