"""Wraps one RPC handler, for threads and for tasks: its shape, and how its messages are (de)serialised.

The wrapper exchanges bytes with the server and calls the handler's own (de)serialisers after the evaluation, so that a refused
message is never deserialised, and the bytes of responses can be counted.
"""

from __future__ import annotations

import logging

import grpc

from ...policy.evaluation import Evaluation
from ..handler_limit import Handler
from ..policy_flags import PolicyFlags
from .request_context import GrpcRequestContext

log = logging.getLogger("limitkeeper")

#: (requests are a stream, responses are a stream) -> the attribute of the handler's function, and the constructor of a handler.
SHAPES = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


class HandlerWrapper:
    """One handler behind a gate."""

    def __init__(self, flags: PolicyFlags, path: str, handler: grpc.RpcMethodHandler) -> None:
        self.flags = flags
        self.gate = flags.gate
        self.path = path
        self.request_streaming = bool(handler.request_streaming)
        self.response_streaming = bool(handler.response_streaming)
        attribute, self.make_handler = SHAPES[self.request_streaming, self.response_streaming]
        self.function: Handler = getattr(handler, attribute)
        self._deserialize = handler.request_deserializer
        self._serialize = handler.response_serializer

    def context_of(self, servicer: grpc.ServicerContext) -> GrpcRequestContext:
        return GrpcRequestContext("POST", self.path, servicer)

    def function_for(self, evaluation: Evaluation) -> Handler:
        """The handler's function, or the rule's degrade handler."""
        degrade = None if evaluation.allowed else evaluation.degrade
        return self.function if degrade is None else degrade

    def is_refused(self, evaluation: Evaluation, context: GrpcRequestContext) -> bool:
        """Whether the call ends here. A degrade handler answers calls, not messages."""
        return evaluation.refusal is not None and (evaluation.degrade is None or context.method != "POST")

    def deserialize(self, data: bytes) -> object:
        try:
            return data if self._deserialize is None else self._deserialize(data)
        except Exception:
            log.exception("%s: deserialising a message failed", self.path)
            raise

    def serialize(self, message: object) -> bytes | None:
        try:
            return message if self._serialize is None else self._serialize(message)  # type: ignore[return-value]
        except Exception:
            log.exception("%s: serialising a response failed", self.path)
            raise
