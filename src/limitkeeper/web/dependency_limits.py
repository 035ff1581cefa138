"""Limits that are asked from within an app, by its dependencies: what one request was told, and what its response owes.

A dependency decides before the handler runs and never sees the response. `DependencyMiddleware` does: it puts the fields of all
limits that were asked on whatever the handler answers, tells the gates of it, and settles what the outcome or the size decides.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ..policy.evaluation import Evaluation
from ..policy.gate import Gate
from ..policy.path_matcher import limits_host
from .asgi import Listening, declared
from .asgi_fast import START, AsgiRequestContext
from .response_settlement import FAILED, GONE, UNKNOWN, outcome
from .view_limit import told

#: Where a scope keeps what its dependencies asked.
ASKED = "limitkeeper.asked"


class DependencyEvaluations:
    """What the dependencies of one request were told. `settles`: somebody sees the response."""

    __slots__ = ("passages", "settles")

    def __init__(self, settles: bool = False) -> None:
        self.passages: list[Evaluation] = []
        self.settles = settles

    def fields(self, scope: Any) -> list[tuple[str, str]]:
        """The fields of all these limits, and of what the policy's middleware was told."""
        first = scope.get("limitkeeper")
        others = [passage for passage in self.passages if passage is not first]
        return told([first, *others] if first is not None else others)


def asked_of(scope: Any) -> DependencyEvaluations:
    found = scope.get(ASKED)
    if found is None:
        found = scope[ASKED] = DependencyEvaluations()
    return found  # type: ignore[no-any-return]


class DependencyMiddleware:
    """Around an app whose dependencies ask."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope[ASKED] = asked = DependencyEvaluations(settles=True)
        response, listening = Response(asked, scope, send), Listening(receive)
        try:
            await self.app(scope, listening, response)
        except BaseException as error:
            response.begun(UNKNOWN if listening.gone else outcome(error))
            raise
        else:
            response.begun(UNKNOWN if listening.gone else FAILED)
        finally:
            if not response.settled:
                await asyncio.shield(asyncio.ensure_future(response.settle()))


class Response:
    """The response of such an app, on its way."""

    def __init__(self, asked: DependencyEvaluations, scope: Any, send: Any) -> None:
        self.asked = asked
        self.scope = scope
        self.send = send
        self.status = 0
        self.size = 0
        self.declared: int | None = None
        self.settled = False

    async def __call__(self, message: Any) -> None:
        kind = message["type"]
        if kind == START and self.asked.passages:
            self.begun(message["status"])
            self.declared = declared(message)
            if all(passage.allowed for passage in self.asked.passages):
                message = {**message, "headers": self.headers(message.get("headers") or ())}
        elif kind == "http.response.body":
            self.size += len(message.get("body", b""))
            if not message.get("more_body", False):
                await self.settle()
        elif kind == "http.response.pathsend":
            self.size = self.declared or 0
            await self.settle()
        await self.send(message)

    def headers(self, own: Any) -> list[tuple[bytes, bytes]]:
        """The response's own fields, and those of the limits instead of what anybody said about them further in."""
        added = [(name.lower().encode(), value.encode()) for name, value in self.asked.fields(self.scope)]
        names = {name for name, _ in added}
        return [*((name, value) for name, value in own if name.lower() not in names), *added]

    def begun(self, status: int) -> None:
        if not self.status:
            self.status = status
            for passage in self.asked.passages:
                if passage.allowed:
                    passage.responded(status or GONE)

    async def settle(self) -> None:
        if not self.settled:
            self.settled = True
            for passage in self.asked.passages:
                if passage.allowed and passage.owes:
                    await passage.adone(self.status, 0 if self.scope["method"] == "HEAD" else self.size)
                passage.facts = None


class SingleRule:
    """One rule of a policy on its own, whatever it matches, for a dependency that names it; counted with the policy's rules."""

    def __init__(self, gate: Gate, rule: str) -> None:
        self.whole = gate
        self.rule = rule
        self._seen: Any = None
        self._gate: Gate | None = None
        self.gate()

    def gate(self) -> Gate:
        """A gate of that rule alone, on the same store; made anew when the policy was reloaded."""
        policy = self.whole.policy
        if self._gate is None or policy is not self._seen:
            self._gate = self.whole.alone(self.rule)
            self._seen = policy
        return self._gate

    def was_asked(self, scope: Any) -> bool:
        """Whether the policy's middleware has asked this rule already for this request."""
        passage = scope.get("limitkeeper")
        if passage is None or passage.gate is not self.whole:
            return False
        facts = AsgiRequestContext(scope)
        plan = passage.edition.plan(facts)
        wanted = plan.hosts or [()] * len(plan.clauses)
        return any(
            clause.name == self.rule and (not hosts or limits_host(hosts, facts))
            for clause, hosts in zip(plan.clauses, wanted, strict=True)
        )
