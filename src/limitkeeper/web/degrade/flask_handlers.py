"""Degrade handlers of Flask: `RateLimit(app, policy, handlers={"cached": flask_cached(cache), "less": flask_reduced(app)})`.

`app.wsgi_app = cache.wsgi(app.wsgi_app)`, before `RateLimit(app, …)`, records the responses.
"""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO

from ...errors import ConfigurationError

try:
    from flask import Flask, g, request
    from werkzeug.wrappers import Response
except ModuleNotFoundError as error:
    raise ConfigurationError(
        f"limitkeeper.web.degrade.flask_handlers needs {error.name}, which is not installed: pip install flask"
    ) from error

from ..flask import EVALUATIONS, SETTLEMENT, refusal_exception
from ..wsgi import HAS_RUN, Environ, WsgiRequestContext
from .deferred_requests import DeferredRequests
from .stale_cache import StaleCache


def flask_cached(cache: StaleCache) -> Callable[[], Response]:
    """The handler that answers from a cache, or refuses as the policy does (error handlers run)."""

    def cached() -> Response:
        found = cache.find(WsgiRequestContext(request.environ), request.environ.get("QUERY_STRING") or "", g.limitkeeper)
        if found is None:
            g.limitkeeper.declined = True
            raise refusal_exception(g.limitkeeper)
        return Response(found.body, headers=found.served_headers(cache.now_us()))

    return cached


def flask_deferred(deferred: DeferredRequests, app: Flask) -> Callable[[], Response]:
    """The handler that defers a request, or refuses as the policy does. Made before `RateLimit`; it adds the status path."""
    handler = deferred.wsgi_handler(app.wsgi_app)
    app.wsgi_app = deferred.wsgi(app.wsgi_app)  # type: ignore[assignment,method-assign]

    def later() -> Response:
        environ = environ_again(deferred.max_body)
        response = Response.from_app(handler, environ, buffered=True)
        if g.limitkeeper.declined:
            raise refusal_exception(g.limitkeeper)
        return response

    return later


def flask_reduced(app: Flask) -> Callable[[], Response]:
    """The handler that has the application itself answer; its views read `is_reduced(request)`. Made before `RateLimit`."""
    inner = app.wsgi_app

    def reduced() -> Response:
        return Response.from_app(inner, environ_again(), buffered=True)

    return reduced


def environ_again(most: int | None = None) -> Environ:
    """The environ of the request for the application, which runs again: its limits and its settlement are that run's own. It has
    the body that other code has read, of at most so many bytes; a chunked one, which may not be the whole, is not deferred."""
    environ = {name: value for name, value in request.environ.items() if name not in (EVALUATIONS, SETTLEMENT)}
    if "stream" in vars(request):
        length = request.content_length
        if most is None or (length is not None and length <= most):
            environ["wsgi.input"] = BytesIO(request.get_data())
        elif length is None and "HTTP_TRANSFER_ENCODING" in environ:
            environ[HAS_RUN] = True
    return environ
