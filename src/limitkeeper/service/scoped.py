"""The HTTP routes and Redis commands of tokens with scopes: for each token a Router, or Commands, over what it may use."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..policy.compiled_rule import CompiledRule
from ..policy.evaluation import Evaluation
from ..policy.request_context import RequestContext
from ..stores.sans_io import Plan
from .access import CHECK, INSPECT, OPERATE, Access, Token, bearer
from .app import FORBIDDEN, Application, RequestError
from .http_routes import Later, Request, Response, Router, error_response
from .reservation_tokens import Charged
from .resp import OK, Arguments, Commands, RespConnection

OPEN_PATHS = (b"/healthz", b"/readyz", b"/v1/openapi.json")
#: Commands that belong to a scope; the others are for every connection.
COMMAND_SCOPES = dict.fromkeys((b"LK.HIT", b"LK.RESERVE", b"LK.SETTLE", b"LK.REFUND", b"CL.THROTTLE"), CHECK)
COMMAND_SCOPES |= {b"LK.PEEK": INSPECT, b"LK.RESET": OPERATE}


class ScopedApplication(Application):
    """The application as a token that is restricted to some limits may use it."""

    def __init__(self, app: Application, token: Token) -> None:
        self.__dict__.update(app.__dict__)
        self._token = token

    def _refuse(self, what: str) -> RequestError:
        return RequestError(
            FORBIDDEN, f"the token {self._token.name!r} is restricted to the limits {', '.join(self._token.limits)}; {what}"
        )

    def allows(self, limit: str) -> bool:
        return self._token.allows(limit)

    def _check(self, limit: str) -> None:
        if not self.allows(limit):
            raise self._refuse(f"it may not use {limit[:80]!r}")

    def rule(self, name: object) -> CompiledRule:
        if isinstance(name, str):
            self._check(name)
        return super().rule(name)

    def charged(self, token: str) -> Charged:
        found = super().charged(token)
        for claim in found.claims[:1]:
            self._check(claim.limit.name.removesuffix(" concurrent"))  # the state of a rule that limits nothing else
        return found

    def hit_nowait(self, limit: str, key: str, cost: int = 1, tier: str | None = None) -> Evaluation | None:
        self.rule(limit)
        return super().hit_nowait(limit, key, cost, tier)

    def match_nowait(self, context: RequestContext) -> Evaluation | None:
        if self._token.limits:
            raise self._refuse("requests are matched by all of them")
        return super().match_nowait(context)

    def throttle(self, key: str, max_burst: int, count: int, period: int, quantity: int = 1) -> Plan[Any]:
        if self._token.limits:
            raise self._refuse("CL.THROTTLE is none of them")
        return super().throttle(key, max_burst, count, period, quantity)

    def limits(self) -> list[dict[str, Any]]:
        return [one for one in super().limits() if self.allows(one["name"])]


class ScopedRouter(Router):
    """Finds the token of a request, and has its Router answer."""

    def __init__(self, app: Application, access: Access) -> None:
        super().__init__(app)
        self._access = access
        self._routers = {token: Router(ScopedApplication(app, token)) for token in access.tokens}
        for router in self._routers.values():
            router.any_host = True

    def respond(self, request: Request) -> Response | Later:
        path = request.url.partition(b"?")[0]
        if path in OPEN_PATHS:
            return super().respond(request)
        gateway = path.startswith(b"/auth")
        token = self._access.find(request.header(b"x-limitkeeper-token") if gateway else bearer(request.headers))
        if token is None:
            message = "expected a token of the service: Authorization: Bearer …, or X-Limitkeeper-Token for /auth"
            return error_response(401, "unauthorized", message, [(b"www-authenticate", b"Bearer")])
        scope = OPERATE if path == b"/v1/reset" else INSPECT if path.startswith(b"/v1/limits") else CHECK
        if scope not in token.scopes:
            return error_response(403, FORBIDDEN, f"the token {token.name!r} lacks the scope {scope!r}")
        return self._routers[token].respond(request)


class ScopedCommands(Commands):
    """The commands of a connection until AUTH or HELLO; then it has those of its token."""

    def __init__(self, app: Application, access: Access) -> None:
        super().__init__(app, "scoped")
        self._access = access
        self._commands = {token: TokenCommands(ScopedApplication(app, token), token, self) for token in access.tokens}

    def restricted(self) -> list[Commands]:
        return list(self._commands.values())

    def _auth(self, connection: RespConnection, arguments: Arguments) -> bytes:
        token = self._access.find(arguments[-1]) if len(arguments) in (2, 3) else None
        if token is None:
            return b"-WRONGPASS invalid username-password pair or user is disabled.\r\n"
        connection.commands, connection.admin = self._commands[token], False
        connection.authenticate()
        return OK


class TokenCommands(Commands):
    """The commands of one token. `scoped` answers another AUTH."""

    def __init__(self, app: Application, token: Token, scoped: ScopedCommands) -> None:
        super().__init__(app)
        self._scoped = scoped
        for name, scope in COMMAND_SCOPES.items():
            if scope not in token.scopes:
                refused = f"-NOPERM the token {token.name!r} lacks the scope {scope!r}\r\n".encode()
                self.table[name] = partial(answer, refused)

    def _auth(self, connection: RespConnection, arguments: Arguments) -> bytes:
        reply: bytes = self._scoped.table[b"AUTH"](connection, arguments)
        return reply


def answer(reply: bytes, connection: RespConnection, arguments: Arguments) -> bytes:
    return reply
