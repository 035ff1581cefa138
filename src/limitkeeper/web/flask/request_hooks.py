"""Asked within a request: a view's own limits, and a policy that needs what only a request has (the session, the user).

What was asked is kept in the request's environ. Its fields are put on the response before any after_request function sees it.
What is owed is settled when the response is known, or at the request's teardown when there never was one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from flask import after_this_request, current_app, g, request
from werkzeug.datastructures import Headers
from werkzeug.wrappers import Response

from ...errors import ConfigurationError
from ...policy.evaluation import Evaluation
from ...policy.gate import Gate
from ..headers import merge
from ..response_settlement import Body, Settlement, let_go
from ..view_identity import Places
from ..view_limit import DEPTH, EXEMPT, ViewLimits, told
from ..wsgi_fast import PASSAGE, WsgiRequestContext
from .refusal import refused

#: Where the passages of a request are kept that were asked for within it; and the accounts that nobody settles yet.
ASKED, OWED = "limitkeeper.asked", "limitkeeper.owed"
#: The passage of the policy around the application, where there is one.
BEFORE = "limitkeeper.before"


def site_of(app: Any) -> ViewLimits:
    """What `init_app` left with an application."""
    site: ViewLimits | None = app.extensions.get("limitkeeper")
    if site is None:
        raise ConfigurationError(f"{app.name!r} has no RateLimit: call limits.init_app(app) where it is made")
    return site


def limited(view: Callable[..., Any], places: Places) -> Callable[..., Any]:
    """A view that asks first. Coroutines too: Flask runs each in a thread of its request, where asking may wait."""

    @wraps(view)
    def asking(*args: Any, **named: Any) -> Any:
        instead = asked(site_of(current_app).gate_for(places.at(request.endpoint)))
        return current_app.ensure_sync(view)(*args, **named) if instead is None else instead

    setattr(asking, DEPTH, getattr(view, DEPTH, 0) + 1)
    return asking


def asked_unless_exempt(gate: Gate) -> Any:
    """The policy, asked as a before_request function."""
    return None if request.endpoint in exempt_endpoints(current_app) else asked(gate)


def asked(gate: Gate) -> Any:
    """Asks for the current request. None: go on. A degrade handler's answer is answered instead; a refusal is raised."""
    environ = request.environ
    facts = WsgiRequestContext(environ)
    facts.raw = request._get_current_object()  # type: ignore[attr-defined]
    passage = let_go(gate.ask(facts), "HTTP_ORIGIN" in environ)
    g.limitkeeper = environ[PASSAGE] = passage
    if ASKED not in environ:
        environ[ASKED] = []
        after_this_request(tell)
    environ[ASKED].append(passage)
    if passage.allowed:
        if passage.owes:
            environ.setdefault(OWED, []).append(Settlement(passage, head=request.method == "HEAD"))
        return None
    if passage.degrade is not None:
        return current_app.ensure_sync(passage.degrade)()
    raise refused(passage)


def tell(response: Response) -> Response:
    """Puts the fields on the response, counts it, and settles what is owed or leaves that to the end of its body."""
    environ = request.environ
    passages: list[Evaluation] = environ[ASKED]
    before = environ.get(BEFORE)
    fields = told(passages if before is None else [before, *passages])
    response.headers = Headers(merge(list(response.headers), fields))
    for passage in passages:
        if passage.allowed:
            passage.responded(response.status_code)
    for account in environ.pop(OWED, ()):
        account.status = response.status_code
        settle(account, response)
    return response


def settle(account: Settlement, response: Response) -> None:
    """At once where the size is known, at the end of the body where it isn't."""
    if not response.is_streamed:
        account.size = sum(map(len, response.iter_encoded()))
    elif response.direct_passthrough and response.content_length is not None:
        account.size = response.content_length  # a file, which the server may send in its own way
    else:
        response.response = Body(response.response, account)
        return
    account.settle()


def settle_what_is_left(error: BaseException | None) -> None:
    """At teardown: the view raised, and nobody made a response of it."""
    for account in request.environ.pop(OWED, ()):
        account.settle(failed=isinstance(error, Exception))


def exempt_endpoints(app: Any) -> frozenset[str]:
    """The endpoints that `exempt` was said of, looked up at the first request: Flask takes no views later. A blueprint's are
    those of the blueprints in it too."""
    site = site_of(app)
    if site.exempt is None:
        blueprints = tuple(f"{name}." for name, one in app.blueprints.items() if getattr(one, EXEMPT, False))
        site.exempt = frozenset(
            endpoint
            for endpoint, view in app.view_functions.items()
            if getattr(view, EXEMPT, False) or endpoint.startswith(blueprints)
        )
    return site.exempt
