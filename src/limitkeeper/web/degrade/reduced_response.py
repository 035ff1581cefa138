"""Reduced responses: the application answers a refused request itself, with less, when its rule degrades to the application.

    app = RateLimitMiddleware(inner, policy, handlers={"less": inner})          # ASGI and WSGI: the application itself
    handlers={"less": flask_reduced(app)}                                       # Flask
    LIMITKEEPER = {…, "HANDLERS": {"less": "limitkeeper.web.degrade.django_handlers.reduced"}}

`is_reduced(request)` is the flag that its views read: a limit has refused the request, and yet the view runs. It stays where
limits of the view itself admit the request then.
"""

from __future__ import annotations

from typing import Any

from ...policy.evaluation import Evaluation
from ..response_settlement import DEFERRED, DEGRADED
from ..wsgi import EVALUATION


def server_values(request: Any) -> Any:
    """The ASGI scope or the WSGI environ of a request of any framework, or the request if it is one."""
    if isinstance(request, dict):
        return request
    return getattr(request, "scope", None) or getattr(request, "environ", None) or {}


def evaluation_of(request: Any) -> Evaluation | None:
    """The evaluation of an ASGI scope, a WSGI environ, or a request of Starlette, Flask, Django or another framework."""
    if hasattr(request, "limitkeeper"):  # Django
        return request.limitkeeper  # type: ignore[no-any-return]
    values = server_values(request)
    return values.get("limitkeeper", values.get(EVALUATION))  # type: ignore[no-any-return]


def is_reduced(request: Any) -> bool:
    """Whether a view should answer with less, because the request is above its limit. False where no policy was evaluated."""
    evaluation, values = evaluation_of(request), server_values(request)
    refused = DEGRADED in values or (evaluation is not None and not evaluation.allowed)
    return refused and DEFERRED not in values
