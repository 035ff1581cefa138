"""Loads the programs of examples/first_programs, and runs them as processes of their own."""

from __future__ import annotations

import asyncio
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

import limitkeeper

FOLDER = Path(__file__).parents[2] / "examples" / "first_programs"
PROGRAMS = sorted(FOLDER.glob("*.py"))
#: The environment with which processes find the build under test.
BUILD = {"PYTHONPATH": str(Path(limitkeeper.__path__[0]).parent)}


def load(name: str, run_name: str = "program") -> dict[str, Any]:
    """The names that a program defines; with "__main__" its script part runs as well."""
    return runpy.run_path(str(FOLDER / f"{name}.py"), run_name=run_name)


def start(*command: str, pipe: int | None = subprocess.PIPE, **variables: str) -> subprocess.Popen[str]:
    """Starts `python COMMAND` in the folder of the programs."""
    environment = {**os.environ, **BUILD, **variables}
    return subprocess.Popen([sys.executable, *command], cwd=FOLDER, env=environment, stdout=pipe, stderr=pipe, text=True)


def run(*command: str, **variables: str) -> str:
    """The output of `python COMMAND`."""
    process = start(*command, **variables)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return output


def statuses(app: Any, count: int, path: str, method: str = "GET", **options: Any) -> list[int]:
    """The statuses of requests to an ASGI application, one after the other."""

    async def send() -> list[int]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop.test") as http:
            return [(await http.request(method, path, **options)).status_code for _ in range(count)]

    return asyncio.run(send())
