"""A faulty network: a TCP proxy on loopback, in a thread of its own, whose faults are switched while it runs.

    with Proxy(server.port) as network:
        network.latency = 0.04      # seconds added each way
        network.trickle = 100       # bytes per second of the replies
        network.silent = True       # accepts everything, passes on nothing; held bytes are sent when it is over
        network.reset()             # every connection ends with an RST
        network.half_close()        # the client reads an end, the server still receives from it
        network.refuse()            # new connections are refused; open ones stay
        network.heal()              # all of that is over

Bytes are never lost or reordered: what is held back comes late, as on a real network. Rejected: a qdisc of the kernel, which
wants root and a module that many machines do not have.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from .valkey import free_port

CHUNK = 65536
ONE_TICK = 0.002
#: A trickle comes in pieces, so many seconds apart; a slow one byte by byte.
TRICKLED = 0.005


class Line:
    """One client's connection and the one that was made for it."""

    def __init__(self, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self.near, self.far = near, far

    def abort(self) -> None:
        """Ends both sides; the linger of zero seconds makes an RST of it."""
        for side in (self.near, self.far):
            raw = side.get_extra_info("socket")
            if raw is not None and raw.fileno() >= 0:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            side.transport.abort()

    def end_replies(self) -> None:
        """Ends the replies to the client; without effect when it is already disconnected."""
        if not self.near.is_closing():
            with contextlib.suppress(OSError):
                self.near.write_eof()


class Proxy:
    """Passes everything on to `target`, a port of loopback, until a fault is set."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = free_port()
        self.latency = 0.0
        self.trickle: float | None = None
        self.silent = False
        self.accepted = 0
        #: How often a client sent something: with one caller, one for each round trip.
        self.asked = 0
        self._lines: set[Line] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"proxy-{self.port}", daemon=True)
        self._thread.start()
        self.accept()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def open(self) -> int:
        """The number of connected clients."""
        return len(self._lines)

    # Faults ----------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Ends every connection with an RST, on both sides."""
        self._do(self._each(Line.abort))

    def half_close(self) -> None:
        """Sends every client the end of its replies, and continues to read from it."""
        self._do(self._each(Line.end_replies))

    def refuse(self) -> None:
        """New connections are refused."""
        self._do(self._stop_listening())

    def accept(self) -> None:
        self._do(self._listen())

    def heal(self) -> None:
        self.latency, self.trickle, self.silent = 0.0, None, False
        self.accept()

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # In the loop -----------------------------------------------------------------------------------------------

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _each(self, what: Callable[[Line], Any]) -> None:
        for line in list(self._lines):
            what(line)

    async def _listen(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, backlog=512)

    async def _stop_listening(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
            await asyncio.sleep(0)

    async def _end(self) -> None:
        await self._stop_listening()
        await self._each(Line.abort)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0.01)  # transports close their sockets in later iterations

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._carry(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        line = Line(writer, far_writer)
        self._lines.add(line)
        directions = [
            asyncio.ensure_future(self._way(reader, far_writer, False)),
            asyncio.ensure_future(self._way(far_reader, writer, True)),
        ]
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._lines.discard(line)
            for direction in directions:
                direction.cancel()
            await asyncio.gather(*directions, return_exceptions=True)
            far_writer.transport.abort()

    async def _way(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, replies: bool) -> None:
        """One direction: bytes are due a latency after they were read, and are then written as quickly as the trickle allows."""
        due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        writing = asyncio.ensure_future(self._deliver(due, writer, replies))
        try:
            while data := await reader.read(CHUNK):
                self.asked += not replies
                due.put_nowait((self._loop.time() + self.latency, data))
            due.put_nowait((self._loop.time() + self.latency, b""))
            await writing
        except OSError:
            pass
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    async def _deliver(self, due: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter, replies: bool) -> None:
        while True:
            moment, data = await due.get()
            await asyncio.sleep(max(0.0, moment - self._loop.time()))
            while self.silent:
                await asyncio.sleep(ONE_TICK)
            if not data:
                return
            await self._write(data, writer, self.trickle if replies else None)

    async def _write(self, data: bytes, writer: asyncio.StreamWriter, trickle: float | None) -> None:
        size = len(data) if trickle is None else max(1, round(trickle * TRICKLED))
        for first in range(0, len(data), size):
            if trickle is not None:
                await asyncio.sleep(size / trickle)
            writer.write(data[first : first + size])
        await writer.drain()
