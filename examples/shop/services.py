"""The services behind the shop, each a process of its own: inventory (stock and reservations) and pricing.

python -m shop.services inventory FD       serves on a listening socket that the parent has opened, until the parent ends
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys

import uvicorn
from fastapi import FastAPI, HTTPException

STOCK = 100_000
CENTS = {1: 4900, 2: 12900, 3: 3500, 4: 2900, 5: 5900, 6: 1900}


def inventory() -> FastAPI:
    app, stock = FastAPI(title="Inventory"), dict.fromkeys(CENTS, STOCK)

    @app.post("/reservations/{product}")
    async def reserve(product: int) -> dict[str, int]:
        if not stock.get(product):
            raise HTTPException(409, f"product {product} is sold out")
        stock[product] -= 1
        return {"left": stock[product]}

    return app


def pricing() -> FastAPI:
    app = FastAPI(title="Pricing")

    @app.get("/prices/{product}")
    async def price(product: int) -> dict[str, int]:
        return {"cents": CENTS.get(product, 0)}

    return app


SERVICES = {"inventory": inventory, "pricing": pricing}


async def serve(name: str, listening: socket.socket) -> None:
    parent = os.getppid()
    server = uvicorn.Server(uvicorn.Config(SERVICES[name](), log_level="warning"))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    while not serving.done():
        await asyncio.wait([serving], timeout=1)
        server.should_exit = server.should_exit or os.getppid() != parent
    await serving


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2]))))
