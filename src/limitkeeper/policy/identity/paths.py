"""Normalizes request paths, however they are encoded, to the canonical form that rules are matched against.

    /checkout   //Checkout/   /%2563heckout   /shop/../checkout;v=1   \\checkout   →   /checkout

Percent-encoding is decoded whatever its depth: a gateway behind this one that decodes once more must not find what was hidden
from the rules. Control characters are removed, backslashes become slashes, an encoded `?` or `#` and what follows is cut, as is
`;` and what follows in its segment, segments are stripped, `.` and `..` resolved, and case is folded. Normalizing is idempotent.

An application may route `/search/../x` to `/search/{rest}`, and a gateway resolve the dots of `/checkout/;/..` first. Rules are
therefore matched against all `readings` of a path (nearly always one): a rule applies when any reading matches, an exemption
only when all do and the path is spelt as its template is.

Everything is linear in the length, and of a path only the first MAX_PATH characters are read; what follows may be anything
(compiled_policy.py). Rejected: refusing longer paths, which some application may serve.
"""

from __future__ import annotations

import re
from decimal import Context
from string import hexdigits

#: The most characters of a path that are read. Servers and proxies accept 4 to 64 kB.
MAX_PATH = 8_192
#: Rounds of decoding. One round undoes nested encodings (%252525…); after these all remaining percent signs are removed.
ROUNDS = 3
_clean = re.compile(r"(?:/[a-z0-9_~@$!*'()+,=:&-][a-z0-9_~@$!*'()+,=:&.-]*)+").fullmatch
_NESTED = re.compile(rb"%(?:25)+(?=[0-9a-fA-F]{2})")
_ESCAPE = re.compile("%[0-9a-fA-F]{2}")
_ENCODED_SLASH = re.compile(rb"%(?=2[fF])")
#: Rejected: urllib's unquote_to_bytes, which takes 50 ms for a path of 60 000 bare percent signs.
_ENCODED = re.compile(rb"%([0-9a-fA-F]{2})")
_BYTES = {(high + low).encode(): bytes.fromhex(high + low) for high in hexdigits for low in hexdigits}
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]+")
_CUT = re.compile("[?#]")
_SLASHES = re.compile("/+")
_PARAMETERS = re.compile(";[^/]*")
#: Scheme and host of a target that does not begin with a slash.
_ORIGIN = re.compile(r"\s*(?:[a-z][a-z0-9+.-]*:)?(?://[^/?#]*)?", re.I)
_NUMBER = re.compile(r"[+-]?[\d_]*(?:\.[\d_]*)?(?:e[+-]?\d{1,4})?")
_UUID = re.compile(r"(?:urn:)?(?:uuid:)?\{?([0-9a-f]{8})-?([0-9a-f]{4})-?([0-9a-f]{4})-?([0-9a-f]{4})-?([0-9a-f]{12})\}?")
_EXACT = Context(prec=MAX_PATH, traps=[])


def fold_case(text: str) -> str:
    """A text in one case. Regular expressions that ignore case (`re_path("(?i)…")` of Django) take two more letters for an i."""
    return text.casefold() if text.isascii() else text.replace("\u0130", "i").replace("\u0131", "i").casefold()


def normalize_path(path: str) -> str:
    """The canonical form of a path: `/`, or segments with a slash before each."""
    return readings(path)[0]


def readings(path: str) -> tuple[str, ...]:
    """All paths that a server may take it for: normalized, normalized without resolving dots, with dots resolved first, with its
    scheme, as received, and so without repeated slashes (Litestar). Most have one. Quart routes `http:/checkout` to /checkout.
    Beyond MAX_PATH a path is cut, before the last segment."""
    if len(path) > MAX_PATH:
        path = path[:MAX_PATH].rpartition("/")[0]
    if _clean(path) is not None:
        return (path,)
    text = _CONTROL.sub("", path)
    texts = [text] if path[:1] == "/" else [_path_of_url(text), text]
    if "." in text or "%" in text:
        texts += _resolved_first(path)
    found = [one for each in dict.fromkeys(texts) for one in _normalized(each)]
    received = [fold_case(one).rstrip("/") or "/" for one in (texts[0], path)]
    merged = [_SLASHES.sub("/", one) for one in received if "//" in one]
    return tuple(dict.fromkeys([*found, *received, *merged]))


