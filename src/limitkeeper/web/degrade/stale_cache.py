"""StaleCache: answers refused requests with the last response to the same request, within a stated age.

    cache = StaleCache(max_stale="10min")
    app = RateLimitMiddleware(cache.asgi(inner), policy, handlers={"cached": cache.asgi_handler})
    #   limits: [{name: search, match: GET /search, key: ip, limit: 5/s, on_refusal: degrade cached}]

Recorded are complete responses to GET with status 200, without Set-Cookie and without `Vary: *`, of which neither the request's
nor the response's Cache-Control forbids it (no-store, no-cache; private with `per` and in a shared cache; Authorization in a
shared cache, RFC 9111). They are kept per client: the key holds the value of every identity of the policy and the credentials of
the request (Authorization, Cookie, X-Api-Key, the headers of tokens, a client certificate), which the application may know the
client by though the policy does not, so that no client gets the response to another. With `per=("tenant",)` it holds these
identities only, and the credentials where one of them is absent (a token that the policy can't verify) or has several values;
with `shared=True` none. Requests with a body are neither recorded nor answered: the response may depend on it. A response is
served while it is at most `max_stale` older than its freshness (s-maxage, max-age, or 0), with `must-revalidate` only while
it is fresh; Age and Cache-Status (RFC 9211) say so. Without a response the request is refused as by any other rule.
The least recently used ones are dropped beyond `max_bytes`.

Rejected: revalidating in the background. A request that the limit refuses must not cost the application anything.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ...clock import SYSTEM, Clock
from ...errors import ConfigurationError
from ...fork import reset_after_fork
from ...policy.compiled_rule import identity_of
from ...policy.evaluation import Evaluation
from ...policy.identity.body import BodyField
from ...policy.identity.identify import SEVERAL, Header
from ...policy.identity.jwt import Jwt
from ...policy.model import Identity
from ...policy.request_context import RequestContext
from ...rate import Duration, duration_us
from ..headers import ASGIApp, AsgiRequestContext, Message, Receive, Scope, Send
from ..refusal_body import body
from ..wsgi import EVALUATION, Application, Environ, ExcInfo, StartResponse, Write, WsgiRequestContext, status_line
from .reduced_response import is_reduced

HeaderLines = list[tuple[str, str]]
#: Status, headers and body.
Response = tuple[int, HeaderLines, bytes]
#: Request headers that a response may depend on without saying so in Vary, or that most responses name there: the last ones are
#: those by which frameworks make absolute links, routes and CORS fields.
NEGOTIATED = (
    *("host", "accept", "accept-encoding", "accept-language", "origin"),
    *("x-forwarded-host", "x-forwarded-proto", "x-forwarded-port", "x-forwarded-prefix", "x-original-url", "x-rewrite-url"),
)
#: Request headers that identify a client to most applications.
CREDENTIALS = ("authorization", "cookie", "x-api-key")
#: What a response takes besides its header lines and its body.
ENTRY_SIZE = 512
#: The most characters of a Cache-Control field that are read, and the longest freshness (s).
MAX_FIELD, MAX_AGE = 1000, 365 * 86_400


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, the request headers that it varies by, when it was made, and how long it is fresh and may be served."""

    headers: tuple[tuple[str, str], ...]
    body: bytes
    vary: tuple[tuple[str, str | None], ...]
    made_us: int
    fresh_us: int
    last_us: int

    @property
    def size(self) -> int:
        lines = (*self.headers, *self.vary)
        return len(self.body) + sum(len(name) + len(value or "") for name, value in lines) + ENTRY_SIZE

    def served_headers(self, now_us: int) -> HeaderLines:
        age = max(0, now_us - self.made_us) // 1_000_000
        left = (self.fresh_us - now_us) // 1_000_000
        own = [(name, value) for name, value in self.headers if name.lower() not in ("age", "cache-status")]
        return [*own, ("Age", str(age)), ("Cache-Status", f"limitkeeper; hit; ttl={left}")]


