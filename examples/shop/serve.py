"""`make serve`: the shop on loopback, with the lines to type.

PORT=8123       that port; without it 8000, or the next one that is free
SHOP_SECONDS=5  types the lines itself, goes on for so many seconds, and ends; `inf` serves until it is told to stop

At a terminal it serves until ctrl-C. Where there is none, it types the lines itself and ends. SIGTERM ends it in order.
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

from shop.app import shop
from shop.lines import lines, script

HOST, PORT, PORTS = "127.0.0.1", 8000, 100


def bound(wanted: str | None) -> socket.socket:
    """A listening socket on the port that was asked for, or on the first free one."""
    if wanted and not (wanted.isascii() and wanted.isdigit() and int(wanted) < 65536):
        raise SystemExit(f"serve: PORT={wanted}: write a number below 65536, or nothing for the first free one from {PORT} on")
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


def patience(said: str | None) -> float:
    """How many seconds it serves after its own demonstration; without one, for ever at a terminal and none elsewhere."""
    if said is None:
        return math.inf if sys.stdin.isatty() or sys.stdout.isatty() else 0.0
    try:
        return float(said)
    except ValueError:
        raise SystemExit(f"serve: SHOP_SECONDS={said}: write a number of seconds, or inf") from None


def greeting(base: str) -> str:
    typed = "\n\n".join(f"# {line.says}\n{line.command}" for line in lines(base))
    return (
        f"The shop is open: {base}   (its limits: examples/shop/limitkeeper.yaml)\n\nTo try it, in another terminal:\n\n{typed}\n"
    )


async def demonstration(base: str) -> None:
    """Types the lines, as a user would."""
    if shutil.which("curl") is None:
        print("serve: there is no curl here to show it with", flush=True)
        return
    print("The same, typed for you:", flush=True)
    shell = await asyncio.create_subprocess_exec("sh", "-c", script(base))
    await shell.wait()


async def serve(sock: socket.socket, seconds: float) -> None:
    """Serves until a signal comes, or until the demonstration is over."""
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
        print("Ctrl-C ends it.", flush=True)
    await serving
    tally = app.state.gate.snapshot()
    print(f"\nThe shop is closed: {tally.requests} requests, {tally.allowed} passed, {tally.refused} refused.", flush=True)


def main() -> int:
    # uvicorn ends in order when a signal comes, and then raises it again: by then there is nothing more to do.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    asyncio.run(serve(bound(os.environ.get("PORT")), patience(os.environ.get("SHOP_SECONDS"))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
