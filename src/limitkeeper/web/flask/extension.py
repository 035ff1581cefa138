"""Flask behind a policy, and limits of single views.

    limits = RateLimit(app, policy="limitkeeper.yaml")     # or init_app in a factory; LIMITKEEPER_POLICY, LIMITKEEPER_STORE
    in app.config

    @app.post("/checkout")
    @limits.limit("5/s burst 10")
    def checkout(): ...

Order. The policy is asked around `app.wsgi_app`: before the session is opened, before any before_request function, before the
view. So a refusal takes no connection from anybody's pool. It is rendered in a request context with an empty session, so that
`errorhandler(429)`, after_request functions (CORS) and teardown functions run for it as for any other answer. A view's own limits
are asked when Flask calls the view: after before_request. `early=False` asks the policy there too, in the place of `init_app`
among the before_request functions, for identities that need `flask.session` or `current_user`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from flask import Blueprint, Flask, current_app

from ...errors import ConfigurationError
from ...policy.gate import Gate, gate_of
from ...policy.model import Policy
from ...stores import Store
from ...stores.urls import store_from_url
from ..view_identity import Places, has_siblings
from ..view_limit import EXEMPT, Key, ViewLimit, ViewLimits, fitting, name_of
from .request_hooks import asked, asked_unless_exempt, limited, settle_what_is_left, site_of
from .wsgi_middleware import FlaskMiddleware, hand_over

V = TypeVar("V", bound=Callable[..., Any] | Blueprint)


class RateLimit:
    """The extension. `policy` is a path, a `Policy` or a `Gate`; without one only views with limits of their own are limited."""

    def __init__(
        self,
        app: Flask | None = None,
        policy: Policy | Gate | str | Path | None = None,
        *,
        store: Store | str | None = None,
        handlers: Mapping[str, Any] | None = None,
        early: bool = True,
    ) -> None:
        self._policy = policy
        self._store = store
        self._handlers = handlers
        self._early = early
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask, policy: Policy | Gate | str | Path | None = None) -> None:
        """Puts the policy in front of an application. Once: twice would count every request twice."""
        if "limitkeeper" in app.extensions:
            raise ConfigurationError(f"{app.name!r} has a RateLimit already: a second one would count every request twice")
        site = app.extensions["limitkeeper"] = self._site(app, policy)
        if site.gate is not None and self._early:
            app.wsgi_app = FlaskMiddleware(app, app.wsgi_app, site.gate)  # type: ignore[method-assign]
            app.before_request_funcs.setdefault(None, []).insert(0, hand_over)
        elif site.gate is not None:
            app.before_request(partial(asked_unless_exempt, site.gate))
        app.teardown_request(settle_what_is_left)

    def _site(self, app: Flask, policy: Policy | Gate | str | Path | None) -> ViewLimits:
        said = next((one for one in (policy, self._policy, app.config.get("LIMITKEEPER_POLICY")) if one is not None), None)
        store: Any = self._store if self._store is not None else app.config.get("LIMITKEEPER_STORE")
        store = store_from_url(store) if isinstance(store, str) else store
        if isinstance(said, (str, Path)) and (Path(app.root_path) / said).exists():
            said = Path(app.root_path) / said
        return ViewLimits(None if said is None else gate_of(said, store=store, handlers=self._handlers), store, self._handlers)

    @property
    def gate(self) -> Gate:
        """The gate of the current application's policy: `limits.gate.snapshot()`."""
        gate = site_of(current_app).gate
        if gate is None:
            raise ConfigurationError("this application has no policy: give RateLimit policy=, or set LIMITKEEPER_POLICY")
        return gate

    def limit(self, limit: Any, key: Key = "ip", name: str | None = None, **words: Any) -> Callable[[V], V]:
        """Limits one view, per client unless `key` says otherwise; a blueprint's views together.

        Goes under `@app.route`. `key` is a policy's words ("user | ip") or a callable given the request. Views that are limited
        under one `name` share that limit. Every other word of a rule may follow (cost=, message=, on_refusal=, …).
        """

        def decorate(view: V) -> V:
            if isinstance(view, Blueprint):
                route = ViewLimit(name or fitting(f"blueprint {view.import_name}.{view.name}"), limit, key, words)
                view.before_request_funcs.setdefault(None, []).insert(0, lambda: asked(site_of(current_app).gate_for(route)))
                return view
            places = Places(name or name_of(view), limit, key, words, name is None and has_siblings(view))
            return limited(view, places)  # type: ignore[return-value]

        return decorate

    def exempt(self, view: V) -> V:
        """Takes a view, or all of a blueprint's, out of the policy. Limits of its own stay."""
        setattr(view, EXEMPT, True)
        return view
