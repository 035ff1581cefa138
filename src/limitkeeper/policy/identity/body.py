"""Identity from a field of the request's body: a JSON object, or a form (application/x-www-form-urlencoded).

A body is read only for a rule that needs it, at most MAX_BODY bytes of it, and the application reads it again. A request without
a body, or without the field, lacks the identity. What is not read here (a larger body, another type, a compressed or invalid
one), the application may still read: all such requests share the key UNREADABLE, so that no client evades its limit. So do bodies
of JSON that are sent as a form: many applications parse them whatever the Content-Type. JSON in which a parser of forms finds the
field (Bottle's reads every type but multipart) shares the key SEVERAL.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from ..request_context import PARAMETERS, RequestContext, decode_parameter, names_other_charset, query_values
from .identify import SEVERAL, NamedIdentity, trimmed

MAX_BODY = 65_536
UNREADABLE = "unreadable body"
FORM = "application/x-www-form-urlencoded"
#: Bytes that may precede JSON: white space, byte order marks, and the zeros of UTF-16 and UTF-32.
BEFORE_JSON = b" \t\r\n\x00\xef\xbb\xbf\xff\xfe"
#: The key of a read body in an ASGI scope or a WSGI environ; None there: it was not read to its end.
BODY = "limitkeeper.body"


class BodyNeeded(Exception):
    """Raised by a context whose body has to be awaited. Nothing was charged: read the body, and evaluate again."""


@dataclass(frozen=True, slots=True)
class BodyField(NamedIdentity):
    """The value of a field of the body, a string or an integer, as the client wrote it."""

    def of(self, request: RequestContext) -> str | None:
        content_type = request.header("content-type") or ""
        kind = content_type.partition(";")[0].strip().lower()
        is_json = kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
        if not (is_json or kind == FORM) or request.header("content-encoding") or names_other_charset(content_type):
            return UNREADABLE if request.may_have_body() else self.default
        body = request.body()
        if not body:
            return UNREADABLE if body is None else self.default
        if not is_json:
            return UNREADABLE if body.lstrip(BEFORE_JSON)[:1] in (b"{", b"[") else self._of_form(body)
        return SEVERAL if self._is_in_form(body) else self._of_json(body)

    def _is_in_form(self, body: bytes) -> bool:
        """Whether a parser of forms finds the field in a body of JSON; some separate fields by `;` too (Bottle before 0.13)."""
        names = {part.partition("=")[0] for part in body.decode("latin-1").replace(";", "&").split("&")}
        return len(names) > PARAMETERS or any(decode_parameter(name) == self.name for name in names)

    def _of_form(self, body: bytes) -> str | None:
        """Some parsers (python-multipart before 0.0.30) separate fields by `;` too: both readings must agree."""
        text = body.decode("latin-1")
        value, several = query_values(text, self.name, MAX_BODY)
        if ";" in text:
            several = several or query_values(text.replace(";", "&"), self.name, MAX_BODY) != (value, False)
        return SEVERAL if several else trimmed(value, self.default)

    def _of_json(self, body: bytes) -> str | None:
        try:
            pairs = json.loads(body, object_pairs_hook=tuple)
        except (ValueError, RecursionError):
            return UNREADABLE
        if not isinstance(pairs, tuple):
            return UNREADABLE
        values = [value for name, value in pairs if name == self.name]
        if any(isinstance(value, (list, tuple)) for value in values):  # not compared: they may be nested deeply
            return UNREADABLE
        if any(value != values[0] for value in values):
            return SEVERAL
        value = values[0] if values else None
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        return trimmed(value, self.default) if value is None or isinstance(value, str) else UNREADABLE


def announced_size(length: str) -> int:
    """The bytes that a Content-Length in digits announces, at most MAX_BODY + 1; servers accept any number of zeros before it."""
    return min(int(length.lstrip("0")[:20] or 0), MAX_BODY + 1)


def check_size(body: bytes) -> bytes | None:
    """A body as `RequestContext.body` returns it: None where it is too large."""
    return body if len(body) <= MAX_BODY else None
