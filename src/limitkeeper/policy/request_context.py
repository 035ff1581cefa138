"""RequestContext: what a policy reads of one request. Each framework has its own; headers and query are parsed when needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

from .identity.host_names_and_patterns import host_of
from .identity.paths import decode_percent

#: No captured segments; shared by all requests, never written to.
NOTHING: dict[str, str] = {}
#: The longest query, and the most parameters of one, that are read.
MAX_QUERY, PARAMETERS = 16_384, 1000
#: Methods that need no normalisation.
USUAL = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
#: Parameters of a Content-Type that name a charset in which ASCII text has one spelling.
PLAIN_CHARSETS = frozenset({"charset=utf-8", "charset=utf8", "charset=us-ascii", "charset=iso-8859-1"})


def names_other_charset(content_type: str) -> bool:
    """Whether a Content-Type names a charset in which one text may have many spellings (UTF-7, ISO-2022), and that applications
    obey where UTF-8 is read here: Django for the query (WSGI), Django REST framework for the body."""
    parts = content_type.lower().replace('"', "").replace(" ", "").split(";")[1:]
    return any("charset" in part and part not in PLAIN_CHARSETS for part in parts)


def method_of(word: str) -> str:
    """A request's method in upper case, as frameworks accept `post` for POST. A request with the method MESSAGE is no message of
    a connection, to which rules without methods do not apply: it stays in lower case, which no rule names."""
    method = word.upper()
    return "message" if method == "MESSAGE" else method


def query_values(query: str, name: str, most: int = MAX_QUERY) -> tuple[str | None, bool]:
    """The first value of a parameter, and whether there may be another: several values, or a query that is too long to be read,
    of which the application may take any. Bytes that are not percent-encoded are UTF-8 to some applications, and Latin-1 to
    others (Django, where they are no UTF-8; Starlette in forms): where both readings differ, there are two values."""
    parts = query[:most].split("&", PARAMETERS)
    more = len(query) > most or len(parts) > PARAMETERS
    del parts[PARAMETERS:]
    if not query.isascii():
        parts += [part.encode("utf-8", "surrogatepass").decode("latin-1") for part in parts]
    pairs = [part.partition("=") for part in parts]
    found = dict.fromkeys([decode_parameter(value) for given, _, value in pairs if decode_parameter(given) == name])
    return next(iter(found), None), more or len(found) > 1


def decode_parameter(text: str) -> str:
    """A name or a value of a query, as applications decode it."""
    if "%" not in text and "+" not in text and text.isascii():
        return text
    return decode_percent(text.replace("+", " ").encode("latin-1", "replace")).decode("utf-8", "replace")


@cython.cclass
class RequestContext:
    """The base of every framework's request context.

    Attributes:
        method: in upper case ("POST"); "MESSAGE" is one message of a websocket or a stream.
        path: the whole path as the server decoded it, mount points included; the matcher normalizes it.
        routed: the path that the application may route instead, where a client can choose the mount point; nearly always None.
        raw: the framework's own request (ASGI scope, WSGI environ, HttpRequest, ServicerContext), for callables.
        identities: values of identities computed so far, by name.
        captured: path segments that a rule's template names.
    """

    __slots__ = ("captured", "identities", "method", "path", "raw", "routed")

    def __init__(self, method: str, path: str, raw: Any = None) -> None:
        self.method = method
        self.path = path
        self.routed: str | None = None
        self.raw = raw
        self.identities: dict[str, str | None] = {}
        self.captured: Mapping[str, str] = NOTHING

    def header(self, name: str) -> str | None:
        """A header's value (`name` in lower case); several lines are joined with ", ". None: not there."""
        return None

    def query(self, name: str) -> str | None:
        """The first value of a query parameter."""
        return None

    def differs(self, kind: str, name: str) -> bool:
        """Whether a "header" or "query" of this name came more than once, with different values; True only where the application
        may well take another one of them than the first."""
        return False

    def host(self) -> str:
        """The requested host, without a port, in lower case; "" without a Host header."""
        return host_of(self.header("host"))

    def route(self) -> str | None:
        """The route that the framework has found, as its template: `/orders/{order}`; None: it has not routed the request."""
        return None

    def may_have_body(self) -> bool:
        """Whether the request announces a body."""
        length = self.header("content-length") or ""
        return bool(length.strip(" 0")) or self.header("transfer-encoding") is not None

    def body(self) -> bytes | None:
        """The body, which the application can read again; None: it is larger than is read (identity/body.py). Under ASGI this
        raises unless a rule's `body` identity has read the body: a function of the application can't await it."""
        return b""

    def peer(self) -> str | None:
        """The address of the other end of the connection; None for a UNIX socket."""
        return None

    def given_address(self) -> str | None:
        """The client's address where a request that is written down names it; None: it is found from peer and headers."""
        return None

    def certificate(self) -> Mapping[str, Any] | None:
        """The verified client certificate: {"subject": "CN=billing", "san": ["spiffe://…"]}; None: there is none."""
        return None

    def call(self, function: Callable[[Any], Any]) -> Any:
        """The result of a function of the application."""
        return function(self)

    def passes_on(self, error: Exception) -> bool:
        """Whether an exception of a function of the application is not logged but raised: the framework then evaluates the
        request again in another place. Nothing has been charged by then."""
        return False


class WrittenRequest(RequestContext):
    """A request context from given values: for `limitkeeper policy explain`, tests and batch jobs."""

    __slots__ = ("_certificate", "_given_ip", "_headers", "_peer", "_query")

    def __init__(
        self,
        method: str = "GET",
        path: str = "/",
        *,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, str] | str | None = None,
        peer: str | None = "127.0.0.1",
        certificate: Mapping[str, Any] | None = None,
        identities: Mapping[str, str | None] | None = None,
    ) -> None:
        super().__init__(method.upper(), path)
        self._headers = {name.lower(): value for name, value in (headers or {}).items()}
        self._query = query or {}
        self._peer = peer
        self._certificate = certificate
        self.identities.update(identities or {})  # given: not computed
        self._given_ip = self.identities.get("ip")

    def header(self, name: str) -> str | None:
        return self._headers.get(name)

    def query(self, name: str) -> str | None:
        return query_values(self._query, name)[0] if isinstance(self._query, str) else self._query.get(name)

    def differs(self, kind: str, name: str) -> bool:
        """Only the text of a query can hold several values."""
        return kind == "query" and isinstance(self._query, str) and query_values(self._query, name)[1]

    def peer(self) -> str | None:
        return self._peer

    def given_address(self) -> str | None:
        return self._given_ip and self._given_ip.partition("/")[0]

    def certificate(self) -> Mapping[str, Any] | None:
        return self._certificate
