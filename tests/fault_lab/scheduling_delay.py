"""Measures how late a machine schedules, so that a busy machine is not taken for a slow store.

A measurement sleeps for a moment again and again, and may call a server that answers at once: the time beyond the sleep is the
machine's delay, not the store's. One that only sleeps measures this process, one that calls a server measures that server.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import redis

NAP = 0.005
#: How often a call is put to sleep and woken until it is over, at most: each time it may come late.
WAKES = 3


class Witness(threading.Thread):
    """Sleeps for a moment and calls, again and again, and keeps the longest delay."""

    def __init__(self, ask: Callable[[], Any] = lambda: None) -> None:
        super().__init__(name="witness", daemon=True)
        self.ask = ask
        self.ended = threading.Event()
        self._latest, self._begun = 0.0, time.monotonic()

    @property
    def late(self) -> float:
        """In seconds; a nap that is not over yet counts as well."""
        return max(self._latest, time.monotonic() - self._begun - NAP if self.is_alive() else 0.0)

    def run(self) -> None:
        while not self.ended.is_set():
            self._begun = time.monotonic()
            time.sleep(NAP)
            self.ask()
            self._latest = max(self._latest, time.monotonic() - self._begun - NAP)

    def stop(self) -> float:
        self.ended.set()
        self.join()
        return self.late


class Watch:
    """Measures this process, and each server: `with Watch(servers) as watch: …` and then `watch.late`."""

    def __init__(self, servers: Iterable[Any] = ()) -> None:
        self.clients = [server.client(socket_timeout=5, retry=None) for server in servers]
        self.witnesses = [Witness(), *(Witness(lambda client=client: pinged(client)) for client in self.clients)]

    def __enter__(self) -> Watch:
        for witness in self.witnesses:
            witness.start()
        return self

    def __exit__(self, *exc: object) -> None:
        for witness in self.witnesses:
            witness.stop()
        for client in self.clients:
            client.close()

    @property
    def late(self) -> float:
        return max(witness.late for witness in self.witnesses)

    def allows(self, seconds: float) -> float:
        """What these seconds may become on a machine that is as late as was seen."""
        return seconds + WAKES * self.late


def pinged(client: redis.Redis) -> None:
    """An error is a reply, too."""
    try:
        client.ping()
    except redis.RedisError:
        time.sleep(NAP)
