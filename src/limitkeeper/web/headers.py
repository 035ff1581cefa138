"""Header fields of an answer: what is left, and when to come back.

`fields(passage)` are the fields of one response as bytes, in lower case as ASGI wants them; `text_fields` the same as text for
WSGI, Django and Flask; `merge` puts them to those that a response has already. Bytes of one limit are of `wire.py`.
No clock, no I/O.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.decision import Decision
    from cython.cimports.limitkeeper.policy.evaluation import Entry, Evaluation
    from cython.cimports.limitkeeper.web.ratelimit_fields import FieldTemplate, Style, digits, item, left
else:
    from ..decision import Decision
    from ..policy.evaluation import Entry, Evaluation
    from .ratelimit_fields import FieldTemplate, Style, digits, item, left

from ..policy.evaluation import Refusal
from .ratelimit_fields import ELEVEN, NONE, SPELT, older_fields, partition, reset_of
from .refusal_body import body

#: A response names at most so many limits: the refusing ones and those closest to their end, in the policy's order.
MOST = 10

Fields = list[tuple[bytes, bytes]]


@lru_cache(64)
def style_of(headers: Any) -> Style:
    return Style(headers)


@cython.cfunc
def posted(entry: Entry, headers: Any) -> FieldTemplate:
    """What is written down about a limit; anew when the policy's headers are others than then."""
    posting = entry.posting
    if isinstance(posting, FieldTemplate):
        known: FieldTemplate = posting
        if known.style.headers is headers:
            return known
    posting = FieldTemplate(entry, Style(headers))
    entry.posting = posting
    return posting


@cython.ccall
def fields(passage: Evaluation) -> list:  # type: ignore[type-arg]
    """What a response tells, allowed or refused. Nothing where nothing limits, or on a success where the policy says so."""
    decision: Decision = passage.decision  # type: ignore[assignment]
    entries = passage.entries
    headers = passage.edition.policy.headers
    if decision is None or not entries:
        return [] if passage.allowed else refused_fields(passage, [], style_of(headers).expose_retry)
    posting: FieldTemplate = posted(entries[0], headers)
    style: Style = posting.style
    if passage.allowed and (style.never or (style.near and decision.remaining * 5 >= decision.limit)):
        return []
    found: list = []  # type: ignore[type-arg]
    if len(entries) > 1:
        several_limits(found, passage, headers, decision, entries)
    else:
        one_limit(found, passage, posting, decision)
    if style.reset != "off":
        found.append((b"x-ratelimit-reset", reset_of(style, decision)))
    if not passage.allowed:
        return refused_fields(passage, found, style.expose_refused)
    if passage.origin:
        found.extend(style.expose)
    return found


def refused_fields(passage: Evaluation, found: Fields, expose: Any) -> Fields:
    """Adds when to come back, and that nobody keeps this answer. Where a handler answers instead, its answer is no refusal."""
    refusal: Refusal = passage.refusal  # type: ignore[assignment]
    if passage.degrade is None:
        if refusal.retry_after is not None:
            found.append((b"retry-after", b"%d" % refusal.retry_after))
        found.append((b"cache-control", b"no-store"))
    if passage.origin:
        found.extend(expose)
    return found


@cython.cfunc
def one_limit(found: list, passage: Evaluation, posting: FieldTemplate, part: Decision) -> cython.int:  # type: ignore[type-arg]
    style: Style = posting.style
    if style.wire == ELEVEN:
        if style.partition:
            pk: bytes = partition(passage.gate.secret, passage.keys[0])
            found.append((b"ratelimit-policy", posting.policy + pk))
            found.append((b"ratelimit", item(posting, part) + pk))
        else:
            found.append(posting.alone)
            found.append((b"ratelimit", item(posting, part)))
    elif style.wire != NONE:
        found.append((b"ratelimit-policy", posting.older))
        found.extend(older_fields(posting, part))
    if style.x:
        found.append(posting.limit)
        found.append((b"x-ratelimit-remaining", digits(left(posting, part))))
    return 0


