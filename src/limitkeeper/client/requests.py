"""An adapter for requests: `session.mount("https://api.example.com/", RateLimitAdapter("10/s"))`.

An Idempotency-Key header marks a request as safe to repeat. A place of a dependency is held until the header of the response has
come, since requests reads the body later; a meter's estimate stays charged.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from ..clock import steady_us
from ..errors import ConfigurationError
from ..stores.sans_io import run
from .client_limits import CallInfo, ClientLimits, ClientRates, Settlement, client_limits
from .httpx_transport import MAX_KEPT
from .response_fields import relevant_fields

try:
    import requests
    from requests.adapters import BaseAdapter, HTTPAdapter
except ModuleNotFoundError as error:
    raise ConfigurationError("limitkeeper.client.requests needs requests: pip install 'limitkeeper[requests]'") from error

__all__ = ["RateLimitAdapter"]

Timeout = float | tuple[float | None, float | None] | None


class RateLimitAdapter(BaseAdapter):
    """Sends the requests of a session within limits. `adapter` sends them in the end; by default an `HTTPAdapter()`."""

    def __init__(self, limits: ClientLimits | ClientRates | None = None, adapter: BaseAdapter | None = None) -> None:
        super().__init__()
        self.limits, self._owns_limits = client_limits(limits)
        self.adapter = HTTPAdapter() if adapter is None else adapter

    def send(
        self,
        request: requests.PreparedRequest,
        stream: bool = False,
        timeout: Timeout = None,
        verify: bool | str = True,
        cert: bytes | str | tuple[bytes | str, bytes | str] | None = None,
        proxies: Mapping[str, str] | None = None,
    ) -> requests.Response:
        options = {"stream": stream, "verify": verify, "cert": cert, "proxies": proxies}
        response: requests.Response = run(self.limits.send(request, RequestsSender(self.adapter, timeout, options)))
        return response

    def close(self) -> None:
        """Closes the adapter, and limits that were not given as an object."""
        if self._owns_limits:
            self.limits.close()
        self.adapter.close()


class RequestsSender:
    """One request with its options, as the plan sees it."""

    failures: tuple[type[Exception], ...] = (
        requests.ConnectionError,
        requests.Timeout,
        requests.exceptions.ChunkedEncodingError,
    )
    unsent: tuple[type[Exception], ...] = (requests.ConnectTimeout,)

    def __init__(self, adapter: BaseAdapter, timeout: Timeout, options: dict[str, Any]) -> None:
        self._adapter, self._timeout, self._options = adapter, timeout, options

    def describe(self, request: requests.PreparedRequest, metered: bool) -> CallInfo:
        body: Any = b"" if request.body is None else request.body.encode() if isinstance(request.body, str) else request.body
        marked = True if "idempotency-key" in request.headers else None
        host = urlsplit(request.url or "").hostname or ""
        return CallInfo(host, request.method or "", body if isinstance(body, bytes) else None, marked)

    def reply(self, response: requests.Response) -> tuple[int, dict[str, str]]:
        fields = [(name.encode(), value.encode("latin-1", "replace")) for name, value in response.headers.items()]
        return response.status_code, relevant_fields(fields)

    def settle_at_end(self, response: object, held: Settlement) -> bool:
        return False  # the body is not seen here

    def send(self, request: requests.PreparedRequest, left: float) -> requests.Response:
        connect, read = self._timeout if isinstance(self._timeout, tuple) else (self._timeout, self._timeout)
        timeout = (left if connect is None else min(left, connect), left if read is None else min(left, read))
        return self._adapter.send(request, timeout=timeout, **self._options)

    def drain(self, request: requests.PreparedRequest, response: requests.Response, left: float) -> requests.Response:
        """Reads up to MAX_KEPT bytes of a refusal, and closes it; `content` and `json()` still work."""
        kept, end_us = b"", steady_us() + int(left * 1e6)
        read = getattr(response.raw, "read1", response.raw.read)  # urllib3 1 has no read1
        try:
            while len(kept) < MAX_KEPT and steady_us() < end_us and (part := read(MAX_KEPT - len(kept), decode_content=True)):
                kept += part
        except Exception:  # of urllib3: the body is cut off, or wrongly compressed
            kept = b""
        response.close()
        response.raw = io.BytesIO(kept)
        return response