class StaleCache:
    """Records responses, and serves them to requests that are refused. One cache serves all threads of a process.

    `asgi`, `wsgi` wrap the application whose responses are recorded; `asgi_handler`, `wsgi_handler` are degrade handlers.
    `flask_cached` and `django_cached` are those of Flask and Django.

    Args:
        max_stale: how long after its `max-age` a response may be served.
        max_bytes: the memory of all responses together.
        max_body: the largest body that is recorded.
        shared: serve a recorded response to every client, whatever cookies it sends.
        per: the identities by which responses differ; by default everything that identifies a client.
        clock: for tests.
    """

    def __init__(
        self,
        *,
        max_stale: Duration = "10min",
        max_bytes: int = 64 << 20,
        max_body: int = 1 << 20,
        shared: bool = False,
        per: Sequence[str] | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        if shared and per is not None:
            raise ConfigurationError(f"expected shared=True or per=, got both (per={per!r}): a shared response has no owner")
        if isinstance(per, str):
            raise ConfigurationError(f"per: expected a sequence of identity names, got the text {per!r}; write ({per!r},)")
        if not 0 < max_body <= max_bytes:
            raise ConfigurationError(f"expected 0 < max_body ≤ max_bytes, got max_body={max_body!r}, max_bytes={max_bytes!r}")
        self.max_stale_us, self.max_bytes, self.max_body = duration_us(max_stale), max_bytes, max_body
        self.shared, self.per, self.now_us = shared, per, clock.now_us
        self.hits = self.misses = 0
        self._reset_after_fork()
        reset_after_fork(self)

    def _reset_after_fork(self) -> None:
        self._lock = threading.Lock()
        self._responses: OrderedDict[bytes, StoredResponse] = OrderedDict()
        self.stored_bytes = 0

    # Keys and responses ---------------------------------------------------------------------------------------------

    def key_of(self, context: RequestContext, query: str, evaluation: Evaluation) -> bytes:
        """A digest of what the response may depend on: target, negotiated headers, and the client's identities."""
        identities = evaluation.compiled.identities
        names = () if self.shared else sorted(identities) if self.per is None else self.per
        unknown = [name for name in names if name not in identities]
        if unknown:
            raise ConfigurationError(f"per: the policy has no identity {unknown[0]!r}; it has {', '.join(sorted(identities))}")
        values = {name: identity_of(identities, context, name) for name in names if has_no_body(identities[name])}
        client: list[object] = [*values.items()]
        unclear = any(value in (SEVERAL, getattr(identities[name], "default", None)) for name, value in values.items())
        if not self.shared and (self.per is None or unclear):
            tokens = sorted({one.verifier.header or "" for one in identities.values() if isinstance(one, Jwt)})
            written = [one.name for one in (identities[name] for name in names) if isinstance(one, Header)]
            sent = [context.header(name.strip().lower()) for name in (*CREDENTIALS, *tokens, *written)]
            client += [sent, repr(context.certificate())]
        parts = [context.path, context.routed, target_of(context), query, [context.header(name) for name in NEGOTIATED], client]
        return hashlib.sha256(json.dumps(parts).encode()).digest()

    def find(self, context: RequestContext, query: str, evaluation: Evaluation) -> StoredResponse | None:
        """The response to serve to a refused request; None: there is none, or it is too old."""
        found = None
        if context.method in ("GET", "HEAD") and may_use(context):
            key = self.key_of(context, query, evaluation)
            with self._lock:
                found = self._responses.get(key)
                if found is not None and (self.now_us() > found.last_us or varies(found, context)):
                    found = None
                if found is not None:
                    self._responses.move_to_end(key)
        with self._lock:
            self.hits += found is not None
            self.misses += found is None
        return found

    def keep(
        self,
        context: RequestContext,
        query: str,
        evaluation: Evaluation | None,
        headers: Iterable[tuple[str, str]],
        content: bytes,
    ) -> None:
        """Records a complete response with status 200 to an allowed GET, if it may be recorded."""
        if evaluation is None or not evaluation.allowed or len(content) > self.max_body or has_body(context):
            return
        lines = [(name, value) for name, value in headers if "ratelimit" not in name.lower()]
        fresh_s = freshness(lines, context, self.shared)
        if fresh_s is None or (self.per is not None and "private" in response_directives(lines)):
            return
        names = [name.strip().lower() for one, value in lines if one.lower() == "vary" for name in value.split(",")]
        if "*" in names or any(name.lower() == "set-cookie" for name, _ in lines):
            return
        now_us = self.now_us()
        fresh_us = now_us + max(0, fresh_s) * 1_000_000
        last_us = fresh_us if must_revalidate(lines) else fresh_us + self.max_stale_us
        vary = tuple([(name, context.header(name)) for name in names if name])
        stored = StoredResponse(tuple(lines), content, vary, now_us, fresh_us, last_us)
        self._insert(self.key_of(context, query, evaluation), stored)

    def respond(self, context: RequestContext, query: str, evaluation: Evaluation) -> Response:
        """The recorded response, or the refusal without its RateLimit fields."""
        found = self.find(context, query, evaluation)
        return refusal_of(evaluation, context) if found is None else (200, found.served_headers(self.now_us()), found.body)

    def _insert(self, key: bytes, stored: StoredResponse) -> None:
        with self._lock:
            before = self._responses.pop(key, None)
            self.stored_bytes += stored.size - (0 if before is None else before.size)
            self._responses[key] = stored
            while self.stored_bytes > self.max_bytes:
                self.stored_bytes -= self._responses.popitem(last=False)[1].size

    def clear(self) -> None:
        """Forgets every response."""
        with self._lock:
            self._responses.clear()
            self.stored_bytes = 0

    # ASGI -----------------------------------------------------------------------------------------------------------

    def asgi(self, app: ASGIApp) -> ASGIApp:
        """The application with its responses recorded; goes inside `RateLimitMiddleware`."""

        async def recording(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["method"] != "GET":
                await app(scope, receive, send)
                return
            recorder, before = AsgiRecorder(send, self.max_body), dict(scope)  # routing changes a scope
            has_read = False

            async def watched() -> Message:
                nonlocal has_read
                message = await receive()
                has_read = has_read or bool(message.get("body"))  # HTTP/2 needs no Content-Length
                return message

            await app(scope, watched, recorder)
            if recorder.complete and not has_read and not is_reduced(scope):
                lines = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in recorder.headers]
                self.keep(AsgiRequestContext(before), query_of(before), before.get("limitkeeper"), lines, bytes(recorder.body))

        return recording

    async def asgi_handler(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The degrade handler: the recorded response, or the refusal."""
        await send_response(self.respond(AsgiRequestContext(scope), query_of(scope), scope["limitkeeper"]), scope, send)

    # WSGI -----------------------------------------------------------------------------------------------------------

    def wsgi(self, app: Application) -> Application:
        """The application with its responses recorded; goes inside `RateLimitMiddleware`."""

        def recording(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
            if environ["REQUEST_METHOD"] != "GET":
                return app(environ, start_response)
            return WsgiRecorder(self, app, environ, start_response)

        return recording

    def wsgi_handler(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """The degrade handler: the recorded response, or the refusal."""
        status, lines, content = self.respond(WsgiRequestContext(environ), environ.get("QUERY_STRING") or "", environ[EVALUATION])
        start_response(status_line(status), lines)
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [content]


class AsgiRecorder:
    """A `send` that keeps a copy of a response with status 200. `complete`: all of it was sent, and it is not too large."""

    def __init__(self, send: Send, max_body: int) -> None:
        self._send, self._max_body = send, max_body
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = bytearray()
        self.complete = self._recording = False

    async def __call__(self, message: Message) -> None:
        await self._send(message)
        kind = message["type"]
        if kind == "http.response.start":
            self._recording = message["status"] == 200
            self.headers = list(message.get("headers") or ())
        elif kind == "http.response.body" and self._recording:
            self.body += message.get("body", b"")
            self._recording = len(self.body) <= self._max_body
            self.complete = self._recording and not message.get("more_body", False)
        else:  # a file that the server sends itself, or trailers
            self._recording = False


class WsgiRecorder:
    """The body of a WSGI response, recorded while the server iterates over it; kept when it ends."""

    def __init__(self, cache: StaleCache, app: Application, environ: Environ, start_response: StartResponse) -> None:
        self._cache, self._start_response = cache, start_response
        self._request, self._environ = environ, dict(environ)  # dispatching changes an environ
        self._headers: HeaderLines = []
        self._body = bytearray()
        self._recording = False
        self._chunks = app(environ, self._start)

    def _start(self, status: str, headers: HeaderLines, exc_info: ExcInfo | None = None) -> Write:
        self._headers, self._recording = list(headers), status.startswith("200")
        write = self._start_response(status, headers) if exc_info is None else self._start_response(status, headers, exc_info)

        def writing(data: bytes) -> object:
            self._recording = False  # the old way of sending a body: not recorded
            return write(data)

        return writing

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._chunks:
            if self._recording:
                self._body += chunk
                self._recording = len(self._body) <= self._cache.max_body
            yield chunk
        if self._recording and not is_reduced(self._request):
            environ = self._environ
            context, query = WsgiRequestContext(environ), environ.get("QUERY_STRING") or ""
            evaluation = environ.get(EVALUATION, self._request.get(EVALUATION))  # Flask may evaluate its policy within
            self._cache.keep(context, query, evaluation, self._headers, bytes(self._body))

    def close(self) -> None:
        getattr(self._chunks, "close", tuple)()


def refusal_of(evaluation: Evaluation, context: RequestContext) -> Response:
    """The refusal that a degrade handler leaves a request to; the middleware adds its fields."""
    assert evaluation.refusal is not None
    evaluation.declined = True
    kind, content = body(evaluation, context.header("accept"))
    return evaluation.refusal.status, [("Content-Type", kind.decode("ascii")), ("Content-Length", str(len(content)))], content


async def send_response(response: Response, scope: Scope, send: Send) -> None:
    status, lines, content = response
    encoded = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in lines]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else content})


def query_of(scope: Scope) -> str:
    return scope.get("query_string", b"").decode("latin-1")  # type: ignore[no-any-return]


# Cache-Control (RFC 9111) -------------------------------------------------------------------------------------------


def directives(text: str | None) -> dict[str, str]:
    """The directives of a Cache-Control field, in lower case, with their arguments."""
    parts = [part.partition("=") for part in (text or "")[:MAX_FIELD].split(",")]
    return {name.strip().lower(): value.strip().strip('"') for name, _, value in parts}


def target_of(context: RequestContext) -> str:
    """The scheme, by which applications make absolute links, and the path as it was received, which they may route by: bytes that
    are no UTF-8 are one character in `context.path`, and an encoded slash is a slash."""
    if isinstance(context, AsgiRequestContext):
        return repr((context.scope.get("scheme", "http"), context.scope.get("raw_path")))
    if not isinstance(context, WsgiRequestContext):
        return context.path
    scheme = getattr(context.raw, "scheme", None) or context.environ.get("wsgi.url_scheme")  # of Django's request, under ASGI
    return repr((scheme, context.environ.get("PATH_INFO")))


def has_no_body(identity: Identity) -> bool:
    """Whether an identity is not read from the body: requests with a body have no recorded responses."""
    return not isinstance(identity, BodyField)


def has_body(context: RequestContext) -> bool:
    """Under ASGI the body of HTTP/2 that no header announces is not read here: `StaleCache.asgi` notices it."""
    return RequestContext.may_have_body(context) if isinstance(context, AsgiRequestContext) else context.may_have_body()


def may_use(context: RequestContext) -> bool:
    """Whether a client accepts a stored response: it wants the whole of it, and does not ask for a new one."""
    if has_body(context):
        return False
    asked = directives(context.header("cache-control"))
    return not {"no-cache", "no-store"} & asked.keys() and asked.get("max-age") != "0" and context.header("range") is None


def response_directives(lines: HeaderLines) -> dict[str, str]:
    return directives(", ".join([value for name, value in lines if name.lower() == "cache-control"]))


def freshness(lines: HeaderLines, context: RequestContext, shared: bool) -> int | None:
    """For how many seconds a response is fresh; None: it must not be recorded."""
    given = response_directives(lines)
    if "no-store" in directives(context.header("cache-control")) or {"no-store", "no-cache"} & given.keys():
        return None
    if shared and "private" in given:
        return None
    if shared and context.header("authorization") is not None and not {"public", "s-maxage", "must-revalidate"} & given.keys():
        return None
    text = given.get("s-maxage") if shared and "s-maxage" in given else given.get("max-age", "0")
    return min(int(text), MAX_AGE) if text is not None and text.isascii() and text.isdecimal() and len(text) < 12 else 0


def must_revalidate(lines: HeaderLines) -> bool:
    return bool({"must-revalidate", "proxy-revalidate"} & response_directives(lines).keys())


def varies(stored: StoredResponse, context: RequestContext) -> bool:
    """Whether a request differs in a header that the response varies by."""
    return any(context.header(name) != value for name, value in stored.vary)
