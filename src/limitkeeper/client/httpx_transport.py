"""The transports of httpx and httpx2, whose interfaces are the same: request and response as the plan sees them.

`httpx.py` and `httpx2.py` name the library and its base classes. A charge or a place is held until the body of the response has
ended or is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

from ..clock import steady_us
from ..stores.sans_io import arun, run
from .client_limits import Attempt, CallInfo, ClientLimits, ClientRates, Settlement, UsageReader, client_limits
from .response_fields import relevant_fields

#: Bytes of a refusal's body that are kept for the exception, and so that the connection can be used again.
MAX_KEPT, PIECE = 1 << 16, 16
#: Compressions that a meter can read.
READABLE = "gzip, deflate"


class SettlingStream:
    """A response body that settles its call when it ends: with what was used after the last byte, with the estimate when it is
    closed before."""

    def __init__(self, stream: Any, settlement: Settlement, reader: UsageReader | None) -> None:
        self._stream, self._settlement, self._reader = stream, settlement, reader
        self._complete = False

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._stream:
            if self._reader is not None:
                self._reader.feed(chunk)
            yield chunk
        self._complete = True

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._stream:
            if self._reader is not None:
                self._reader.feed(chunk)
            yield chunk
        self._complete = True

    def _used(self) -> Any:
        return None if self._reader is None else self._reader.used(self._complete)

    def close(self) -> None:
        try:
            self._stream.close()
        finally:
            self._settlement.finish(self._used())

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            await self._settlement.afinish(self._used())


class HttpxSender:
    """What both transports share. `library` is the module; `stream_class` a SettlingStream of the library's own base."""

    library: Any
    stream_class: Any
    failures: tuple[type[Exception], ...]
    unsent: tuple[type[Exception], ...]

    def __init__(self, limits: ClientLimits | ClientRates | None = None, transport: Any = None) -> None:
        self.limits, self._owns_limits = client_limits(limits)
        self._transport = transport

    def describe(self, request: Any, metered: bool) -> CallInfo:
        encodings = request.headers.get("accept-encoding", "") if metered else ""
        if "br" in encodings or "zstd" in encodings:
            request.headers["accept-encoding"] = READABLE
        marked = request.extensions.get("retry")
        if marked is None and "idempotency-key" in request.headers:
            marked = True
        body = request.content if isinstance(request.stream, self.library.ByteStream) else None
        return CallInfo(request.url.host, request.method, body, marked)

    def reply(self, response: Any) -> tuple[int, dict[str, str]]:
        return response.status_code, relevant_fields(response.headers.raw)

    def settle_at_end(self, response: Any, held: Settlement) -> bool:
        headers, read = response.headers, response.is_closed
        encoding = "" if read else headers.get("content-encoding", "")
        reader = None if held.meter is None else held.meter.reader(headers.get("content-type", ""), encoding)
        if read and reader is not None:  # from a cache or a test
            reader.feed(response.content)
            held.used = reader.used(complete=True)
        elif not read:
            response.stream = self.stream_class(response.stream, held, reader)
        return not read

    def _in_time(self, request: Any, left: float) -> Any:
        """The request, with no timeout longer than what is left of the call's total time."""
        timeouts = request.extensions.get("timeout") or {"read": None}
        for value in timeouts.values():
            if value is None or value > left:
                known = {**dict.fromkeys(("connect", "read", "write", "pool")), **timeouts}
                shorter = {name: left if value is None else min(left, value) for name, value in known.items()}
                request.extensions = {**request.extensions, "timeout": shorter}
                break
        return request

    def _refusal(self, request: Any, response: Any, body: bytes) -> Any:
        """A closed response with what was read of its body."""
        headers = response.headers.copy()
        encoding = headers.pop("content-encoding", "")
        content, more = self._decoded(body, encoding) if encoding else body, response.extensions
        return self.library.Response(response.status_code, headers=headers, content=content, request=request, extensions=more)

    def _decoded(self, body: bytes, encoding: str) -> bytes:
        """At most MAX_KEPT bytes of a compressed body. It is decoded by PIECE bytes, of which each may expand a thousandfold; one
        that was compressed several times is left out, since it would a millionfold."""
        kept, pieces = bytearray(), (body[at : at + PIECE] for at in range(0, len(body), PIECE))
        with suppress(self.library.DecodingError):  # the body is cut off, or wrongly compressed
            if "," not in encoding:
                for part in self.library.Response(200, headers={"content-encoding": encoding}, content=pieces).iter_bytes():
                    kept += part
                    if len(kept) >= MAX_KEPT:
                        break
        return bytes(kept[:MAX_KEPT])