@cython.cfunc
def several_limits(
    found: list,  # type: ignore[type-arg]
    passage: Evaluation,
    headers: Any,
    decision: Decision,
    entries: Any,
) -> cython.int:
    parts: tuple = decision.decisions  # type: ignore[type-arg]
    policies: list = []  # type: ignore[type-arg]
    items: list = []  # type: ignore[type-arg]
    posting: FieldTemplate
    part: Decision
    speaker: FieldTemplate = posted(entries[0], headers)
    spoken: Decision = decision
    style: Style = speaker.style
    pk: bytes = b""
    i: cython.Py_ssize_t
    for i in closest(parts) if len(parts) > MOST else range(len(parts)):
        posting = posted(entries[i], headers)
        part = parts[i]
        if part.name == decision.name:
            speaker = posting
            spoken = part
        if style.wire == ELEVEN:
            if style.partition:
                pk = partition(passage.gate.secret, passage.keys[i])
            policies.append(posting.policy + pk)
            items.append(item(posting, part) + pk)
        elif style.wire != NONE:
            policies.append(posting.older)
    if policies:
        found.append((b"ratelimit-policy", b", ".join(policies)))
        found.extend([(b"ratelimit", b", ".join(items))] if items else older_fields(speaker, spoken))
    if style.x:
        found.append(speaker.limit)
        found.append((b"x-ratelimit-remaining", digits(left(speaker, spoken))))
    return 0


def closest(parts: tuple[Decision, ...]) -> list[int]:
    """The limits to name where there are too many: who refuses, then who has the smallest part left; in their order."""
    by_need = sorted(range(len(parts)), key=lambda i: (parts[i].allowed, parts[i].remaining / max(1.0, parts[i].limit)))
    return sorted(by_need[:MOST])


# Responses -------------------------------------------------------------------------------------------------------

#: Families of fields. A response that has one of a family keeps what it says, and gets none of that family from us.
FAMILIES = {b"retry-after": 4, b"cache-control": 8, b"access-control-expose-headers": 16}
FAMILIES |= {name: 1 if name.startswith(b"r") else 2 for name in SPELT if name not in FAMILIES}
FAMILY: dict[Any, int] = {**FAMILIES, **{name.decode(): family for name, family in FAMILIES.items()}}


def text_fields(passage: Evaluation) -> list[tuple[str, str]]:
    """The same fields as text, names as people write them."""
    return [(SPELT[name], value.decode("ascii")) for name, value in fields(passage)]


def merge(own: list[Any], added: list[Any]) -> list[Any]:
    """A response's own fields and ours, as bytes or as text; never two lines of a kind.

    What the handler says of its quota stands: it (or a gate further in) knows more. Access-Control-Expose-Headers is joined.
    """
    there: cython.int = 0
    for name, _ in own:
        there |= FAMILY.get(name.lower(), 0)
    if there == 0:
        return own + added
    kept = [field for field in added if not FAMILY.get(field[0].lower(), 0) & there & 15]
    return joined(own, kept) if there & 16 else own + kept


def joined(own: list[Any], added: list[Any]) -> list[Any]:
    """The names that the response exposes and ours in one line, its first; "*" exposes ours too."""
    lines = [field for field in own + added if FAMILY.get(field[0].lower()) == 16]
    comma: Any
    comma, star, space = (b",", b"*", b", ") if isinstance(lines[0][1], bytes) else (",", "*", ", ")
    seen: dict[Any, Any] = {}
    for _, line in lines:
        for word in line.split(comma):
            if word.strip() and star not in seen:
                seen.setdefault(word.strip().lower(), word.strip())
    rest = [field for field in own + added if FAMILY.get(field[0].lower()) != 16]
    return [*rest, (lines[0][0], space.join(seen.values()))]


__all__ = ["body", "fields", "merge", "text_fields"]
