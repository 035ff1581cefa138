"""Every ASGI framework passes the table of cases, in process and behind real servers."""

from __future__ import annotations

import pytest
from asgi_apps import BUILDERS, AsgiApp
from cases import CASES, REAL
from served import play, play_real
from servers_asgi import Hypercorn, Uvicorn


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("framework", BUILDERS)
def test_in_process(framework, case):
    """The case holds in this framework."""
    play(AsgiApp(framework), case)


@pytest.mark.parametrize("case", REAL, ids=str)
@pytest.mark.parametrize("framework", BUILDERS)
def test_behind_uvicorn(framework, case, valkey):
    """The case holds over the wire: uvicorn (uvloop, httptools), a real Valkey, real time."""
    play_real(AsgiApp(framework, Uvicorn), case, valkey.url)


@pytest.mark.parametrize("case", REAL, ids=str)
@pytest.mark.parametrize("framework", ["starlette", "quart"])
def test_behind_hypercorn(framework, case, valkey):
    """The case holds behind hypercorn."""
    play_real(AsgiApp(framework, Hypercorn), case, valkey.url)
