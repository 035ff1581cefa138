"""How gRPC says no: a status with details that clients can obey, and what a handler's own status means to a policy.

RetryInfo has the delay to the microsecond. `grpc-retry-pushback-ms` says the same to the client library itself: a channel with a
retry policy waits exactly so long before it tries again, and does not try at all when it would be in vain (-1).

Clients refuse metadata of more than 8 KiB, and then know neither why nor when: what could grow (a message, the number of limits
that refused) has an end here.
"""

from __future__ import annotations

from string import punctuation
from typing import Any
from urllib.parse import quote

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from ...policy.evaluation import Evaluation
from ...policy.refusal import PENALTY_BOX, QUEUE_FULL, QUOTA, STORE, Refusal
from ..headers import fields

DOMAIN = "limitkeeper"
#: What gRPC sends of a message as it is, besides letters and digits.
PLAIN = " " + punctuation.replace("%", "")
REASONS = {QUOTA: "RATE_LIMITED", QUEUE_FULL: "QUEUE_FULL", PENALTY_BOX: "PENALTY_BOX", STORE: "STORE_UNAVAILABLE"}
Code = grpc.StatusCode
#: What a gRPC status is in HTTP, for rules that charge by outcome and for the counters.
HTTP = {
    Code.OK: 200,
    Code.INVALID_ARGUMENT: 400,
    Code.FAILED_PRECONDITION: 400,
    Code.OUT_OF_RANGE: 400,
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.ABORTED: 409,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.CANCELLED: 499,
    Code.UNIMPLEMENTED: 501,
    Code.UNAVAILABLE: 503,
    Code.DEADLINE_EXCEEDED: 504,
}

#: So many bytes of a message are told, as they go over the wire; so many of the limits that refused are named.
LONGEST, MOST = 600, 10

Metadata = tuple[tuple[str, str | bytes], ...]


def http_of(code: Any) -> int:
    return HTTP.get(code, 500)


def metadata_of(passage: Evaluation) -> Metadata:
    """The fields of a response that mean something in gRPC, as metadata."""
    return tuple(
        [(name.decode(), value.decode()) for name, value in fields(passage) if not name.startswith((b"access", b"cache"))]
    )


def refused_status(passage: Evaluation, refusal: Refusal) -> tuple[Any, str, Metadata]:
    """(code, message, trailing metadata) of a refused call."""
    code = Code.UNAVAILABLE if refusal.status >= 500 else Code.RESOURCE_EXHAUSTED
    message = shortened(refusal.message)
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in details_of(refusal, code, message):
        status.details.add().Pack(detail)
    trailing: Metadata = tuple(rpc_status.to_status(status).trailing_metadata)
    return code, message, (*trailing, *metadata_of(passage), ("grpc-retry-pushback-ms", pushback(refusal)))


def pushback(refusal: Refusal) -> str:
    return "-1" if refusal.retry_after is None else str(-(-refusal.retry_us // 1000))


def shortened(message: str) -> str:
    """A message that fits: gRPC sends everything but plain ASCII as three letters for each byte."""
    message = message.encode("utf-8", "replace").decode()
    if len(message) <= LONGEST // 9:
        return message
    while len(quote(message, safe=PLAIN)) > LONGEST:
        message = message[: -max(1, len(message) // 8)]
    return message


def details_of(refusal: Refusal, code: Any, message: str) -> list[Any]:
    """google.rpc.RetryInfo, ErrorInfo and QuotaFailure; a key is in none of them."""
    rule = refusal.rule.name if refusal.rule is not None else ""
    told = {"rule": rule, "limit": str(refusal.limit), "remaining": str(refusal.remaining)}
    found: list[Any] = [error_details_pb2.ErrorInfo(reason=REASONS[refusal.reason], domain=DOMAIN, metadata=told)]
    if refusal.retry_after is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMicroseconds(refusal.retry_us)
        found.insert(0, retry)
    if code is Code.RESOURCE_EXHAUSTED and refusal.violated:
        failure = error_details_pb2.QuotaFailure
        named = refusal.violated[:MOST]
        found.append(failure(violations=[failure.Violation(subject=name) for name in named]))
        found[-1].violations[0].description = message
    return found
