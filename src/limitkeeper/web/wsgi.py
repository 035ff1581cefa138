"""WSGI middleware: puts a policy in front of any WSGI application.

    application = RateLimitMiddleware(application, policy="limitkeeper.yaml")

What the application returns goes to the server unchanged: nothing is buffered, a file wrapper stays one, `len()` and `close()`
are the application's own. The body is wrapped, to count its bytes and to notice its end, only where settlement needs its length
and that is not known before, or a rule counts requests at a time. A refusal calls no application and reads no body.

`X-Tenant` and `X_Tenant` are one key of an environ, HTTP_X_TENANT: a client that sends both could hide one behind the other.
Servers that drop names with an underscore (waitress always, gunicorn by default, nginx too) prevent that; others can't.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from io import BytesIO
from itertools import chain, islice
from pathlib import Path
from socket import MSG_PEEK
from types import TracebackType
from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.policy.evaluation import Evaluation
    from cython.cimports.limitkeeper.policy.request_context import RequestContext
    from cython.cimports.limitkeeper.web.headers import append_fields, fields
else:
    from ..policy.evaluation import Evaluation
    from ..policy.request_context import RequestContext
    from .headers import append_fields, fields

from ..policy.gate import Gate, gate_of
from ..policy.identity.body import BODY, MAX_BODY, announced_size
from ..policy.model import Policy
from ..policy.request_context import NOTHING, USUAL, method_of, names_other_charset, query_values
from ..stores import Store
from .field_names import SPELLING
from .headers import text_fields
from .refusal_body import body
from .response_settlement import (
    DEFERRED,
    DEGRADED,
    GONE,
    UNKNOWN,
    Settlement,
    SettlingBody,
    WatchedInput,
    as_received,
    byte_length,
)

Environ = dict[str, Any]
ExcInfo = tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]
Write = Callable[[bytes], object]
#: (status, headers, exc_info=None); `wsgiref.types.StartResponse` as a plain callable, since servers' own types differ.
StartResponse = Callable[..., Write]
Application = Callable[[Environ, StartResponse], Iterable[bytes]]

#: The status of a response to a client that has disconnected.
GONE_STATUS = "499 Client Closed Request"
#: The environ key of a request's evaluation.
EVALUATION = "limitkeeper.evaluation"
#: The environ key of a request whose response is refused after the application has run.
HAS_RUN = "limitkeeper.has_run"
#: What waitress, wsgiref and werkzeug call the peer of a UNIX socket, which has no address. Taken for an address, all clients
#: behind it would share one key.
SOCKETS = frozenset({"localhost", "<local>", "unix", "unix:"})
#: The text of fields whose value is constant for a limit; and the names of such fields.
CONSTANT: dict[tuple[bytes, bytes], tuple[str, str]] = {}
CONSTANT_NAMES = frozenset({b"ratelimit-policy", b"x-ratelimit-limit", b"access-control-expose-headers"})
#: Methods whose requests rarely have a body.
BODILESS = frozenset({"GET", "HEAD", "OPTIONS"})
#: The environ keys of header names that policies read.
KEYS: dict[str, str] = {"content-type": "CONTENT_TYPE", "content-length": "CONTENT_LENGTH"}
MAX_KEYS = 1000


def environ_key(name: str) -> str:
    """`x-tenant` is HTTP_X_TENANT; cached."""
    key = "HTTP_" + name.upper().replace("-", "_")
    if len(KEYS) < MAX_KEYS:
        KEYS[name] = key
    return key


def mount_is_sent(environ: dict[str, Any]) -> bool:
    """Whether a header may have set SCRIPT_NAME: gunicorn takes it from peers that it trusts (loopback by default), werkzeug's
    ProxyFix from X-Forwarded-Prefix. A client that can choose it chooses what precedes the path that the application routes."""
    return "HTTP_SCRIPT_NAME" in environ or "HTTP_X_SCRIPT_NAME" in environ or "HTTP_X_FORWARDED_PREFIX" in environ


def decode_path(path: str) -> str:
    """The UTF-8 text of a path whose bytes the server decoded as latin-1; invalid bytes become replacement characters."""
    return path.encode("latin-1", "replace").decode("utf-8", "replace")


def path_after_word(path: str) -> str:
    """The path that an application may route of one that does not begin with a slash: werkzeug's DispatcherMiddleware takes what
    precedes the first slash of `x/login` for a mount point, whatever it is."""
    return decode_path("/" + path.partition("/")[2])


@cython.cclass
class WsgiRequestContext(RequestContext):
    """The context of an environ. Nothing is read before a policy needs it, the body only for an identity from it."""

    __slots__ = ("environ",)

    def __init__(self, environ: dict[str, Any]) -> None:
        self.environ = environ
        read_environ(self, environ)

    def header(self, name: str) -> str | None:
        value: str | None = self.environ.get(KEYS.get(name) or environ_key(name))
        return value

    def query(self, name: str) -> str | None:
        return query_values(self.environ.get("QUERY_STRING") or "", name)[0]

    def differs(self, kind: str, name: str) -> bool:
        """The server has joined repeated lines of a header: the application sees the same value. Django reads a query in the
        charset of the Content-Type."""
        query = self.environ.get("QUERY_STRING") or "" if kind == "query" else ""
        return query != "" and (names_other_charset(self.environ.get("CONTENT_TYPE") or "") or query_values(query, name)[1])

    def may_have_body(self) -> bool:
        """HTTP/2 need not announce a body, and one that is not announced is not read here."""
        announced = RequestContext.may_have_body(self) or bool(self.environ.get("CONTENT_LENGTH"))
        unannounced = self.method not in BODILESS and self.environ.get("SERVER_PROTOCOL", "") >= "HTTP/2"
        return RequestContext.may_have_body(self) if announced else unannounced

    def body(self) -> bytes | None:
        return read_input(self.environ)

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


def read_input(environ: dict[str, Any]) -> bytes | None:
    """The body of a request, which the application then reads from memory; None: larger than MAX_BODY, or of unknown length."""
    if BODY not in environ:
        length = environ.get("CONTENT_LENGTH") or ""
        if not length.isdecimal():
            chunked = environ.get("wsgi.input_terminated") or "HTTP_TRANSFER_ENCODING" in environ
            return None if chunked else b""
        size = announced_size(length)
        if size > MAX_BODY:
            return None
        environ[BODY] = environ["wsgi.input"].read(size)
        environ["wsgi.input"] = BytesIO(environ[BODY])
    found: bytes = environ[BODY]
    return found


@cython.cfunc
def read_environ(context: WsgiRequestContext, environ: dict[str, Any]) -> cython.int:
    path: str = environ.get("PATH_INFO", "")
    mount: str = environ.get("SCRIPT_NAME", "")
    context.routed = None
    if mount:
        if mount_is_sent(environ):
            context.routed = decode_path(path)
        path = mount + path
    if path and path[0] != "/" and context.routed is None:
        context.routed = path_after_word(path)
    method: str = environ["REQUEST_METHOD"]
    context.method = method if method in USUAL else method_of(method)
    context.path = path if path.isascii() else decode_path(path)
    context.raw = environ
    context.environ = environ
    context.identities = {}
    context.captured = NOTHING
    return 0


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


class SettlingStartResponse(HeaderStartResponse):
    """A HeaderStartResponse that reports to a settlement: the status, the bytes sent through `write`, and Content-Length.

    The server's is called by `release`, when it is known that the response is sent, or by the first `write`; `refusing` is the
    evaluation that can't hold the length announced before that: then nothing is written.
    """

    __slots__ = ("_held", "_write", "content_length", "refusing", "settlement")

    def __init__(self, start_response: StartResponse, evaluation: Evaluation, settlement: Settlement) -> None:
        super().__init__(start_response, evaluation)
        self.settlement = settlement
        self.content_length: int | None = None
        self.refusing: Evaluation | None = None
        self._held: tuple[Any, ...] | None = None
        self._write: Write | None = None

    def __call__(self, status: str, headers: list[tuple[str, str]], exc_info: ExcInfo | None = None) -> Write:
        self._held = (status, headers, exc_info)
        self.settlement.status = int(status[:3])
        lengths = [int(value) for name, value in headers if name.lower() == "content-length" and value.isdecimal()]
        self.content_length = 0 if self.settlement.status in (204, 304) else lengths[0] if lengths else None
        if self._write is not None:
            self.release()
        return self.write

    def release(self) -> None:
        held = self._held
        if held is not None:
            self.settlement.counted, self._held = True, None
            self._write = super().__call__(*held)

    def write(self, data: bytes) -> object:
        if self._write is None and self.refusing is None and self.content_length is not None:
            self.refusing = self.settlement.afford(self.content_length)
        if self.refusing is not None:
            return None
        self.release()
        assert self._write is not None
        self.settlement.size += len(data)
        try:
            return self._write(data)
        except BaseException:
            self.settlement.gone = True
            raise


@cython.cclass
class RateLimitMiddleware:
    """WSGI middleware that evaluates a policy before every request.

    `policy` is a path, a `Policy` or a `Gate` (which has its store and handlers already); `store` replaces the policy's store;
    `handlers` are the WSGI applications that `on_refusal: degrade NAME` names.
    """

    def __init__(
        self,
        app: Application,
        policy: Policy | Gate | str | Path = "limitkeeper.yaml",
        handlers: Mapping[str, Application] | None = None,
        store: Store | None = None,
    ) -> None:
        self.app = app
        self.gate = gate_of(policy, handlers=handlers, store=store)
        self.ask = self.gate.ask
        self._owns_gate = self.gate is not policy

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        context: WsgiRequestContext = WsgiRequestContext.__new__(WsgiRequestContext)
        read_environ(context, environ)
        evaluation: Evaluation = self.ask(context)
        environ[EVALUATION] = evaluation
        evaluation.origin = "HTTP_ORIGIN" in environ
        if evaluation.wait_us > 0 and has_disconnected(environ):
            evaluation.count_response(GONE)
            evaluation.settle(UNKNOWN)
            start_response(GONE_STATUS, [("Content-Length", "0")])
            return []
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
        """The response of the rule's degrade handler, or the refusal."""
        if evaluation.degrade is not None:
            environ[EVALUATION], environ[DEGRADED] = evaluation, True  # an evaluation within may have taken its place
            response: Iterable[bytes] = evaluation.degrade(environ, HeaderStartResponse(start_response, evaluation))
            return response
        assert evaluation.refusal is not None
        kind, content = body(evaluation, environ.get("HTTP_ACCEPT"))
        headers = [("Content-Type", kind.decode("ascii")), ("Content-Length", str(len(content))), *text_fields(evaluation)]
        start_response(status_line(evaluation.refusal.status), headers)
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [content]

    def run_and_settle(self, evaluation: Evaluation, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        """Calls the application, and settles when its response has been sent, however it ends."""
        settlement = Settlement([evaluation], head=environ["REQUEST_METHOD"] == "HEAD")
        start = SettlingStartResponse(start_response, evaluation, settlement)
        environ["wsgi.input"] = WatchedInput(environ["wsgi.input"], environ.get("CONTENT_LENGTH"), settlement)
        before = dict(environ)
        chunks: Iterable[bytes] = ()
        try:
            chunks = self.app(environ, start)
            body: SettlingBody[bytes] = SettlingBody(chunks, settlement)
            if settlement.status == 0:  # a generator: it starts its response with its first chunk
                iterator = iter(chunks)
                first = [*islice(iterator, 1)]
                chunks, body._next = body, chain(first, iterator)
            written = settlement.size
            refusing = start.refusing
            if refusing is not None:
                pass
            elif isinstance(chunks, (list, tuple)):  # the whole body: its size is known before a byte is sent
                settlement.size += sum(map(byte_length, chunks))
            elif start.content_length is not None:
                settlement.size = start.content_length
            else:
                start.release()
                return body
            if refusing is None and written == 0:
                refusing = settlement.afford(settlement.size)
            if refusing is None:
                start.release()
                if settlement.holds_place and not isinstance(chunks, (list, tuple)):
                    settlement.size = written
                    return body
        except BaseException as error:  # the server has no body to close
            try:
                settlement.settle(failed=isinstance(error, Exception))
            finally:
                close_body(chunks)
            raise
        if refusing is not None:
            close_body(chunks)
            environ[HAS_RUN] = environ[DEGRADED] = True  # a StaleCache may look at this environ
            again = as_received(before, environ)
            again["wsgi.input"] = environ["wsgi.input"]
            return self.refuse(refusing, again, start_response)
        settlement.settle(failed=not settlement.status)  # servers answer 500 where no status was given
        return chunks

    def close(self) -> None:
        """Closes the gate, unless it was passed in."""
        if self._owns_gate:
            self.gate.close()


def close_body(chunks: Iterable[bytes]) -> None:
    """Closes the body of a response that is not returned to the server."""
    getattr(chunks, "close", tuple)()


def has_disconnected(environ: Environ) -> bool:
    """Whether the client of a request that waited in a thread has disconnected, where the server lets it be known: waitress with
    `channel_request_lookahead`, gunicorn without TLS. The client of a deferred request has its answer: its connection may be
    closed."""
    if DEFERRED in environ:
        return False
    connection, check = environ.get("gunicorn.socket"), environ.get("waitress.client_disconnected")
    if check is not None or connection is None:
        return bool(check()) if check is not None else False
    timeout = connection.gettimeout()
    try:
        connection.settimeout(0)
        return not connection.recv(1, MSG_PEEK)
    except (BlockingIOError, ValueError):  # connected; TLS can't be peeked
        return False
    except OSError:
        return True
    finally:
        connection.settimeout(timeout)


def status_line(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return f"{status} Refused"
