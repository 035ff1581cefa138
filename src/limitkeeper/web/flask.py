"""The Flask extension: puts a policy in front of an application, and limits single views.

    limits = RateLimit(app, policy="limitkeeper.yaml")     # or init_app in a factory, or LIMITKEEPER_POLICY in app.config

    @app.post("/checkout")
    @limits.limit("5/s burst 10")
    def checkout(): ...

Order. The policy is evaluated around `app.wsgi_app`: before the session is opened, before any before_request function, before the
view, so that a refusal takes no connection from a pool. A refusal is rendered in a request context with an empty session, so that
`errorhandler(429)`, after_request functions (CORS) and teardown functions run for it as for any other response. A view's own
limits are evaluated when Flask calls the view, after before_request. With `early=False` the policy too is evaluated as a
before_request function, in the place of `init_app`, for identities that need `flask.session` or `current_user`.

The evaluations are kept in the request's environ. Their fields are added to the response before any after_request function sees
it. They are settled when the response is known, or at the request's teardown when there never was one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from functools import cache, partial, wraps
from pathlib import Path
from typing import TypeVar, Unpack, cast
from urllib.parse import urlencode

from ..errors import ConfigurationError

try:
    from flask import Blueprint, Flask, after_this_request, current_app, g, request
    from flask import Response as FlaskResponse
    from flask.ctx import RequestContext
    from flask.globals import app_ctx, request_ctx
    from flask.sessions import SessionMixin
    from flask.typing import ResponseReturnValue
    from werkzeug.datastructures import Headers
    from werkzeug.exceptions import HTTPException, default_exceptions
    from werkzeug.wrappers import Response
except ModuleNotFoundError as error:
    raise ConfigurationError(f"limitkeeper.web.flask needs {error.name}, which is not installed: pip install flask") from error

from ..policy.evaluation import Evaluation
from ..policy.gate import Gate, gate_of
from ..policy.identity.body import MAX_BODY
from ..policy.model import Policy
from ..stores import Store
from ..stores.urls import store_from_url
from .handler_limit import (
    DEPTH,
    EXEMPT,
    PARENTHESES,
    ClientAddress,
    Handler,
    HandlerGates,
    HandlerLimit,
    Key,
    LimitSource,
    RuleOptions,
    check_choice,
    check_order,
    combined_fields,
    count_limit,
    handler_name,
    has_own_limit,
    rule_name,
    shares_name,
)
from .headers import body, merge
from .response_settlement import (
    DEGRADED,
    GONE,
    NOT_SENT,
    UNKNOWN,
    Settlement,
    SettlingBody,
    WatchedInput,
    byte_length,
    detach_request,
)
from .wsgi import (
    EVALUATION,
    Application,
    Environ,
    HeaderStartResponse,
    RateLimitMiddleware,
    StartResponse,
    WsgiRequestContext,
    has_disconnected,
)

V = TypeVar("V", bound=Handler | Blueprint)
View = TypeVar("View", bound=Handler)
PolicySource = Policy | Gate | str | Path

#: The environ keys of the evaluations within a request, and of the settlement of those that need one.
EVALUATIONS, SETTLEMENT = "limitkeeper.evaluations", "limitkeeper.settlement"
#: The environ key of the gates that were asked before a degrade handler, which may run the application again.
EVALUATED = "limitkeeper.evaluated"
#: The environ key of the evaluation by the middleware around the application.
POLICY_EVALUATION = "limitkeeper.policy_evaluation"
#: The environ key of a request whose response was counted.
COUNTED = "limitkeeper.counted"


class RateLimit:
    """The extension. `policy` is a path, a `Policy` or a `Gate`; without one only views with limits of their own are limited, and
    `client_ip` (or LIMITKEEPER_CLIENT_IP) names trusted proxies, as in a policy: `{"trusted_proxies": ["10.0.0.0/8"]}`. `default`
    (or LIMITKEEPER_DEFAULT) is the limit of each view that has none of its own: a limit, or the arguments of `limit` in a dict.
    Without `enabled` (or LIMITKEEPER_ENABLED) nothing is limited."""

    def __init__(
        self,
        app: Flask | None = None,
        policy: PolicySource | None = None,
        *,
        store: Store | str | None = None,
        handlers: Mapping[str, Handler] | None = None,
        early: bool = True,
        client_ip: ClientAddress | None = None,
        enabled: bool = True,
        default: LimitSource | Mapping[str, object] | None = None,
    ) -> None:
        self._policy = policy
        self._default = default
        self._enabled = enabled
        self._store = store
        self._handlers = handlers
        self._early = early
        self._client_ip = client_ip
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask, policy: PolicySource | None = None) -> None:
        """Puts the policy in front of an application. Once: twice would count every request twice."""
        if not isinstance(app, Flask):
            raise ConfigurationError(
                f"expected a Flask application, got {app!r}; write RateLimit(app), and @limits.limit('5/s') on a view"
            )
        if "limitkeeper" in app.extensions:
            raise ConfigurationError(f"{app.name!r} already has a RateLimit: a second one would count every request twice")
        gates = app.extensions["limitkeeper"] = self._make_gates(app, policy)
        if gates.gate is not None and self._early:
            app.wsgi_app = FlaskMiddleware(app, app.wsgi_app, gates.gate)  # type: ignore[method-assign]
            app.before_request_funcs.setdefault(None, []).insert(0, publish_evaluation)
        elif gates.gate is not None:
            app.before_request(partial(evaluate_policy, gates.gate))
        if gates.default is not None:
            app.before_request(partial(evaluate_default, gates, gates.default))
        elif gates.gate is None:
            app.before_request(prepare)
        app.teardown_request(settle_failed)

    def _make_gates(self, app: Flask, policy: PolicySource | None) -> HandlerGates:
        sources = (policy, self._policy, app.config.get("LIMITKEEPER_POLICY"))
        source = next((one for one in sources if one is not None), None)
        store = self._store if self._store is not None else app.config.get("LIMITKEEPER_STORE")
        if isinstance(store, str):
            store = store_from_url(store)
        if isinstance(source, (str, Path)) and (Path(app.root_path) / source).exists():
            source = Path(app.root_path) / source
        if not (self._enabled and app.config.get("LIMITKEEPER_ENABLED", True)):
            return HandlerGates(None, store, enabled=False)
        gate = None if source is None else gate_of(source, store=store, handlers=self._handlers)
        client_ip = self._client_ip if self._client_ip is not None else app.config.get("LIMITKEEPER_CLIENT_IP")
        default = self._default if self._default is not None else app.config.get("LIMITKEEPER_DEFAULT")
        return HandlerGates(gate, store, self._handlers, client_ip, default=default)

    @property
    def gate(self) -> Gate:
        """The gate of the current application's policy: `limits.gate.snapshot()`."""
        gate = gates_of(current_app).gate
        if gate is None:
            raise ConfigurationError("this application has no policy: pass policy= to RateLimit, or set LIMITKEEPER_POLICY")
        return gate

    def limit(
        self, limit: LimitSource, key: Key = "ip", name: str | None = None, **options: Unpack[RuleOptions]
    ) -> Callable[[V], V]:
        """Limits one view, or the views of a blueprint together; per client address unless `key` is given.

        Goes under `@app.route`. `key` is an expression of identities ("user | ip") or a callable that is given the request. Views
        with limits of one `name` share them. All other fields of a rule are options (cost=, message=, on_refusal=, …).
        """

        if callable(limit):
            check_choice(limit)

        def decorate(*views: V, **arguments: object) -> V:
            if len(views) != 1 or arguments:  # Flask calls it as a view
                raise ConfigurationError(f"expected a view under @limit, got none; {PARENTHESES}")
            view = views[0]
            if isinstance(view, Blueprint):
                own = name or rule_name(f"blueprint {view.name}", view.import_name)
                shared = HandlerLimit(own, limit, key, options)
                setattr(view, DEPTH, 1)
                # Flask raises an error where the blueprint was registered before.
                view.before_request(lambda: evaluate(gates_of(current_app).gate_for(shared, shared.name, request)))
                functions = view.before_request_funcs[None]
                functions.insert(0, functions.pop())
                return view
            own = name or handler_name(view)
            return limit_view(view, HandlerLimit(own, limit, key, options, name is None and shares_name(view)))

        return decorate

    def exempt(self, view: V) -> V:
        """Exempts a view, or all views of a blueprint, from the policy. Limits of its own stay."""
        setattr(view, EXEMPT, True)
        return view


