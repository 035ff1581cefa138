"""The routes of the HTTP port: JSON to calls of the Application, and decisions to JSON.

    POST /v1/check     {"limit", "key", "cost", "tier"} -> 200 or 429; {"checks": [...]} -> 200; {"request": {...}} -> 200 or 429
    POST /v1/reserve /v1/settle /v1/refund /v1/reset;  GET /v1/limits  /v1/limits/{limit}/{key}  /v1/openapi.json
    any  /auth         X-Forwarded-Method, -Uri, -Host name the request: 200, or 429 with all fields; ?deny=403 for nginx
    any  /auth/path/…  the request's own method and path, for gateways that append it (Envoy); 429 instead of 5xx
    GET  /healthz /readyz

Pages of other sites can send requests to a loopback port, and browsers add Origin to them: /v1 refuses requests with an Origin.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from functools import lru_cache, partial
from hmac import compare_digest
from ipaddress import ip_address
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from ..decision import Decision
from ..errors import StoreError
from ..policy.calls_by_rule_name import RuleHit
from ..policy.evaluation import Evaluation
from ..policy.identity.paths import application_path
from ..policy.request_context import RequestContext
from ..stores.guarded.breaker import CLOSED, HALF_OPEN, OPEN
from ..web.headers import AsgiRequestContext, fields
from ..web.refusal_body import body as refusal_body
from .access import bearer
from .app import (
    INVALID,
    INVALID_TOKEN,
    UNKNOWN_LIMIT,
    Application,
    JoinedLines,
    RequestError,
    Reserved,
    decision_of,
    request_context,
)
from .connections import log
from .openapi import document

Headers = list[tuple[bytes, bytes]]
#: Status, body, and further header fields; a content-type, where it is not JSON, is the last of them.
Response = tuple[int, bytes, Headers]
Later = Coroutine[Any, Any, Response]
Fields = dict[str, Any]
NO_FIELDS: Headers = []
STATUS = {INVALID: 400, UNKNOWN_LIMIT: 404, INVALID_TOKEN: 404}
#: What /readyz says of the store, by the state of its breaker.
STORE_STATES = {CLOSED: "ok", OPEN: "failing", HALF_OPEN: "probing"}
HIT_FIELDS = ("limit", "key", "cost", "tier")
EXAMPLE = '{"limit": "checkout", "key": "user:42"}'
DECISION = b'{"allowed":%b,"limit":%d,"remaining":%d,"retry_after":%b,"reset_after":%.6f}'
#: In half the time of json.loads, which looks for encodings and white space.
decode_json = json.JSONDecoder().raw_decode
UNLIMITED = b'{"allowed":true,"limit":null,"remaining":null,"retry_after":0.0,"reset_after":0.0}'


class Request(NamedTuple):
    """A complete request. `headers` have names in lower case; `old`: HTTP/1.0."""

    method: bytes
    url: bytes
    headers: Headers
    body: bytes
    keep_alive: bool
    old: bool
    peer: Any

    def header(self, name: bytes) -> bytes | None:
        return next((value for one, value in self.headers if one == name), None)


class GatewayRequest(JoinedLines, AsgiRequestContext):
    """The request that a gateway asks about. Its body stays there, whatever its headers announce."""

    __slots__ = ()

    def may_have_body(self) -> bool:
        return False

    def body(self) -> bytes | None:
        return b""


class Router:
    """The routes over an Application. `token`: what clients must present, None: nothing. `any_host`: a token is checked."""

    def __init__(self, app: Application, token: str | None = None) -> None:
        self.app = app
        self.token = None if token is None else token.encode()
        self.any_host = token is not None
        self._posts: dict[bytes, Callable[[Fields], Response | Later]] = {
            b"/v1/check": self._check,
            b"/v1/reserve": self._reserve,
            b"/v1/settle": self._settle,
            b"/v1/refund": self._refund,
            b"/v1/reset": self._reset,
        }
        self._gets: dict[bytes, Callable[[], Response]] = {
            b"/healthz": lambda: ok({"status": "ok"}),
            b"/readyz": self._ready,
            b"/v1/openapi.json": lambda: (200, openapi_json(self.app.version, self.app.ttl_us / 1e6), NO_FIELDS),
            b"/v1/limits": lambda: ok({"policy": self.app.gate.policy.name, "limits": self.app.limits()}),
        }

    def respond(self, request: Request) -> Response | Later:
        """A Response, or a coroutine of one."""
        path = request.url
        post = self._posts.get(path)
        if post is None and b"?" in path:
            path = path.partition(b"?")[0]
            post = self._posts.get(path)
        if post is not None:
            refused = self._refuse_access(request)
            if refused is not None:
                return refused
            return post(json_object(request.body)) if request.method == b"POST" else not_allowed("POST")
        if path == b"/auth" or path.startswith(b"/auth/path/"):
            return self._auth(request, path)
        inspected = path.startswith(b"/v1/limits")
        get = self._gets.get(path)
        if get is None and not path.startswith(b"/v1/limits/"):
            return error_response(404, "not_found", f"there is no {path[:80].decode('latin-1')!r}; see /v1/openapi.json")
        refused = self._refuse_access(request) or self._refuse_name(request) if inspected else None
        if refused is not None:
            return refused
        if request.method not in (b"GET", b"HEAD"):
            return not_allowed("GET, HEAD")
        return self._inspect(path) if get is None else get()

    def _refuse_access(self, request: Request) -> Response | None:
        """Refuses pages of other sites, and clients without the token."""
        if request.header(b"origin") is not None:
            return error_response(403, "cross_origin", "requests of web pages (Origin) are not answered here")
        return None if self.token is None else self._refuse_token(bearer(request.headers))

    def _refuse_name(self, request: Request) -> Response | None:
        """Refuses, without a token, a name that an attacker may have let resolve to this host (DNS rebinding): a GET of a page's
        own site has no Origin."""
        if self.any_host or is_own_name((request.header(b"host") or b"localhost").decode("latin-1")):
            return None
        return error_response(403, "cross_origin", "expected an IP address or localhost as Host, or a token of the service")

    def _refuse_token(self, given: bytes | None) -> Response | None:
        if self.token is None or (given is not None and compare_digest(given, self.token)):
            return None
        message = "expected the service's token: Authorization: Bearer …, or X-Limitkeeper-Token for /auth"
        return error_response(401, "unauthorized", message, [(b"www-authenticate", b"Bearer")])

    # Checks ----------------------------------------------------------------------------------------------------

    def _check(self, asked: Fields) -> Response | Later:
        if "checks" in asked:
            return self._check_many(asked)
        if "request" in asked:
            only(asked, ("request",))
            return self._match(request_context(asked["request"]), shown_match)
        hit = self._hit(asked)
        evaluation = self.app.gate.hit_rule_nowait(*hit)
        if evaluation is not None:
            return shown(evaluation)
        return self.app.perform(self.app.hit_many([hit]), lambda found: shown(found[0]))  # type: ignore[no-any-return]

    def _check_many(self, asked: Fields) -> Response | Later:
        only(asked, ("checks",))
        if not isinstance(asked["checks"], list):
            raise RequestError(INVALID, f"checks: expected a list of objects such as {EXAMPLE}")
        hits = []
        for place, one in enumerate(asked["checks"]):
            try:
                hits.append(self._hit(one))
            except RequestError as error:
                raise RequestError(error.kind, f"checks[{place}]: {error}") from None
        return self.app.perform(self.app.hit_many(hits), shown_many)  # type: ignore[no-any-return]

    def _hit(self, asked: Fields) -> RuleHit:
        if type(asked) is not dict:
            raise RequestError(INVALID, f"expected an object such as {EXAMPLE}")
        hit = self.app.checked_hit(asked.get("limit"), asked.get("key"), whole(asked.get("cost", 1)), asked.get("tier"))
        if len(asked) > 2:
            only(asked, HIT_FIELDS)
        return hit

    def _match(self, context: RequestContext, show: Callable[[Evaluation], Response]) -> Response | Later:
        evaluation = self.app.match_nowait(context)
        return self._match_later(context, show) if evaluation is None else show(evaluation)

    async def _match_later(self, context: RequestContext, show: Callable[[Evaluation], Response]) -> Response:
        task = asyncio.current_task()
        self.app.leaving.add(task)
        try:
            return show(await self.app.match(context))
        finally:
            self.app.leaving.discard(task)

    # Reservations, operating -----------------------------------------------------------------------------------

    def _reserve(self, asked: Fields) -> Response | Later:
        wait = asked.pop("max_wait", 0)
        if isinstance(wait, bool) or not isinstance(wait, (int, float)) or not 0 <= wait < 1e9:
            raise RequestError(INVALID, f"max_wait: expected a number of seconds ≥ 0, got {wait!r:.80}")
        return self.app.perform(self.app.reserve(self._hit(asked), round(wait * 1e6)), shown_reservation)  # type: ignore[no-any-return]

    def _settle(self, asked: Fields) -> Response | Later:
        only(asked, ("token", "used"))
        used = self.app.checked_cost(whole(asked.get("used")), "used")
        return self.app.perform(self.app.settle(token(asked), used), lambda done: ok({"settled": done}))  # type: ignore[no-any-return]

    def _refund(self, asked: Fields) -> Response | Later:
        if "token" in asked:
            only(asked, ("token",))
            plan = self.app.cancel(token(asked))
        else:
            plan = self.app.refund(self._hit(asked))
        return self.app.perform(plan, lambda done: ok({"refunded": done}))  # type: ignore[no-any-return]

    def _reset(self, asked: Fields) -> Response | Later:
        only(asked, ("limit", "key"))
        plan = self.app.reset(asked.get("limit"), asked.get("key"))
        return self.app.perform(plan, lambda _: ok({"reset": True}))  # type: ignore[no-any-return]

    def _inspect(self, path: bytes) -> Response | Later:
        limit, slash, key = path.decode("latin-1").removeprefix("/v1/limits/").partition("/")
        rule, limit, key = self.app.rule(unquote(limit)), unquote(limit), unquote(key)
        if not slash:
            return ok(next(one for one in self.app.limits() if one["name"] == rule.name))
        return self.app.perform(self.app.inspect(self.app.checked_hit(limit, key)), partial(shown_state, limit, key))  # type: ignore[no-any-return]

    # Gateways, readiness ---------------------------------------------------------------------------------------

    def _auth(self, request: Request, path: bytes) -> Response | Later:
        """A gateway's question. Its headers are those of the client's request, so the token has a header of its own."""
        refused = self._refuse_token(request.header(b"x-limitkeeper-token"))
        if refused is not None:
            return refused
        method, uri = request.method, request.url.removeprefix(b"/auth/path")
        headers = [field for field in request.headers if field[1]]  # Caddy sends empty fields in the place of missing ones
        deny: Callable[[int], int] = below_500
        if path == b"/auth":
            deny = (lambda _: 403) if b"deny=403" in request.url.partition(b"?")[2].split(b"&") else int
            uri, method = request.header(b"x-forwarded-uri") or b"", request.header(b"x-forwarded-method") or b"GET"
            if not uri:
                raise RequestError(INVALID, "X-Forwarded-Uri is missing: the gateway must name the request's path and query")
            host = request.header(b"x-forwarded-host")
            if host is not None:
                headers = [(b"host", host), *[field for field in headers if field[0] != b"host"]]
        scope: Fields = {"method": method.decode("latin-1").upper(), "headers": headers, "client": request.peer}
        asked, _, scope["query_string"] = uri.partition(b"?")
        scope["path"] = application_path(asked)
        return self._match(GatewayRequest(scope), lambda evaluation: auth_response(evaluation, request, deny))

    def _ready(self) -> Response:
        if self.app.draining:
            return 503, b'{"status":"draining"}', NO_FIELDS
        guard = self.app.gate.snapshot().store
        state = "ok" if guard is None else STORE_STATES[guard.state]
        return ok({"status": "ready", "store": state, "policy": self.app.gate.policy.name})


def is_own_name(host: str) -> bool:
    """Whether a Host field is an IP address or localhost."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or bool(ip_address(name))
    except ValueError:
        return False


