"""Customers of the shop, in process: each has a name (or none), an address, and perhaps a partner's key or a tenant."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from shop.people import token_for


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def retry_after(self) -> int:
        return int(self.headers["retry-after"])


class Street:
    """The server of the customers: an ASGI app, called in process."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self._runner = asyncio.Runner()

    def __enter__(self) -> Street:
        return self

    def __exit__(self, *exc: object) -> None:
        self._runner.close()

    def customer(self, name: str | None = None, address: str = "203.0.113.7", **headers: str) -> Customer:
        return Customer(self, name, address, headers)

    def ask(self, method: str, path: str, address: str, headers: list[tuple[bytes, bytes]]) -> Answer:
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(b"host", b"shop.test"), *headers],
            "client": (address, 40000),
            "server": ("shop.test", 80),
        }
        return self._runner.run(answered(self.app, scope))


async def answered(app: Any, scope: dict[str, Any]) -> Answer:
    status, fields, chunks = 0, {}, []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        nonlocal status, fields
        if message["type"] == "http.response.start":
            status = message["status"]
            fields = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            chunks.append(message.get("body", b""))

    await app(scope, receive, send)
    return Answer(status, fields, b"".join(chunks))


#: Headers that identify customers.
NAMES = {"partner": "x-api-key", "tenant": "x-tenant"}


class Customer:
    """One customer. `partner="acme-corp"` and `tenant=…` are headers; other names are spelt as headers, `_` for `-`."""

    def __init__(self, street: Street, name: str | None, address: str, headers: dict[str, str]) -> None:
        self.street = street
        self.address = address
        self.headers = [(NAMES.get(key, key.replace("_", "-")).encode(), value.encode()) for key, value in headers.items()]
        if name is not None:
            self.headers.append((b"authorization", f"Bearer {token_for(name)}".encode()))

    def get(self, path: str) -> Answer:
        return self.street.ask("GET", path, self.address, self.headers)

    def post(self, path: str) -> Answer:
        return self.street.ask("POST", path, self.address, self.headers)

    def passes(self, method: str, path: str, most: int) -> int:
        """How many requests in a row are admitted, `most` at most."""
        for number in range(most):
            if self.street.ask(method, path, self.address, self.headers).status in (429, 503):
                return number
        return most