def gates_of(app: Flask) -> HandlerGates:
    """The gates that `init_app` made for an application."""
    gates: HandlerGates | None = app.extensions.get("limitkeeper")
    if gates is None:
        raise ConfigurationError(f"{app.name!r} has no RateLimit: call limits.init_app(app) where the application is made")
    return gates


def limit_view(view: View, limit: HandlerLimit) -> View:
    """A view that evaluates its limit first. Coroutines too: Flask runs each in its request's thread, which may block."""

    @wraps(view)
    def limited(*args: object, **named: object) -> object:
        response = evaluate(gates_of(current_app).gate_for(limit, limit.name_at(request.endpoint), request))
        return current_app.ensure_sync(view)(*args, **named) if response is None else response

    count_limit(limited, view)
    return cast(View, limited)


class FlaskRequestContext(WsgiRequestContext):
    """The context of a request that Flask has routed; `raw` is the request, which may have read its body already."""

    __slots__ = ()

    def route(self) -> str | None:
        return None if self.raw.url_rule is None else str(self.raw.url_rule.rule)

    def body(self) -> bytes | None:
        if self.raw.content_length is None or self.raw.content_length > MAX_BODY:
            unannounced = self.environ.get("wsgi.input_terminated") or "HTTP_TRANSFER_ENCODING" in self.environ  # HTTP/2 too
            return None if self.raw.content_length or unannounced else b""
        found: bytes = self.raw.get_data()
        return found or urlencode(list(self.raw.form.items(multi=True))).encode()  # a form that was parsed from the stream


