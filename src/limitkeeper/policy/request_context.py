"""RequestContext: what a policy reads of one request. Each framework has its own; headers and query are parsed when needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

from .identity.hosts import host_of

#: No captured segments; shared by all requests, never written to.
NOTHING: dict[str, str] = {}
#: The most parameters of a query that are read.
PARAMETERS = 1000
#: Methods that need no normalisation.
USUAL = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})


def method_of(word: str) -> str:
    """A request's method in upper case, as frameworks accept `post` for POST. A request with the method MESSAGE is no message of
    a connection, to which rules without methods do not apply: it stays in lower case, which no rule names."""
    method = word.upper()
    return "message" if method == "MESSAGE" else method


def differing(query: str, name: str) -> bool:
    """Whether a query has several values of a parameter, or more parameters than are read."""
    if query.count("&") >= PARAMETERS:
        return True
    if "&" not in query:  # `n&n=5` has two values: the first is empty
        return False
    return len({value for found, value in parse_qsl(query, keep_blank_values=True, errors="replace") if found == name}) > 1


@cython.cclass
class RequestContext:
    """The base of every framework's request context.

    method   upper case ("POST"); "MESSAGE" is one message of a websocket or a stream
    path     the whole path as the server decoded it, mount points included; the matcher normalises it
    raw      the framework's own request (ASGI scope, WSGI environ, HttpRequest, ServicerContext), for callables
    found    values of identities computed so far, by name
    captured   path segments that a rule's template names
    """

    __slots__ = ("captured", "identities", "method", "path", "raw")

    def __init__(self, method: str, path: str, raw: Any = None) -> None:
        self.method = method
        self.path = path
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

    def peer(self) -> str | None:
        """The address of the other end of the connection; None for a UNIX socket."""
        return None

    def certificate(self) -> Mapping[str, Any] | None:
        """The verified client certificate: {"subject": "CN=billing", "san": ["spiffe://…"]}; None: there is none."""
        return None


class WrittenRequest(RequestContext):
    """A request context from given values: for `limitkeeper policy explain`, tests and batch jobs."""

    __slots__ = ("_certificate", "_headers", "_peer", "_query")

    def __init__(
        self,
        method: str = "GET",
        path: str = "/",
        *,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
        peer: str | None = "127.0.0.1",
        certificate: Mapping[str, Any] | None = None,
        identities: Mapping[str, str | None] | None = None,
    ) -> None:
        super().__init__(method.upper(), path)
        self._headers = {name.lower(): value for name, value in (headers or {}).items()}
        self._query = dict(query or {})
        self._peer = peer
        self._certificate = certificate
        self.identities.update(identities or {})  # given: not computed

    def header(self, name: str) -> str | None:
        return self._headers.get(name)

    def query(self, name: str) -> str | None:
        return self._query.get(name)

    def peer(self) -> str | None:
        return self._peer

    def certificate(self) -> Mapping[str, Any] | None:
        return self._certificate
