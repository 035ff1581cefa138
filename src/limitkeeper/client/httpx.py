"""Transports for httpx: `httpx.Client(transport=RateLimitTransport("10/s"))`, and the same for `httpx.AsyncClient`.

A request is marked as safe to repeat with `extensions={"retry": True}`, as unsafe with `False`.
"""

from __future__ import annotations

from ..errors import ConfigurationError
from .httpx_transport import AsyncTransport, HttpxSender, SettlingStream, SyncTransport

try:
    import httpx
except ModuleNotFoundError as error:
    raise ConfigurationError("limitkeeper.client.httpx needs httpx: pip install 'limitkeeper[httpx]'") from error

__all__ = ["AsyncRateLimitTransport", "RateLimitTransport"]


class _Stream(SettlingStream, httpx.SyncByteStream, httpx.AsyncByteStream):
    pass


class _Sender(HttpxSender):
    library, stream_class = httpx, _Stream
    failures = (httpx.NetworkError, httpx.TimeoutException, httpx.RemoteProtocolError)
    unsent = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


class RateLimitTransport(_Sender, SyncTransport, httpx.BaseTransport):
    """Sends the requests of a `httpx.Client` within limits."""


class AsyncRateLimitTransport(_Sender, AsyncTransport, httpx.AsyncBaseTransport):
    """Sends the requests of a `httpx.AsyncClient` within limits."""
