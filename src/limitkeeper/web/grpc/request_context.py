"""What a policy may ask about a gRPC call, and which passage the handler that runs now has."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any
from urllib.parse import unquote

from ...policy.evaluation import Evaluation
from ...policy.model import Policy
from ...policy.request_context import RequestContext

MESSAGE = "MESSAGE"
passing: ContextVar[Evaluation | None] = ContextVar("limitkeeper.web.grpc", default=None)


def current() -> Evaluation | None:
    """The passage of the call that is being handled here; None outside of a handler, and where nobody guards the server."""
    return passing.get()


class GrpcRequestContext(RequestContext):
    """A call is a POST to its method's path; metadata are its headers, binary ones left out. `raw` is the servicer context."""

    __slots__ = ()

    def header(self, name: str) -> str | None:
        if name.endswith("-bin"):
            return None
        found = [value for key, value in self.raw.invocation_metadata() or () if key == name]
        return ", ".join([text_of(value) for value in found]) if found else None

    def differs(self, kind: str, name: str) -> bool:
        return kind == "header" and len({value for key, value in self.raw.invocation_metadata() or () if key == name}) > 1

    def peer(self) -> str | None:
        return address_of(self.raw.peer())

    def certificate(self) -> Mapping[str, Any] | None:
        known = self.raw.auth_context() or {}
        names = [text_of(name) for name in known.get("x509_subject_alternative_name", ())]
        subject = [text_of(name) for name in known.get("x509_subject", ())]
        subject = subject or [f"CN={text_of(name)}" for name in known.get("x509_common_name", ())]
        return {"subject": subject[0] if subject else "", "san": names} if subject or names else None

    def message(self) -> GrpcRequestContext:
        """The same caller with one message of a stream; who it is need not be found out again."""
        facts = GrpcRequestContext(MESSAGE, self.path, self.raw)
        facts.identities.update(self.identities)
        return facts


def text_of(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("utf-8", "replace")


def address_of(peer: str | None) -> str | None:
    """The address in what gRPC calls a peer: "ipv4:192.0.2.1:55" or "ipv6:%5B::1%5D:5"; a UNIX socket has none."""
    kind, _, place = unquote(peer or "").partition(":")
    if kind not in ("ipv4", "ipv6") or not place:
        return None
    host = place.rpartition(":")[0]
    return host.removeprefix("[").removesuffix("]").partition("%")[0] or None


def limits_messages(policy: Policy) -> bool:
    """Whether any rule is meant by single messages: otherwise streams are not touched."""
    return any(MESSAGE in match.methods for rule in policy.rules for match in rule.match)
