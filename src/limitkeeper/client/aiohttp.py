"""A client middleware for aiohttp (3.12 and newer): `aiohttp.ClientSession(middlewares=[RateLimitMiddleware("10/s")])`.

An Idempotency-Key header marks a request as safe to repeat. A place of a dependency is held until the header of the response has
come; a meter's estimate stays charged. Rejected: a connector (one connection serves several requests) and trace signals, which
cannot repeat a request.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from ..errors import ConfigurationError
from ..stores.sans_io import arun
from .client_limits import CallInfo, ClientLimits, ClientRates, Settlement, client_limits
from .httpx_transport import MAX_KEPT
from .response_fields import relevant_fields

try:
    import aiohttp
    from aiohttp.payload import BytesPayload
except ModuleNotFoundError as error:
    raise ConfigurationError("limitkeeper.client.aiohttp needs aiohttp: pip install 'limitkeeper[aiohttp]'") from error

__all__ = ["RateLimitMiddleware"]


class RateLimitMiddleware:
    """Sends the requests of a session within limits; a session may have others beside it. `aclose` closes limits that were not
    given as an object."""

    def __init__(self, limits: ClientLimits | ClientRates | None = None) -> None:
        self.limits, self._owns_limits = client_limits(limits)

    async def __call__(self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        plan = self.limits.send(request, AiohttpSender(handler), asyncio.get_running_loop())
        response: aiohttp.ClientResponse = await arun(plan)
        return response

    async def aclose(self) -> None:
        if self._owns_limits:
            await self.limits.aclose()


class AiohttpSender:
    """One request with the rest of its middlewares, as the plan sees it."""

    failures: tuple[type[Exception], ...] = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError)
    unsent: tuple[type[Exception], ...] = (aiohttp.ClientConnectorError,)

    def __init__(self, handler: aiohttp.ClientHandlerType) -> None:
        self._handler = handler

    def describe(self, request: aiohttp.ClientRequest, metered: bool) -> CallInfo:
        body: Any = request.body
        if isinstance(body, BytesPayload):
            body = body.decode(errors="replace").encode() if metered else b""
        marked = True if "Idempotency-Key" in request.headers else None
        return CallInfo(request.url.host or "", request.method, body if isinstance(body, bytes) else None, marked)

    def reply(self, response: aiohttp.ClientResponse) -> tuple[int, dict[str, str]]:
        return response.status, relevant_fields(response.raw_headers)

    def settle_at_end(self, response: object, held: Settlement) -> bool:
        return False  # the body is not seen here

    async def asend(self, request: aiohttp.ClientRequest, left: float) -> aiohttp.ClientResponse:
        async with asyncio.timeout(left):
            return await self._handler(request)

    async def adrain(
        self, request: aiohttp.ClientRequest, response: aiohttp.ClientResponse, left: float
    ) -> aiohttp.ClientResponse:
        """Reads up to MAX_KEPT bytes of a refusal, and releases its connection; `text()` and `json()` still work."""
        kept = bytearray()
        with suppress(aiohttp.ClientError, TimeoutError):  # the body is cut off, or wrongly compressed
            async with asyncio.timeout(left):
                while len(kept) < MAX_KEPT and (part := await response.content.read(MAX_KEPT - len(kept))):
                    kept += part
        if not response.content.at_eof():
            response.close()
        response._body = bytes(kept)  # where aiohttp keeps a body that was read
        return response
