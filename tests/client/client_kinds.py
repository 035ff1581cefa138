"""Drives every HTTP client that has a translator in the same way, so that one case covers all of them."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import httpx
import httpx2
import requests

from limitkeeper.client import ClientLimits
from limitkeeper.client import aiohttp as our_aiohttp
from limitkeeper.client import httpx as our_httpx
from limitkeeper.client import httpx2 as our_httpx2
from limitkeeper.client import requests as our_requests

#: One for all clients of the tests: loading the certificates of authorities takes longer than a test.
CONTEXT = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


class Parts:
    """A body that is a stream: it can be sent once."""

    def __init__(self, *parts: bytes) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.parts)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self.parts:
            yield part


class HttpxKind:
    library: Any = httpx
    ours: Any = our_httpx
    failures = (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError)

    def call(self, limits: ClientLimits, method: str, url: str, **options: Any) -> tuple[int, bytes]:
        extensions = {"retry": options.pop("marked")} if "marked" in options else {}
        body = options.pop("body", b"")
        options["content"] = iter(body) if isinstance(body, Parts) else body
        transport = self.ours.RateLimitTransport(limits, self.library.HTTPTransport(verify=CONTEXT))
        with self.library.Client(transport=transport, trust_env=False) as client:
            response = client.request(method, url, extensions=extensions, **options)
            return response.status_code, response.content

    def body(self, response: Any) -> bytes:
        return response.content


class AsyncHttpxKind(HttpxKind):
    def call(self, limits: ClientLimits, method: str, url: str, **options: Any) -> tuple[int, bytes]:
        extensions = {"retry": options.pop("marked")} if "marked" in options else {}
        body = options.pop("body", b"")
        options["content"] = aiter(body) if isinstance(body, Parts) else body

        async def main() -> tuple[int, bytes]:
            transport = self.ours.AsyncRateLimitTransport(limits, self.library.AsyncHTTPTransport(verify=CONTEXT))
            async with self.library.AsyncClient(transport=transport, trust_env=False) as client:
                response = await client.request(method, url, extensions=extensions, **options)
                return response.status_code, response.content

        return asyncio.run(main())


class Httpx2Kind(HttpxKind):
    library, ours = httpx2, our_httpx2
    failures = (httpx2.ConnectError, httpx2.ReadError, httpx2.RemoteProtocolError)


class AsyncHttpx2Kind(AsyncHttpxKind):
    library, ours, failures = httpx2, our_httpx2, Httpx2Kind.failures


class RequestsKind:
    failures = (requests.ConnectionError,)

    def call(self, limits: ClientLimits, method: str, url: str, **options: Any) -> tuple[int, bytes]:
        with requests.Session() as session:
            session.trust_env = False
            session.mount("http://", our_requests.RateLimitAdapter(limits))
            body = options.pop("body", b"")
            response = session.request(method, url, data=iter(body) if isinstance(body, Parts) else body, **options)
            return response.status_code, response.content

    def body(self, response: requests.Response) -> bytes:
        return response.content


class AiohttpKind:
    failures = (aiohttp.ClientConnectionError,)

    def call(self, limits: ClientLimits, method: str, url: str, **options: Any) -> tuple[int, bytes]:
        body = options.pop("body", b"")

        async def main() -> tuple[int, bytes]:
            data = aiter(body) if isinstance(body, Parts) else body
            middlewares = [our_aiohttp.RateLimitMiddleware(limits)]
            async with (
                aiohttp.ClientSession(middlewares=middlewares) as session,
                session.request(method, url, data=data, **options) as response,
            ):
                return response.status, await response.read()

        return asyncio.run(main())

    def body(self, response: aiohttp.ClientResponse) -> bytes:
        return asyncio.run(response.text("latin-1")).encode("latin-1")


KINDS = {
    "httpx": HttpxKind(),
    "httpx-async": AsyncHttpxKind(),
    "httpx2": Httpx2Kind(),
    "httpx2-async": AsyncHttpx2Kind(),
    "requests": RequestsKind(),
    "aiohttp": AiohttpKind(),
}
