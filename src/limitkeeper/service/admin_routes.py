"""The routes of the admin port: the dashboard, metrics, the policy in force, and what operators do.

    GET  / /assets/…  /healthz /readyz                              the page; no token
    GET  /metrics  /v1/policy  /v1/status  /v1/events  /v1/audit  /v1/limits/{limit}/{key}        scope inspect
    POST /v1/explain  {"line": "POST /checkout user=42"}            which rules apply, and why; nothing is charged: inspect
    POST /v1/try      the same, and charges it                                                    scope operate
    POST /v1/reset {"limit", "key"}   /v1/reload   /v1/load {"limit", "rate", "seconds", "keys"}  scope operate
    GET, PUT, DELETE /v1/overrides/{limit}/{key}    PUT {"limit", "for", "reason"}; GET /v1/overrides lists all

A request of a web page must come from this page: its Origin is this host, and without a token the Host is an IP address or
localhost (otherwise a name that an attacker controls could resolve to it). Keys of clients are shown as hashes; with
`?keys=shown`, which needs the scope operate, as they are.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import lru_cache
from importlib import metadata
from importlib.resources import files
from random import Random
from typing import Any
from urllib.parse import unquote

from ..clock import utc_us
from ..errors import ConfigurationError, InvalidLimit, LimitkeeperError, StoreError
from ..observe.key_hash import KeyHash
from ..observe.snapshot import Snapshot, total
from ..policy.explain import RequestExplanation
from ..policy.model import Policy
from ..policy.one_line_request import parse_request
from ..rate import duration_us
from ..stores.contract import Store
from ..stores.guarded import GuardedStore
from ..stores.guarded.store import GuardStats
from ..stores.leased import LeasedStore
from ..stores.sans_io import arun
from ..stores.store_hash import MemoryHash
from .access import INSPECT, OPERATE, Access, Token, bearer
from .app import FORBIDDEN, INVALID, Application, RequestError
from .audit_log import AuditLog
from .connections import log
from .demo_load import MAX_KEYS, MAX_RATE, MAX_SECONDS, DemoLoad
from .http_routes import (
    Fields,
    Headers,
    Later,
    Request,
    Response,
    Router,
    error_response,
    is_own_name,
    json_object,
    not_allowed,
    ok,
    only,
    shown_match,
    shown_state,
)
from .scoped import ScopedApplication
from .worker_peers import WorkerPeers, decode, encode

#: Asset -> the distribution and file that it comes from; "" is this package.
ASSETS = {
    "dashboard.js": ("", "dashboard.js"),
    "dashboard.css": ("", "dashboard.css"),
    "d3.js": ("XStatic-D3", "d3.js"),
    "rickshaw.js": ("XStatic-Rickshaw", "rickshaw.js"),
    "rickshaw.css": ("XStatic-Rickshaw", "rickshaw.css"),
}
TYPES = {"js": b"text/javascript; charset=utf-8", "css": b"text/css; charset=utf-8", "html": b"text/html; charset=utf-8"}
CONTENT_SOURCES = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    b"frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
SECURE: Headers = [
    (b"content-security-policy", CONTENT_SOURCES),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
]
RELOAD_TIMEOUT = 30.0
Handler = Callable[[Request, Token], Awaitable[Response]]


class AdminRouter:
    """The routes over an Application. Answers are coroutines: some wait for other workers, or for the store."""

    def __init__(self, app: Application, access: Access, folder: str | None) -> None:
        self.app, self.access = app, access
        self.peers = WorkerPeers(folder, self._answer_peer)
        self.load = DemoLoad(app, Random())
        self.streams = 0
        self._own_audit = MemoryHash()  # where the store keeps no hashes
        self._public = Router(app)
        self._hash = KeyHash(app.gate.secret)
        self._routes: dict[tuple[bytes, str], tuple[str, Handler]] = {
            (b"GET", "/metrics"): (INSPECT, self._metrics),
            (b"GET", "/v1/policy"): (INSPECT, self._policy),
            (b"GET", "/v1/status"): (INSPECT, self._status),
            (b"GET", "/v1/audit"): (INSPECT, self._audit_entries),
            (b"GET", "/v1/limits"): (INSPECT, self._inspect),
            (b"GET", "/v1/overrides"): (INSPECT, self._overrides),
            (b"PUT", "/v1/overrides"): (OPERATE, self._put_override),
            (b"DELETE", "/v1/overrides"): (OPERATE, self._delete_override),
            (b"POST", "/v1/explain"): (INSPECT, self._explain),
            (b"POST", "/v1/try"): (OPERATE, self._try),
            (b"POST", "/v1/reset"): (OPERATE, self._reset),
            (b"POST", "/v1/reload"): (OPERATE, self._reload),
            (b"POST", "/v1/load"): (OPERATE, self._load),
        }

    def respond(self, request: Request) -> Response | Later:
        path = request.url.partition(b"?")[0].decode("latin-1")
        method = b"GET" if request.method == b"HEAD" else request.method
        if path in ("/healthz", "/readyz"):
            return self._public.respond(request)
        if path == "/" or path.startswith("/assets/"):
            return page(path.removeprefix("/assets/") if path != "/" else "index.html")
        name = "/".join(path.split("/")[:3])
        found = self._routes.get((method, name))
        if found is None:
            methods = [known.decode() for known, one in self._routes if one == name]
            return not_allowed(", ".join(methods)) if methods else error_response(404, "not_found", f"there is no {path[:80]!r}")
        refused, token = self.refuse(request, found[0])
        return refused if refused is not None else found[1](request, token)  # type: ignore[return-value]

    def refuse(self, request: Request, scope: str) -> tuple[Response | None, Token]:
        """The refusal of a request of another site's page, or without a token of this scope; otherwise None and the token."""
        token = self.access.find(bearer(request.headers))
        host, origin = request.header(b"host") or b"", request.header(b"origin")
        foreign = origin is not None and origin.partition(b"://")[2] != host
        foreign = foreign or (request.header(b"sec-fetch-site") or b"none") not in (b"none", b"same-origin")
        if foreign or (self.access.open and not is_own_name(host.decode("latin-1"))):
            return error_response(403, "cross_origin", "requests of pages of other sites are not answered here"), Token("", b"")
        if token is None:
            message = "expected a token of the service: Authorization: Bearer …"
            return error_response(401, "unauthorized", message, [(b"www-authenticate", b"Bearer")]), Token("", b"")
        if scope not in token.scopes:
            return error_response(403, FORBIDDEN, f"the token {token.name!r} lacks the scope {scope!r}"), token
        return None, token

    # Workers ---------------------------------------------------------------------------------------------------

    async def _answer_peer(self, asked: dict[str, Any]) -> Any:
        """What this worker answers to any worker: its counters, or how a reload went."""
        gate = self.app.gate
        if asked["do"] == "reload":
            try:
                await asyncio.to_thread(lambda: gate.reload(Policy.load(asked["source"])))
            except Exception as error:
                gate.reload_refused(error)
                return str(error)
            return ""
        snapshot = gate.snapshot()
        if asked.get("keys"):
            snapshot = replace(snapshot, offenders=tuple(gate.offenders.look(10, show_keys=True)[1]))
        return encode(snapshot)

    async def snapshots(self, keys: bool = False) -> tuple[list[Snapshot], int]:
        found, workers = await self.peers.ask_all({"do": "snapshot", "keys": keys})
        return [decode(one) for one in found], workers

    # Reading ---------------------------------------------------------------------------------------------------

    async def status(self, token: Token, keys: bool = False) -> dict[str, Any]:
        """What the dashboard shows, of all workers together, and of the limits that the token may see."""
        found, workers = await self.snapshots(keys)
        one, gate = total(found), self.app.gate
        names = ("requests", "allowed", "refused", "unlimited", "exempt", "penalty_box", "reloads", "reloads_refused", "offered")
        rules = {rule["name"]: rule for rule in self.app.limits()}
        counters = ("passed", "refused", "shadow_refused", "near", "waiting", "failed_open", "failed_closed", "failed_local")
        return {
            "at": utc_us() / 1e6,
            "service": self.app.version,
            "workers": {"answered": len(found), "running": workers},
            "policy": {"name": gate.policy.name, "version": gate.policy.version or "-", "source": str(gate.policy.source or "")},
            **{name: getattr(one, name) for name in names},
            "rules": [
                {**rules.get(rule.name, {"name": rule.name}), **{name: getattr(rule, name) for name in counters}}
                for rule in one.rules
                if token.allows(rule.name)
            ],
            "latency": None if one.decisions is None else {"bounds_us": one.decisions.bounds, "counts": one.decisions.counts},
            "offenders": [
                {"rule": each.rule, "key": each.key, "count": each.count - each.error}
                for each in one.offenders
                if token.allows(each.rule)
            ],
            "store": describe_store(gate.store, one.store),
        }

    async def _status(self, request: Request, token: Token) -> Response:
        return ok(await self.status(token, shows_keys(request, token)))

    async def _metrics(self, request: Request, token: Token) -> Response:
        check_unrestricted(token)
        try:
            from ..observe.prometheus import scrape
        except ConfigurationError as error:
            return error_response(501, "not_installed", str(error))
        text, kind = scrape((await self.snapshots())[0])
        return 200, text, [(b"content-type", kind.encode())]

    async def _policy(self, request: Request, token: Token) -> Response:
        policy = self.app.gate.policy
        limits = [one for one in self.app.limits() if token.allows(one["name"])]
        return ok({"name": policy.name, "version": policy.version, "source": str(policy.source or ""), "limits": limits})

    async def _audit_entries(self, request: Request, token: Token) -> Response:
        entries = await asyncio.to_thread(self._audit_log().entries)
        found = [one for one in entries if not token.limits or token.allows(one.get("limit", ""))]
        return ok({"entries": [self._hidden(one, token) for one in found]})

    def _hidden(self, entry: dict[str, Any], token: Token) -> dict[str, Any]:
        """An entry with its key, and the request that an operator tried, hashed for those who may only inspect."""
        secret = () if OPERATE in token.scopes else ("key", "request")
        return {name: self._hash(value) if name in secret else value for name, value in entry.items()}

    async def _inspect(self, request: Request, token: Token) -> Response:
        limit, key = limit_and_key(request)
        self._check_limit(token, limit)
        found = await arun(self.app.inspect(self.app.checked_hit(limit, key)))
        status, body, fields = shown_state(limit, key, found)
        override = await asyncio.to_thread(self.app.gate.operator_overrides.find, limit, key)
        return status, json.dumps({**json.loads(body), "override": override and override.to_dict()}).encode(), fields

    async def _explain(self, request: Request, token: Token) -> Response:
        asked = json_object(request.body)
        only(asked, ("line",))
        return ok(await self._explanation(asked, token))

    async def _explanation(self, asked: Fields, token: Token) -> dict[str, Any]:
        check_unrestricted(token)
        gate, line = self.app.gate, asked.get("line")
        if not isinstance(line, str):
            raise RequestError(INVALID, "line: expected a request such as 'POST /checkout user=42 header:X-Tenant=acme'")
        context = invalid(parse_request, line, gate.policy)
        rules = await asyncio.to_thread(gate.explain, context)
        explanation = RequestExplanation(gate.policy, context, rules)
        return {**explanation.as_dict(), "text": explanation.text()}

    # Changing --------------------------------------------------------------------------------------------------

    def _audit_log(self) -> AuditLog:
        gate = self.app.gate
        return AuditLog(gate.store.open_hash(f"audit:{gate.policy.name}") or self._own_audit, utc_us)

    async def _record(self, token: Token, action: str, **details: Any) -> None:
        try:
            await asyncio.to_thread(lambda: self._audit_log().record(token.name, action, **details))
        except StoreError as error:  # what was done is done
            log.warning("the audit log can't be written (%s): %s by %r", error, action, token.name)

    def _check_limit(self, token: Token, limit: object) -> None:
        ScopedApplication(self.app, token).rule(limit)

    async def _try(self, request: Request, token: Token) -> Response:
        asked = json_object(request.body)
        only(asked, ("line",))
        explained = await self._explanation(asked, token)
        context = parse_request(asked["line"], self.app.gate.policy)
        evaluation = self.app.match_nowait(context)
        status, body, _ = shown_match(await self.app.match(context) if evaluation is None else evaluation)
        await self._record(token, "try", request=asked["line"], status=status)
        return ok({"status": status, "decision": json.loads(body), **explained})

    async def _reset(self, request: Request, token: Token) -> Response:
        asked = json_object(request.body)
        only(asked, ("limit", "key"))
        self._check_limit(token, asked.get("limit"))
        await arun(self.app.reset(asked.get("limit"), asked.get("key")))
        await self._record(token, "reset", limit=asked["limit"], key=asked["key"])
        return ok({"reset": True})

    async def _reload(self, request: Request, token: Token) -> Response:
        check_unrestricted(token)
        source = self.app.gate.policy.source
        if source is None:
            raise RequestError(INVALID, "the policy was not read from a file, so there is nothing to reload")
        try:  # a file with errors is found before any worker is asked
            await asyncio.to_thread(Policy.load, source)
        except LimitkeeperError as error:
            return error_response(400, "invalid_policy", str(error))
        errors, workers = await self.peers.ask_all({"do": "reload", "source": str(source)}, RELOAD_TIMEOUT)
        errors += ["a worker did not answer in time"] * (workers - len(errors))
        version = self.app.gate.policy.version
        await self._record(token, "reload", version=version, errors=sum(map(bool, errors)))
        return ok({"reloaded": not any(errors), "version": version, "errors": [one for one in errors if one]})

    async def _load(self, request: Request, token: Token) -> Response:
        asked = json_object(request.body)
        only(asked, ("limit", "rate", "seconds", "keys"))
        bounds = {"rate": (200, MAX_RATE), "seconds": (10, MAX_SECONDS), "keys": (50, MAX_KEYS)}
        values = {name: asked.get(name, usual) for name, (usual, _) in bounds.items()}
        for name, (_, most) in bounds.items():
            if isinstance(values[name], bool) or not isinstance(values[name], int) or not 0 <= values[name] <= most:
                raise RequestError(INVALID, f"{name}: expected a whole number from 0 to {most}, got {values[name]!r:.40}")
        self._check_limit(token, asked.get("limit"))
        self.load.start(asked["limit"], values["rate"], values["seconds"], max(1, values["keys"]))
        await self._record(token, "load", limit=asked["limit"], **values)
        return ok({"started": values})

    # Overrides -------------------------------------------------------------------------------------------------

    async def _overrides(self, request: Request, token: Token) -> Response:
        overrides = self.app.gate.operator_overrides
        if request.url.partition(b"?")[0] == b"/v1/overrides":
            found = [one.to_dict() for one in await asyncio.to_thread(overrides.all) if token.allows(one.rule)]
            return ok({"overrides": [self._hidden(one, token) for one in found]})
        limit, key = limit_and_key(request)
        self._check_limit(token, limit)
        one = await asyncio.to_thread(overrides.find, limit, key)
        return error_response(404, "not_found", "there is no such override") if one is None else ok(one.to_dict())

    async def _put_override(self, request: Request, token: Token) -> Response:
        limit, key = limit_and_key(request)
        self._check_limit(token, limit)
        asked = json_object(request.body)
        only(asked, ("limit", "for", "reason"))
        text, reason = asked.get("limit"), asked.get("reason", "")
        if not isinstance(text, str) or not isinstance(reason, str):
            raise RequestError(INVALID, 'expected {"limit": "token bucket 5/s burst 10", "for": "1h", "reason": "…"}')
        for_us = None if asked.get("for") is None else invalid(duration_us, asked["for"])
        put = self.app.gate.operator_overrides.put
        made = await asyncio.to_thread(lambda: invalid(put, limit, key, text, for_us=for_us, reason=reason, by=token.name))
        await self._record(token, "override", limit=limit, key=key, to=text, until=made.until_us / 1e6 or None, reason=reason)
        return ok(made.to_dict())

    async def _delete_override(self, request: Request, token: Token) -> Response:
        limit, key = limit_and_key(request)
        if not token.allows(limit):
            self._check_limit(token, limit)
        removed = await asyncio.to_thread(self.app.gate.operator_overrides.remove, limit, key)
        if removed:
            await self._record(token, "remove override", limit=limit, key=key)
        return ok({"removed": removed})