def evaluate_policy(gate: Gate) -> ResponseReturnValue | None:
    """Evaluates the policy as a before_request function."""
    return None if request.endpoint in exempt_endpoints(current_app) else evaluate(gate)


def evaluate_default(gates: HandlerGates, limit: HandlerLimit) -> ResponseReturnValue | None:
    """Evaluates the default limit as a before_request function, unless the view or its blueprint has a limit of its own."""
    endpoint = request.endpoint
    if endpoint is None or is_static(current_app, endpoint) or endpoint in exempt_endpoints(current_app):
        return None
    own = (current_app.view_functions.get(endpoint), *(current_app.blueprints.get(name) for name in request.blueprints))
    if any(has_own_limit(one, request.method) for one in own):
        return None
    return evaluate(gates.gate_for(limit, limit.name_at(endpoint), request))


def evaluate(gate: Gate) -> ResponseReturnValue | None:
    """Evaluates the current request. None: allowed. Returns the response of a degrade handler, or raises the refusal."""
    environ = request.environ
    if gate in environ.get(EVALUATED, ()):
        g.limitkeeper = environ[EVALUATION]
        return None
    context = FlaskRequestContext(environ)
    context.raw = request._get_current_object()  # type: ignore[attr-defined]
    context.captured = {name: str(value) for name, value in (request.view_args or {}).items()}
    evaluation = detach_request(gate.ask(context), "HTTP_ORIGIN" in environ)
    g.limitkeeper = environ[EVALUATION] = evaluation
    if EVALUATIONS not in environ:
        environ[EVALUATIONS] = []
        after_this_request(finish_response)
    environ[EVALUATIONS].append(evaluation)
    if evaluation.wait_us > 0 and has_disconnected(environ):
        evaluation.settle(UNKNOWN)
        return "", GONE
    if evaluation.allowed:
        if evaluation.needs_settlement:
            settle_later(evaluation, environ)
        return None
    if evaluation.degrade is not None:
        mark_degraded(environ, evaluation)
        response: ResponseReturnValue = current_app.ensure_sync(evaluation.degrade)()
        return response
    raise refusal_exception(evaluation)


def mark_degraded(environ: Environ, refusing: Evaluation) -> None:
    """For a degrade handler, which may run the application again: this limit, and those that have admitted the request, are not
    evaluated again."""
    found = [one.gate for one in environ.get(EVALUATIONS, ()) if one.allowed or one is refusing]
    environ[DEGRADED], environ[EVALUATED] = True, {*environ.get(EVALUATED, ()), *found}


def settle_later(evaluation: Evaluation, environ: Environ) -> None:
    """Adds an evaluation to those that the request settles together: a response that one of them refuses costs none its size."""
    found: Settlement | None = environ.get(SETTLEMENT)
    if found is None:
        found = environ[SETTLEMENT] = Settlement((), head=request.method == "HEAD")
        environ["wsgi.input"] = WatchedInput(environ["wsgi.input"], environ.get("CONTENT_LENGTH"), found)
    found.evaluations = (*found.evaluations, evaluation)


