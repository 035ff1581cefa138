"""Builds the body of a refusal: short JSON with a message, problem details (RFC 9457), or what the policy defines.

A policy's texts may hold the placeholders {retry_after} {limit} {remaining} {rule} {message}. They are replaced from a table,
never by `str.format`, so that a text can't reach attributes. No placeholder shows a key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache

from ..policy.evaluation import Evaluation
from ..policy.model import Answer
from ..policy.refusal import CAPACITY, CONCURRENT, PENALTY_BOX, QUEUE_FULL, QUOTA, STORE, Refusal

JSON, PROBLEM, TEXT = b"application/json", b"application/problem+json", b"text/plain; charset=utf-8"
CODE = "RATE_LIMITED"
TYPES = "https://iana.org/assignments/http-problem-types#"
EXCEEDED = ("quota-exceeded", "Request cannot be satisfied as assigned quota has been exceeded")
REDUCED = ("temporary-reduced-capacity", "Request cannot be satisfied due to temporary server capacity constraints")
ABNORMAL = ("abnormal-usage-detected", "Request cannot be satisfied due to detection of abnormal request pattern")
PROBLEMS = {QUOTA: EXCEEDED, PENALTY_BOX: ABNORMAL, **dict.fromkeys((QUEUE_FULL, STORE, CONCURRENT, CAPACITY), REDUCED)}

PLACEHOLDER = re.compile(r"\{(retry_after|limit|remaining|rule|message)\}")
WEIGHT = re.compile(r"[01](\.\d{0,3})?")
#: Only this many characters of Accept are read.
MAX_ACCEPT = 1000


def body(evaluation: Evaluation, accept: str | None = None) -> tuple[bytes, bytes]:
    """(content type, body) of a refused evaluation. `accept` is the client's Accept field."""
    refusal = evaluation.refusal
    if refusal is None:
        raise ValueError("expected a refused evaluation, got an allowed one: only a refusal has a body")
    if is_default(evaluation, refusal, accept):
        return JSON, default_body(refusal.message)
    values = placeholder_values(refusal)
    own = refusal.rule.answer.body if refusal.rule is not None else None
    if wants_problem(evaluation, refusal, accept):
        more = fill(own, values) if isinstance(own, Mapping) else None
        return PROBLEM, encode_json({**problem_details(refusal), **(more if isinstance(more, dict) else {})})
    if own is None:
        return JSON, default_body(refusal.message)
    if isinstance(own, str):
        return TEXT, encode_text(fill_text(own, values))
    return JSON, encode_json(fill(own, values))


def is_default(evaluation: Evaluation, refusal: Refusal, accept: str | None) -> bool:
    """Whether the body is the default one, whatever the client accepts: the path of a client in a retry loop."""
    answer = refusal.rule.answer if refusal.rule is not None else None
    if evaluation.policy.problem or (accept is not None and "problem" in accept[:MAX_ACCEPT].lower()):
        return False
    return answer is None or (answer.body is None and not answer.problem)


@lru_cache(1024)  # a message changes every second, so the cache is small
def default_body(message: str) -> bytes:
    return encode_json({"code": CODE, "message": message})


def wants_problem(evaluation: Evaluation, refusal: Refusal, accept: str | None) -> bool:
    """Whether the rule wants problem details; or else, unless the rule has a body of its own, the policy or the client."""
    answer = refusal.rule.answer if refusal.rule is not None else Answer()
    if answer.problem or answer.body is not None:
        return bool(answer.problem)
    if answer.problem is None and evaluation.policy.problem:
        return True
    return accept is not None and prefers_problem(accept)


def placeholder_values(refusal: Refusal) -> dict[str, str]:
    return {
        "retry_after": "" if refusal.retry_after is None else str(refusal.retry_after),
        "limit": str(refusal.limit),
        "remaining": str(refusal.remaining),
        "rule": refusal.rule.name if refusal.rule is not None else "",
        "message": refusal.message,
    }


def fill_text(text: str, values: Mapping[str, str]) -> str:
    return PLACEHOLDER.sub(lambda match: values[match[1]], text)


def fill(template: object, values: Mapping[str, str]) -> object:
    """A body of the policy with its placeholders replaced, at any depth."""
    if isinstance(template, str):
        return fill_text(template, values)
    if isinstance(template, Mapping):
        return {fill_text(str(name), values): fill(value, values) for name, value in template.items()}
    if isinstance(template, (list, tuple)):
        return [fill(value, values) for value in template]
    return template


def problem_details(refusal: Refusal) -> dict[str, object]:
    """Problem details (RFC 9457) of the types that the RateLimit draft registers."""
    kind, title = PROBLEMS.get(refusal.reason, EXCEEDED)
    if refusal.reason == QUOTA and refusal.status == 503:  # the service's own capacity was used up, not a client's quota
        kind, title = REDUCED
    details = {"type": TYPES + kind, "title": title, "status": refusal.status, "detail": refusal.message}
    return {**details, "violated-policies": list(refusal.violated)} if refusal.violated else details


def encode_json(value: object) -> bytes:
    return encode_text(json.dumps(value, separators=(",", ":"), ensure_ascii=False, default=str))


def encode_text(text: str) -> bytes:
    return text.encode("utf-8", "replace")  # a lone surrogate has no bytes


def prefers_problem(accept: str) -> bool:
    """Whether Accept names problem details, and before plain JSON: by weight, then by order. Wildcards don't count."""
    weights = [parse_media_range(part) for part in accept[:MAX_ACCEPT].lower().split(",")]
    named = [
        (weight, -place, kind)
        for place, (kind, weight) in enumerate(weights)
        if kind in ("application/problem+json", "application/json")
    ]
    best = max(named, default=(0.0, 0, ""))
    return best[0] > 0 and best[2] == "application/problem+json"


def parse_media_range(part: str) -> tuple[str, float]:
    """(media type, weight) of one member of Accept; an invalid weight is 0."""
    kind, *parameters = (piece.strip() for piece in part.split(";"))
    for parameter in parameters:
        if parameter.startswith("q="):
            return kind, float(parameter[2:]) if WEIGHT.fullmatch(parameter[2:]) else 0.0
    return kind, 1.0