def invalid(call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The result of a call; a mistake in its arguments is the client's."""
    try:
        return call(*arguments, **named)
    except (InvalidLimit, ConfigurationError) as error:
        raise RequestError(INVALID, str(error)) from None


def check_unrestricted(token: Token) -> None:
    if token.limits:
        raise RequestError(
            FORBIDDEN, f"this concerns all limits, and the token {token.name!r} is restricted to {', '.join(token.limits)}"
        )


def limit_and_key(request: Request) -> tuple[str, str]:
    """The last two parts of /v1/overrides/{limit}/{key}; the key may contain slashes."""
    rest = request.url.partition(b"?")[0].decode("latin-1").split("/", 3)[3:]
    limit, slash, key = rest[0].partition("/") if rest else ("", "", "")
    if not slash or not key:
        raise RequestError(
            INVALID, "the path names a limit and a key, as in /v1/overrides/checkout/user:42; encode slashes as %2F"
        )
    return unquote(limit), unquote(key)


def shows_keys(request: Request, token: Token) -> bool:
    asked = b"keys=shown" in request.url.partition(b"?")[2].split(b"&")
    if asked and OPERATE not in token.scopes:
        raise RequestError(FORBIDDEN, f"keys=shown needs the scope {OPERATE!r}")
    return asked


def describe_store(store: Store, guard: GuardStats | None) -> list[dict[str, Any]]:
    """A store and what it wraps, from the outside in: kind, state (the guards' of all workers), keys or leases, failures."""
    found: dict[str, Any] = {"kind": type(store).__name__, "overflow": store.overflow}
    if isinstance(store, GuardedStore) and guard is not None:
        found |= guard._asdict()
    elif isinstance(store, LeasedStore):
        found |= {"leases": len(store), "failures": store.failures}
    elif store.local and hasattr(store, "__len__"):
        found["keys"] = len(store)
    inner = getattr(store, "inner", None)
    return [found, *(describe_store(inner, None) if isinstance(inner, Store) else ())]


@lru_cache(16)
def page(name: str) -> Response:
    """A file of the dashboard: its own, or of an installed package."""
    distribution, file = ASSETS.get(name, ("", "index.html" if name == "index.html" else ""))
    kind: Headers = [*SECURE, (b"content-type", TYPES.get(name.rpartition(".")[2], b"text/plain"))]
    if not file:
        return error_response(404, "not_found", f"there is no {name[:80]!r}")
    if not distribution:
        return 200, files(__package__).joinpath("dashboard", file).read_bytes(), kind
    try:
        place = next(one for one in metadata.files(distribution) or () if one.name == file)
        return 200, place.read_binary(), kind
    except (metadata.PackageNotFoundError, StopIteration, OSError):
        return error_response(404, "not_installed", f"{file} comes with {distribution}; pip install 'limitkeeper[dashboard]'")
