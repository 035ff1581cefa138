"""The policy around a Flask application: evaluated before Flask does anything, refused as Flask would respond.

A refusal gets a request context with an empty session: nothing is opened for it, but error handlers, after_request and teardown
functions run as for every other response.
"""

from __future__ import annotations

from collections.abc import Iterable

from flask import Flask, Response, g, request
from flask.ctx import RequestContext
from flask.globals import app_ctx, request_ctx
from flask.sessions import SessionMixin
from werkzeug.exceptions import HTTPException

from ...policy.evaluation import Evaluation
from ...policy.gate import Gate
from ..wsgi import RateLimitMiddleware
from ..wsgi_fast import EVALUATION, Application, Environ, HeaderStartResponse, StartResponse
from .refusal import RefusalException, refusal_exception
from .request_hooks import POLICY_EVALUATION, exempt_endpoints


class FlaskMiddleware(RateLimitMiddleware):
    """The middleware that `init_app` puts around `app.wsgi_app`."""

    def __init__(self, flask: Flask, app: Application, gate: Gate) -> None:
        super().__init__(app, gate)
        self.flask = flask
        self._exempt: frozenset[str] | None = None

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        exempt = self._exempt
        if exempt is None:
            exempt = self._exempt = exempt_endpoints(self.flask)
        if exempt and self.endpoint(environ) in exempt:
            return self.app(environ, start_response)
        return super().__call__(environ, start_response)

    def endpoint(self, environ: Environ) -> str | None:
        """The endpoint that Flask will find; needed only where some view is exempt."""
        try:
            adapter = self.flask.create_url_adapter(self.flask.request_class(environ, populate_request=False))
            return None if adapter is None else adapter.match()[0]
        except HTTPException:
            return None

    def refuse(self, evaluation: Evaluation, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        session: SessionMixin = self.flask.session_interface.make_null_session(self.flask)
        with RequestContext(self.flask, environ, session=session):
            g.limitkeeper = evaluation
            try:
                return self.refusal_response(evaluation)(environ, HeaderStartResponse(start_response, evaluation))
            finally:
                preserve_contexts(environ)

    def refusal_response(self, evaluation: Evaluation) -> Response:
        app = self.flask
        try:
            if evaluation.degrade is not None:
                return app.finalize_request(app.ensure_sync(evaluation.degrade)())
            try:
                raise refusal_exception(evaluation)  # Flask's traps raise the exception again that is being handled
            except RefusalException as refusal:
                return app.finalize_request(app.handle_user_exception(refusal))
        except Exception as error:
            return app.handle_exception(error)


def preserve_contexts(environ: Environ) -> None:
    """Keeps the contexts of a refusal where the server asks for those of a request (`with client:` in tests)."""
    keep = environ.get("werkzeug.debug.preserve_context")
    if keep is not None:
        keep(app_ctx._get_current_object())  # type: ignore[attr-defined]
        keep(request_ctx._get_current_object())  # type: ignore[attr-defined]


def publish_evaluation() -> None:
    """The first before_request function: sets `g.limitkeeper`."""
    g.limitkeeper = request.environ[POLICY_EVALUATION] = request.environ.get(EVALUATION)
