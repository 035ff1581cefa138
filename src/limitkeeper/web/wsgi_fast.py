"""What of WSGI is on the way of every request: an environ as facts, and the `start_response` that puts the fields on a response.

Flask speaks environ too, and so does Django (`request.META` has the same names, also under ASGI). Two spellings of a header,
`X-Tenant` and `X_Tenant`, are one key there, HTTP_X_TENANT: whoever may send both could hide one behind the other. Servers that
can be trusted with that drop names with an underscore (waitress always, gunicorn unless it is told otherwise, nginx too); behind
a server that does not, nobody can tell which one it was.
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
    from cython.cimports.limitkeeper.policy.evaluation import Evaluation
    from cython.cimports.limitkeeper.policy.request_context import RequestContext
    from cython.cimports.limitkeeper.web.headers import fields
else:
    from ..policy.evaluation import Evaluation
    from ..policy.request_context import RequestContext
    from .headers import fields

from ..policy.request_context import NOTHING, PARAMETERS, USUAL, differing, method_of
from .headers import merge
from .ratelimit_fields import SPELT

#: Where the application finds what was decided.
PASSAGE = "limitkeeper.passage"
#: What servers call the other end of a UNIX socket, which has no address: waitress, wsgiref and werkzeug. Taken for one, all
#: clients behind it would be one.
SOCKETS = frozenset({"localhost", "<local>", "unix", "unix:"})
#: Fields that one limit says in the same way every time, as text; and the names of those that may be kept.
CONSTANT: dict[Any, tuple[str, str]] = {}
LASTING = frozenset({b"ratelimit-policy", b"x-ratelimit-limit", b"access-control-expose-headers"})
#: How long the names of our fields are: a name of another length is none of them.
LENGTHS = frozenset(map(len, SPELT))
#: The environ's spelling of header names, as far as they were asked for; a policy asks for a handful.
KEYS: dict[str, str] = {"content-type": "CONTENT_TYPE", "content-length": "CONTENT_LENGTH"}
MOST_KEYS = 1000


def key_of(name: str) -> str:
    """`x-tenant` is HTTP_X_TENANT, and remembered."""
    key = "HTTP_" + name.upper().replace("-", "_")
    if len(KEYS) < MOST_KEYS:
        KEYS[name] = key
    return key


def utf8(text: str) -> str:
    """What a server put into an environ letter by letter, read as the UTF-8 it was; what is none keeps a mark in its place."""
    return text.encode("latin-1", "replace").decode("utf-8", "replace")


def first_of(query: str, name: str) -> str | None:
    """The first value of a query parameter."""
    if query.count("&") >= PARAMETERS:
        query = "&".join(query.split("&", PARAMETERS)[:PARAMETERS])
    for found, value in parse_qsl(query, keep_blank_values=True, errors="replace"):
        if found == name:
            return value
    return None


@cython.cclass
class WsgiRequestContext(RequestContext):
    """Facts over an environ. Nothing is read before somebody asks, and never the body."""

    __slots__ = ("environ",)

    def __init__(self, environ: dict[str, Any]) -> None:
        self.environ = environ
        read(self, environ)

    def header(self, name: str) -> str | None:
        value: str | None = self.environ.get(KEYS.get(name) or key_of(name))
        return value

    def query(self, name: str) -> str | None:
        query = self.environ.get("QUERY_STRING")
        return first_of(query, name) if query else None

    def differs(self, kind: str, name: str) -> bool:
        """Lines of a header are joined by the server: the application sees what is seen here."""
        return kind == "query" and differing(self.environ.get("QUERY_STRING") or "", name)

    def peer(self) -> str | None:
        peer = self.environ.get("REMOTE_ADDR")
        return peer if peer and peer not in SOCKETS else None

    def certificate(self) -> Mapping[str, Any] | None:
        """What the server says it verified (mod_ssl's and uWSGI's names). A client can't set these: its headers are HTTP_*."""
        subject = self.environ.get("SSL_CLIENT_S_DN")
        if not subject or self.environ.get("SSL_CLIENT_VERIFY") != "SUCCESS":
            return None
        names = [f"SSL_CLIENT_SAN_{kind}_{number}" for kind in ("URI", "DNS", "Email") for number in range(10)]
        return {"subject": subject, "san": [self.environ[name] for name in names if self.environ.get(name)]}


