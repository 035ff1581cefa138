"""A service in a process of its own that decides on the time that requests carry: each port is a node with a store of its own.

The commands and connections are those of `limitkeeper serve`. LK.TEST.FRESH empties the store of a port.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from limitkeeper.policy.gate import Gate
from limitkeeper.policy.model import Policy
from limitkeeper.service.app import Application
from limitkeeper.service.connections import Listener
from limitkeeper.service.resp import FULL, OK, Commands
from limitkeeper.service.serve import bind
from limitkeeper.service.settings import Address, Settings
from limitkeeper.service.store_commands import StoreCommands
from limitkeeper.stores import MemoryStore
from limitkeeper.testing import ManualClock

SECRET = b"0123456789abcdef"


class SetClock(ManualClock):
    def set(self, now_us: int) -> None:
        self._now_us = now_us


def fill(commands: Commands) -> bytes:
    """Gives a listener's commands a fresh store and a fresh map."""
    clock = SetClock()
    app = Application(Gate(Policy(), store=MemoryStore(clock=clock), clock=clock, secret=SECRET), secret=SECRET)
    commands.app = app
    StoreCommands(app, Settings(), clock.set).add_to(commands)
    commands.table[b"LK.TEST.FRESH"] = lambda connection, arguments: fill(commands)
    return OK


async def serve(count: int) -> None:
    for number in range(count):
        commands = Commands(None)  # type: ignore[arg-type]  # `fill` sets it
        fill(commands)
        bound = bind("resp", Address("127.0.0.1", 0))
        await Listener(Settings(), commands.connection, FULL).start(bound, None)
        print(bound.getsockname()[1], end="\n" if number + 1 == count else " ", flush=True)
    await asyncio.to_thread(sys.stdin.read)


@contextmanager
def running(count: int) -> Iterator[list[int]]:
    """The ports of a service process that ends with the block."""
    command = [sys.executable, "-P", __file__, str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            yield list(map(int, process.stdout.readline().split()))
        finally:
            process.stdin.close()
            process.wait(60)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
