"""A policy in front of any WSGI application: one decision before the application is called, header fields when it answers.

    application = RateLimitMiddleware(application, policy="limitkeeper.yaml")

What the application returns goes to the server as it is: nothing is buffered, a file wrapper stays one, `len()` and `close()` are
the application's own. Only where a passage owes something (its cost is the response's size, or its outcome decides whether it
counts) and its length is not announced, the body is wrapped, to count its bytes and to hear of its end. A refusal calls nothing
and reads no body.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

from ..policy.evaluation import Evaluation
from ..policy.gate import Gate, gate_of
from ..policy.model import Policy
from ..stores import Store
from .headers import body, text_fields
from .response_settlement import Body, Settlement
from .wsgi_fast import HeaderStartResponse, WsgiApp

Environ = dict[str, Any]
StartResponse = Callable[..., Callable[[bytes], object]]
Application = Callable[[Environ, StartResponse], Iterable[bytes]]


class RateLimitMiddleware(WsgiApp):
    """Asks the policy before every request.

    `policy` is a path, a `Policy` or a `Gate` (which has its store and handlers already); `store` where its state lives, when not
    where the policy says; `handlers` the WSGI applications that `on_refusal: degrade NAME` names.
    """

    def __init__(
        self,
        app: Application,
        policy: Policy | Gate | str | Path = "limitkeeper.yaml",
        handlers: Mapping[str, Any] | None = None,
        store: Store | None = None,
    ) -> None:
        self.gate = gate_of(policy, handlers=handlers, store=store)
        self._owns = self.gate is not policy
        super().__init__(app, self.gate.ask)

    def refuse(self, passage: Evaluation, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """The answer of a request that may not go on: the rule's own handler, or a few bytes."""
        if passage.degrade is not None:
            answered: Iterable[bytes] = passage.degrade(environ, HeaderStartResponse(start_response, passage))
            return answered
        return refusal(passage, environ, start_response)

    def owing(self, passage: Evaluation, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Calls the application for a passage that is settled when its response has gone, whatever way it goes."""
        account = Settlement(passage, head=environ["REQUEST_METHOD"] == "HEAD")
        start = CountedStart(start_response, account)
        try:
            chunks: Iterable[bytes] = self.app(environ, start)
        except BaseException as error:
            account.settle(failed=isinstance(error, Exception))
            raise
        if isinstance(chunks, (list, tuple)):  # all there is: known before a byte has gone
            account.size += sum(map(len, chunks))
        elif start.length is not None:  # announced: known as well
            account.size = start.length
        else:
            return Body(chunks, account)
        account.settle(failed=not account.status)  # servers answer 500 where no status was given
        return chunks

    def close(self) -> None:
        """Closes the gate, unless it was given one."""
        if self._owns:
            self.gate.close()


def status_line(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return f"{status} Refused"


def refusal(passage: Evaluation, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
    """Why, and when to come back."""
    assert passage.refusal is not None
    kind, text = body(passage, environ.get("HTTP_ACCEPT"))
    headers = [("Content-Type", kind.decode("ascii")), ("Content-Length", str(len(text))), *text_fields(passage)]
    start_response(status_line(passage.refusal.status), headers)
    return [] if environ["REQUEST_METHOD"] == "HEAD" else [text]


class CountedStart(HeaderStartResponse):
    """The same, where bytes count: those that go through `write`, and the length that the application announced."""

    __slots__ = ("account", "length")

    def __init__(self, start_response: StartResponse, account: Settlement) -> None:
        super().__init__(start_response, account.passage)
        self.account = account
        self.length: int | None = None

    def __call__(self, status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[[bytes], object]:
        write = super().__call__(status, headers, exc_info)
        self.account.status = self.status
        lengths = [value for name, value in headers if name.lower() == "content-length"]
        self.length = int(lengths[0]) if lengths and lengths[0].isdecimal() else 0 if self.status in (204, 304) else None

        def counted(data: bytes) -> object:
            self.account.size += len(data)
            try:
                return write(data)
            except BaseException:
                self.account.gone = True
                raise

        return counted
