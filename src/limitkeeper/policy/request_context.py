"""What a policy may ask about one request. Each framework answers in its own way; nothing is read before somebody asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

from .identity.hosts import host_of

#: Nothing was captured; shared by all requests, never written to.
NOTHING: dict[str, str] = {}
#: A query may have so many parameters; what comes behind is not looked at.
PARAMETERS = 1000
#: Methods that need no second look.
USUAL = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})


def method_of(word: str) -> str:
    """A request's method as rules know it: frameworks take `post` for POST, so it is. A request that calls itself MESSAGE is not
    one message of a connection, which rules without methods do not mean: it stays in lower case, where nobody names it."""
    method = word.upper()
    return "message" if method == "MESSAGE" else method


def differing(query: str, name: str) -> bool:
    """Whether a query has several values of a parameter, or more parameters than anybody looks at."""
    if query.count("&") >= PARAMETERS:
        return True
    if "&" not in query:  # `n&n=5` has two values: the first is empty
        return False
    return len({value for found, value in parse_qsl(query, keep_blank_values=True, errors="replace") if found == name}) > 1


@cython.cclass
class RequestContext:
    """The base of every framework's context.

    method   upper case ("POST"); "MESSAGE" is one message of a websocket or a stream
    path     the whole path as the server decoded it, mount points included; the matcher tidies it up
    raw      the framework's own request (ASGI scope, WSGI environ, HttpRequest, ServicerContext), for callables
    found    what identities answered so far, by name; filled by the gate
    captured the path's parts that a rule's template named
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
        """The host that was asked for, without a port, in lower case; "" when nobody said."""
        return host_of(self.header("host"))

    def peer(self) -> str | None:
        """The address of whoever holds the other end of the connection; None for a UNIX socket."""
        return None

    def certificate(self) -> Mapping[str, Any] | None:
        """The verified client certificate: {"subject": "CN=billing", "san": ["spiffe://…"]}; None: there is none."""
        return None


class WrittenRequest(RequestContext):
    """Facts that were written down: for `limitkeeper policy explain`, for tests, for batch jobs."""

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
        self.identities.update(identities or {})  # said outright: no identity is asked again

    def header(self, name: str) -> str | None:
        return self._headers.get(name)

    def query(self, name: str) -> str | None:
        return self._query.get(name)

    def peer(self) -> str | None:
        return self._peer

    def certificate(self) -> Mapping[str, Any] | None:
        return self._certificate
