"""A server with a steppable clock behind a network that misbehaves, and the faults that are applied to them.

A fault strikes, lasts, and heals. It declares how often it makes the server forget (`forgets`: each time is worth one more full
limit to every key) and how often the clock jumps ahead (`jumps`: each is worth one full limit at most). `cuts`: no call can be
answered while it lasts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import redis

from servers.faketime import FaketimeValkey, faketime_library
from servers.proxy import Proxy
from servers.valkey import Valkey

HOUR = 3600


class Laboratory:
    """`url` leads through the network; `server` and `network` are the targets of faults.

    With `houses`, as in a soak, there is also a second server that stays well, a house with sentinels, a cluster, and a folder.
    """

    def __init__(self, houses: bool = False) -> None:
        self.stack = ExitStack()
        options = ("--lua-time-limit", "20")
        #: The wheel's Valkey can be made to believe another time; other servers may not even start then.
        self.fakes_time = faketime_library() is not None and not os.environ.get("LIMITKEEPER_TEST_REDIS_SERVER")
        self.server: Any = self.stack.enter_context(FaketimeValkey(*options) if self.fakes_time else Valkey(*options))
        self.network = self.stack.enter_context(Proxy(self.server.port))
        self._busy: Any = None
        self.places: dict[str, str] = {"server": self.url}
        #: In a soak: the clock of every other worker, and the workers.
        self.skew: Any = None
        self.crew: list[Any] = []
        if houses:
            self._build()

    def _build(self) -> None:
        from .topologies import ReplicatedCluster, WatchedHouse

        second = self.stack.enter_context(Valkey())
        self.watched = self.stack.enter_context(WatchedHouse())
        self.cluster = self.stack.enter_context(ReplicatedCluster())
        folder = self.stack.enter_context(tempfile.TemporaryDirectory(prefix="limitkeeper-soak-"))
        self.places |= {"second": second.url, "sentinel": self.watched.url, "cluster": self.cluster.url, "folder": folder}

    @property
    def url(self) -> str:
        return self.network.url

    def ask(self, *command: Any) -> Any:
        """A command to the server itself, around the network."""
        with self.server.client(socket_timeout=5) as client:
            return client.execute_command(*command)

    def begin_busy(self) -> None:
        """A script that does not end: the server answers every client with BUSY."""
        self._busy = self.server.client(socket_timeout=None, retry=None).connection_pool.get_connection()
        self._busy.send_command("EVAL", "while true do end", 0)
        time.sleep(0.05)

    def end_busy(self) -> None:
        with contextlib.suppress(redis.ResponseError):
            self.ask("SCRIPT", "KILL")
        if self._busy is not None:
            self._busy.disconnect()
            self._busy = None

    def killed(self) -> None:
        """kill -9 to the last worker of every mode."""
        for worker in {worker.mode.name: worker for worker in self.crew}.values():
            worker.kill()

    def received(self, number: int) -> None:
        """SIGSTOP or SIGCONT to the last worker of every mode."""
        for worker in {worker.mode.name: worker for worker in self.crew}.values():
            worker.process.send_signal(number)

    def close(self) -> None:
        self.stack.close()

    def __enter__(self) -> Laboratory:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclass(frozen=True)
class Fault:
    """A fault of a server or its network."""

    name: str
    strike: Callable[[Laboratory], Any]
    heal: Callable[[Laboratory], Any] = lambda lab: None
    forgets: int = 0
    jumps: int = 0
    cuts: bool = False
    fakes_time: bool = False
    place: str = "server"

    def __str__(self) -> str:
        return self.name


def several(lab: Laboratory, what: Callable[[], Any], times: int = 4) -> None:
    for _ in range(times):
        what()
        time.sleep(0.05)


def to_nobody(lab: Laboratory) -> None:
    lab.network.refuse()
    lab.network.reset()


FAULTS = (
    Fault("nothing", lambda lab: None),
    Fault("server killed, restarted empty", lambda lab: lab.server.kill(), lambda lab: lab.server.start(), forgets=1, cuts=True),
    Fault("server stopped (SIGSTOP)", lambda lab: lab.server.freeze(), lambda lab: lab.server.thaw(), cuts=True),
    Fault("server flushed", lambda lab: lab.ask("FLUSHALL"), forgets=1),
    Fault("script cache flushed", lambda lab: several(lab, lambda: lab.ask("SCRIPT", "FLUSH"))),
    Fault("clients thrown out", lambda lab: several(lab, lambda: lab.ask("CLIENT", "KILL", "TYPE", "normal"))),
    Fault("connections reset", lambda lab: several(lab, lab.network.reset)),
    Fault("connections half-closed", lambda lab: several(lab, lab.network.half_close)),
    Fault("connections refused", to_nobody, lambda lab: lab.network.heal(), cuts=True),
    Fault("network silent", lambda lab: setattr(lab.network, "silent", True), lambda lab: lab.network.heal(), cuts=True),
    Fault("40 ms each way", lambda lab: setattr(lab.network, "latency", 0.04), lambda lab: lab.network.heal()),
    Fault("replies trickle", lambda lab: setattr(lab.network, "trickle", 2000), lambda lab: lab.network.heal()),
    Fault("server busy with a script", lambda lab: lab.begin_busy(), lambda lab: lab.end_busy(), cuts=True),
    Fault(
        "server out of memory",
        lambda lab: lab.ask("CONFIG", "SET", "maxmemory", 1),
        lambda lab: lab.ask("CONFIG", "SET", "maxmemory", 0),
        cuts=True,
    ),
    Fault(
        "server read-only",
        lambda lab: lab.ask("REPLICAOF", "127.0.0.1", 1),
        lambda lab: lab.ask("REPLICAOF", "NO", "ONE"),
        cuts=True,
    ),
    Fault("server wants a password", lambda lab: locked(lab), lambda lab: unlocked(lab), cuts=True),
    Fault(
        "server clock an hour ahead",
        lambda lab: lab.server.step(HOUR),
        lambda lab: lab.server.step(-HOUR),
        jumps=1,
        fakes_time=True,
    ),
    Fault(
        "server clock an hour back",
        lambda lab: lab.server.step(-HOUR),
        lambda lab: lab.server.step(HOUR),
        jumps=1,
        fakes_time=True,
    ),
    Fault("server clock back and forth", lambda lab: to_and_fro(lab), jumps=4, fakes_time=True),
)

#: What goes wrong with clients, and with houses of several servers: these are for a soak, which has them.
MORE_FAULTS = (
    Fault("client killed (kill -9)", lambda lab: lab.killed(), place="client"),
    Fault(
        "client stopped (SIGSTOP)",
        lambda lab: lab.received(signal.SIGSTOP),
        lambda lab: lab.received(signal.SIGCONT),
        place="client",
    ),
    Fault("client clock 5 s ahead", lambda lab: lab.skew.set(5), lambda lab: lab.skew.set(0), fakes_time=True, place="client"),
    Fault("client clock 5 s back", lambda lab: lab.skew.set(-5), lambda lab: lab.skew.set(0), fakes_time=True, place="client"),
    Fault("primary killed (sentinel)", lambda lab: lab.watched.fail_over(), lambda lab: lab.watched.mend(), 1, place="sentinel"),
    Fault("node killed (cluster)", lambda lab: lab.cluster.fail_over(), lambda lab: lab.cluster.mend(), 1, place="cluster"),
)


def locked(lab: Laboratory) -> None:
    lab.ask("CONFIG", "SET", "requirepass", "secret")
    lab.network.reset()


def unlocked(lab: Laboratory) -> None:
    with lab.server.client(password="secret") as client:
        client.config_set("requirepass", "")
    lab.network.reset()


def to_and_fro(lab: Laboratory) -> None:
    for seconds in (-5, 10, -10, 5, 2, -2, -0.5, 0.5):
        lab.server.step(seconds)
        time.sleep(0.03)
