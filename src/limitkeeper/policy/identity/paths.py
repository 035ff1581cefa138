"""Normalizes request paths, however they are encoded, to the canonical form that rules are matched against.

    /checkout   //Checkout/   /%2563heckout   /shop/../checkout;v=1   \\checkout   →   /checkout

Percent-encoding is decoded until nothing is left to decode, whatever its depth: a gateway behind this one that decodes once more
must not find what was hidden from the rules. Then control characters are removed, backslashes become slashes, an encoded `?` or
`#` and what follows is cut, as is `;` and what follows in its segment (`;jsessionid=…`), segments are stripped of spaces, `//`
becomes `/`, `.` and `..` are resolved, the final slash is removed, and case is folded. Normalizing is idempotent.

Limiting a path for which the application answers 404 costs nothing; missing one does, and an application may route
`/search/../x` to `/search/{rest}`. Rules are therefore matched against all `readings` of a path (nearly always one): a rule
applies when any reading matches, an exemption only when all do.
"""

from __future__ import annotations

import re

#: Rounds of decoding. One round undoes nested encodings (%252525…); after these all remaining percent signs are removed.
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
    """The canonical form of a path: `/`, or segments with a slash before each."""
    if _clean(path) is not None:
        return path
    return _join(_resolve_dots(_split(_decode_path(path))))


def readings(path: str) -> tuple[str, ...]:
    """All paths that a server may take it for: normalized, normalized without resolving dots, and as received. Most have one."""
    if _clean(path) is not None:
        return (path,)
    segments = _split(_decode_path(path))
    found = (_join(_resolve_dots(segments)), _join(segments), path.casefold().rstrip("/") or "/")
    return tuple(dict.fromkeys(found))


def _decode_path(path: str) -> str:
    """Decoded and case-folded, without origin, control characters, query and fragment."""
    if path[:1] not in ("/", "\\") and "://" in path:
        path = _ORIGIN.sub("", path, count=1)
    text = _CONTROL.sub("", path).replace("\\", "/")
    if "%" in text or not text.isascii():
        text = _decode_percent(text).replace("\\", "/")
    found = _CUT.search(text)
    if found is not None:
        text = text[: found.start()]
    return text.casefold()


def _byte(found: re.Match[bytes]) -> bytes:
    return bytes((int(found[1], 16),))


def _decode_percent(text: str) -> str:
    for _ in range(ROUNDS):
        data = text.encode("utf-8", "surrogatepass")
        text = _ENCODED.sub(_byte, _NESTED.sub(b"%", data)).decode("utf-8", "replace")
        text = _CONTROL.sub("", text)
        if _ESCAPE.search(text) is None:
            return text
    return text.replace("%", "")


def _split(text: str) -> list[str]:
    return [part for part in (raw.partition(";")[0].strip() for raw in text.split("/")) if part]


def _resolve_dots(segments: list[str]) -> list[str]:
    found: list[str] = []
    for part in segments:
        if part == "..":
            if found:
                found.pop()
        elif part != ".":
            found.append(part)
    return found


def _join(segments: list[str]) -> str:
    return "/" + "/".join(segments)