class SyncTransport(HttpxSender):
    """Sends requests of a sync client, within limits. `transport` sends them in the end; by default the library's own."""

    def __init__(self, limits: ClientLimits | ClientRates | None = None, transport: Any = None) -> None:
        super().__init__(limits, self.library.HTTPTransport() if transport is None else transport)

    def handle_request(self, request: Any) -> Any:
        limits, host = self.limits, request.url.host
        began_us = limits.clock.now_us()
        number = limits.start_nowait(request, host, began_us)
        if not number:
            return run(limits.send(request, self))
        try:
            response = self._transport.handle_request(self._in_time(request, limits.total))
        except BaseException as error:
            return run(limits.send(request, self, None, Attempt(began_us, number, None, error)))
        if limits.end_plain(host, number, *self.reply(response)):
            return response
        return run(limits.send(request, self, None, Attempt(began_us, number, response)))

    def send(self, request: Any, left: float) -> Any:
        return self._transport.handle_request(self._in_time(request, left))

    def drain(self, request: Any, response: Any, left: float) -> Any:
        kept, end_us = bytearray(), steady_us() + int(left * 1e6)
        try:
            for chunk in response.stream if left > 0 else ():
                kept += chunk
                if len(kept) >= MAX_KEPT or steady_us() >= end_us:
                    break
        except self.library.TransportError:
            pass
        finally:
            response.stream.close()
        return self._refusal(request, response, bytes(kept[:MAX_KEPT]))

    def close(self) -> None:
        """Closes the transport, and limits that were not given as an object."""
        if self._owns_limits:
            self.limits.close()
        self._transport.close()


class AsyncTransport(HttpxSender):
    """The same for an async client."""

    def __init__(self, limits: ClientLimits | ClientRates | None = None, transport: Any = None) -> None:
        super().__init__(limits, self.library.AsyncHTTPTransport() if transport is None else transport)

    async def handle_async_request(self, request: Any) -> Any:
        limits, host = self.limits, request.url.host
        began_us = limits.clock.now_us()
        number = limits.start_nowait(request, host, began_us)
        if not number:
            return await arun(limits.send(request, self, asyncio.get_running_loop()))
        try:
            response = await self._transport.handle_async_request(self._in_time(request, limits.total))
        except BaseException as error:
            first = Attempt(began_us, number, None, error)
            return await arun(limits.send(request, self, asyncio.get_running_loop(), first))
        if limits.end_plain(host, number, *self.reply(response)):
            return response
        return await arun(limits.send(request, self, asyncio.get_running_loop(), Attempt(began_us, number, response)))

    async def asend(self, request: Any, left: float) -> Any:
        return await self._transport.handle_async_request(self._in_time(request, left))

    async def adrain(self, request: Any, response: Any, left: float) -> Any:
        kept = bytearray()
        try:
            async with asyncio.timeout(left):
                async for chunk in response.stream:
                    kept += chunk
                    if len(kept) >= MAX_KEPT:
                        break
        except (self.library.TransportError, TimeoutError):
            pass
        finally:
            await response.stream.aclose()
        return self._refusal(request, response, bytes(kept[:MAX_KEPT]))

    async def aclose(self) -> None:
        """Closes the transport, and limits that were not given as an object."""
        if self._owns_limits:
            await self.limits.aclose()
        await self._transport.aclose()
