"""Warns (SeveralWorkers) when several worker processes each count in their own memory: N of them admit N times the limit.

The warning is given once, for a store that was not chosen explicitly (the default of a limiter, or memory:// in a URL), when

- the process is a worker of a web server that runs more than one (`several_workers`), or
- the store was created before a fork, and two live children have both decided on their copies of it. A `FirstUseProbe` as the
  store's clock detects the first decision of a child and replaces itself by the system clock, so that the hot path has no check.
  Children record their decisions in a page of shared memory.

Not enough: WEB_CONCURRENCY alone (hosts set it for every script), a process pool whose workers create their own limiters,
children one after the other, a child that never decides. An explicit `MemoryStore()` counts as a choice.
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
from typing import TYPE_CHECKING

from ..clock import SYSTEM, Clock
from ..errors import SeveralWorkers
from .memory import MemoryStore

REMEDY = (
    "each admits the whole limit by itself, so N workers admit N times as much; use one store for all of them: "
    "SharedStore (shared:///path) on one host, RedisStore (redis://…) on several"
)
#: Command of a web server -> the flags and the environment variables that set its number of workers.
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
_warned = False
_clock: Clock = SYSTEM
_page: mmap.mmap | None = None
_page_of = 0


def memory_store(max_keys: int = 1_000_000) -> MemoryStore:
    """Creates the store of memory:// URLs and of limiters without a store."""
    global _warned
    if not _warned and (server := several_workers(sys.argv, os.environ, sys.modules)) is not None:
        _warned = True
        warn(f"{server} runs several workers, and this one keeps its limits in memory")
    store = MemoryStore(max_keys, _clock)
    _made[store] = next(_numbers)
    return store


def set_clock_of_default_stores(clock: Clock) -> None:
    """For tests: empties all stores that `memory_store` made, and puts them, and those that it makes from now on, on a clock."""
    global _clock
    _clock = clock
    for store in list(_made):
        store.clear()
        store.set_clock(clock)


def warn(what: str) -> None:
    """Warns with the location of the caller outside this package."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "limitkeeper":
        level, frame = level + 1, frame.f_back
    warnings.warn(SeveralWorkers(f"{what}: {REMEDY}"), stacklevel=level)


def several_workers(argv: Sequence[str], environment: Mapping[str, str], modules: Mapping[str, object]) -> str | None:
    """The name of the web server if this process is one of several workers of it, by its flags, its environment variables, other
    workers that gunicorn's arbiter has forked before this one, the numbers of uWSGI and mod_wsgi, or the settings that uvicorn
    and hypercorn pass to a worker (from `uvicorn.run(…, workers=4)`, or a file); otherwise None."""
    for module, count in (("uwsgi", "numproc"), ("mod_wsgi", "maximum_processes")):
        if getattr(modules.get(module), count, 1) > 1:
            return module
    if getattr(getattr(modules.get("gunicorn.arbiter"), "Arbiter", None), "WORKERS", None):
        return "gunicorn"
    process = getattr(modules.get("multiprocessing.process"), "current_process", lambda: None)()
    config = getattr(process, "_kwargs", {}).get("config")
    workers = getattr(config, "workers", 1)
    if isinstance(workers, int) and workers > 1:
        return type(config).__module__.partition(".")[0]
    path = PurePath(argv[0]) if argv else PurePath()
    server = path.parent.name if path.stem == "__main__" else path.stem
    if server not in SERVERS:
        return None
    flags, variables = SERVERS[server]
    arguments = list(argv[1:])
    if server == "gunicorn":
        import shlex

        arguments = [*shlex.split(environment.get("GUNICORN_CMD_ARGS", "")), *arguments]
    count = flag_value(arguments, flags)
    for variable in variables:
        count = count or environment.get(variable, "")
    return server if count.isdigit() and int(count) > 1 else None


def flag_value(arguments: Sequence[str], flags: Sequence[str]) -> str:
    """The last value of a flag: "-w 4", "-w4", "--workers 4", "--workers=4"."""
    found = ""
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        for flag in flags:
            if word == flag:
                found = following
            elif word.startswith(flag + "=") or (len(flag) == 2 and word.startswith(flag)):
                found = word.removeprefix(flag).removeprefix("=")
    return found


# Copies of one store in several children ------------------------------------------------------------------------------


class FirstUseProbe:
    """A clock that detects the first decision of a child, then sets the store's clock back to the system clock."""

    def __init__(self, store: MemoryStore, number: int, page: mmap.mmap) -> None:
        self._store = weakref.ref(store)
        self._number = number
        self._page = page

    def now_us(self) -> int:
        store = self._store()
        if store is not None:
            store.set_clock(SYSTEM)
            decided(self._number, self._page)
        return SYSTEM.now_us()

    def sleep(self, seconds: float, wake: threading.Event | None = None) -> None:
        SYSTEM.sleep(seconds, wake)

    async def asleep(self, seconds: float, wake: asyncio.Event | None = None) -> None:
        await SYSTEM.asleep(seconds, wake)


def decided(number: int, page: mmap.mmap) -> None:
    """Records that this process decides on its copy of a store; warns once when a live sibling does too."""
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
    """Whether a process runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"  # a zombie, or dead
    except (OSError, IndexError):
        return True


def _before_fork() -> None:
    """Allocates a shared page for the children of this process if there are stores that they would copy."""
    global _page, _page_of
    if _made and _page_of != os.getpid():
        import mmap

        _page, _page_of = mmap.mmap(-1, PAGE), os.getpid()


def _after_fork() -> None:
    if _page is not None:
        for store, number in list(_made.items()):
            store.set_clock(FirstUseProbe(store, number, _page))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
