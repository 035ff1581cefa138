"""One store for each of several workers is several limits: the pitfall of memory://, noticed where there is evidence.

N processes that each keep their own count admit N times the limit. Told, once, when a store that was not chosen with care (the
default of a limiter, or memory:// in a URL) meets one of these:

- the process is a worker of a web server that says it has more than one: gunicorn, uvicorn, fastapi, hypercorn or granian was
  started with --workers above 1 (or WEB_CONCURRENCY, GUNICORN_CMD_ARGS, GRANIAN_WORKERS where that server reads them), gunicorn's
  arbiter has forked other workers before this one, or uWSGI's `numproc` is above 1;
- the store was made before a fork, and two children that live at the same time have both decided on their copies of it.

No evidence are: WEB_CONCURRENCY alone (hosts set it for every script), a process pool whose workers make their own limiters,
children one after the other, a child that never asks. `MemoryStore()` written out is taken for a choice.

A child notices its first decision because the first reading of the store's clock goes through a `Notice`, which then steps aside:
the hot path has nothing to look at. Children tell each other in a page of shared memory.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from ..clock import SYSTEM
from ..errors import SeveralWorkers
from .memory import MemoryStore

REMEDY = (
    "each admits the whole limit by itself, so N workers admit N times as much; use one store for all of them: "
    "SharedStore (shared:///path) on one host, RedisStore (redis://…) on several"
)
#: Web servers by the name of their command, the flags that say how many workers, and the environment variables that do.
SERVERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "gunicorn": (("-w", "--workers"), ("WEB_CONCURRENCY",)),
    "uvicorn": (("--workers",), ("WEB_CONCURRENCY", "UVICORN_WORKERS")),
    "fastapi": (("--workers",), ("WEB_CONCURRENCY",)),
    "hypercorn": (("-w", "--workers"), ()),
    "granian": (("--workers",), ("GRANIAN_WORKERS",)),
}
PAGE = 16_384

if TYPE_CHECKING:
    import mmap

_made: weakref.WeakKeyDictionary[MemoryStore, int] = weakref.WeakKeyDictionary()
_numbers = iter(range(1, 1 << 30))
_told = False
_page: mmap.mmap | None = None
_page_of = 0


def memory_store(max_keys: int = 1_000_000) -> MemoryStore:
    """The store of a limiter that was given none, or memory://."""
    global _told
    if not _told and (server := several_workers(sys.argv, os.environ, sys.modules)) is not None:
        _told = True
        warn(f"{server} runs several workers, and this one keeps its limits in memory")
    store = MemoryStore(max_keys)
    _made[store] = next(_numbers)
    return store


def warn(what: str) -> None:
    """Warns at the line outside of this package that led here."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "limitkeeper":
        level, frame = level + 1, frame.f_back
    warnings.warn(SeveralWorkers(f"{what}: {REMEDY}"), stacklevel=level)


def several_workers(argv: Sequence[str], environment: Mapping[str, str], modules: Mapping[str, Any]) -> str | None:
    """The web server of which this process is one of several workers, as far as anybody can tell."""
    if getattr(modules.get("uwsgi"), "numproc", 1) > 1:
        return "uwsgi"
    if getattr(getattr(modules.get("gunicorn.arbiter"), "Arbiter", None), "WORKERS", None):
        return "gunicorn"
    path = PurePath(argv[0]) if argv else PurePath()
    server = path.parent.name if path.stem == "__main__" else path.stem
    if server not in SERVERS:
        return None
    flags, variables = SERVERS[server]
    said = list(argv[1:])
    if server == "gunicorn":
        import shlex

        said = [*shlex.split(environment.get("GUNICORN_CMD_ARGS", "")), *said]
    count = flagged(said, flags)
    for variable in variables:
        count = count or environment.get(variable, "")
    return server if count.isdigit() and int(count) > 1 else None


def flagged(said: Sequence[str], flags: Sequence[str]) -> str:
    """The last value of a flag: "-w 4", "-w4", "--workers 4", "--workers=4"."""
    found = ""
    for word, following in zip(said, [*said[1:], ""], strict=True):
        for flag in flags:
            if word == flag:
                found = following
            elif word.startswith(flag + "=") or (len(flag) == 2 and word.startswith(flag)):
                found = word.removeprefix(flag).removeprefix("=")
    return found


# Copies of one store in several children ------------------------------------------------------------------------------


class FirstUseProbe:
    """A clock that is read once, by the first decision of a child; from then on the store reads its own."""

    def __init__(self, store: MemoryStore, number: int, page: mmap.mmap) -> None:
        self._store = weakref.ref(store)
        self._number = number
        self._page = page

    def now_us(self) -> int:
        store = self._store()
        if store is not None:
            store.go_by(SYSTEM)
            decided(self._number, self._page)
        return SYSTEM.now_us()

    def sleep(self, seconds: float, wake: threading.Event | None = None) -> None:
        SYSTEM.sleep(seconds, wake)

    async def asleep(self, seconds: float, wake: asyncio.Event | None = None) -> None:
        await SYSTEM.asleep(seconds, wake)


def decided(number: int, page: mmap.mmap) -> None:
    """This process decides on its copy of a store; when a sibling does too, that is told, by the first who finds out."""
    mine, notes = os.getpid(), memoryview(page).cast("i")
    others = [notes[at + 1] for at in range(2, len(notes), 2) if notes[at] == number and notes[at + 1] not in (0, mine)]
    free = next((at for at in range(2, len(notes), 2) if not notes[at] or not lives(notes[at + 1])), None)
    if free is not None:
        notes[free + 1] = mine
        notes[free] = number
    sibling = next((pid for pid in others if lives(pid)), None)
    if sibling is not None and not notes[0]:
        notes[0] = 1
        warn(f"processes {sibling} and {mine} decide on copies of one memory store, made before a fork")


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"  # one that is over and not yet waited for
    except (OSError, IndexError):
        return True


def _before_fork() -> None:
    """A page of its own for the children of this process, when there is something that they could have in common."""
    global _page, _page_of
    if _made and _page_of != os.getpid():
        import mmap

        _page, _page_of = mmap.mmap(-1, PAGE), os.getpid()


def _after_fork() -> None:
    if _page is not None:
        for store, number in list(_made.items()):
            store.go_by(FirstUseProbe(store, number, _page))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
