"""The body of a refusal: short JSON that says when to come back, or problem details, or what the policy wrote.

Texts of a policy may hold {retry_after} {limit} {remaining} {rule} {message}. They are looked up in a table and put in place,
never formatted, so that a text can't reach into anything. A key is in none of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ..policy.evaluation import QUEUE_FULL, QUOTA, SHUT_OUT, STORE, Evaluation, Refusal
from ..policy.model import Answer

JSON, PROBLEM, TEXT = b"application/json", b"application/problem+json", b"text/plain; charset=utf-8"
CODE = "RATE_LIMITED"
TYPES = "https://iana.org/assignments/http-problem-types#"
EXCEEDED = ("quota-exceeded", "Request cannot be satisfied as assigned quota has been exceeded")
REDUCED = ("temporary-reduced-capacity", "Request cannot be satisfied due to temporary server capacity constraints")
ABNORMAL = ("abnormal-usage-detected", "Request cannot be satisfied due to detection of abnormal request pattern")
PROBLEMS = {QUOTA: EXCEEDED, QUEUE_FULL: REDUCED, STORE: REDUCED, SHUT_OUT: ABNORMAL}

PLACES = re.compile(r"\{(retry_after|limit|remaining|rule|message)\}")
#: Nobody needs a longer Accept.
LONGEST = 1000
#: Usual bodies by their message.
KEPT = 1024
_plain: dict[str, bytes] = {}


def body(passage: Evaluation, accept: str | None = None) -> tuple[bytes, bytes]:
    """(content type, body) of a refused passage. `accept` is the client's Accept field."""
    refusal = passage.refusal
    if refusal is None:
        raise ValueError("only a refusal has a body: this passage is allowed")
    if is_plain(passage, refusal, accept):
        return JSON, plain(refusal.message)
    words = words_of(refusal)
    own = refusal.rule.answer.body if refusal.rule is not None else None
    if wants_problem(passage, refusal, accept):
        more = filled(own, words) if isinstance(own, Mapping) else {}
        return PROBLEM, written({**problem(refusal, words["message"]), **more})
    if own is None:
        return JSON, written({"code": CODE, "message": words["message"]})
    if isinstance(own, str):
        return TEXT, encoded(put(own, words))
    return JSON, written(filled(own, words))


def is_plain(passage: Evaluation, refusal: Refusal, accept: str | None) -> bool:
    """Whether the body is the usual one, whatever the client accepts: the way of a client in a retry loop."""
    answer = refusal.rule.answer if refusal.rule is not None else None
    if passage.policy.problem or (accept is not None and "problem" in accept[:LONGEST].lower()):
        return False
    return answer is None or (answer.body is None and not answer.problem)


def plain(message: str) -> bytes:
    """The usual body; the last few are kept, since a message has a second of its own and not more."""
    found = _plain.get(message)
    if found is None:
        if len(_plain) >= KEPT:
            _plain.clear()
        found = _plain[message] = written({"code": CODE, "message": message})
    return found


def wants_problem(passage: Evaluation, refusal: Refusal, accept: str | None) -> bool:
    """Whether the rule wants problem details; or else, unless the rule has a body of its own, the policy or the client."""
    answer = refusal.rule.answer if refusal.rule is not None else Answer()
    if answer.problem or answer.body is not None:
        return bool(answer.problem)
    if answer.problem is None and passage.policy.problem:
        return True
    return accept is not None and prefers_problem(accept)


def words_of(refusal: Refusal) -> dict[str, str]:
    """What the places in texts stand for."""
    return {
        "retry_after": "" if refusal.retry_after is None else str(refusal.retry_after),
        "limit": str(refusal.limit),
        "remaining": str(refusal.remaining),
        "rule": refusal.rule.name if refusal.rule is not None else "",
        "message": refusal.message,
    }


def put(text: str, words: Mapping[str, str]) -> str:
    return PLACES.sub(lambda place: words[place[1]], text)


def filled(shape: Any, words: Mapping[str, str]) -> Any:
    """A body of the policy with its places filled in, however deep."""
    if isinstance(shape, str):
        return put(shape, words)
    if isinstance(shape, Mapping):
        return {put(str(name), words): filled(value, words) for name, value in shape.items()}
    if isinstance(shape, (list, tuple)):
        return [filled(value, words) for value in shape]
    return shape


def problem(refusal: Refusal, detail: str) -> dict[str, Any]:
    """Problem details (RFC 9457) of the types that the RateLimit draft registers."""
    kind, title = PROBLEMS.get(refusal.reason, EXCEEDED)
    if refusal.reason == QUOTA and refusal.status == 503:  # the service's own capacity was all used, not a client's quota
        kind, title = REDUCED
    said: dict[str, Any] = {"type": TYPES + kind, "title": title, "status": refusal.status, "detail": detail}
    if refusal.violated:
        said["violated-policies"] = list(refusal.violated)
    return said


def written(value: Any) -> bytes:
    return encoded(json.dumps(value, separators=(",", ":"), ensure_ascii=False, default=str))


def encoded(text: str) -> bytes:
    return text.encode("utf-8", "replace")  # a lone surrogate has no bytes


def prefers_problem(accept: str) -> bool:
    """Whether problem details are named, and before plain JSON: by weight, then by order. A wildcard names nobody."""
    weights = [weighed(part) for part in accept[:LONGEST].lower().split(",")]
    named = [
        (weight, -place, kind)
        for place, (kind, weight) in enumerate(weights)
        if kind in ("application/problem+json", "application/json")
    ]
    best = max(named, default=(0.0, 0, ""))
    return best[0] > 0 and best[2] == "application/problem+json"


def weighed(part: str) -> tuple[str, float]:
    """(media type, weight) of one member of Accept; a weight that is no number is 0."""
    kind, *parameters = (piece.strip() for piece in part.split(";"))
    for parameter in parameters:
        if parameter.startswith("q="):
            return kind, float(parameter[2:]) if re.fullmatch(r"[01](\.\d{0,3})?", parameter[2:]) else 0.0
    return kind, 1.0
