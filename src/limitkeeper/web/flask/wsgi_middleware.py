"""The policy around a Flask application: asked before Flask does anything, answered as Flask would.

A refusal gets a request context with an empty session: nothing is opened for it, but error handlers, after_request and teardown
functions run as for every other answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flask import Flask, Response, g, request
from flask.ctx import RequestContext
from flask.globals import app_ctx, request_ctx
from werkzeug.exceptions import HTTPException

from ...policy.evaluation import Evaluation
from ...policy.gate import Gate
from ..wsgi import Environ, RateLimitMiddleware, StartResponse
from ..wsgi_fast import PASSAGE, HeaderStartResponse
from .refusal import RefusalException, refused
from .request_hooks import BEFORE, exempt_endpoints


class FlaskMiddleware(RateLimitMiddleware):
    """What `init_app` puts around `app.wsgi_app`."""

    def __init__(self, flask: Flask, app: Any, gate: Gate) -> None:
        super().__init__(app, gate)
        self.flask = flask
        self._exempt: frozenset[str] | None = None

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        exempt = self._exempt
        if exempt is None:
            exempt = self._exempt = exempt_endpoints(self.flask)
        if exempt and self.endpoint(environ) in exempt:
            return self.app(environ, start_response)  # type: ignore[no-any-return]
        return super().__call__(environ, start_response)  # type: ignore[no-any-return]

    def endpoint(self, environ: Environ) -> str | None:
        """The endpoint that Flask will find; only asked for where some view is exempt."""
        try:
            adapter = self.flask.create_url_adapter(self.flask.request_class(environ, populate_request=False))
            return None if adapter is None else adapter.match()[0]
        except HTTPException:
            return None

    def refuse(self, passage: Evaluation, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        session: Any = self.flask.session_interface.make_null_session(self.flask)
        with RequestContext(self.flask, environ, session=session):
            g.limitkeeper = passage
            try:
                return self.answer(passage)(environ, HeaderStartResponse(start_response, passage))
            finally:
                preserve(environ)

    def answer(self, passage: Evaluation) -> Response:
        app = self.flask
        try:
            if passage.degrade is not None:
                return app.finalize_request(app.ensure_sync(passage.degrade)())
            try:
                raise refused(passage)  # Flask's traps raise once more whatever is being handled
            except RefusalException as refusal:
                return app.finalize_request(app.handle_user_exception(refusal))
        except Exception as error:
            return app.handle_exception(error)


def preserve(environ: Environ) -> None:
    """Whoever asked to keep the contexts of a request (`with client:` in tests) keeps those of a refusal too."""
    keep = environ.get("werkzeug.debug.preserve_context")
    if keep is not None:
        keep(app_ctx._get_current_object())  # type: ignore[attr-defined]
        keep(request_ctx._get_current_object())  # type: ignore[attr-defined]


def hand_over() -> None:
    """The first before_request function: what was decided is at hand as `g.limitkeeper`."""
    g.limitkeeper = request.environ[BEFORE] = request.environ.get(PASSAGE)
