"""The RequestContext of a gRPC call, and the evaluation of the call that is being handled."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any
from urllib.parse import unquote

from ...policy.evaluation import Evaluation
from ...policy.request_context import RequestContext
from ..policy_flags import MESSAGE

current_evaluation: ContextVar[Evaluation | None] = ContextVar("limitkeeper.web.grpc", default=None)


def current() -> Evaluation | None:
    """The evaluation of the call that is being handled; None outside of a handler, or without an interceptor."""
    return current_evaluation.get()


class GrpcRequestContext(RequestContext):
    """A call is a POST to its method's path; metadata are its headers, except binary ones. `raw` is the servicer context."""

    __slots__ = ()

    def header(self, name: str) -> str | None:
        if name.endswith("-bin"):
            return None
        found = [value for key, value in self.raw.invocation_metadata() or () if key == name]
        return ", ".join([decode(value) for value in found]) if found else None

    def differs(self, kind: str, name: str) -> bool:
        return kind == "header" and len({value for key, value in self.raw.invocation_metadata() or () if key == name}) > 1

    def peer(self) -> str | None:
        return parse_peer(self.raw.peer())

    def certificate(self) -> Mapping[str, Any] | None:
        auth = self.raw.auth_context() or {}
        names = [decode(name) for name in auth.get("x509_subject_alternative_name", ())]
        subject = [decode(name) for name in auth.get("x509_subject", ())]
        subject = subject or [f"CN={decode(name)}" for name in auth.get("x509_common_name", ())]
        return {"subject": subject[0] if subject else "", "san": names} if subject or names else None

    def message(self) -> GrpcRequestContext:
        """The context of one message of the call's stream, with the identities found so far."""
        context = GrpcRequestContext(MESSAGE, self.path, self.raw)
        context.identities.update(self.identities)
        return context


def decode(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("utf-8", "replace")


def parse_peer(peer: str | None) -> str | None:
    """The address of gRPC's peer string, "ipv4:192.0.2.1:55" or "ipv6:%5B::1%5D:5"; None for a UNIX socket."""
    kind, _, address = unquote(peer or "").partition(":")
    if kind not in ("ipv4", "ipv6") or not address:
        return None
    host = address.rpartition(":")[0]
    return host.removeprefix("[").removesuffix("]").partition("%")[0] or None
