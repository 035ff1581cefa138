"""One spelling for a path, whatever disguise it came in: what rules are matched against.

    /checkout   //Checkout/   /%2563heckout   /shop/../checkout;v=1   \\checkout   →   /checkout

Percent-encoding is undone until nothing is left to undo, whatever its depth: a gateway behind that decodes once more must not
find what was hidden from the rules. Then: no control characters, backslashes are slashes, what stands behind a `?` or `#` that
was hidden in the path and behind a `;` in a segment (`;jsessionid=…`) is cut, segments lose the spaces around them, `//` is `/`,
`.` and `..` are resolved, the last slash goes, and case is folded. The result never changes when tidied again.

A path that is limited although the application would have answered 404 costs nobody anything. The other way round it does: an
application may well take `/search/../x` for its route `/search/{rest}`. So whoever matches rules asks for all `readings` of a
path (one, for nearly every request): a request is meant by a rule when any of them is, and exempt only when all are.
"""

from __future__ import annotations

import re

#: Rounds of decoding. Nested encodings (%252525…) are undone within one; what still hides after these was made to.
ROUNDS = 3
_clean = re.compile(r"(?:/[a-z0-9_~@$!*'()+,=:&-][a-z0-9_~@$!*'()+,=:&.-]*)+").fullmatch
_NESTED = re.compile(rb"%(?:25)+(?=[0-9a-fA-F]{2})")
_ESCAPE = re.compile("%[0-9a-fA-F]{2}")
#: Rejected: urllib's unquote_to_bytes, which takes 50 ms for a path of 60 000 bare percent signs.
_ENCODED = re.compile(rb"%([0-9a-fA-F]{2})")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]+")
_CUT = re.compile("[?#]")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/]*", re.I)


def normalize_path(path: str) -> str:
    """The one spelling of a path: `/`, or segments with a slash before each."""
    if _clean(path) is not None:
        return path
    return _joined(_resolved(_segments(_plain(path))))


def readings(path: str) -> tuple[str, ...]:
    """All that a server may take a path for: tidied, tidied but for its dots, and as it came. Most have one."""
    if _clean(path) is not None:
        return (path,)
    segments = _segments(_plain(path))
    found = (_joined(_resolved(segments)), _joined(segments), path.casefold().rstrip("/") or "/")
    return tuple(dict.fromkeys(found))


def _plain(path: str) -> str:
    """Decoded, without what is no part of a path, in folded case."""
    if path[:1] not in ("/", "\\") and "://" in path:
        path = _ORIGIN.sub("", path, count=1)
    text = _CONTROL.sub("", path).replace("\\", "/")
    if "%" in text or not text.isascii():
        text = _decoded(text).replace("\\", "/")
    found = _CUT.search(text)
    if found is not None:
        text = text[: found.start()]
    return text.casefold()


def _byte(found: re.Match[bytes]) -> bytes:
    return bytes((int(found[1], 16),))


def _decoded(text: str) -> str:
    for _ in range(ROUNDS):
        data = text.encode("utf-8", "surrogatepass")
        text = _ENCODED.sub(_byte, _NESTED.sub(b"%", data)).decode("utf-8", "replace")
        text = _CONTROL.sub("", text)
        if _ESCAPE.search(text) is None:
            return text
    return text.replace("%", "")


def _segments(text: str) -> list[str]:
    return [part for part in (raw.partition(";")[0].strip() for raw in text.split("/")) if part]


def _resolved(segments: list[str]) -> list[str]:
    found: list[str] = []
    for part in segments:
        if part == "..":
            if found:
                found.pop()
        elif part != ".":
            found.append(part)
    return found


def _joined(segments: list[str]) -> str:
    return "/" + "/".join(segments)
