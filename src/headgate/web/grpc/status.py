"""How gRPC says no: a status with details that clients can obey, and what a handler's own status means to a policy.

RetryInfo has the delay to the microsecond. `grpc-retry-pushback-ms` says the same to the client library itself: a channel with a
retry policy waits exactly so long before it tries again, and does not try at all when it would be in vain (-1).
"""

from __future__ import annotations

from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from ...policy.passage import QUEUE_FULL, QUOTA, SHUT_OUT, STORE, Passage, Refusal
from ..headers import fields

DOMAIN = "headgate"
REASONS = {QUOTA: "RATE_LIMITED", QUEUE_FULL: "QUEUE_FULL", SHUT_OUT: "SHUT_OUT", STORE: "STORE_UNAVAILABLE"}
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

Metadata = tuple[tuple[str, str | bytes], ...]


def http_of(code: Any) -> int:
    return HTTP.get(code, 500)


def metadata_of(passage: Passage) -> Metadata:
    """The fields of a response that mean something in gRPC, as metadata."""
    return tuple(
        [(name.decode(), value.decode()) for name, value in fields(passage) if not name.startswith((b"access", b"cache"))]
    )


def refused_status(passage: Passage, refusal: Refusal) -> tuple[Any, str, Metadata]:
    """(code, message, trailing metadata) of a refused call."""
    code = Code.UNAVAILABLE if refusal.status >= 500 else Code.RESOURCE_EXHAUSTED
    status = status_pb2.Status(code=code.value[0], message=refusal.message)
    for detail in details_of(refusal, code):
        status.details.add().Pack(detail)
    trailing: Metadata = tuple(rpc_status.to_status(status).trailing_metadata)
    return code, refusal.message, (*trailing, *metadata_of(passage), ("grpc-retry-pushback-ms", pushback(refusal)))


def pushback(refusal: Refusal) -> str:
    return "-1" if refusal.retry_after is None else str(-(-refusal.retry_us // 1000))


def details_of(refusal: Refusal, code: Any) -> list[Any]:
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
        found.append(
            failure(violations=[failure.Violation(subject=name, description=refusal.message) for name in refusal.violated])
        )
    return found
