"""Transports for httpx2: `httpx2.Client(transport=RateLimitTransport("10/s"))`, and the same for `httpx2.AsyncClient`.

A request is marked as safe to repeat with `extensions={"retry": True}`, as unsafe with `False`.
"""

from __future__ import annotations

from ..errors import ConfigurationError
from .httpx_transport import AsyncTransport, HttpxSender, SettlingStream, SyncTransport

try:
    import httpx2
except ModuleNotFoundError as error:
    raise ConfigurationError("limitkeeper.client.httpx2 needs httpx2: pip install 'limitkeeper[httpx2]'") from error

__all__ = ["AsyncRateLimitTransport", "RateLimitTransport"]


class _Stream(SettlingStream, httpx2.SyncByteStream, httpx2.AsyncByteStream):
    pass


class _Sender(HttpxSender):
    library, stream_class = httpx2, _Stream
    failures = (httpx2.NetworkError, httpx2.TimeoutException, httpx2.RemoteProtocolError)
    unsent = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)


class RateLimitTransport(_Sender, SyncTransport, httpx2.BaseTransport):
    """Sends the requests of a `httpx2.Client` within limits."""


class AsyncRateLimitTransport(_Sender, AsyncTransport, httpx2.AsyncBaseTransport):
    """Sends the requests of a `httpx2.AsyncClient` within limits."""
