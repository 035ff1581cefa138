"""Evaluates limits within a Flask request: a view's own, and a policy that needs the session or the user.

The evaluations are kept in the request's environ. Their fields are added to the response before any after_request function sees
it. They are settled when the response is known, or at the request's teardown when there never was one.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import wraps
from typing import TypeVar, cast

from flask import Flask, after_this_request, current_app, g, request
from flask.typing import ResponseReturnValue
from werkzeug.datastructures import Headers
from werkzeug.wrappers import Response

from ...errors import ConfigurationError
from ...policy.evaluation import Evaluation
from ...policy.gate import Gate
from ..handler_limit import DEPTH, EXEMPT, Handler, HandlerGates, HandlerLimit, combined_fields
from ..ratelimit_fields import merge
from ..response_settlement import Settlement, SettlingBody, detach_request
from ..wsgi_fast import EVALUATION, WsgiRequestContext
from .refusal import refusal_exception

V = TypeVar("V", bound=Handler)

#: The environ keys of the evaluations within a request, and of their settlements that are still open.
EVALUATIONS, SETTLEMENTS = "limitkeeper.evaluations", "limitkeeper.settlements"
#: The environ key of the evaluation by the middleware around the application.
POLICY_EVALUATION = "limitkeeper.policy_evaluation"


def gates_of(app: Flask) -> HandlerGates:
    """The gates that `init_app` made for an application."""
    gates: HandlerGates | None = app.extensions.get("limitkeeper")
    if gates is None:
        raise ConfigurationError(f"{app.name!r} has no RateLimit: call limits.init_app(app) where the application is made")
    return gates


def limit_view(view: V, limit: HandlerLimit) -> V:
    """A view that evaluates its limit first. Coroutines too: Flask runs each in its request's thread, which may block."""

    @wraps(view)
    def limited(*args: object, **named: object) -> object:
        response = evaluate(gates_of(current_app).gate_for(limit, limit.name_at(request.endpoint)))
        return current_app.ensure_sync(view)(*args, **named) if response is None else response

    setattr(limited, DEPTH, getattr(view, DEPTH, 0) + 1)
    return cast(V, limited)


def evaluate_policy(gate: Gate) -> ResponseReturnValue | None:
    """Evaluates the policy as a before_request function."""
    return None if request.endpoint in exempt_endpoints(current_app) else evaluate(gate)


def evaluate(gate: Gate) -> ResponseReturnValue | None:
    """Evaluates the current request. None: allowed. Returns the response of a degrade handler, or raises the refusal."""
    environ = request.environ
    context = WsgiRequestContext(environ)
    context.raw = request._get_current_object()  # type: ignore[attr-defined]
    evaluation = detach_request(gate.ask(context), "HTTP_ORIGIN" in environ)
    g.limitkeeper = environ[EVALUATION] = evaluation
    if EVALUATIONS not in environ:
        environ[EVALUATIONS] = []
        after_this_request(finish_response)
    environ[EVALUATIONS].append(evaluation)
    if evaluation.allowed:
        if evaluation.needs_settlement:
            environ.setdefault(SETTLEMENTS, []).append(Settlement([evaluation], head=request.method == "HEAD"))
        return None
    if evaluation.degrade is not None:
        response: ResponseReturnValue = current_app.ensure_sync(evaluation.degrade)()
        return response
    raise refusal_exception(evaluation)


def finish_response(response: Response) -> Response:
    """Adds the fields to the response, counts it, and settles, now or at the end of its body."""
    environ = request.environ
    evaluations: list[Evaluation] = environ[EVALUATIONS]
    first: Evaluation | None = environ.get(POLICY_EVALUATION)
    fields = combined_fields(evaluations if first is None else [first, *evaluations])
    response.headers = Headers(merge(list(response.headers), fields))
    settlements: list[Settlement] = environ.pop(SETTLEMENTS, [])
    for evaluation in evaluations:
        if evaluation.allowed:
            evaluation.count_response(response.status_code)
    for settlement in settlements:
        settlement.status, settlement.counted = response.status_code, True
        settle(settlement, response)
    return response


def settle(settlement: Settlement, response: Response) -> None:
    """Settles at once where the size is known, otherwise at the end of the body."""
    if not response.is_streamed:
        settlement.size = sum(map(len, response.iter_encoded()))
    elif response.direct_passthrough and response.content_length is not None:
        settlement.size = response.content_length  # a file, which the server may send itself
    else:
        response.response = SettlingBody(cast(Iterable[bytes], response.response), settlement)
        return
    settlement.settle()


def settle_failed(error: BaseException | None) -> None:
    """At teardown: settles what has no response, since the view raised."""
    for settlement in request.environ.pop(SETTLEMENTS, ()):
        settlement.settle(failed=isinstance(error, Exception))


def exempt_endpoints(app: Flask) -> frozenset[str]:
    """The exempt endpoints, looked up at the first request: Flask adds no views later. A blueprint's include nested ones."""
    gates = gates_of(app)
    if gates.exempt is None:
        blueprints = tuple([f"{name}." for name, one in app.blueprints.items() if getattr(one, EXEMPT, False)])
        gates.exempt = frozenset(
            endpoint
            for endpoint, view in app.view_functions.items()
            if getattr(view, EXEMPT, False) or endpoint.startswith(blueprints)
        )
    return gates.exempt