def auth_response(evaluation: Evaluation, request: Request, deny: Callable[[int], int]) -> Response:
    """`deny` gives the status that the gateway understands as that refusal; X-Limitkeeper-Status has the refusal's own."""
    evaluation.origin = bool(request.header(b"origin"))
    added: Headers = fields(evaluation)
    if evaluation.refusal is None:
        return 200, b'{"allowed":true}', added
    kind, content = refusal_body(evaluation, (request.header(b"accept") or b"").decode("latin-1"))
    status = evaluation.refusal.status
    return deny(status), content, [*added, (b"x-limitkeeper-status", b"%d" % status), (b"content-type", kind)]


def below_500(status: int) -> int:
    """For Envoy, which takes 5xx for a failure of the service, and then may let the request pass."""
    return 429 if status >= 500 else status


# JSON --------------------------------------------------------------------------------------------------------------


def json_object(body: bytes) -> Fields:
    if not body:
        raise RequestError(INVALID, f"the body is empty; expected an object such as {EXAMPLE}")
    try:
        text = body.decode().strip()
        found, end = decode_json(text)
    except (ValueError, RecursionError):
        end = -1
    if end < 0 or end != len(text):
        raise RequestError(INVALID, f"the body is not JSON; expected an object such as {EXAMPLE}") from None
    if type(found) is not dict:
        raise RequestError(INVALID, f"expected a JSON object, got {type(found).__name__}")
    return found


