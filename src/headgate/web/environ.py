"""What a WSGI environ tells about a request. Flask and Django speak it too (`request.META` has the same names).

Two spellings of a header, `X-Tenant` and `X_Tenant`, are one key in an environ, `HTTP_X_TENANT`: whoever may send both could hide
one behind the other. Servers that can be trusted with that drop the names with an underscore (waitress always, gunicorn unless it
is told otherwise, nginx too); a server that does not can't tell the policy which one it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

from ..policy.facts import Facts

#: The environ's spelling of header names, as far as they were asked for; a policy asks for a handful.
KEYS = {"content-type": "CONTENT_TYPE", "content-length": "CONTENT_LENGTH"}
MOST_KEYS = 1000


def key_of(name: str) -> str:
    """`x-tenant` is HTTP_X_TENANT, and remembered."""
    key = "HTTP_" + name.upper().replace("-", "_")
    if len(KEYS) < MOST_KEYS:
        KEYS[name] = key
    return key


def utf8(text: str) -> str:
    """What a server put into an environ letter by letter, read as the UTF-8 it was; what is none keeps a mark in its place."""
    return text if text.isascii() else text.encode("latin-1", "replace").decode("utf-8", "replace")


def first_of(query: str, name: str) -> str | None:
    """The first value of a query parameter."""
    for found, value in parse_qsl(query, keep_blank_values=True, errors="replace"):
        if found == name:
            return value
    return None


class WsgiFacts(Facts):
    """Facts over an environ. Nothing is read before somebody asks, and never the body."""

    __slots__ = ("environ",)

    environ: dict[str, Any]

    def __init__(self, environ: dict[str, Any], raw: Any = None) -> None:
        path = environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", "")
        super().__init__(environ["REQUEST_METHOD"], path if path.isascii() else utf8(path), environ if raw is None else raw)
        self.environ = environ

    def header(self, name: str) -> str | None:
        value: str | None = self.environ.get(KEYS.get(name) or key_of(name))
        return value

    def query(self, name: str) -> str | None:
        query = self.environ.get("QUERY_STRING")
        return first_of(query, name) if query else None

    def peer(self) -> str | None:
        return self.environ.get("REMOTE_ADDR") or None

    def certificate(self) -> Mapping[str, Any] | None:
        """What the server says it verified (mod_ssl's and uWSGI's names). A client can't set these: its headers are HTTP_*."""
        subject = self.environ.get("SSL_CLIENT_S_DN")
        if not subject or self.environ.get("SSL_CLIENT_VERIFY") != "SUCCESS":
            return None
        names = (f"SSL_CLIENT_SAN_{kind}_{number}" for kind in ("URI", "DNS", "Email") for number in range(10))
        return {"subject": subject, "san": [self.environ[name] for name in names if self.environ.get(name)]}
