"""WSGI middleware: puts a policy in front of any WSGI application.

    application = RateLimitMiddleware(application, policy="limitkeeper.yaml")

What the application returns goes to the server unchanged: nothing is buffered, a file wrapper stays one, `len()` and `close()`
are the application's own. The body is wrapped, to count its bytes and to notice its end, only where an evaluation needs
settlement (its cost is the response's size, or its outcome decides whether it counts) and its length is not known before. A
refusal calls no application and reads no body.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from http import HTTPStatus
from pathlib import Path

from ..policy.evaluation import Evaluation
from ..policy.gate import Gate, gate_of
from ..policy.model import Policy
from ..stores import Store
from .ratelimit_fields import text_fields
from .refusal_body import body
from .response_settlement import Settlement, SettlingBody
from .wsgi_fast import Application, Environ, ExcInfo, HeaderStartResponse, StartResponse, Write, WsgiApp


class RateLimitMiddleware(WsgiApp):
    """Evaluates the policy before every request.

    `policy` is a path, a `Policy` or a `Gate` (which has its store and handlers already); `store` replaces the policy's store;
    `handlers` are the WSGI applications that `on_refusal: degrade NAME` names.
    """

    def __init__(
        self,
        app: Application,
        policy: Policy | Gate | str | Path = "limitkeeper.yaml",
        handlers: Mapping[str, Application] | None = None,
        store: Store | None = None,
    ) -> None:
        self.gate = gate_of(policy, handlers=handlers, store=store)
        self._owns_gate = self.gate is not policy
        super().__init__(app, self.gate.ask)

    def refuse(self, evaluation: Evaluation, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """The response of the rule's degrade handler, or the refusal."""
        if evaluation.degrade is not None:
            response: Iterable[bytes] = evaluation.degrade(environ, HeaderStartResponse(start_response, evaluation))
            return response
        assert evaluation.refusal is not None
        kind, content = body(evaluation, environ.get("HTTP_ACCEPT"))
        headers = [("Content-Type", kind.decode("ascii")), ("Content-Length", str(len(content))), *text_fields(evaluation)]
        start_response(status_line(evaluation.refusal.status), headers)
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [content]

    def run_and_settle(self, evaluation: Evaluation, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Calls the application, and settles when its response has been sent, however it ends."""
        settlement = Settlement([evaluation], head=environ["REQUEST_METHOD"] == "HEAD")
        start = SettlingStartResponse(start_response, evaluation, settlement)
        try:
            chunks: Iterable[bytes] = self.app(environ, start)
        except BaseException as error:
            settlement.settle(failed=isinstance(error, Exception))
            raise
        if isinstance(chunks, (list, tuple)):  # the whole body: its size is known before a byte is sent
            settlement.size += sum(map(len, chunks))
        elif start.content_length is not None:
            settlement.size = start.content_length
        else:
            return SettlingBody(chunks, settlement)
        settlement.settle(failed=not settlement.status)  # servers answer 500 where no status was given
        return chunks

    def close(self) -> None:
        """Closes the gate, unless it was passed in."""
        if self._owns_gate:
            self.gate.close()


def status_line(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return f"{status} Refused"


class SettlingStartResponse(HeaderStartResponse):
    """A HeaderStartResponse that reports to a settlement: the status, the bytes sent through `write`, and Content-Length."""

    __slots__ = ("content_length", "settlement")

    def __init__(self, start_response: StartResponse, evaluation: Evaluation, settlement: Settlement) -> None:
        super().__init__(start_response, evaluation)
        self.settlement = settlement
        self.content_length: int | None = None

    def __call__(self, status: str, headers: list[tuple[str, str]], exc_info: ExcInfo | None = None) -> Write:
        write = super().__call__(status, headers, exc_info)
        self.settlement.status = self.status
        self.settlement.counted = True
        lengths = [value for name, value in headers if name.lower() == "content-length"]
        no_body = 0 if self.status in (204, 304) else None
        self.content_length = int(lengths[0]) if lengths and lengths[0].isdecimal() else no_body

        def counting_write(data: bytes) -> object:
            self.settlement.size += len(data)
            try:
                return write(data)
            except BaseException:
                self.settlement.gone = True
                raise

        return counting_write
