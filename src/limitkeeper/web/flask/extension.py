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
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar, Unpack

from flask import Blueprint, Flask, current_app

from ...errors import ConfigurationError
from ...policy.gate import Gate, gate_of
from ...policy.model import Policy
from ...stores import Store
from ...stores.urls import store_from_url
from ..handler_limit import (
    EXEMPT,
    Handler,
    HandlerGates,
    HandlerLimit,
    Key,
    LimitSpec,
    RuleOptions,
    handler_name,
    rule_name,
    shares_name,
)
from .request_hooks import evaluate, evaluate_policy, gates_of, limit_view, settle_failed
from .wsgi_middleware import FlaskMiddleware, publish_evaluation

V = TypeVar("V", bound=Handler | Blueprint)
PolicySource = Policy | Gate | str | Path


class RateLimit:
    """The extension. `policy` is a path, a `Policy` or a `Gate`; without one only views with limits of their own are limited."""

    def __init__(
        self,
        app: Flask | None = None,
        policy: PolicySource | None = None,
        *,
        store: Store | str | None = None,
        handlers: Mapping[str, Handler] | None = None,
        early: bool = True,
    ) -> None:
        self._policy = policy
        self._store = store
        self._handlers = handlers
        self._early = early
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask, policy: PolicySource | None = None) -> None:
        """Puts the policy in front of an application. Once: twice would count every request twice."""
        if "limitkeeper" in app.extensions:
            raise ConfigurationError(f"{app.name!r} already has a RateLimit: a second one would count every request twice")
        gates = app.extensions["limitkeeper"] = self._make_gates(app, policy)
        if gates.gate is not None and self._early:
            app.wsgi_app = FlaskMiddleware(app, app.wsgi_app, gates.gate)  # type: ignore[method-assign]
            app.before_request_funcs.setdefault(None, []).insert(0, publish_evaluation)
        elif gates.gate is not None:
            app.before_request(partial(evaluate_policy, gates.gate))
        app.teardown_request(settle_failed)

    def _make_gates(self, app: Flask, policy: PolicySource | None) -> HandlerGates:
        sources = (policy, self._policy, app.config.get("LIMITKEEPER_POLICY"))
        source = next((one for one in sources if one is not None), None)
        store = self._store if self._store is not None else app.config.get("LIMITKEEPER_STORE")
        if isinstance(store, str):
            store = store_from_url(store)
        if isinstance(source, (str, Path)) and (Path(app.root_path) / source).exists():
            source = Path(app.root_path) / source
        gate = None if source is None else gate_of(source, store=store, handlers=self._handlers)
        return HandlerGates(gate, store, self._handlers)

    @property
    def gate(self) -> Gate:
        """The gate of the current application's policy: `limits.gate.snapshot()`."""
        gate = gates_of(current_app).gate
        if gate is None:
            raise ConfigurationError("this application has no policy: pass policy= to RateLimit, or set LIMITKEEPER_POLICY")
        return gate

    def limit(
        self, limit: LimitSpec, key: Key = "ip", name: str | None = None, **options: Unpack[RuleOptions]
    ) -> Callable[[V], V]:
        """Limits one view, or the views of a blueprint together; per client address unless `key` is given.

        Goes under `@app.route`. `key` is an expression of identities ("user | ip") or a callable that is given the request. Views
        with limits of one `name` share them. All other fields of a rule are options (cost=, message=, on_refusal=, …).
        """

        def decorate(view: V) -> V:
            if isinstance(view, Blueprint):
                own = name or rule_name(f"blueprint {view.import_name}.{view.name}")
                shared = HandlerLimit(own, limit, key, options)
                view.before_request_funcs.setdefault(None, []).insert(
                    0, lambda: evaluate(gates_of(current_app).gate_for(shared, shared.name))
                )
                return view
            own = name or handler_name(view)
            return limit_view(view, HandlerLimit(own, limit, key, options, name is None and shares_name(view)))

        return decorate

    def exempt(self, view: V) -> V:
        """Exempts a view, or all views of a blueprint, from the policy. Limits of its own stay."""
        setattr(view, EXEMPT, True)
        return view
