"""`make shop`: serves the shop on loopback and prints commands to try it.

PORT=8123       the port; default: 8000 or the next free one
SHOP_SECONDS=5  runs the commands itself, serves for that many seconds, and exits; `inf` serves until a signal

At a terminal it serves until Ctrl-C. Without a terminal it runs the commands itself and exits. SIGTERM shuts it down gracefully.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import signal
import socket
import sys

import uvicorn
from local_servers import HOST, services

from shop.app import shop
from shop.lines import lines, script
from shop.services import SERVICES

PORT, PORTS = 8000, 100


def bound(wanted: str | None) -> socket.socket:
    """A listening socket on the wanted port, or on the first free one."""
    if wanted and not (wanted.isascii() and wanted.isdigit() and int(wanted) < 65536):
        raise SystemExit(
            f"serve: PORT={wanted}: expected a number below 65536; leave it empty for the first free port from {PORT} on"
        )
    ports = [int(wanted)] if wanted else range(PORT, PORT + PORTS)
    for port in ports:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # without the name, asyncio leaves Nagle on
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((HOST, port))
            sock.listen(1024)
            return sock
        except OSError:
            sock.close()
    raise SystemExit(f"serve: port {wanted or f'{PORT} to {PORT + PORTS - 1}'} is taken; choose another with PORT=")


def serving_seconds(said: str | None) -> float:
    """Seconds to serve after the demonstration. Default: unlimited at a terminal, otherwise 0."""
    if said is None:
        return math.inf if sys.stdin.isatty() or sys.stdout.isatty() else 0.0
    try:
        return float(said)
    except ValueError:
        raise SystemExit(f"serve: SHOP_SECONDS={said}: expected a number of seconds, or inf") from None


def greeting(base: str) -> str:
    typed = "\n\n".join(f"# {line.says}\n{line.command}" for line in lines(base))
    return f"The shop is open: {base}   (limits: examples/shop/limitkeeper.yaml)\n\nTry it in another terminal:\n\n{typed}\n"


async def demonstration(base: str) -> None:
    """Runs the commands in a shell."""
    if shutil.which("curl") is None:
        print("serve: curl is not installed, so the demonstration is skipped", flush=True)
        return
    print("Running the same commands:", flush=True)
    shell = await asyncio.create_subprocess_exec("sh", "-c", script(base))
    await shell.wait()


async def serve(sock: socket.socket, seconds: float) -> None:
    """Serves until a signal arrives, or for `seconds` after the demonstration."""
    base = "http://{}:{}".format(*sock.getsockname())
    app = shop()
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    print(greeting(base), flush=True)
    if seconds < math.inf:
        await demonstration(base)
        await asyncio.wait([serving], timeout=seconds)
        server.should_exit = True
    else:
        print("Press Ctrl-C to stop.", flush=True)
    await serving
    snapshot = app.state.gate.snapshot()
    print(
        f"\nThe shop is closed: {snapshot.requests} requests, {snapshot.allowed} passed, {snapshot.refused} refused.", flush=True
    )


def main() -> int:
    # uvicorn shuts down gracefully on a signal and then raises it again; ignore the second one.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    sock, seconds = bound(os.environ.get("PORT")), serving_seconds(os.environ.get("SHOP_SECONDS"))
    with services("shop.services", SERVICES) as addresses:
        os.environ |= addresses
        asyncio.run(serve(sock, seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
