"""Looks host names up within a deadline: `getaddrinfo` can't be cancelled, so it runs in a few daemon threads of its own.

All callers that want the same name wait for one lookup, each for its own budget. At most MAX_LOOKUPS are under way; when all of
them hang, a further name fails at once. Addresses are used again for FRESH_US, so that a storm of new connections is one lookup,
and longer while a new lookup fails or takes more than half of what is left.
Rejected: the event loop's executor (it belongs to the application, and `asyncio.run` waits for its threads at the end).
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Callable

from ...clock import SYSTEM
from ...errors import StoreError, StoreUnavailable
from ...fork import reset_after_fork
from ..sans_io import Call, Pending, Plan

MAX_LOOKUPS = 8
#: Microseconds; a failover by DNS is followed as soon as a connection fails (`expire`).
FRESH_US = 5_000_000


class Resolver:
    """The addresses of host names, for sync and async callers."""

    def __init__(self, now_us: Callable[[], int]) -> None:
        self._now_us = now_us
        self._known: dict[str, tuple[int, list[str]]] = {}
        self._reset_after_fork()
        reset_after_fork(self)

    def _reset_after_fork(self) -> None:
        """No thread of the parent process looks anything up in its child."""
        self._lock = threading.Lock()
        self._lookups: dict[str, Pending] = {}

    def plan(self, host: str, seconds: float) -> Plan[list[str]]:
        """The numeric addresses of a host, within so many seconds."""
        if is_numeric(host):
            return [host]
        looked_up_us, known = self._known.get(host, (0, []))
        if known and self._now_us() - looked_up_us < FRESH_US:
            return known
        try:
            found: list[str] | StoreError = yield Call(self._lookup(host), "result", (seconds / 2 if known else seconds,))
        except StoreError as error:
            found = error
        if isinstance(found, StoreError):
            if known:
                return known
            raise type(found)(*found.args)
        return found

    def expire(self, host: str) -> None:
        """Has a host looked up again before the next connection: its addresses could not be reached."""
        if host in self._known:
            self._known[host] = (0, self._known[host][1])

    def _lookup(self, host: str) -> Pending:
        with self._lock:
            found = self._lookups.get(host)
            if found is None:
                if len(self._lookups) >= MAX_LOOKUPS:
                    raise StoreUnavailable(f"{host} can't be looked up: {MAX_LOOKUPS} DNS lookups hang")
                found = self._lookups[host] = Pending()
                try:
                    threading.Thread(target=self._run, args=(host, found), name="limitkeeper DNS", daemon=True).start()
                except BaseException:
                    del self._lookups[host]
                    raise
            return found

    def _run(self, host: str, pending: Pending) -> None:
        found: list[str] | StoreError
        try:
            found = list(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)))
            self._known[host] = (self._now_us(), found)
        except Exception as error:
            found = StoreUnavailable(f"{host} can't be looked up: {error}")
        with self._lock:
            self._lookups.pop(host, None)
        pending.finish(found)


#: One for the whole process.
RESOLVER = Resolver(SYSTEM.now_us)


def is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
