"""Protobuf messages of Envoy's rate limit service v3 and of the gRPC health service, made when this module is imported.

Only field numbers and types go over the wire, so these are the parts that the service needs, under a package of its own in a pool
of its own: nothing is generated, and nothing clashes with xds-protos. Enums are integers. Keys and values of descriptors are
bytes: a client's header that is not UTF-8 must not make a request unreadable, because Envoy lets unanswered requests pass.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

__all__ = ["DecodeError", "HealthCheckRequest", "HealthCheckResponse", "RateLimitRequest", "RateLimitResponse"]

PACKAGE = "limitkeeper.envoy"
#: Message -> its fields: type, name, number.
MESSAGES = {
    "Entry": ("bytes key 1", "bytes value 2"),
    "RateLimitOverride": ("uint32 requests_per_unit 1", "uint32 unit 2"),
    "UInt64Value": ("uint64 value 1",),
    "RateLimitDescriptor": ("repeated Entry entries 1", "RateLimitOverride limit 2", "UInt64Value hits_addend 3"),
    "RateLimitRequest": ("string domain 1", "repeated RateLimitDescriptor descriptors 2", "uint32 hits_addend 3"),
    "RateLimit": ("uint32 requests_per_unit 1", "uint32 unit 2", "string name 3"),
    "Duration": ("int64 seconds 1", "int32 nanos 2"),
    "Status": ("uint32 code 1", "RateLimit current_limit 2", "uint32 limit_remaining 3", "Duration duration_until_reset 4"),
    "HeaderValue": ("string key 1", "string value 2"),
    "RateLimitResponse": (
        "uint32 overall_code 1",
        "repeated Status statuses 2",
        "repeated HeaderValue response_headers_to_add 3",
    ),
    "HealthCheckRequest": ("string service 1",),
    "HealthCheckResponse": ("uint32 status 1",),
}


def message_classes() -> dict[str, Any]:
    file = FileDescriptorProto(name="limitkeeper/envoy.proto", package=PACKAGE, syntax="proto3")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for text in fields:
            kind, field, number = text.removeprefix("repeated ").split()
            label = "LABEL_REPEATED" if text.startswith("repeated ") else "LABEL_OPTIONAL"
            added = message.field.add(name=field, number=int(number), label=FieldDescriptorProto.Label.Value(label))
            if kind in MESSAGES:
                added.type, added.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
            else:
                added.type = FieldDescriptorProto.Type.Value(f"TYPE_{kind.upper()}")
    pool = DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in MESSAGES}


_CLASSES = message_classes()
RateLimitRequest, RateLimitResponse = _CLASSES["RateLimitRequest"], _CLASSES["RateLimitResponse"]
HealthCheckRequest, HealthCheckResponse = _CLASSES["HealthCheckRequest"], _CLASSES["HealthCheckResponse"]
