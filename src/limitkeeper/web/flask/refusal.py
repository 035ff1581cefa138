"""A refusal as Flask knows it: an HTTP exception with our body, which `errorhandler(429)` may answer in its own way."""

from __future__ import annotations

from functools import cache
from typing import Any

from flask import request
from werkzeug.exceptions import HTTPException, default_exceptions

from ...policy.evaluation import Evaluation
from ..refusal_body import body


class RefusalException(HTTPException):
    """What a refused request raises. `passage` is the gate's answer, `retry_after` whole seconds (None: never), and
    `description` the message. Handlers of its status (429, 503, …) are found as for werkzeug's own exceptions."""

    def __init__(self, passage: Evaluation) -> None:
        assert passage.refusal is not None
        super().__init__(passage.refusal.message)
        self.passage = passage
        self.retry_after = passage.refusal.retry_after

    def get_headers(self, *_: Any) -> list[tuple[str, str]]:
        return [("Content-Type", self._told()[0].decode("ascii"))]

    def get_body(self, *_: Any) -> str:
        return self._told()[1].decode()

    def _told(self) -> tuple[bytes, bytes]:
        return body(self.passage, request.headers.get("Accept"))


@cache
def kind(status: int) -> type[RefusalException]:
    """The exception's class for a status: also werkzeug's, so that whoever handles that handles this."""
    known: Any = default_exceptions.get(status, HTTPException)
    return type(known.__name__ if known is not HTTPException else "Refused", (RefusalException, known), {"code": status})


def refused(passage: Evaluation) -> RefusalException:
    assert passage.refusal is not None
    return kind(passage.refusal.status)(passage)
