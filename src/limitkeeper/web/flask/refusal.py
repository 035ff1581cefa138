"""A refusal as a werkzeug HTTP exception with our body, which `errorhandler(429)` may replace."""

from __future__ import annotations

from functools import cache

from flask import request
from werkzeug.exceptions import HTTPException, default_exceptions

from ...policy.evaluation import Evaluation
from ..refusal_body import body


class RefusalException(HTTPException):
    """Raised for a refused request. `evaluation` is the gate's, `retry_after` whole seconds (None: never), `description` the
    message. Error handlers of its status (429, 503, …) are found as for werkzeug's own exceptions."""

    def __init__(self, evaluation: Evaluation) -> None:
        assert evaluation.refusal is not None
        super().__init__(evaluation.refusal.message)
        self.evaluation = evaluation
        self.retry_after = evaluation.refusal.retry_after

    def get_headers(self, *_: object) -> list[tuple[str, str]]:
        return [("Content-Type", self._body()[0].decode("ascii"))]

    def get_body(self, *_: object) -> str:
        return self._body()[1].decode()

    def _body(self) -> tuple[bytes, bytes]:
        return body(self.evaluation, request.headers.get("Accept"))


@cache
def exception_class(status: int) -> type[RefusalException]:
    """The exception class of a status: also werkzeug's own, so that its error handlers apply."""
    known = default_exceptions.get(status, HTTPException)
    name = known.__name__ if known is not HTTPException else "Refused"
    return type(name, (RefusalException, known), {"code": status})


def refusal_exception(evaluation: Evaluation) -> RefusalException:
    assert evaluation.refusal is not None
    return exception_class(evaluation.refusal.status)(evaluation)
