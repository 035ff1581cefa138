"""A policy in front of any WSGI application: one decision before the application is called, header fields when it answers.

    application = RateLimitMiddleware(application, policy="headgate.yaml")

What the application returns goes to the server as it is: nothing is buffered, a file wrapper stays one, `len()` and `close()` are
the application's own. Only where a passage owes something (its cost is the response's size, or its outcome decides whether it
counts) the body is wrapped, to count its bytes and to hear of its end. A refusal calls nothing and reads no body.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

from ..policy.gate import Gate, gate_of
from ..policy.model import Policy
from ..policy.passage import Passage
from .environ import WsgiFacts
from .headers import body, merge_text, text_fields

Environ = dict[str, Any]
StartResponse = Callable[..., Callable[[bytes], object]]
Application = Callable[[Environ, StartResponse], Iterable[bytes]]

#: Where the application finds what was decided.
PASSAGE = "headgate.passage"
FAILED = 500


class RateLimitMiddleware:
    """Asks the policy before every request. `policy` is a path, a `Policy` or a `Gate`; `handlers` are what `degrade` names."""

    def __init__(
        self, app: Application, policy: Policy | Gate | str | Path = "headgate.yaml", handlers: Mapping[str, Any] | None = None
    ) -> None:
        self.app = app
        self.gate = gate_of(policy, handlers=handlers)
        self._ask = self.gate.ask

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        passage = environ[PASSAGE] = self._ask(WsgiFacts(environ))
        if not passage.allowed:
            return self.refuse(passage, environ, start_response)
        if passage.owes:
            return owing(self.app, passage, environ, start_response)
        try:
            return self.app(environ, Start(start_response, passage))
        except BaseException:
            passage.responded(FAILED)
            raise

    def refuse(self, passage: Passage, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """The answer of a request that may not go on: the rule's own handler, or a few bytes."""
        if passage.degrade is not None:
            answered: Iterable[bytes] = passage.degrade(environ, Start(start_response, passage))
            return answered
        return refusal(passage, environ, start_response)

    def close(self) -> None:
        """Closes the gate, and the store that it made."""
        self.gate.close()


def status_line(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return f"{status} Refused"


def refusal(passage: Passage, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
    """Why, and when to come back."""
    assert passage.refusal is not None
    kind, text = body(passage, environ.get("HTTP_ACCEPT"))
    headers = [("Content-Type", kind.decode("ascii")), ("Content-Length", str(len(text))), *text_fields(passage)]
    start_response(status_line(passage.refusal.status), headers)
    return [] if environ["REQUEST_METHOD"] == "HEAD" else [text]


class Start:
    """`start_response` with the header fields of a passage. A second call (with exc_info) takes the place of the first."""

    __slots__ = ("passage", "start_response", "status")

    def __init__(self, start_response: StartResponse, passage: Passage) -> None:
        self.start_response = start_response
        self.passage = passage
        self.status = 0

    def __call__(self, status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[[bytes], object]:
        passage = self.passage
        if not self.status and passage.allowed:
            passage.responded(int(status[:3]))
        self.status = int(status[:3])
        told = merge_text(headers, text_fields(passage))
        if exc_info is None:
            return self.start_response(status, told)
        return self.start_response(status, told, exc_info)


def owing(app: Application, passage: Passage, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
    """The same for a passage that is settled when its response has gone, whatever way it goes."""
    start = Counted(start_response, passage)
    try:
        chunks = app(environ, start)
    except BaseException:
        start.settle(failed=True)
        raise
    if isinstance(chunks, (list, tuple)):  # all there is: known before a byte has gone
        start.size += sum(map(len, chunks))
        start.settle()
        return chunks
    if start.length is not None and is_file(chunks, environ):
        start.size = start.length
        start.settle()
        return chunks  # the server may send the file in its own way
    return Body(chunks, start)


def is_file(chunks: object, environ: Environ) -> bool:
    wrapper = environ.get("wsgi.file_wrapper")
    return isinstance(wrapper, type) and isinstance(chunks, wrapper) and environ["REQUEST_METHOD"] != "HEAD"


class Counted(Start):
    """A start that knows how many bytes went, and settles once."""

    __slots__ = ("length", "settled", "size")

    def __init__(self, start_response: StartResponse, passage: Passage) -> None:
        super().__init__(start_response, passage)
        self.length: int | None = None
        self.size = 0
        self.settled = False

    def __call__(self, status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[[bytes], object]:
        write = super().__call__(status, headers, exc_info)
        lengths = [value for name, value in headers if name.lower() == "content-length"]
        self.length = int(lengths[0]) if lengths and lengths[0].isdecimal() else None

        def counted(data: bytes) -> object:
            self.size += len(data)
            return write(data)

        return counted

    def settle(self, failed: bool = False) -> None:
        if self.settled:
            return
        self.settled = True
        if failed and not self.status:
            self.passage.responded(FAILED)
        self.passage.done(FAILED if failed or not self.status else self.status, self.size)


class Body:
    """An application's chunks, one by one as they come, and their end: settled when closed, exhausted or broken."""

    __slots__ = ("_chunks", "_close", "_next", "_start")

    def __init__(self, chunks: Iterable[bytes], start: Counted) -> None:
        self._chunks = chunks
        self._start = start
        self._next: Callable[[], bytes] | None = None
        self._close: Callable[[], object] | None = getattr(chunks, "close", None)

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        try:
            if self._next is None:
                self._next = iter(self._chunks).__next__
            chunk = self._next()
        except StopIteration:
            self._start.settle()
            raise
        except BaseException:
            self._start.settle(failed=True)
            raise
        self._start.size += len(chunk)
        return chunk

    def close(self) -> None:
        """Closes the application's own iterable, once, and settles whatever that does."""
        close, self._close = self._close, None
        try:
            if close is not None:
                close()
        finally:
            self._start.settle()
