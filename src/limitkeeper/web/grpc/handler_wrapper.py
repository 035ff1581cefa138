"""What stands before one handler, for threads and for tasks alike: which shape it has, and how its messages are read and written.

Messages come and go as bytes: the server's own (de)serialisers are taken out and called here, after the gate has let the call
pass, so that a refused message is never deserialised, and the bytes of responses can be counted.
"""

from __future__ import annotations

import logging
from typing import Any

import grpc

from ...policy.gate import Gate
from ...policy.model import WAIT, Policy
from .request_context import GrpcRequestContext, limits_messages

log = logging.getLogger("limitkeeper")

#: (requests are a stream, responses are) -> the name of the handler's behaviour, and what makes a handler of one.
SHAPES = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


class PolicyFlags:
    """A gate and what is known of its policy's version: whether messages are limited, whether anybody waits."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self._policy: Policy | None = None
        self._messages = self._waits = False

    def _look(self) -> None:
        policy = self.gate.policy
        if policy is not self._policy:
            self._messages = limits_messages(policy)
            self._waits = any(rule.on_refusal.action == WAIT for rule in policy.rules)
            self._policy = policy

    @property
    def messages(self) -> bool:
        self._look()
        return self._messages

    @property
    def waits(self) -> bool:
        self._look()
        return self._waits


class HandlerWrapper:
    """One handler behind a gate."""

    def __init__(self, desk: PolicyFlags, path: str, handler: Any) -> None:
        self.desk = desk
        self.gate = desk.gate
        self.path = path
        self.streamed = bool(handler.request_streaming)
        self.streams = bool(handler.response_streaming)
        self.name, self.make = SHAPES[self.streamed, self.streams]
        self.behaviour = getattr(handler, self.name)
        self.reads = handler.request_deserializer
        self.writes = handler.response_serializer

    def handler(self, behaviour: Any) -> Any:
        """A handler that takes and gives bytes."""
        return self.make(behaviour)

    def facts(self, context: Any) -> GrpcRequestContext:
        return GrpcRequestContext("POST", self.path, context)

    def read(self, raw: bytes) -> Any:
        """A message, deserialised."""
        return raw if self.reads is None else self.reads(raw)

    def written(self, message: Any) -> Any:
        return message if self.writes is None else self.writes(message)