def mounted_path(path: str, root: str) -> tuple[str, str | None]:
    """The whole path of a request below a mount point, which servers and frameworks may have left out, and the whole path that
    the application may route instead, if there is one. Quart removes the mount point from every path that begins with it, and
    slashes after it: below /api it routes `/apicheckout`, `/api//checkout` and `http://host/api/checkout` to checkout."""
    root = root.rstrip("/")
    is_below = path.startswith(root) and path[len(root) : len(root) + 1] in ("", "/")
    whole = path if is_below else root + path
    own = path if path[:1] == "/" else _path_of_url(_CONTROL.sub("", path))
    routed = f"{root}/{own[len(root) :].lstrip('/')}" if own.startswith(root) else whole
    return whole, routed if routed.rstrip("/") != whole.rstrip("/") else None


def segments_of(path: str, most: int = -1) -> list[str]:
    """The segments of a path or a template: "/" has none. With `most`, the last one holds all that follow."""
    stripped = path.strip("/")
    return stripped.split("/", most) if stripped else []


def matches_exactly(template: str, path: str) -> bool:
    """Whether a path as received is the template as written: upper case, an empty segment or a slash at the end differ."""
    parts, segments = template.split("/"), path.split("/")
    if parts[-1] == "**":
        del parts[-1]
        if len(parts) > 1 and "" in segments[len(parts) : -1]:  # routers may take the rest for another path
            return False
        del segments[len(parts) :]
    open_ = ("*", "{")
    return len(parts) == len(segments) and all(
        segment == part or (segment and part.startswith(open_)) or ("%" in part and segment == _decode(part))
        for part, segment in zip(parts, segments, strict=True)
    )


def canonical_value(text: str) -> str:
    """A captured segment as applications convert it: `07`, `+7`, `7.0` and `7e0` are 7, a UUID is written with dashes."""
    text = text.strip()
    if 0 < len(text) < 32 and text.isascii() and text.isdigit() and text[0] != "0":
        return text
    text = fold_case(text)
    if _UUID.fullmatch(text) is None and _NUMBER.fullmatch(text) is not None:
        number = _EXACT.create_decimal(text.replace("_", ""))
        if number.is_finite():
            text = format(number.normalize(_EXACT), "f") if number else "0"
    found = _UUID.fullmatch(text)  # also a number of 32 digits
    return text if found is None else "-".join(found.groups())


def application_path(path: bytes | str) -> str:
    """The path of a request target as servers hand it to an application: decoded once. An encoded slash stays encoded, because
    some applications route by it: `readings` has both."""
    data = path if isinstance(path, bytes) else path.encode("utf-8", "surrogatepass")
    return decode_percent(_ENCODED_SLASH.sub(b"%25", data)).decode("utf-8", "replace")


def decode_percent(data: bytes) -> bytes:
    """Decodes percent-encoding once."""
    parts = _ENCODED.split(data)
    parts[1::2] = map(_BYTES.__getitem__, parts[1::2])
    return b"".join(parts)


def _path_of_url(text: str) -> str:
    """What `urllib.parse.urlparse` takes for the path of a target that does not begin with a slash; Quart routes by it."""
    head, slash, last = _CUT.split(_ORIGIN.sub("", text, count=1), maxsplit=1)[0].rpartition("/")
    return head + slash + last.partition(";")[0]


def _resolved_first(path: str) -> list[str]:
    """A path with dots resolved where every segment counts, also `;a`, `%20`, `%3f` or an empty one: as it is, decoded once (as
    nginx does), and decoded whole."""
    data = path.encode("utf-8", "surrogatepass")
    levels = dict.fromkeys([data, decode_percent(data), decode_percent(_NESTED.sub(b"%", data))])
    split = [level.decode("utf-8", "replace").split("/") for level in levels]
    return ["/".join(_resolve_dots(segments)) for segments in split if ".." in segments]


def _normalized(text: str) -> tuple[str, str]:
    """A path decoded and case-folded, without query and fragment: with dots resolved, and with dots."""
    text = text.replace("\\", "/")
    if "%" in text or not text.isascii():
        text = _decode(text).replace("\\", "/")
    text = _PARAMETERS.sub("", fold_case(_CUT.split(text, maxsplit=1)[0]))
    segments = [part for part in map(str.strip, text.split("/")) if part]
    return "/" + "/".join(_resolve_dots(segments)), "/" + "/".join(segments)


def _decode(text: str) -> str:
    for _ in range(ROUNDS):
        text = decode_percent(_NESTED.sub(b"%", text.encode("utf-8", "surrogatepass"))).decode("utf-8", "replace")
        text = _CONTROL.sub("", text)
        if _ESCAPE.search(text) is None:
            return text
    return text.replace("%", "")


def _resolve_dots(segments: list[str]) -> list[str]:
    found: list[str] = []
    for part in segments:
        if part == "..":
            del found[-1:]
        elif part != ".":
            found.append(part)
    return found
