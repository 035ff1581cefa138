"""TLS in front of a real server whose wheel was built without it: a thread that decrypts, and passes on byte for byte."""

from __future__ import annotations

import asyncio
import ssl
import threading
from contextlib import suppress
from pathlib import Path


class TlsFront:
    """Listens with a certificate on a port of loopback; `shown` are the names on the certificates that clients showed."""

    def __init__(self, behind: int, folder: Path) -> None:
        self.behind = behind
        self.shown: list[str] = []
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(folder / "server.pem", folder / "server.key")
        self.context.load_verify_locations(folder / "ca.pem")
        self.context.verify_mode = ssl.CERT_OPTIONAL
        self.loop = asyncio.new_event_loop()
        self.ready = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        assert self.ready.wait(60), "it does not listen"

    def _run(self) -> None:
        self.loop.run_until_complete(self._serve())
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    async def _serve(self) -> None:
        self.end = asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(self._take, "127.0.0.1", 0, ssl=self.context)
        self.port: int = server.sockets[0].getsockname()[1]
        self.ready.set()
        await self.end.wait()
        server.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        certificate = writer.get_extra_info("peercert")
        if certificate:
            self.shown.append(certificate["subject"][0][0][1])
        there, back = await asyncio.open_connection("127.0.0.1", self.behind)
        for source, target in ((reader, back), (there, writer)):
            task = asyncio.ensure_future(self._pass_on(source, target))
            self.tasks.add(task)

    async def _pass_on(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            try:
                while some := await source.read(65536):
                    target.write(some)
                    await target.drain()
            finally:
                target.close()
                await target.wait_closed()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.end.set)
        self.thread.join(60)

    def __enter__(self) -> TlsFront:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