def only(asked: Fields, known: tuple[str, ...]) -> None:
    for name in asked:
        if name not in known:
            raise RequestError(INVALID, f"unknown field {name!r:.80}; expected {', '.join(known)}")


def whole(value: object) -> object:
    """JSON has one kind of number: 2.0 is the integer 2."""
    return int(value) if type(value) is float and value.is_integer() else value


def token(asked: Fields) -> str:
    value = asked.get("token")
    if not isinstance(value, str):
        raise RequestError(INVALID, f"token: expected a string, got {value!r:.80}")
    return value


def decision_json(decision: Decision) -> bytes:
    """A decision; never is null, and so are limit and remaining where nothing limits."""
    if decision.limit < 0:
        return UNLIMITED
    retry_us = decision.retry_us
    retry = b"0.0" if not retry_us else b"null" if retry_us < 0 else b"%.6f" % (retry_us / 1e6)
    return DECISION % (b"true" if decision.allowed else b"false", decision.limit, decision.remaining, retry, decision.reset_after)


def shown(evaluation: Evaluation) -> Response:
    """200; 429 for a limit, 503 where the store failed and the rule fails closed, or the status that the rule names."""
    decision = decision_of(evaluation)
    if evaluation.refusal is None:
        return 200, decision_json(decision), NO_FIELDS
    retry_after = evaluation.refusal.retry_after
    retry = [] if retry_after is None else [(b"retry-after", b"%d" % max(1, retry_after))]
    return evaluation.refusal.status, decision_json(decision), retry


