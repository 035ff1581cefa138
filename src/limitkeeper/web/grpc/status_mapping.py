"""Encodes a refusal as a gRPC status with machine-readable details, and maps a handler's status code to HTTP.

RetryInfo has the delay to the microsecond. `grpc-retry-pushback-ms` tells the client library the same: a channel with a retry
policy waits exactly that long before it retries, and does not retry where that can't succeed (-1).

Clients reject metadata of more than 8 KiB, and would lose the reason and the delay with it. So the parts that could grow (the
message, the number of refusing limits) are bounded here.
"""

from __future__ import annotations

from string import punctuation
from urllib.parse import quote

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from ...policy.evaluation import Evaluation
from ...policy.refusal import BLOCKED, CAPACITY, CONCURRENT, PENALTY_BOX, QUEUE_FULL, QUOTA, STORE, Refusal
from ..headers import fields

DOMAIN = "limitkeeper"
#: The characters of a message that gRPC does not percent-encode, besides letters and digits.
UNQUOTED = " " + punctuation.replace("%", "")
REASONS = {
    QUOTA: "RATE_LIMITED",
    QUEUE_FULL: "QUEUE_FULL",
    PENALTY_BOX: "PENALTY_BOX",
    STORE: "STORE_UNAVAILABLE",
    BLOCKED: "BLOCKED",
    CONCURRENT: "CONCURRENCY_LIMITED",
    CAPACITY: "CAPACITY_EXCEEDED",
}
Code = grpc.StatusCode
#: gRPC status codes as HTTP statuses, for rules that charge by outcome and for the counters.
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

#: The most bytes of a message, percent-encoded, and the most refusing limits that are named.
MAX_MESSAGE, MAX_VIOLATIONS = 600, 10

Metadata = tuple[tuple[str, str | bytes], ...]


def http_status(code: grpc.StatusCode) -> int:
    return HTTP.get(code, 500)


def evaluation_metadata(evaluation: Evaluation) -> Metadata:
    """The RateLimit fields as metadata, without those that only HTTP has."""
    return tuple(
        [
            (name.decode(), value.decode())
            for name, value in fields(evaluation)
            if not name.startswith((b"access", b"cache", b"vary"))
        ]
    )


def refusal_status(evaluation: Evaluation) -> tuple[grpc.StatusCode, str, Metadata]:
    """(code, message, trailing metadata) of a refused call."""
    refusal = evaluation.refusal
    assert refusal is not None
    evaluation.declined = True
    code = Code.UNAVAILABLE if refusal.status >= 500 else Code.RESOURCE_EXHAUSTED
    message = shorten(refusal.message)
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in error_details(refusal, code, message):
        status.details.add().Pack(detail)
    trailing: Metadata = tuple(rpc_status.to_status(status).trailing_metadata)
    return code, message, (*trailing, *evaluation_metadata(evaluation), ("grpc-retry-pushback-ms", pushback(refusal)))


def pushback(refusal: Refusal) -> str:
    return "-1" if refusal.retry_after is None else str(-(-refusal.retry_us // 1000))


def shorten(message: str) -> str:
    """A message that fits: gRPC percent-encodes everything but plain ASCII, three characters for each byte."""
    message = message.encode("utf-8", "replace").decode()
    if len(message) <= MAX_MESSAGE // 9:
        return message
    while len(quote(message, safe=UNQUOTED)) > MAX_MESSAGE:
        message = message[: -max(1, len(message) // 8)]
    return message


def error_details(refusal: Refusal, code: grpc.StatusCode, message: str) -> list[Message]:
    """google.rpc.RetryInfo, ErrorInfo and QuotaFailure; none of them shows a key."""
    rule = refusal.rule.name if refusal.rule is not None else ""
    metadata = {"rule": rule, "limit": str(refusal.limit), "remaining": str(refusal.remaining)}
    found: list[Message] = [error_details_pb2.ErrorInfo(reason=REASONS[refusal.reason], domain=DOMAIN, metadata=metadata)]
    if refusal.retry_after is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMicroseconds(refusal.retry_us)
        found.insert(0, retry)
    if code is Code.RESOURCE_EXHAUSTED and refusal.violated:
        failure = error_details_pb2.QuotaFailure
        named = refusal.violated[:MAX_VIOLATIONS]
        violations = [failure.Violation(subject=name) for name in named]
        violations[0].description = message
        found.append(failure(violations=violations))
    return found
