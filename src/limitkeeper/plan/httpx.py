"""The HTTP client of a probe, over httpx: sends one request and returns its status, 0 where there was no response."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import ConfigurationError

try:
    import httpx
except ModuleNotFoundError as error:
    raise ConfigurationError("a probe needs httpx: pip install 'limitkeeper[plan]'") from error


class HttpSender:
    """Requests to one URL. It follows no redirect and uses no proxy of the environment: the URL is what is probed."""

    def __init__(self, url: str, method: str, headers: Mapping[str, str], body: bytes, timeout: float, connections: int) -> None:
        self._request = (method, url)
        self._body = body or None
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        self._client = httpx.AsyncClient(timeout=timeout, limits=limits, headers=dict(headers), trust_env=False)

    async def send(self) -> int:
        try:
            response = await self._client.request(*self._request, content=self._body)
        except httpx.HTTPError:
            return 0
        return response.status_code

    async def close(self) -> None:
        await self._client.aclose()