def shown_many(evaluations: list[Evaluation]) -> Response:
    return 200, b'{"decisions":[%b]}' % b",".join([decision_json(decision_of(one)) for one in evaluations]), NO_FIELDS


def shown_match(evaluation: Evaluation) -> Response:
    """A matched request: the joined decision, and each limit that was asked."""
    status, content, added = shown(evaluation)
    decision = evaluation.decision
    parts = [] if decision is None else zip(evaluation.entries, decision.decisions, strict=True)
    limits = [b'{"name":%b,%b' % (json.dumps(entry.label).encode(), decision_json(part)[1:]) for entry, part in parts]
    return status, content[:-1] + b',"limits":[%b]}' % b",".join(limits), added


def shown_reservation(reserved: Reserved) -> Response:
    status, content, added = shown(reserved.evaluation)
    if reserved.token:
        wait = decision_of(reserved.evaluation).wait
        content = content[:-1] + b',"wait":%.6f,"token":"%b"}' % (wait, reserved.token.encode())
    return status, content, added


def shown_state(limit: str, key: str, found: list[tuple[Any, Decision]]) -> Response:
    limits = []
    for claim, one in found:
        state = {"capacity": one.limit, "remaining": one.remaining, "reset_after": one.reset_after}
        limits.append({"name": claim.limit.name, "limit": str(claim.limit.limit), **state})
    return ok({"limit": limit, "key": key, "limits": limits})


def ok(value: object) -> Response:
    return 200, json.dumps(value).encode(), NO_FIELDS


def error_response(status: int, code: str, message: str, more: Headers = NO_FIELDS) -> Response:
    return status, json.dumps({"error": {"code": code, "message": message}}).encode(), more


def not_allowed(methods: str) -> Response:
    return error_response(405, "method_not_allowed", f"use {methods}", [(b"allow", methods.encode())])


def failure(error: Exception) -> Response:
    """The response to a request that raised."""
    if isinstance(error, RequestError):
        return error_response(STATUS.get(error.kind, 403), error.kind, str(error))
    if isinstance(error, StoreError):
        return error_response(503, "store_unavailable", "the store could not be asked; try again later", [(b"retry-after", b"1")])
    log.error("a request failed", exc_info=error)
    return error_response(500, "internal", "the service failed to answer this request")


@lru_cache(1)
def openapi_json(version: str, max_wait: float) -> bytes:
    return json.dumps(document(version, max_wait)).encode()
