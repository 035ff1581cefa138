"""The HTTP transports of client.py, over httpx. Its own retries are those of connections that were refused."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import httpx

from ..errors import ConfigurationError, LimitkeeperError, StoreTimeout, StoreUnavailable
from ..stores.urls import masked
from .app import RequestError
from .client import Json, Operation, readable


def options(url: str, token: str | None, timeout: float) -> dict[str, Any]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return {"base_url": url, "headers": headers, "timeout": timeout}


def request(operation: Operation[Any]) -> dict[str, Any]:
    if operation.name == "limits":
        limit, key = quote(operation.body["limit"], ""), quote(operation.body["key"], "")
        return {"method": "GET", "url": f"/v1/limits/{limit}/{key}"}
    return {"method": "POST", "url": f"/v1/{operation.name}", "json": operation.body}


def answer(response: httpx.Response) -> Json:
    """The JSON of a result; a refused check is one, whatever its status."""
    try:
        found = json.loads(response.content)
        error = found.get("error")
    except (ValueError, AttributeError):
        found, error = {}, None
    if error is None and (response.status_code == 200 or "allowed" in found):
        return found  # type: ignore[no-any-return]
    raise failure(error or {"code": "", "message": f"expected the limitkeeper service, got status {response.status_code}"})


def failure(error: Json) -> LimitkeeperError:
    code, message = error["code"], error["message"]
    if code in ("unauthorized", "cross_origin", "forbidden"):
        return ConfigurationError(f"the service refused access: {message}")
    return RequestError(code, message) if code in ("invalid", "unknown_limit", "invalid_token") else StoreUnavailable(message)


def lost(url: str, error: httpx.HTTPError) -> LimitkeeperError:
    kind = StoreTimeout if isinstance(error, httpx.TimeoutException) else StoreUnavailable
    ended = isinstance(error, httpx.RemoteProtocolError | httpx.ReadError | httpx.WriteError)  # which one depends on the moment
    remedy = "; is this its HTTP port (7070)?" if ended else ""
    return kind(f"the service at {masked(url)}: {str(error).removesuffix('.') or type(error).__name__}{remedy}")


class Transport:
    def __init__(self, url: str, token: str | None, timeout: float, retries: int) -> None:
        self._url, connections = url, httpx.HTTPTransport(retries=retries)
        self._client = httpx.Client(transport=connections, **options(url, token, timeout))

    def call(self, operation: Operation[Any]) -> Json:
        try:
            return readable(answer, self._client.request(**request(operation)))
        except httpx.HTTPError as error:
            raise lost(self._url, error) from error

    def close(self) -> None:
        self._client.close()


class AsyncTransport:
    def __init__(self, url: str, token: str | None, timeout: float, retries: int) -> None:
        self._url, connections = url, httpx.AsyncHTTPTransport(retries=retries)
        self._client = httpx.AsyncClient(transport=connections, **options(url, token, timeout))

    async def call(self, operation: Operation[Any]) -> Json:
        try:
            return readable(answer, await self._client.request(**request(operation)))
        except httpx.HTTPError as error:
            raise lost(self._url, error) from error

    async def aclose(self) -> None:
        await self._client.aclose()