@cython.cclass
class HeaderStartResponse:
    """`start_response` with the header fields of a passage. A second call (with exc_info) takes the place of the first.

    `status` is the last one that was said, 0 before that.
    """

    __slots__ = ("passage", "start_response", "status")

    def __init__(self, start_response: Any, passage: Evaluation) -> None:
        self.start_response = start_response
        self.passage = passage
        self.status = 0

    def __call__(self, status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Any:
        passage: Evaluation = self.passage
        code = 200 if status == "200 OK" else int(status[:3])
        if self.status == 0 and passage.allowed:
            passage.responded(code)
        self.status = code
        told = put(headers, passage)
        if exc_info is None:
            return self.start_response(status, told)
        return self.start_response(status, told, exc_info)


@cython.cfunc
def put(own: list, passage: Evaluation) -> list:  # type: ignore[type-arg]
    """A response's fields and a passage's. Only where a length is that of one of ours `merge` has to look closer."""
    added: list = spelt(fields(passage))  # type: ignore[type-arg]
    name: str
    for name, _ in own:
        if len(name) in LENGTHS:
            return merge(own, added)
    return own + added


@cython.cfunc
def spelt(found: list) -> list:  # type: ignore[type-arg]
    """Fields as text, names as people write them. What a limit says every time is kept as text."""
    told: list = []  # type: ignore[type-arg]
    name: bytes
    value: bytes
    for field in found:
        known = CONSTANT.get(field)
        if known is None:
            name, value = field
            known = (SPELT[name], value.decode("ascii"))
            if name in LASTING and len(CONSTANT) < MOST_KEYS:
                CONSTANT[field] = known
        told.append(known)
    return told


@cython.cclass
class WsgiApp:
    """The way of a request to its application and back. `RateLimitMiddleware` adds what is seldom: refusals, and debts."""

    __slots__ = ("app", "ask")

    def __init__(self, app: Any, ask: Any) -> None:
        self.app = app
        self.ask = ask

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        passage: Evaluation = self.ask(facts_of(environ))
        environ[PASSAGE] = passage
        passage.origin = "HTTP_ORIGIN" in environ
        if passage.owes and passage.allowed:
            return self.owing(passage, environ, start_response)  # type: ignore[attr-defined]
        passage.facts = None  # they hold the environ, which holds the passage: a circle would wait for the garbage collector
        if not passage.allowed:
            return self.refuse(passage, environ, start_response)  # type: ignore[attr-defined]
        start: HeaderStartResponse = started(start_response, passage)
        try:
            return self.app(environ, start)
        except BaseException:
            if start.status == 0:
                passage.responded(500)
            raise


@cython.cfunc
def facts_of(environ: dict) -> WsgiRequestContext:  # type: ignore[type-arg]
    """`WsgiFacts(environ)`; compiled, without the detour of a call."""
    facts: WsgiRequestContext = WsgiRequestContext.__new__(WsgiRequestContext)
    read(facts, environ)
    return facts


@cython.cfunc
def read(facts: WsgiRequestContext, environ: dict) -> cython.int:  # type: ignore[type-arg]
    path: str = environ.get("PATH_INFO", "")
    mounted: str = environ.get("SCRIPT_NAME", "")
    if mounted:
        path = mounted + path
    method: str = environ["REQUEST_METHOD"]
    facts.method = method if method in USUAL else method_of(method)
    facts.path = path if path.isascii() else utf8(path)
    facts.raw = environ
    facts.environ = environ
    facts.found = {}
    facts.captured = NOTHING
    return 0


@cython.cfunc
def started(start_response: Any, passage: Evaluation) -> HeaderStartResponse:
    start: HeaderStartResponse = HeaderStartResponse.__new__(HeaderStartResponse)
    start.start_response = start_response
    start.passage = passage
    start.status = 0
    return start