def is_static(app: Flask, endpoint: str) -> bool:
    """Whether an endpoint sends the static files of an application or a blueprint; other views may have that name."""
    owner, _, name = endpoint.rpartition(".")
    return name == "static" and bool((app.blueprints[owner] if owner else app).has_static_folder)


def finish_response(response: Response) -> Response:
    """Adds the fields to the response, counts it, and settles, now or at the end of its body. To a copy: a view may return one
    response to several requests."""
    response, environ = copy(response), request.environ
    evaluations: list[Evaluation] = environ[EVALUATIONS]
    first: Evaluation | None = environ.get(POLICY_EVALUATION)
    settlement: Settlement | None = environ.get(SETTLEMENT)
    for evaluation in evaluations if COUNTED not in environ else ():  # once: this is called again where an after_request fails
        if evaluation.allowed:
            evaluation.count_response(response.status_code)
    environ[COUNTED] = True
    if settlement is not None:
        settlement.status, settlement.counted = response.status_code, True
        refusing = settle(settlement, response)
        if refusing is not None:
            close = response.close
            response = current_app.make_response(current_app.handle_user_exception(refusal_exception(refusing)))
            response.call_on_close(close)  # of the one that is not sent: its file, its stream
    fields = combined_fields(evaluations if first is None else [first, *evaluations])
    response.headers = Headers(merge(list(response.headers), fields))
    return response


def settle(settlement: Settlement, response: Response) -> Evaluation | None:
    """Settles at once a body in one piece, and a file, which the server may send itself; a stream at its end. Returns the
    evaluation that refuses the size, where that is known now."""
    size: int | None = response.content_length
    if response.status_code in (204, 304):  # whatever length they announce
        size = 0
    elif not response.is_streamed:
        size = sum(map(byte_length, response.iter_encoded()))
    refusing = settlement.afford(size) if size is not None else None
    if refusing is None and response.is_streamed and (not response.direct_passthrough or size is None or settlement.holds_place):
        response.response = SettlingBody(cast(Iterable[bytes], response.response), settlement)
        return None
    settlement.size = size or 0
    settlement.settle()
    return refusing


def settle_failed(error: BaseException | None) -> None:
    """At teardown: settles what has no response, since the view raised, or an after_request function, which drops the body."""
    settlement: Settlement | None = request.environ.pop(SETTLEMENT, None)
    if settlement is not None and (error is not None or not settlement.counted):
        settlement.size = NOT_SENT  # of another response
        settlement.settle(failed=isinstance(error, Exception))


def prepare() -> None:
    """A before_request function: checks the views at the first request."""
    exempt_endpoints(current_app)


def exempt_endpoints(app: Flask) -> frozenset[str]:
    """The exempt endpoints, looked up at the first request: Flask adds no views later. A blueprint's include nested ones."""
    gates = gates_of(app)
    if gates.exempt is None:
        check_order(app.view_functions.values())
        blueprints = tuple([f"{name}." for name, one in app.blueprints.items() if getattr(one, EXEMPT, False)])
        gates.exempt = frozenset(
            endpoint
            for endpoint, view in app.view_functions.items()
            if getattr(view, EXEMPT, False) or endpoint.startswith(blueprints)
        )
    return gates.exempt


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
    evaluation.declined = True
    return exception_class(evaluation.refusal.status)(evaluation)


# Around the application -------------------------------------------------------------------------------------------


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
            g.limitkeeper = environ[EVALUATION] = evaluation  # an evaluation within may have taken its place
            mark_degraded(environ, evaluation)
            try:
                return self.refusal_response(evaluation)(environ, HeaderStartResponse(start_response, evaluation))
            finally:
                preserve_contexts(environ)

    def refusal_response(self, evaluation: Evaluation) -> FlaskResponse:
        app = self.flask
        try:
            try:
                if evaluation.degrade is None:
                    raise refusal_exception(evaluation)  # Flask's traps raise the exception again that is being handled
                return app.finalize_request(app.ensure_sync(evaluation.degrade)())
            except HTTPException as error:  # of a degrade handler too
                return app.finalize_request(app.handle_user_exception(error))
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
