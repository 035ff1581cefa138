"""How a request is timed: prepared once, sent again and again in short slices, all cases taking turns.

A slice lasts about 0.5 ms, after two requests that are not counted (they fetch the case's code back into the caches). A repeat
keeps the smallest slice of each case. The overhead of a middleware is the difference to the same app without it, and of all
repeats the median of the quietest fifth: those in which the bare app was quickest, since a neighbour on the same core slows both,
and so widens the difference. Cases that are compared take turns with each other, and with no others.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from itertools import cycle
from statistics import median
from typing import Any

from timing import Effort

SLICE_NS = 500_000
WARM = 2
#: More paths than a policy caches, so that each is new when its turn comes again.
PATHS = 12_000
Loop = Callable[[int], Awaitable[float]]
clock = time.perf_counter_ns

HEADERS = (
    (b"host", b"shop.test"),
    (b"user-agent", b"bench/1.0"),
    (b"accept", b"*/*"),
    (b"accept-encoding", b"gzip, deflate, br"),
    (b"accept-language", b"en"),
    (b"x-tenant", b"acme"),
    (b"x-user", b"u42"),
    (b"connection", b"keep-alive"),
)
SCOPE: dict[str, Any] = {
    "type": "http",
    "asgi": {"version": "3.0", "spec_version": "2.3"},
    "http_version": "1.1",
    "server": ("127.0.0.1", 8000),
    "client": ("203.0.113.7", 40000),
    "scheme": "http",
    "method": "GET",
    "root_path": "",
    "path": "/products/17",
    "raw_path": b"/products/17",
    "query_string": b"",
    "headers": list(HEADERS),
}
ENVIRON: dict[str, Any] = {
    "REQUEST_METHOD": "GET",
    "SCRIPT_NAME": "",
    "PATH_INFO": "/products/17",
    "QUERY_STRING": "",
    "REMOTE_ADDR": "203.0.113.7",
    "SERVER_NAME": "127.0.0.1",
    "SERVER_PORT": "8000",
    "SERVER_PROTOCOL": "HTTP/1.1",
    "wsgi.version": (1, 0),
    "wsgi.url_scheme": "http",
    "wsgi.multithread": True,
    "wsgi.multiprocess": False,
    "wsgi.run_once": False,
    **{f"HTTP_{name.decode().upper().replace('-', '_')}": value.decode() for name, value in HEADERS},
}


async def receive() -> dict[str, Any]:
    return {"type": "http.request", "body": b"", "more_body": False}


async def send(message: Any) -> None:
    pass


def paths() -> Iterator[str]:
    """Paths that are not in the cache."""
    return cycle([f"/products/{number}" for number in range(100_000, 100_000 + PATHS)])


def asgi(app: Any) -> Loop:
    async def loop(n: int) -> float:
        begun = clock()
        for _ in range(n):
            await app(dict(SCOPE), receive, send)
        return (clock() - begun) / n

    return loop


def asgi_new_paths(app: Any) -> Loop:
    path = paths()

    async def loop(n: int) -> float:
        begun = clock()
        for _ in range(n):
            await app(dict(SCOPE, path=next(path)), receive, send)
        return (clock() - begun) / n

    return loop


def start_response(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[[bytes], object]:
    return bytes


def wsgi(app: Any) -> Loop:
    async def loop(n: int) -> float:
        begun = clock()
        for _ in range(n):
            found = app(dict(ENVIRON), start_response)
            for _chunk in found:
                pass
            if hasattr(found, "close"):
                found.close()
        return (clock() - begun) / n

    return loop


async def status_of(app: Any) -> int:
    """The response of an ASGI app to the prepared request."""
    statuses = []

    async def noted(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    await app(dict(SCOPE), receive, noted)
    return statuses[0]


class Taken:
    """Nanoseconds of a request, by case: the smallest slice of each repeat."""

    def __init__(self) -> None:
        self.best: dict[str, list[float]] = {}

    def total(self, name: str) -> float:
        return median(sorted(self.best[name])[: self._quiet(name)])

    def added(self, name: str, base: str) -> float:
        """The overhead of a case on its base."""
        quiet = sorted(zip(self.best[base], self.best[name], strict=True))[: self._quiet(base)]
        return median(more - less for less, more in quiet)

    def _quiet(self, name: str) -> int:
        return -(-len(self.best[name]) // 5)

    def __or__(self, other: Taken) -> Taken:
        both = Taken()
        both.best = self.best | other.best
        return both

    def __contains__(self, name: str) -> bool:
        return name in self.best


async def take(loops: dict[str, Loop], effort: Effort, note: Callable[[str], None], failed: dict[str, str]) -> Taken:
    """Every case in turn, in slices."""
    sizes: dict[str, int] = {}
    for name, loop in loops.items():
        try:
            await loop(20)
            sizes[name] = max(1, int(SLICE_NS / min([await loop(5) for _ in range(3)])))
        except Exception as error:  # a peer that fails is reported, and stops nothing
            failed[name] = f"{type(error).__name__}: {error}"
    taken = Taken()
    note(f"{len(sizes)} cases: {', '.join(sizes)}"[:90])
    for _ in range(effort.pick(30, 6)):
        smallest = dict.fromkeys(sizes, float("inf"))
        for _ in range(effort.pick(16, 8)):
            for name, size in sizes.items():
                await loops[name](WARM)
                smallest[name] = min(smallest[name], await loops[name](size))
        for name, value in smallest.items():
            taken.best.setdefault(name, []).append(value)
    return taken
